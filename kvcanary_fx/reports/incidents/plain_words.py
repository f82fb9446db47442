"""The commonest patterns of what a slot went through, in plain words: who had it, who lost it, who wrote over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..past import PastEvent, SlotHistory, party, when
from ..untrusted import one_line
from ..violation import Violation
from .tenants import Tenants, until

#: Reasons for which it matters whether the request ever had the slot: it reads it, or writes it.
_READS, _WRITES = ("READ_AFTER_FREE", "FOREIGN_READ"), ("WRITE_AFTER_FREE", "OVERWRITE")


def plain_words(past: SlotHistory, violation: Violation) -> str:
    """What of the history explains a violation, in a sentence or two; empty if it is of no known pattern.

    Args:
        past: of the slot.
    """
    tell = _TELLERS.get(violation.why or violation.check)
    return " ".join(tell(Tenants(until(past, violation)), violation)) if tell is not None else ""


Teller = Callable[[Tenants, Violation], Iterable[str]]


def _lost(tenants: Tenants, violation: Violation) -> Iterable[str]:
    """The request had the slot, it was released, and perhaps given on and written."""
    asker, events = violation.request, tenants.past.events
    if asker is None:
        return
    who = _name(asker)
    if tenants.had(asker) is False:
        yield f"{_begin(who)} never had this slot."
    held = max((i for i, e in enumerate(events) if e.request == asker and e.kind != "release"), default=len(events))
    after = events[held + 1 :]
    given = next((i for i, e in enumerate(after) if e.kind == "allocate"), len(after))
    gone = _last(after[:given], "release")
    if gone is None:
        return
    yield f"{_begin(who)} had it until it was released{_when(gone)}{_by(gone)}."
    got, wrote = _last(after, "allocate"), _last(after[given:], "write", "fill")
    if got is None or got.request is None:
        return
    other = _name(got.request)
    over = "" if wrote is None else f", and {'wrote it' if wrote.kind == 'write' else 'had it filled'}{_when(wrote)}"
    yield f"{_begin(other)} got it{_when(got)}{over}."
    if wrote is not None and violation.why in ("FOREIGN_READ", "OVERWRITE"):
        does = "reads" if violation.why == "FOREIGN_READ" else "writes over"
        yield f"So {who} {does} what is {other}'s."


def _released(tenants: Tenants, violation: Violation) -> Iterable[str]:
    """It was released before; the last release is the one that is reported."""
    gone = [e for e in tenants.past.events if e.kind == "release"]
    if len(gone) > 1:
        yield f"It had been released{_when(gone[-2])}{_by(gone[-2])}; this is the second time{_at(gone[-1])}."


def _handed_out(tenants: Tenants, violation: Violation) -> Iterable[str]:
    got = [e for e in tenants.past.events if e.kind == "allocate"]
    if len(got) > 1 and got[-2].request is not None:
        yield f"{_begin(_name(got[-2].request))} had got it{_when(got[-2])}, and nobody has released it since."


def _former(tenants: Tenants, violation: Violation) -> Iterable[str]:
    """Who had the slot before: what it left, or wrote late, may be what is there."""
    events = tenants.past.events
    got = max((i for i, e in enumerate(events) if e.kind == "allocate"), default=0)
    gone = _last(events[:got], "release")
    before = next((e for e in reversed(events[:got]) if e.request is not None and e.kind != "release"), None)
    if gone is not None and before is not None and before.request is not None:
        yield f"{_begin(_name(before.request))} had the slot before, until it was released{_when(gone)}{_at(gone)}."


_TELLERS: dict[str, Teller] = {
    **dict.fromkeys(_READS + _WRITES, _lost),
    "DOUBLE_FREE": _released,
    "DOUBLE_ALLOCATE": _handed_out,
    "NEVER_WRITTEN": _former,
    "content": _former,
}


def _last(events: Sequence[PastEvent], *kinds: str) -> PastEvent | None:
    return next((event for event in reversed(events) if event.kind in kinds), None)


def _begin(name: str) -> str:
    """At the beginning of a sentence."""
    return name[:1].upper() + name[1:]


def _name(request: str | int) -> str:
    return party(one_line(request))


def _when(event: PastEvent) -> str:
    return f" {when(event.step)}".rstrip()


def _by(event: PastEvent) -> str:
    return (f" by {_name(event.request)}" if event.request is not None else "") + _at(event)


def _at(event: PastEvent) -> str:
    return f", at {event.stack[0]}" if event.stack else ""

"""What a slot went through, for a report: its last events, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

#: What happened, and the word before who is named, by the kind of an event.
VERBS = {
    "allocate": ("allocated", "to"),
    "release": ("released", "by"),
    "share": ("shared", "with"),
    "hand_over": ("handed over", "to"),
    "reject": ("rejected as a draft", "of"),
    "forget": ("forgotten", "of"),
    "write": ("written", "by"),
    "fill": ("filled from elsewhere", "for"),
}


def party(name: str | int) -> str:
    """Who had a slot, in words: a request, or what an engine names itself, such as ``the prefix cache of vLLM``."""
    return str(name) if str(name).startswith("the ") else f"request {name}"


def when(step: int | None) -> str:
    """In which step something happened; empty if it has none."""
    return "" if step is None else "before step 1" if step == 0 else f"in step {step}"


@dataclasses.dataclass(frozen=True)
class PastEvent:
    """Something that happened to a slot.

    Attributes:
        kind: ``allocate``, ``release``, ``share``, ``hand_over``, ``reject``, ``forget`` (calls of the allocator),
            ``write`` (by a forward; writes of one request that follow each other are one event, the last) or ``fill``
            (imported or adopted).
        step: of the engine; what happened between two steps has the number of the earlier one, 0 what came before the
            first.  None if it has none.
        request: that is named; None if none is.
        forward: of a write.
        stack: of the call, the innermost frame first; empty unless ``stacks`` is set.
    """

    kind: str
    step: int | None
    request: str | int | None = None
    forward: int | None = None
    stack: tuple[str, ...] = ()

    def told(self) -> str:
        """In words, without the stack but where it begins."""
        verb, link = VERBS.get(self.kind, (self.kind, "by"))
        words = [verb, when(self.step)]
        if self.forward:
            words.append(f"(forward {self.forward})")
        if self.request is not None:
            words.append(f"{link} {party(self.request)}")
        if self.stack:
            words.append(f"at {self.stack[0]}")
        return " ".join(word for word in words if word)


@dataclasses.dataclass(frozen=True)
class SlotHistory:
    """The last events of a slot.

    Attributes:
        events: oldest first.
        earlier: how many there were before them.
        written: the last write by a forward, also if ``events`` has it no more; None if there was none.
        reads: forwards since the allocation that read the slot and for which its bytes were compared, which is not each
            of them under a budget.
        first_read, last_read, read_before: their first and last step, and the one before the last; None if there was
            none.
    """

    events: tuple[PastEvent, ...]
    earlier: int = 0
    written: PastEvent | None = None
    reads: int = 0
    first_read: int | None = None
    last_read: int | None = None
    read_before: int | None = None

    def told(self) -> str:
        """In one line; empty if nothing happened."""
        return ", ".join(told for told, _ in self._parts())

    def lines(self) -> list[str]:
        """A line for each part, and below it the callers of a call, where its stack is known."""
        return [line for told, callers in self._parts() for line in (told, *(f"  from {one}" for one in callers))]

    def _parts(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        if self.written is not None and all(e.kind != "write" for e in self.events):
            yield self.written.told(), ()
        if self.earlier:
            yield ("an earlier event" if self.earlier == 1 else f"{self.earlier} earlier events"), ()
        for before, event in zip((None, *self.events), self.events, strict=False):
            if event.kind != "forget" or event != before:  # forgotten twice is forgotten; freed twice is a bug
                yield event.told(), event.stack[1:]
        if self.reads:
            yield self._read(), ()

    def _read(self) -> str:
        if self.reads == 1:
            return f"compared for a read in step {self.last_read}"
        return f"compared for reads {self.reads} times, in steps {self.first_read} to {self.last_read}"

"""An incident in words: which request damaged which, in which step, by what, as far as the records say."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from ...kernels.checks import Shown, how_shown
from ..past import SlotHistory, party
from ..untrusted import one_line
from ..violation import ALL_LAYERS, Violation
from .incident import HalfScene, Incident, PoolScene, Record, SlotScene
from .plain_words import plain_words
from .tables import slots_in_words

#: Slots and checks that are told of.
TOLD = 5

#: What a request did, by the reason: ``{who}`` did it, ``{whose}`` is the other one, where the check knows both.
_DEEDS = {
    "READ_AFTER_FREE": "{who} was about to read {slot}, which is free",
    "FOREIGN_READ": "{who} was about to read {slot}, which belongs to {found}",
    "READ_WHILE_WRITTEN": "{who} was about to read {slot}, which {found} writes in the same forward",
    "WRITE_AFTER_FREE": "{who} was about to write {slot}, which is free",
    "OVERWRITE": "{who} was about to write over {slot}, which belongs to {found}",
    "WRITE_SHARED": "{who} was about to write {slot}, which several requests share",
    "WRITTEN_BEFORE": "{who} was about to write {slot} a second time",
    "DOUBLE_FREE": "{found} released {slot}, which is free already",
    "FOREIGN_FREE": "{found} released {slot}, which belongs to {stored}",
    "DOUBLE_ALLOCATE": "{slot} of {stored} was handed out again, to {found}",
    "SHARE_AFTER_FREE": "{slot} was shared although it is free",
    "NEVER_WRITTEN": "{who} was about to read {slot}, which nobody has written since it was allocated",
    "OUT_OF_RANGE": "{who} named {slot}, which does not exist",
    "RESERVED_SLOT": "{who} named {slot}, which is reserved for padding",
    "REJECTED_TOKEN": "{who} was about to read {slot}, which holds a rejected draft",
}


#: Reasons whose sentence names who reads the slot.
_READ_BY = tuple(why for why, told in _DEEDS.items() if told.startswith("{who} was about to read"))


def story(incident: Incident, events: bool = True) -> list[str]:
    """A paragraph for each slot and check, the most telling first.

    Args:
        events: tell all that the slots went through, too.
    """
    if not incident.records:
        return ["No check had failed when this snapshot was taken."]
    alike: dict[tuple[object, ...], list[Record]] = {}
    for slot in _by_slot(incident):
        record = _explained(slot)
        v = record.violation
        tensors = frozenset((r.violation.layer, r.violation.half) for r in slot)
        shown = tuple(byte_sentences(incident, record))
        key = (v.check, v.why, v.phase, v.step, v.forward, v.request, *v.owners, record.pool, tensors, shown)
        alike.setdefault((*key, _past(incident, record)), []).extend(slot)
    told: list[str] = []
    known: set[str] = set()  # of neighbours it is often the same
    for records in list(alike.values())[:TOLD]:
        record = _explained(records)
        past = _history(incident, record)
        words = plain_words(past, record.violation) if past is not None else ""
        last = _past(incident, record) if events else _since(past, record.violation) if past is not None else ""
        first, *others = _sentences(incident, records)
        told.append(" ".join(s.strip() for s in (first, words, *others, last) if s.strip() and s not in known))
        known |= {words, last}
    if len(alike) > TOLD:
        told.append(f"So it goes on, in {len(alike) - TOLD} further slots or checks.")
    return told


def _by_slot(incident: Incident) -> Iterable[list[Record]]:
    """The records of each slot and check, in the order of the first."""
    found: dict[tuple[object, ...], list[Record]] = {}
    for record in incident.records:
        v = record.violation
        found.setdefault((v.check, v.why, v.phase, v.step, record.pool, record.slot), []).append(record)
    return found.values()


def _explained(records: Sequence[Record]) -> Record:
    """The first whose bytes were looked into, if any was."""
    return next((r for r in records if r.evidence is not None), records[0])


def _sentences(incident: Incident, records: Sequence[Record]) -> Iterable[str]:
    """What happened to a slot, and to which others the same."""
    record = _explained(records)
    violation, pool = record.violation, _pool(incident, record)
    yield f"{violation.when().capitalize()}: {deed(violation)}."
    yield from byte_sentences(incident, record)
    others = {
        r.violation.layer + r.violation.half
        for r in incident.records
        if r.slot == record.slot and r.pool == record.pool and r.violation.check == violation.check
    }
    if pool is not None and violation.layer != ALL_LAYERS and len(pool.halves) > 1:
        yield f"The slot is reported in {len(others)} of {len(pool.halves)} tensors."
    place = None if pool is None else pool.place(record.slot)
    if pool is not None and place is not None:
        yield from _about(pool.near[place], violation)
    readers = [] if pool is None else readers_of(pool, record.slot)
    if len(readers) > (violation.why in _READ_BY and violation.request is not None):
        yield f"In the batch it is read by {', '.join(readers)}."
    more = sorted({r.slot for r in records} - {record.slot})
    if more:
        yield f"The same in {slots_in_words(more)}."


def _history(incident: Incident, record: Record) -> SlotHistory | None:
    pool = _pool(incident, record)
    place = None if pool is None else pool.place(record.slot)
    return pool.near[place].past if pool is not None and place is not None else None


def _past(incident: Incident, record: Record) -> str:
    """What the slot went through; empty if it is not known."""
    past = _history(incident, record)
    told = past.told() if past is not None else ""
    if past is None or not told:
        return ""
    return f"What the slot went through: {one_line(told)}.{_since(past, record.violation)}"


def _since(past: SlotHistory, violation: Violation) -> str:
    """From when on the bytes can have changed; empty if they were compared again since."""
    if violation.check != "content" or past.last_read != violation.step:
        return ""
    written = past.written.step if past.written is not None and past.written.step is not None else -1
    if past.read_before is not None and past.read_before >= written:
        return f" Its bytes were right when they were compared in step {past.read_before}: they changed after that."
    return " Its bytes had not been compared since they were written." if written >= 0 else ""


def _about(slot: SlotScene, violation: Violation) -> Iterable[str]:
    """What is known of the slot besides: whose it is; of a free one, whether the release or the table is wrong."""
    if violation.why == "READ_AFTER_FREE" and slot.fits is not None:
        yield "It still holds the request's own token." if slot.fits else "What it holds is not the request's."
    if slot.owner not in (None, violation.request, *violation.owners):
        yield f"The slot is {party(one_line(slot.owner))}'s."
    if slot.state == "reserved":
        yield "The slot is reserved for padding."


def deed(violation: Violation) -> str:
    """What happened to the slot, without the step."""
    slot = f"slot {violation.slot} of {one_line(violation.pool)}"
    if violation.layer != ALL_LAYERS:
        slot = f"{violation.half} of {one_line(violation.layer)} in {slot}"
    who = party(one_line(violation.request)) if violation.request is not None else "a request"
    position = [] if violation.position is None else [f"position {violation.position}"]
    if violation.why in _DEEDS:
        slot += f" ({position[0]})" if position else ""
        return _DEEDS[violation.why].format(who=who, slot=slot, **_compared(violation))
    whose = ", ".join([who] * (violation.request is not None) + position)
    slot += f" ({whose})" if whose else ""
    if violation.check == "content":
        return f"{slot} was not what had been written there"
    if violation.check == "operand":
        return f"{slot} was not what the write had been given"
    facts = violation.explain().split("\n", 1)[0].partition("] ")[2]
    return f"{slot}: {facts}" if violation.slot >= 0 else f"{who}: {facts}"


def _compared(violation: Violation) -> dict[str, str]:
    """What the check compared, requests by their ids."""
    if how_shown(violation.check, violation.why) is not Shown.OWNER:
        return {"stored": str(violation.stored), "found": str(violation.found)}
    named = (party(one_line(owner)) if owner is not None else "somebody unknown" for owner in violation.owners)
    return dict(zip(("stored", "found"), named, strict=True))


def byte_sentences(incident: Incident, record: Record) -> Iterable[str]:
    """What the bytes show."""
    seen, half = record.evidence, incident.half(record.half)
    if seen is None or half is None:
        return
    if not seen.unchanged:
        yield "The bytes have changed again since the check; what follows is of those in this file."
    if seen.bit is not None:
        yield f"One bit differs: {bit_name(half, seen.bit)}."
    for row in seen.same_as[:1]:
        yield f"The bytes are those that were recorded for {_row_name(incident, row.half, row.slot)}."
    if seen.moved_to:
        yield f"What was written here is in slot {', '.join(map(str, seen.moved_to))} now."
    if not seen.nonzero:
        yield "All bytes are zero."
    if seen.poisoned:
        yield f"{seen.poisoned} elements are NaN or Inf."
    if seen.bit is None and seen.nonzero and not (seen.same_as or seen.moved_to or seen.poisoned):
        yield "More than one bit differs, and no recorded row of the pool has these bytes."


def bit_name(half: HalfScene, bit: int) -> str:
    """Where a bit of a row is: its element and head."""
    width = 8 * int(getattr(torch, half.dtype).itemsize)
    element = bit // width
    place = f"bit {bit % width} of element {element}"
    if len(half.row_shape) > 1:
        place += f", head {element // math.prod(half.row_shape[1:])}"
    return f"{place} ({half.dtype})"


def readers_of(pool: PoolScene, slot: int) -> list[str]:
    """The requests of the batch whose table names a slot in their prefix."""
    found = [(request, request.reads(slot)) for request in pool.batch]
    return [
        f"request {one_line(request.request)} (position {position})"
        for request, position in found
        if position is not None
    ]


def _pool(incident: Incident, record: Record) -> PoolScene | None:
    return None if record.pool is None else incident.pools[record.pool]


def _row_name(incident: Incident, number: int, slot: int) -> str:
    """A row elsewhere, with who is in the slot."""
    half = incident.half(number)
    pool = next((p for p in incident.pools if half in p.halves), None)
    known = None if pool is None else next((s for s in pool.near if s.slot == slot), None)
    name = f"{half.name if half is not None else '?'} in slot {slot}"
    whose = [] if known is None or known.owner is None else [party(one_line(known.owner))]
    whose += [] if known is None or known.position is None else [f"position {known.position}"]
    return f"{name} ({', '.join(whose)})" if whose else name

"""The checks that failed, once more, on what an incident's file has stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from . import row_bytes
from .incident import HalfScene, Incident, PoolScene, Record, SlotScene


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one check.

    Attributes:
        fails: True if it fails again, False if it passes now, None if it cannot be run.
        why: what was compared, or what is missing.
    """

    record: Record
    fails: bool | None
    why: str


def replay(incident: Incident) -> list[Outcome]:
    """Every check of the file, run again."""
    return [_outcome(incident, record) for record in incident.records]


def _outcome(incident: Incident, record: Record) -> Outcome:
    violation = record.violation
    pool = None if record.pool is None else incident.pools[record.pool]
    if pool is None:
        return Outcome(record, None, "the pool is not in the file")
    if violation.why is None:
        half, place = incident.half(record.half), pool.place(record.slot)
        return Outcome(record, *_of_bytes(record, half, place))
    rule = _RULES.get(violation.why)
    if rule is None:
        return Outcome(record, None, "what it compared, a call or a table of the moment, is not in the file")
    return Outcome(record, *rule(pool, record, next((s for s in pool.near if s.slot == record.slot), None)))


Answer = tuple[bool | None, str]


def _of_bytes(record: Record, half: HalfScene | None, place: int | None) -> Answer:
    """A check of the bytes of one row."""
    violation = record.violation
    if violation.check not in ("content", "operand", "index", "poison"):
        return None, "what it compared, the indices of a write or the batch's tokens, is not in the file"
    if half is None or half.rows is None or place is None:
        return None, "the bytes are not in the file"
    if violation.check == "poison":
        count = row_bytes.poisoned(half.rows[place], getattr(torch, half.dtype))
        return count > 0, f"{count} elements are NaN or Inf"
    if half.recorded is None:
        return None, "the digests are not in the file"
    (now,) = row_bytes.digests_of(half.rows[place : place + 1], half.seeds, half.recorded.shape[0]).tolist()
    return (
        not row_bytes.packed_equal(now, violation.stored),
        f"the bytes have digest {row_bytes.shown(now)}, recorded was {row_bytes.shown(violation.stored)}",
    )


def _state(*states: str) -> Callable[[PoolScene, Record, SlotScene | None], Answer]:
    """The check failed because of what the slot is."""

    def rule(pool: PoolScene, record: Record, slot: SlotScene | None) -> Answer:
        if slot is None:
            return None, "the slot is not in the file"
        return slot.state in states, f"the slot is {slot.state}"

    return rule


def _foreign(pool: PoolScene, record: Record, slot: SlotScene | None) -> Answer:
    """The slot belongs to another request."""
    request = record.violation.request
    if slot is None or request is None:
        return None, "the slot, or who used it, is not in the file"
    return slot.owner not in (None, request), f"the slot belongs to {slot.owner or 'nobody'}, {request} uses it"


def _shared(pool: PoolScene, record: Record, slot: SlotScene | None) -> Answer:
    if slot is None or slot.references is None:
        return None, "the slot is not in the file"
    return slot.references > 1, f"the slot has {slot.references} references"


def _out_of_range(pool: PoolScene, record: Record, slot: SlotScene | None) -> Answer:
    named = record.violation.stored
    return not 0 <= named < pool.slots, f"slot {named} of {pool.slots}"


def _never_written(pool: PoolScene, record: Record, slot: SlotScene | None) -> Answer:
    if slot is None:
        return None, "the slot is not in the file"
    return slot.position is None, "no token is in the slot" if slot.position is None else "a token is in the slot"


def _wrong_token(pool: PoolScene, record: Record, slot: SlotScene | None) -> Answer:
    if slot is None or slot.token is None:
        return None, "the slot's token is not in the file"
    return slot.token != record.violation.stored, f"token {slot.token}, the request's is {record.violation.stored}"


def _wrong_position(pool: PoolScene, record: Record, slot: SlotScene | None) -> Answer:
    violation = record.violation
    given = {
        position for r in pool.batch for s, position in zip(r.slots, r.positions, strict=False) if s == record.slot
    }
    if slot is not None and slot.position is not None:
        given.add(slot.position)
    if violation.found not in given:
        return None, "the position that failed is not in the file"
    return violation.found != violation.stored, f"position {violation.found}, it should be {violation.stored}"


def _planned_twice(pool: PoolScene, record: Record, slot: SlotScene | None) -> Answer:
    times = sum(r.slots.count(record.violation.stored) for r in pool.batch)
    return times > 1, f"{times} tokens of the batch go to slot {record.violation.stored}"


def _read_while_written(pool: PoolScene, record: Record, slot: SlotScene | None) -> Answer:
    writers = [r.request for r in pool.batch if record.slot in r.slots and r.request != record.violation.request]
    return bool(writers), f"{len(writers)} other requests of the batch write it"


_RULES: dict[str, Callable[[PoolScene, Record, SlotScene | None], Answer]] = {
    "READ_AFTER_FREE": _state("free"),
    "WRITE_AFTER_FREE": _state("free"),
    "DOUBLE_FREE": _state("free"),
    "SHARE_AFTER_FREE": _state("free"),
    "RESERVED_SLOT": _state("reserved"),
    "REJECTED_TOKEN": _state("rejected"),
    "FOREIGN_READ": _foreign,
    "OVERWRITE": _foreign,
    "WRITE_SHARED": _shared,
    "OUT_OF_RANGE": _out_of_range,
    "NEVER_WRITTEN": _never_written,
    "WRONG_TOKEN": _wrong_token,
    "WRONG_POSITION": _wrong_position,
    "PLANNED_TWICE": _planned_twice,
    "READ_WHILE_WRITTEN": _read_while_written,
}

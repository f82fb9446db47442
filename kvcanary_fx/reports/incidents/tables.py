"""The tables of an incident, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator

from ..past import SlotHistory
from ..violation import one_line
from .incident import Incident, PoolScene

#: Rows of a table, and numbers in one of its cells.
SLOTS, REQUESTS, NUMBERS = 64, 32, 16

#: Histories that are shown.
HISTORIES = 8

SLOT_HEAD = ("slot", "state", "held", "owner", "position", "token")
BATCH_HEAD = ("request", "row", "prefix", "adds", "to slots", "table")


def slot_rows(pool: PoolScene) -> Iterator[list[str]]:
    """The slots that are known in detail, under :data:`SLOT_HEAD`."""
    for s in pool.near[:SLOTS]:
        values = (s.slot, s.state, s.references, s.owner, s.position, s.token)
        yield ["-" if value is None else one_line(value) for value in values]


def batch_rows(pool: PoolScene) -> Iterator[list[str]]:
    """The requests of the batch, under :data:`BATCH_HEAD`."""
    for r in pool.batch[:REQUESTS]:
        yield [one_line(r.request), *map(str, (r.row, r.prefix, r.extend)), _numbers(r.slots), _numbers(r.table)]


def histories(incident: Incident, number: int) -> Iterator[tuple[str, list[str]]]:
    """What the damaged slots of a pool went through, as far as it is known: a title, and lines."""
    for which, past, _ in alike_histories(incident, number):
        yield f"What {which} went through:", past.lines() or ["nothing that is known"]


def alike_histories(incident: Incident, number: int) -> Iterator[tuple[str, SlotHistory, list[int]]]:
    """Damaged slots of a pool that went through the same, as neighbours often did: in words, what it was, and which."""
    pool = incident.pools[number]
    alike: dict[tuple[str, ...], tuple[SlotHistory, list[int]]] = {}
    for slot in dict.fromkeys(r.slot for r in incident.records if r.pool == number):
        place = pool.place(slot)
        past = pool.near[place].past if place is not None else None
        if past is not None:
            alike.setdefault(tuple(past.lines()), (past, []))[1].append(slot)
    for past, slots in list(alike.values())[:HISTORIES]:
        yield f"slot {slots[0]}" if len(slots) == 1 else f"slots {_numbers(tuple(slots))}", past, slots


def _numbers(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values[:NUMBERS])) + ("..." if len(values) > NUMBERS else "")

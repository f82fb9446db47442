"""The tables of an incident, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..past import SlotHistory
from ..untrusted import one_line
from .incident import Incident, PoolScene

#: Rows of a table, and numbers in one of its cells.
SLOTS, REQUESTS, NUMBERS = 64, 32, 16

#: Slots that are named in a sentence.
NAMED = 5

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
        yield slots_in_words(sorted(slots)), past, slots


def slots_in_words(numbers: Sequence[int]) -> str:
    """Slots, ascending; those that follow each other as a range."""
    if len(numbers) == 1:
        return f"slot {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"slots {numbers[0]} to {numbers[-1]}"
    some = ", ".join(map(str, numbers[:NAMED]))
    return f"slots {some}" + (f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else "")


def _numbers(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values[:NUMBERS])) + ("..." if len(values) > NUMBERS else "")

"""The tables of an incident, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator

from ..violation import one_line
from .incident import PoolScene

#: Rows of a table, and numbers in one of its cells.
SLOTS, REQUESTS, NUMBERS = 64, 32, 16

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


def _numbers(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values[:NUMBERS])) + ("..." if len(values) > NUMBERS else "")

"""The time line of an incident: what the damaged slots went through, a column a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..past import VERBS, SlotHistory, when
from .incident import Incident
from .tables import alike_histories

#: Columns of a time line; the last ones are kept.
STEPS = 10


@dataclasses.dataclass(frozen=True)
class Mark:
    """Something in a cell.

    Attributes:
        request: who did it, or got the slot; None if nobody is named.
        damage: it is what was reported.
    """

    text: str
    request: str | int | None = None
    damage: bool = False


@dataclasses.dataclass(frozen=True)
class TimeLine:
    """Of the slots of one pool.

    Attributes:
        head: the steps, after a title for the slots.
        rows: for each group of slots that went through the same, its name and a cell for each step.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[Mark, ...], ...]], ...]


def time_line(incident: Incident, number: int) -> TimeLine | None:
    """That of a pool; None if nothing is known of the past of its damaged slots.

    Args:
        number: of the pool.
    """
    groups = [(which, past, set(slots)) for which, past, slots in alike_histories(incident, number)]
    found: list[tuple[str, dict[int, list[Mark]]]] = []
    for which, past, slots in groups:
        cells: dict[int, list[Mark]] = {}
        for step, mark in [*_marks(past), *_reported(incident, number, slots)]:
            cells.setdefault(step, []).append(mark)
        found.append((which, cells))
    steps = sorted({step for _, cells in found for step in cells})[-STEPS:]
    if not steps:
        return None
    rows = tuple((which, tuple(tuple(cells.get(step, ())) for step in steps)) for which, cells in found)
    return TimeLine(("", *(when(step).removeprefix("in ") for step in steps)), rows)


def _marks(past: SlotHistory) -> Iterator[tuple[int, Mark]]:
    kept = past.events
    if past.written is not None and past.written not in kept:
        kept = (past.written, *kept)
    for event in kept:
        if event.step is not None:
            yield event.step, Mark(VERBS.get(event.kind, (event.kind, ""))[0], event.request)
    for step in dict.fromkeys((past.read_before, past.last_read)):
        if step is not None:
            yield step, Mark("compared")


def _reported(incident: Incident, number: int, slots: set[int]) -> Iterator[tuple[int, Mark]]:
    """What was reported of some slots, each kind once a step."""
    ours = (r.violation for r in incident.records if r.pool == number and r.slot in slots)
    for step, what, who in dict.fromkeys((v.step, v.why or v.check, v.request) for v in ours):
        yield step, Mark(what.lower().replace("_", " "), who, damage=True)

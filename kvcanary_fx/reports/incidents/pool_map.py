"""The map of a pool: which slots to show, what each one is, and in which tensors it is damaged."""

from __future__ import annotations

import dataclasses

from ..violation import ALL_LAYERS
from .incident import STATES, Incident

#: One character for each state, and for a damaged slot.
MARKS = dict(zip(STATES, ".#-=R~", strict=True))
DAMAGED = "!"

#: Windows of a pool, at most.
SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Window:
    """Slots that lie side by side.

    Attributes:
        states: one of :data:`STATES` for each slot; ``?`` where the file does not say.
        owners: who is in each slot, None if unknown.
        damaged: the tensors in which a slot failed a check, by the slot; ``*`` for all.
        tensors: names of the tensors that are damaged somewhere in the window.
    """

    first: int
    states: tuple[str, ...]
    owners: tuple[str | int | None, ...]
    damaged: dict[int, tuple[str, ...]]
    tensors: tuple[str, ...]


def windows(incident: Incident, number: int, width: int) -> list[Window]:
    """The parts of a pool around its damaged slots; its beginning if there are none.

    Args:
        number: of the pool.
        width: slots of a window.
    """
    pool = incident.pools[number]
    damaged: dict[int, list[str]] = {}
    for record in incident.records:
        if record.pool == number and 0 <= record.slot < pool.slots:
            half = incident.half(record.half)
            name = ALL_LAYERS if half is None else half.name
            if name not in damaged.setdefault(record.slot, []):
                damaged[record.slot].append(name)
    starts: list[int] = []
    for slot in sorted(damaged) or [0]:
        if not starts or slot >= starts[-1] + width:
            starts.append(max(0, min(slot - width // 4, pool.slots - width)))
    return [_window(incident, number, first, min(width, pool.slots - first), damaged) for first in starts[:SHOWN]]


def _window(incident: Incident, number: int, first: int, width: int, damaged: dict[int, list[str]]) -> Window:
    pool = incident.pools[number]
    near = {s.slot: s for s in pool.near}
    span = range(first, first + width)
    states = ["?"] * width if pool.map is None else [_state(n) for n in pool.map[first : first + width].tolist()]
    owners: list[str | int | None] = [None] * width
    if pool.owners is not None:
        for i, owner in enumerate(pool.owners[first : first + width].tolist()):
            owners[i] = pool.owner_names[owner] if 0 <= owner < len(pool.owner_names) else None
    for i, slot in enumerate(span):
        if slot in near:
            states[i], owners[i] = near[slot].state, near[slot].owner
    here = {slot: tuple(names) for slot, names in damaged.items() if slot in span}
    tensors = dict.fromkeys(name for names in here.values() for name in names if name != ALL_LAYERS)
    return Window(first, tuple(states), tuple(owners), here, tuple(tensors))


def _state(number: int) -> str:
    return STATES[number] if number < len(STATES) else "?"

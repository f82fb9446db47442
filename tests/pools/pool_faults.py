"""One fault for each check, for any shape of pool: what is done, and what must be reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from groups import Cross, Group, Mapped, State
from rig import Rig

from kvcanary_fx import Violation

PREFILL, MORE = 9, 15  # tokens of a first forward; of a request in which every group has something to read


@dataclasses.dataclass(frozen=True)
class Told:
    """What must have been reported: violations of a check about a pool, at a slot if one is known."""

    check: str
    slot: int | None = None
    half: str | None = None
    layer: str | None = None


def _warm(rig: Rig) -> None:
    """A request that has tokens, the last of them of decode steps, and room for more."""
    while rig.stored.get("A", 0) < MORE:
        rig.run("A", PREFILL)
    for _ in range(2):
        rig.run("A")


def flip_each_half(rig: Rig, group: Group) -> list[Told]:
    """A bit of a stored slot flips, in each half of each layer in turn."""
    _warm(rig)
    told = []
    for layer in range(len(group.kv)):
        for half in range(len(group.bytes_of[layer])):
            slot = rig.live(group)
            rig.flip(group, layer, half, slot)
            rig.run("A")
            first = next(i for i, tensors in enumerate(group.kv) if tensors is group.kv[layer])  # that has them
            label = rig.session.pools[group.name].declared.half_names[half]
            told.append(Told("content", slot, label, group.layer_names[first]))
    return told


def flip_and_sweep(rig: Rig, group: Group) -> list[Told]:
    """A bit of a stored slot flips, and the sweep comes by before any forward."""
    _warm(rig)
    slot = rig.live(group)
    rig.flip(group, 0, 0, slot)
    rig.session.sweep.run()
    return [Told("content", slot)]


def _write_next(rig: Rig, group: Group, **faults: object) -> list[int]:
    """Forwards with faults until the group has written a slot; the slots planned for it."""
    planned: list[int] = []

    def note(name: str, slots: list[int]) -> list[int]:
        if name != group.name or not any(slots):
            return slots
        planned.extend(s for s in slots if s)
        return [group.unused() if s else s for s in slots] if faults.get("misdirect") else slots

    rest = {k: v for k, v in faults.items() if k != "misdirect"}
    if isinstance(group, Cross):
        rig.run("B", PREFILL, received=note, **rest)
    else:
        _warm(rig)
        while not planned:
            rig.run("A", received=note, **rest)
    return planned


def misdirect(rig: Rig, group: Group) -> list[Told]:
    """The write receives another slot than the planned one."""
    return [Told("index", _write_next(rig, group, misdirect=True)[0])]


def miss(rig: Rig, group: Group) -> list[Told]:
    """The write receives the right slot, and its kernel misses it by one."""
    return [Told("operand", _write_next(rig, group, shift=1)[0])]


def poison(rig: Rig, group: Group) -> list[Told]:
    """What is written holds a NaN."""
    return [Told("poison", _write_next(rig, group, poison=True)[0])]


def free_early(rig: Rig, group: Group) -> list[Told]:
    """A slot is released while its request still reads it."""
    _warm(rig)
    slot = rig.live(group)
    rig.run("A", late=lambda: group.guard.release([slot], owner="A"))
    return [Told("owner", slot)]


def reuse(rig: Rig, group: Group) -> list[Told]:
    """A slot is released too early, and another request gets it."""
    _warm(rig)
    slot = rig.live(group)
    group.guard.release([slot], owner="A")
    group.guard.allocate([slot], owner="B")
    rig.run("A")
    return [Told("owner", slot)]


def _entry(rig: Rig, group: Group) -> tuple[torch.Tensor, int, int]:
    """``(row of the table, column of an entry that is read, column of another one)``."""
    return group.table[rig.row("A")], *group.columns(rig.stored["A"])


def misread(rig: Rig, group: Group) -> list[Told]:
    """An entry of the request table, or of the map, is beyond the pool."""
    _warm(rig)
    row, column, _ = _entry(rig, group)
    if isinstance(group, Mapped):
        rig.run("A", late=lambda: group.map.__setitem__(int(row[column]), 999))
    else:
        rig.run("A", late=lambda: row.__setitem__(column, 999))
    return [Told("bounds")]


def exchange(rig: Rig, group: Group) -> list[Told]:
    """Two entries of a row change places; a state is replaced by one of an earlier step."""
    _warm(rig)
    row, a, b = _entry(rig, group)
    if isinstance(group, State):
        slot = int(row[0])
        shadow, old = group.guard.export([slot]), [[h[slot].clone() for h in halves] for halves in group.bytes_of]
        rig.run("A")
        for halves, rows in zip(group.bytes_of, old, strict=True):
            for half, kept in zip(halves, rows, strict=True):
                half[slot] = kept
        group.guard.import_(shadow, [slot], owner="A")
        rig.run("A")
        return [Told("chain", slot)]

    def swap() -> None:
        row[[a, b]] = row[[b, a]]

    rig.run("A", late=swap)
    return [Told("chain")]


def foreign_history(rig: Rig, group: Group) -> list[Told]:
    """The slots hold other tokens than the request has."""
    _warm(rig)
    rig.run("A", history=torch.full((1, 40), 99))
    return [Told("token")]


def foreign_namespace(rig: Rig, group: Group) -> list[Told]:
    """The prefix was written for another adapter."""
    for _ in range(group.namespaced):  # a prefill of another length would be another graph
        rig.run("A")
    rig.run("A", namespaces=[7])
    return [Told("namespace")]


#: By the column of the table.
FAULTS: dict[str, Callable[[Rig, Group], list[Told]]] = {
    "content": flip_each_half,
    "operand": miss,
    "index": misdirect,
    "bounds": misread,
    "owner": free_early,
    "reuse": reuse,
    "chain": exchange,
    "token": foreign_history,
    "namespace": foreign_namespace,
    "poison": poison,
    "sweep": flip_and_sweep,
}


def fits(told: Told, violation: Violation, pool: str) -> bool:
    """Whether a violation is what must have been reported."""
    wanted = {"slot": told.slot, "half": told.half, "layer": told.layer}
    return (
        told.check in (violation.check, *violation.also)
        and violation.pool == pool
        and all(value is None or getattr(violation, name) == value for name, value in wanted.items())
    )

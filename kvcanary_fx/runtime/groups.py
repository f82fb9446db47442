"""Tensors that share slot numbers, and what of them failed a check."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from ..kernels.slots.space import RequestPlan, SlotSpace
from ..reports.past import SlotHistory
from .pool_half import PoolHalf
from .registry import PoolRegistry


@dataclasses.dataclass(frozen=True)
class Group:
    """Tensors that share slot numbers.

    Attributes:
        info_id: stands for all layers in a row of the ring; None where no row has it.
        views: the tensor of each half; None if it is gone.
        space: who is in the slots, in an engine's pool.
        name_of: the request behind a hash.
        plan: what the running forward, or else the last one, reads and writes.
        imported: bool ``[slots + 1]``, which slots' bytes came from elsewhere; None if none ever did.
        histories: what slots went through, None each if it is not kept; None without an engine.
    """

    name: str
    halves: Sequence[PoolHalf]
    views: Sequence[torch.Tensor | None]
    info_id: int | None = None
    space: SlotSpace | None = None
    name_of: Callable[[int], str | int | None] | None = None
    plan: RequestPlan | None = None
    imported: torch.Tensor | None = None
    histories: Callable[[Sequence[int]], list[SlotHistory | None]] | None = None

    @property
    def slots(self) -> int:
        return self.halves[0].place.layout.slots if self.space is None else self.space.slots

    def numbers(self) -> set[int]:
        """What the half of a row of the ring may be."""
        return {h.id for h in self.halves} | ({self.info_id} if self.info_id is not None else set())


def groups_of(registry: PoolRegistry) -> list[Group]:
    """The tensors of a session without an engine: caches with the same slots are one group."""
    alike: dict[tuple[object, ...], list[PoolHalf]] = defaultdict(list)
    for half in registry.halves():
        layout = half.place.layout
        device = half.buffers.digest.device
        alike[layout.slots, layout.positions, layout.has_rows, half.info.heads, half.kind, device].append(half)
    return [Group(_name(hs), hs, [registry.view_of(h) for h in hs]) for hs in alike.values()]


def _name(halves: Sequence[PoolHalf]) -> str:
    names = list(dict.fromkeys(half.info.pool for half in halves))
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


@dataclasses.dataclass(frozen=True)
class Damage:
    """A failed check that names a slot.

    Attributes:
        number: the half, or what stands for all layers.
        digests: what it compared are digests of the slot's bytes.
        poison: it found NaN or Inf in them.
    """

    number: int
    slot: int
    stored: int
    found: int
    digests: bool
    poison: bool

"""The forward that is running in a session, the checks that no graph makes for it, and what comes every so often."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from .errors import SessionStateError
from .kernels.buffers import Gate
from .kernels.ops import kernels_for, request_kernels_for
from .kernels.slot_space import RequestPlan

if TYPE_CHECKING:
    from .engine_pools import EnginePool


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a session does every so many steps; 0 is never."""

    sweep: int = 0
    health: int = 64
    stats: int = 0
    windows: int = 0


@dataclasses.dataclass
class Forward:
    """The forward that is running: its index, and what each pool is to be read and written at, by the number of the
    pool's slot space."""

    index: int
    plans: dict[int, RequestPlan]

    def require(self, index: int) -> None:
        if index != self.index:
            raise SessionStateError(
                f"forward({index}) inside forward({self.index}): leave one before entering the next; a draft model "
                "with pools of its own has a session of its own"
            )


def check_before(pool: EnginePool, plan: RequestPlan) -> None:
    """What a forward is about to read and write in a pool."""
    kernels = request_kernels_for(pool.space.block.device)
    kernels.walk(pool.space, plan.reads or plan)
    kernels.check_writes(pool.space, plan)
    pool.scales.check()
    if pool.declared.written_once:
        _check_bytes(pool)


def _check_bytes(pool: EnginePool) -> None:
    """The bytes of the slots that the walk found: the graphs that read them may never write them, and then have
    nothing to guard."""
    device = pool.space.block.device
    if pool.outside_gate is None:
        pool.outside_gate = torch.zeros(len(Gate), dtype=torch.int64, device=device)
    for half in (half for layer in pool.layer_halves(pool.outside_gate).values() for half in layer):
        if not half.reader:
            kernels_for(device).verify(half.site, half.view, None)

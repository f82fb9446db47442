"""How the groups of a hybrid model differ: numbers that show whether the window checks had anything to check.

If a window's pool has the same slot numbers as the full pool, a forgotten mapping does not show: nothing differs, so
nothing fails.  A window that no request has outgrown never moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ...kernels.slots.checks import CHUNK, table_slots
from ...kernels.slots.space import REFERENCE, Flag, RequestPlan, SpaceCount
from ...kernels.slots.tokens import real_requests
from ...reports import summary

if TYPE_CHECKING:
    from ..guarded_pool import EnginePool
from .observed import Observed


@dataclasses.dataclass(frozen=True)
class GroupReport:
    """One pool.  Unless stated otherwise, the numbers are about the last forward's requests.

    Attributes:
        pool: its name.
        window: tokens that attention sees; None for all.
        verified: tokens whose slot was looked up and compared before a forward, since the session was ready.
        inside: tokens that the next forward may read.
        outside: tokens that the window has left behind.
        held: how many of those are still stored in a slot of this pool.
        pairs: tokens inside the window that the base pool has, too.
        differ: how many of those have another slot number there.
    """

    pool: str
    window: int | None
    verified: int
    inside: int = 0
    outside: int = 0
    held: int = 0
    pairs: int = 0
    differ: int = 0


@dataclasses.dataclass(frozen=True)
class WindowReport:
    """How the groups of a hybrid model differ.

    Attributes:
        step: steps of the session so far.
        base: name of the pool that the others' slots are compared with: the first without a window; None if all
            have one.
        groups: one per pool that has one slot per token of the batch.
    """

    step: int
    base: str | None
    groups: tuple[GroupReport, ...]

    def line(self) -> str:
        """The numbers as one stable line of ``key=value`` pairs."""
        told = [f"step={self.step}", f"base={self.base}"]
        for group in self.groups:
            values = dataclasses.asdict(group)
            told += [f"{group.pool}.{key}={value}" for key, value in values.items() if key != "pool"]
        return " ".join(told)


class Windows:
    """Makes the report: on demand, and as a log line every so many steps.

    Attributes:
        last_plans: what the last forward read and wrote, by the number of the slot space.
    """

    def __init__(self, session: Observed):
        self._session = session
        self.last_plans: Mapping[int, RequestPlan] = {}

    def reset(self) -> None:
        """Forget the last forward: it was warm-up."""
        self.last_plans = {}

    def after_step(self) -> None:
        """Log the report if the schedule says so."""
        every = self._session.schedule.windows
        if every and self._session.steps % every == 0:
            summary.log.info("kvcanary.windows %s", self.report().line())

    def report(self) -> WindowReport:
        """The numbers up to now; waits for the devices."""
        pools = [p for p in self._session.pools.values() if _has_tokens(p)]
        base = next((p for p in pools if p.declared.window is None), None)
        return WindowReport(
            self._session.steps, base.name if base is not None else None, tuple(self._group(p, base) for p in pools)
        )

    def _group(self, pool: EnginePool, base: EnginePool | None) -> GroupReport:
        verified = int(pool.space.counters[SpaceCount.CHECKED])
        plan = self.last_plans.get(pool.space.space_id)
        if plan is None or not plan.rows.shape[0] or not plan.table.numel():
            return GroupReport(pool.name, pool.declared.window, verified)
        other = self.last_plans.get(base.space.space_id) if base is not None and base is not pool else None
        total = plan.prefix_lens.to(torch.int64) + plan.extend_lens
        total = torch.where(real_requests(plan), total, 0).clamp(max=plan.width)
        sums = torch.zeros(5, dtype=torch.int64, device=total.device)
        for start in range(0, int(total.max()), CHUNK):
            position = torch.arange(start, start + CHUNK, device=total.device).unsqueeze(0)
            sums += _counts(pool, plan, other, total.unsqueeze(1), position)
        return GroupReport(pool.name, pool.declared.window, verified, *sums.tolist())


def _has_tokens(pool: EnginePool) -> bool:
    declared = pool.declared
    return declared.layout.slot_per_token and declared.batch is None


def _counts(
    pool: EnginePool, plan: RequestPlan, other: RequestPlan | None, total: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """``[inside, outside, held, pairs, differ]`` over some positions of all requests."""
    window, space = pool.declared.window, pool.space
    first = torch.zeros_like(total) if window is None else (total - window + 1).clamp(min=0)
    live = position < total
    inside, outside = live & (position >= first), live & (position < first)
    requests = torch.arange(total.shape[0], device=total.device).unsqueeze(1)
    slot = table_slots(plan, requests, position)
    at = torch.where((slot >= 0) & (slot < space.slots), slot, space.nowhere)
    flags = space.flags[at]
    stored = (flags >= REFERENCE) & ((flags & int(Flag.RESERVED)) == 0) & ((flags & int(Flag.WRITTEN)) != 0)
    held = outside & stored & (space.positions[at] == position)
    pairs = inside & stored if other is not None else torch.zeros_like(inside)
    differ = pairs if other is None else pairs & (slot != table_slots(other, requests, position))
    return torch.stack([mask.sum() for mask in (inside, outside, held, pairs, differ)])

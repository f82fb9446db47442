"""Proof that the checks of an engine's session run: each layer's writes must leave fingerprints behind."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import UnrecordedLayersError
from ...kernels.checks import Check
from ...kernels.slots.space import Flag, RequestPlan
from ...kernels.slots.tokens import token_requests
from ...reports import summary
from .observed import Observed


class Health:
    """Looks, every so many steps, whether the last forward's slots have a fingerprint in every layer.

    A layer without one runs unguarded: its graph was compiled without the canary, by another backend, or from a
    cached artifact.

    Attributes:
        last_plans: what the last forward read and wrote, by the number of the slot space.
    """

    def __init__(self, session: Observed):
        self._session = session
        self.last_plans: Mapping[int, RequestPlan] = {}

    def after_step(self) -> None:
        """Run if it is due; also logs the line with the counts.

        Raises:
            UnrecordedLayersError: mode ``raise``, and a layer's writes are not recorded.
        """
        steps, schedule = self._session.steps, self._session.schedule
        if schedule.health and steps % schedule.health == 0:
            self.check()
        if schedule.stats and steps % schedule.stats == 0:
            summary.log.info("kvcanary.stats %s", self._session.stats().line())

    def check(self) -> None:
        """Look now.  Waits for the device.

        Raises:
            UnrecordedLayersError: mode ``raise``, and a layer's writes are not recorded.
        """
        missing = [name for number, plan in self.last_plans.items() for name in self._unrecorded(number, plan)]
        if missing:
            self._session.report_lost(UnrecordedLayersError(missing))

    def _unrecorded(self, number: int, plan: RequestPlan) -> list[str]:
        """The halves of a pool that have no fingerprint of the slots just written."""
        pool = next(p for p in self._session.pools.values() if p.space.space_id == number)
        if not pool.checks & Check.CONTENT or not plan.slots.numel():
            return []
        slots = plan.slots[token_requests(plan)[2]].to(torch.int64)
        slots = slots[(slots >= 0) & (slots < pool.space.slots)]
        slots = slots[(pool.space.flags[slots] & int(Flag.RESERVED)) == 0]
        if not slots.numel():
            return []
        recorded = (pool.digests[:, 0, slots] != 0).all(1).tolist()
        return [f"{h.info.layer} {h.info.half}" for h, ok in zip(pool.halves, recorded, strict=True) if not ok]

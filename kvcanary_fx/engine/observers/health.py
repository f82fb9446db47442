"""Proof that the checks of an engine's session run: each layer's writes must leave fingerprints behind."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import UnrecordedLayersError
from ...kernels.buffers import Count
from ...kernels.checks import Check
from ...kernels.ring import UNKNOWN
from ...kernels.slots.space import Flag, RequestPlan
from ...kernels.slots.tokens import token_requests
from ...reports import summary
from ..guarded_pool import EnginePool
from .observed import Observed


class Health:
    """Looks, every so many steps, whether the last forward's slots have a fingerprint in every layer, and whether the
    writes of each layer were recorded since it looked last.

    A layer without one runs unguarded: its graph was compiled without the canary, by another backend, or from a
    cached artifact.  Slots that are written again (of drafts, rings, states) still have that of the write before: a
    layer that stopped writing to them was seen by nobody.

    Attributes:
        last_plans: what the last forward read and wrote, by the number of the slot space.
    """

    def __init__(self, session: Observed):
        self._session = session
        self.last_plans: Mapping[int, RequestPlan] = {}
        self._runs: dict[int, list[int]] = {}  # by the number of the slot space: records of each half so far

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
        missing: list[str] = []
        stopped: list[str] = []
        for number, plan in self.last_plans.items():
            pool = next(p for p in self._session.pools.values() if p.space.space_id == number)
            recorded = self._recorded(pool, plan)
            if not recorded:
                continue
            for half, there, still in zip(pool.halves, recorded, self._stopped(number, pool), strict=True):
                if still or not there:
                    (stopped if there else missing).append(f"{half.info.layer} {half.info.half}")
        if missing or stopped:
            self._session.report_lost(UnrecordedLayersError(missing, stopped))

    def _recorded(self, pool: EnginePool, plan: RequestPlan) -> list[bool]:
        """Of each half of a pool, whether the slots that were just written have a fingerprint; nothing if none were.

        Slots that were handed out since are left out: seen with vLLM, of a request that ended before what a connector
        was to load for it had come, so that its slots were forgotten and never written.
        """
        if not pool.checks & Check.CONTENT or not plan.slots.numel():
            return []
        slots = plan.slots[token_requests(plan)[2]].to(torch.int64)
        slots = slots[(slots >= 0) & (slots < pool.space.slots)]
        slots = slots[(pool.space.flags[slots] & int(Flag.RESERVED)) == 0]
        slots = slots[pool.space.positions[slots] != UNKNOWN]
        if not slots.numel():
            return []
        recorded: list[bool] = (pool.digests[:, 0, slots] != 0).all(1).tolist()
        return recorded

    def _stopped(self, number: int, pool: EnginePool) -> list[bool]:
        """Of each half of a pool, whether no write was recorded since this was asked last, while one of another half
        was."""
        before, runs = self._runs.get(number), pool.on_device[1].counts[:, Count.RECORD_RUNS].tolist()
        for binding in self._session.bindings:
            in_graph = binding.record_runs()
            runs = [n + in_graph.get(half.id, 0) for n, half in zip(runs, pool.halves, strict=True)]
        self._runs[number] = runs
        since = [after - n for after, n in zip(runs, before or runs, strict=True)]
        return [n == 0 and any(since) for n in since]

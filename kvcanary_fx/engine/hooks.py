"""What an engine's session knows beyond its graphs: the running forward's plans, the owners of slots, its pools."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.context import ForwardContext
from ..kernels.ring import Ring
from ..reports.violation import Violation
from ..runtime.bound_call import BoundCall
from ..runtime.groups import Group, groups_of
from ..runtime.hooks import Hooks
from ..runtime.registry import PoolRegistry
from .blame import Blame
from .graph_layers import GraphLayers
from .guarded_pool import Pools
from .observers.all import Observers
from .request_ids import RequestIds
from .steps import Steps


class EngineHooks(Hooks):
    """The answers of an engine.

    Attributes:
        measures_calls: False: an engine is timed by its steps.
    """

    measures_calls = False

    def __init__(self, steps: Steps, pools: Pools, registry: PoolRegistry, ids: RequestIds, observers: Observers):
        self._steps, self._pools, self._observers = steps, pools, observers
        self._blame = Blame({p.space.space_id: p for p in pools.values()}, registry, ids)
        self._registry, self._ids, self._graph_layers = registry, ids, GraphLayers(pools)
        self.pools_in = self._count

    def _count(self, tensor: Any) -> int:
        return self._registry.pools_in(tensor) if isinstance(tensor, torch.Tensor) else 0

    def context_of(self, call: BoundCall) -> ForwardContext:
        """The graph's context, with the plans of the running forward.

        Raises:
            SessionStateError: no forward is running, and the session is ready or a CUDA graph is being captured.
        """
        running, context = self._steps.running, call.context
        # made in the first call, which is in no capture
        together = self._graph_layers.together(context, call.together) if call.together else None
        if running is None:
            self._require_forward(call)
            return context
        if not context.joins:  # its checks run in the model's stream
            self._steps.join()
        return dataclasses.replace(
            context,
            requests=running.plans,
            layers=self._pools.layer_records(context.gates),
            sides=self._steps.sides if context.joins else {},
            together=together,
        )

    def _require_forward(self, call: BoundCall) -> None:
        """Refuse a call of a guarded graph outside a forward."""
        if not call.opaque and all(half.space is None for half in call.halves):
            return
        error = self._steps.outside_forward()
        if error is not None:
            raise error

    def before_drain(self) -> bool:
        """Send the allocators' calls to the devices; rows of the warm-up do not count."""
        self._steps.flush()
        return self._steps.ready

    def decode(self, row: Sequence[int]) -> Violation | None:
        """The record of a row about one of the engine's pools, with the request that owns the slot."""
        running = self._steps.running
        return self._blame.decode(row, running.plans if running is not None else {}, self._observers.health.last_plans)

    def history(self, row: Sequence[int]) -> str | None:
        """What the slot of a row about one of the engine's pools went through."""
        pool = self._blame.pool_of(row)
        if pool is None or not 0 <= row[Ring.SLOT] < pool.declared.slots:
            return None
        past = pool.histories([row[Ring.SLOT]])[0]
        return past.told() or None if past is not None else None

    def groups(self, registry: PoolRegistry) -> list[Group]:
        """The engine's pools, and other caches that its graphs write."""
        running = self._steps.running
        plans = running.plans if running is not None else self._observers.health.last_plans
        pools = [
            Group(
                name=pool.name,
                halves=pool.halves,
                views=pool.views,
                info_id=pool.info.id,
                space=pool.space,
                name_of=self._ids.name,
                plan=plans.get(pool.space.space_id),
                imported=pool.content.imported,
                histories=pool.histories,
            )
            for pool in self._pools.values()
        ]
        declared = {half.id for pool in pools for half in pool.halves}
        return pools + [g for g in groups_of(registry) if declared.isdisjoint(g.numbers())]

    def checks_without_inputs(self) -> dict[str, str]:
        """The checks that cannot run in this session, each with what it lacks."""
        return self._observers.checks_without_inputs()

    def checks_in_part(self) -> dict[str, str]:
        """The checks that run without some of their inputs, each with what is lost."""
        return self._observers.checks_in_part()

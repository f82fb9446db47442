"""Short runs with one planted fault each, on engines that are made once and reset for each run.

What a :class:`Trial` says is the truth by the oracle and by the engine's own books; the canary's reports are handed
on beside it.  ``python -m kvcanary_fx campaign`` counts how they agree.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from config import EngineConfig
from engine import Engine
from models import expected_tokens
from planted import PAGES, PLANTS, LostTransfer, Plant, RankSkew, cached_slots
from prefix_cache import PrefixCache
from transfer import move
from workload import Request, State

from kvcanary_fx import Violation
from kvcanary_fx.kernels.slots.space import REFERENCE
from kvcanary_fx.proof import perturb

#: Steps after which a run must have ended.
MAX_STEPS = 80


@functools.cache
def expected(prompt: tuple[int, ...], fp8: bool) -> list[int]:
    """What follows a prompt, by the oracle."""
    return expected_tokens(list(prompt), 3, 0, EngineConfig(fp8=fp8))


@dataclasses.dataclass
class Trial:
    """A run.

    Attributes:
        strike: what was injected, if there was an opportunity.
        mattered: an output is not the oracle's.
        visible: somebody used what was struck.
        reports: step, violation, and whether the strike explains it.
    """

    strike: perturb.Strike | None
    mattered: bool
    visible: bool
    reports: list[tuple[int, Violation, bool]]


class Lab:
    """Engines that serve run after run; only those of one kind are kept, as Dynamo keeps few graphs of a model.

    Args:
        device: where the engines run.
        settings: of the canary.
    """

    def __init__(self, device: str = "cpu", **settings: Any):
        self.device = device
        self.settings = dict(mode="log", health_every=0, on_violation=self._hear) | settings
        self.heard: list[tuple[int, Violation]] = []
        self.step = 0
        self._kind: Any = None
        self._engines: list[Engine] = []

    def trial(self, name: str, seed: int, armed: bool = True) -> Trial:
        """One run; unarmed there is no strike."""
        plant = PLANTS[name](seed, armed)
        engines = self._engines_for(plant)
        for engine in engines:
            reset(engine, plant.pages, plant.cache)
            engine.faults = plant
        if isinstance(plant, RankSkew):
            engines[0].faults = plant.theirs
        self.heard.clear()
        requests = plant.requests()
        copies = [[dataclasses.replace(r, output=[], pages=[]) for r in requests] for _ in engines]
        served = self._serve(plant, engines, copies)
        self._end(plant, engines)
        mattered = any(r.output != expected(tuple(r.prompt), engines[0].config.fp8)[: r.new_tokens] for r in served)
        strike = plant.strike
        if strike is None and mattered:
            raise RuntimeError(f"class {name}, seed {seed}: a wrong output without any fault, the lab is broken")
        reports = [(s, v, strike is not None and s >= strike.step and plant.explains(v)) for s, v in self.heard]
        return Trial(strike, mattered, plant.visible, reports)

    def close(self) -> None:
        for engine in self._engines:
            engine.host.close()

    def _hear(self, violation: Violation) -> None:
        self.heard.append((self.step, violation))

    def _engines_for(self, plant: Plant) -> list[Engine]:
        kind = (plant.engines, tuple(plant.features.items()))
        if kind != self._kind:
            self.close()
            torch._dynamo.reset()
            first = {"prefill_only": True} if plant.engines == "transfer" else {}
            each = [{}] if plant.engines == "one" else [first, {}]
            self._engines = [Engine(lab_config(self.device, plant.features), **more, **self.settings) for more in each]
            self._kind = kind
        return self._engines

    def _serve(self, plant: Plant, engines: list[Engine], copies: list[list[Request]]) -> list[Request]:
        """Serve the requests on the first engine, or a copy on each rank; all requests served."""
        ranks = plant.engines == "ranks"
        fed = list(zip(engines, copies, strict=True)) if ranks else [(engines[0], copies[0])]
        for step in range(MAX_STEPS):
            self.step = plant.step = step
            for engine, requests in fed:
                for request in requests:
                    if request.arrival == step:
                        engine.add(request)
            for engine in engines:
                engine.step()
            if isinstance(plant, LostTransfer):
                plant.sending = [request.id for request, _ in engines[0].sent]
                move(*engines)
            for engine in engines:
                engine.session.drain()
            if all(r.state is State.DONE for _, requests in fed for r in requests):
                break
        return [r for _, requests in fed for r in requests]

    def _end(self, plant: Plant, engines: list[Engine]) -> None:
        """Sweep what is cached, evict it, and sweep what the cache still lists although it should be empty."""
        self.step += 1
        for engine in engines:
            for _ in range(2):
                slots = cached_slots(engine)
                if slots:
                    plant.swept(engine, slots)
                    engine.session.sweep.run(slots, "kv")
                while engine._evict():
                    pass
            engine.session.drain()


def lab_config(device: str, features: dict[str, Any]) -> EngineConfig:
    sizes = dict(device=device, pages=PAGES, width=24, max_running=4, token_budget=96, chunk=24)
    return EngineConfig(inner=perturb.FaultyWrites(), **sizes, **features)


def reset(engine: Engine, pages: int, caching: bool) -> None:
    """An engine as new, with ``pages`` pages, whatever the last run did to it."""
    memory, scheduler = engine.memory, engine.scheduler
    for pool in engine.session.pools.values():
        flags = pool.space.flags[:-1]
        refs = (flags // REFERENCE).index_fill(0, pool.slot_tensor(pool.declared.reserved), 0)
        pool.release(torch.arange(refs.numel(), device=refs.device).repeat_interleave(refs))
    engine.session.mark_ready()
    for tensor in (t for group in engine.groups for layer in group.layers for t in layer):
        tensor.zero_()
    memory.full.free[:] = range(pages - 1, 0, -1)
    memory.full.refs[:] = [0] * len(memory.full.refs)
    memory.table.zero_()
    memory.rows[:] = range(engine.config.max_running, 0, -1)
    scheduler.waiting.clear()
    scheduler.running.clear()
    engine.host.forget()
    engine.sent.clear()
    engine.cache = PrefixCache(memory) if caching else None
    engine.config.inner.armed = None

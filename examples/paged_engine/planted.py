"""The perturbations of :mod:`kvcanary_fx.proof.perturb`, planted in this engine: one strike in each short run."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from batching import Plan
from config import EngineConfig
from engine import Engine
from faults import Faults
from workload import BOS, VOCAB, Request, State

from kvcanary_fx import EnginePool, Violation
from kvcanary_fx.proof import perturb
from kvcanary_fx.proof.perturb import Spot

#: Pages of the pool; a run may have fewer of them, so that some evict and retract.
PAGES, FEWER = 24, 10


class Plant(Faults):
    """One perturbation in one run: the workload, where it strikes, and what must follow.

    Attributes:
        kind: the perturbation.
        features: of the engine.
        engines: how many there are: ``one``, ``transfer`` (prefill and decode) or ``ranks``.
        caching: with a prefix cache always, never, or in every second run (None).
        early: the first request ends in the first step, and the others come after it.
        certain: the strike itself says whether the fault shows; else it does if somebody reads the slot struck.
        late: now and then the first opportunity is left alone.
        by_bytes: found by the check of stored bytes, which a ``verify_fraction`` below 1 samples.
        visible: somebody used what was struck, so that it must be reported.
    """

    kind: type[perturb.Perturbation]
    features: dict[str, Any] = {}
    engines = "one"
    caching: bool | None = None
    early = False
    certain = True
    late = True
    by_bytes = False

    def __init__(self, seed: int, armed: bool = True):
        self.random = random.Random(f"{self.kind.kind} {seed}")
        own, warm_up = self.random.randrange(2**32), int(self.late and self.random.random() < 0.2)
        self.fault: Any = self.kind(probability=float(armed), seed=own, warm_up=warm_up, limit=1)
        self.cache = self.random.random() < 0.5 if self.caching is None else self.caching
        self.pages = PAGES if self.random.random() < 0.7 else FEWER
        self.step, self.visible, self.rewritten = 0, self.certain, False
        self.holders: set[str] = set()

    @property
    def strike(self) -> perturb.Strike | None:
        return self.fault.strikes[0] if self.fault.strikes else None

    def requests(self) -> list[Request]:
        """A few short requests, some with a prompt in common."""
        made = []
        for i in range(self.random.choice((2, 2, 3, 4))):
            first = self.early and i == 0
            new = 1 if first else self.random.choice((2, 2, 2, 3))
            arrival = 0 if first else int(self.early or self.random.random() < 0.15)
            made.append(Request(f"r{i}", list(self.random.choice(prompts())), new, arrival=arrival))
        return made

    # ---- what follows from the strike

    def before_forward(self, engine: Engine, plan: Plan) -> None:
        if self.strike is not None:
            self.watch(engine, plan, self.strike)
        self.plant(engine, plan)

    def plant(self, engine: Engine, plan: Plan) -> None:
        """Strike, if this is where the fault can happen."""

    def watch(self, engine: Engine, plan: Plan, strike: perturb.Strike) -> None:
        """Note who uses what was struck."""
        struck = {s // engine.config.page for s in self.slots()}
        self.holders |= {w.request.id for w in plan.work if struck & set(w.request.pages)}
        if not self.certain and not self.rewritten:
            self.visible |= strike.slot in {s.slot for s in read_spots(engine, plan)}
            self.rewritten = strike.slot in plan.slots

    def swept(self, engine: Engine, slots: list[int]) -> None:
        """A sweep over the cached ``slots`` follows."""
        if self.strike is not None and not self.certain and not self.rewritten:
            self.visible |= self.strike.slot in slots

    def slots(self) -> list[int]:
        """The slots struck."""
        strike = self.strike
        assert strike is not None
        return [strike.slot] + ([strike.partner.slot] if strike.partner is not None else [])

    def explains(self, violation: Violation) -> bool:
        """Whether a report follows from the strike: it is about the slots struck, or who holds their pages."""
        strike = self.strike
        assert strike is not None
        victims = {strike.request, strike.partner.request if strike.partner else None} - {None}
        return violation.slot in self.slots() or violation.request in victims | self.holders


class ExactPlant(Plant):
    """Its reports can only be about the very slots, layer and half."""

    def explains(self, violation: Violation) -> bool:
        strike = self.strike
        assert strike is not None
        place = (violation.pool, violation.layer, violation.half)
        return violation.slot in self.slots() and place == (strike.pool, strike.layer, strike.half)


# ---- bytes


class UsedBytes(ExactPlant):
    kind, by_bytes = perturb.UsedBytes, True

    def plant(self, engine: Engine, plan: Plan) -> None:
        self.fault.strike(pool_of(engine), read_spots(engine, plan), self.step)


class Scale(UsedBytes):
    kind, features = perturb.Scale, {"fp8": True}


class IdleBytes(ExactPlant):
    kind, by_bytes, certain = perturb.IdleBytes, True, False
    caching, early = True, True

    def before_step(self, engine: Engine) -> None:
        refs, page = engine.memory.full.refs, engine.config.page
        idle = [s for s in cached_slots(engine) if refs[s // page] == 1]
        self.fault.strike(pool_of(engine), [Spot(s) for s in idle], self.step)


class LateBytes(ExactPlant):
    kind, by_bytes, certain = perturb.LateBytes, True, False

    def after_forward(self, engine: Engine, plan: Plan) -> None:
        self.fault.strike(pool_of(engine), write_spots(plan), self.step)


class LateWrite(ExactPlant):
    kind, by_bytes, certain = perturb.LateWrite, True, False
    caching, early = False, True

    def before_step(self, engine: Engine) -> None:
        self.engine = engine

    def on_release(self, pages: list[int]) -> list[int]:
        self.fault.remember(pool_of(self.engine), self.engine.memory.full.slots(pages).tolist())
        return pages

    def plant(self, engine: Engine, plan: Plan) -> None:
        memory, page = engine.memory, engine.config.page
        spots = [
            Spot(s, w.request.id, p)
            for w in plan.work
            for p, s in enumerate(memory.slots(w.request, 0, len(w.request.pages) * page))
        ]
        strike = self.fault.strike(pool_of(engine), spots, self.step)
        if strike is not None:
            self.watch(engine, plan, strike)


class LostTransfer(Plant):
    kind, engines, by_bytes = perturb.LostTransfer, "transfer", True
    sending: list[str] = []

    def on_transfer(self, raw: bytearray) -> bytearray:
        self.fault.strike(raw, self.sending.pop(0), self.step)
        return raw

    def explains(self, violation: Violation) -> bool:
        return self.strike is not None and violation.request == self.strike.request


# ---- writes


class Written(ExactPlant):
    """A write inside the graph goes wrong."""

    def plant(self, engine: Engine, plan: Plan) -> None:
        self.fault.strike(pool_of(engine), write_spots(plan), engine.config.inner, self.step)


class Operand(Written):
    kind = perturb.Operand


class SkippedWrite(Written):
    kind = perturb.SkippedWrite


class Nan(Written):
    kind = perturb.Nan


class SlotIndex(Plant):
    kind = perturb.SlotIndex

    def plant(self, engine: Engine, plan: Plan) -> None:
        everywhere = range(PAGES * engine.config.page)
        self.fault.strike(plan.slots, dict(enumerate(write_spots(plan))), everywhere, self.step)


# ---- tables, plans and tokens


class TableEntry(Plant):
    kind = perturb.TableEntry

    def plant(self, engine: Engine, plan: Plan) -> None:
        work, page = self.random.choice(plan.work), engine.config.page
        spots = {c: Spot(p * page, work.request.id, c * page) for c, p in enumerate(work.request.pages)}
        used = {c: s for c, s in spots.items() if s.position < work.stop}
        strike = self.fault.strike(pool_of(engine), work.request.row, used, range(PAGES), self.step)
        if strike is not None:  # a page with the very same tokens may take the place of another
            self.visible = self._differ(engine, strike, work.start, work.stop)

    def _differ(self, engine: Engine, strike: perturb.Strike, start: int, stop: int) -> bool:
        """Whether attention finds other bytes there, now or when this step's tokens are in their slots."""
        first, page = strike.position, engine.config.page
        if min(stop, first + page) > start:
            return True
        old, new = (torch.arange(s, s + page) for s in self.slots())
        return any(not torch.equal(t[old], t[new]) for layer in engine.groups[0].layers for t in layer)

    def explains(self, violation: Violation) -> bool:
        return self.strike is not None and violation.request == self.strike.request


class StaleLength(Plant):
    kind = perturb.StaleLength
    moved: Callable[[], None] | None = None
    wrong: list[int] = []  # slots written by mistake, which others may share, and those left out

    def after_plan(self, engine: Engine, plan: Plan) -> None:
        page, slots = engine.config.page, engine.memory.slots
        spots = {
            i: Spot(slots(w.request, w.start, w.stop)[0], w.request.id, w.start)
            for i, w in enumerate(plan.work)
            if w.start > 0 and w.stop < len(w.request.pages) * page
        }
        if self.fault.strike(plan.prefix_lens, spots, step=self.step) is None:
            return
        number = next(i for i, w in enumerate(plan.work) if w.start != plan.prefix_lens[i])
        work, before = plan.work[number], plan.work[number].start
        work.start = plan.prefix_lens[number]
        tokens = slice(plan.ends[number] - len(work.tokens), plan.ends[number])
        plan.positions[tokens] = range(work.start, work.stop)
        received = slots(work.request, work.start, work.stop)
        self.wrong = plan.slots[tokens] + received
        plan.slots[tokens] = received
        self.moved = functools.partial(setattr, work, "start", before)

    def after_forward(self, engine: Engine, plan: Plan) -> None:
        if self.moved is not None:  # the engine itself goes on as if nothing had been
            self.moved()
            self.moved = None

    def slots(self) -> list[int]:
        return super().slots() + self.wrong


class SwappedTokens(Plant):
    kind, late = perturb.SwappedTokens, False

    def after_plan(self, engine: Engine, plan: Plan) -> None:
        spots = write_spots(plan)
        decodes = [e - 1 for w, e in zip(plan.work, plan.ends, strict=True) if w.request.output and len(w.tokens) == 1]
        self.fault.strike(plan.input_ids, {i: spots[i] for i in decodes}, self.step)


class RankSkew(Plant):
    """Rank 1 goes on with another token than rank 0; the ranks compare digests after each forward."""

    kind, engines, late = perturb.RankSkew, "ranks", False

    def __init__(self, seed: int, armed: bool = True):
        super().__init__(seed, armed)
        self.theirs = Witness()

    def before_step(self, engine: Engine) -> None:
        ready = [r for r in engine.scheduler.running if r.state is State.RUNNING and r.missing == 1]
        tokens = [r.output[-1] for r in ready]
        spots = {i: Spot(-1, r.id, r.stored) for i, r in enumerate(ready)}
        if self.fault.strike(tokens, spots, VOCAB, self.step) is not None:
            for request, token in zip(ready, tokens, strict=True):
                request.output[-1] = token

    def after_forward(self, engine: Engine, plan: Plan) -> None:
        for request, mine in digests(engine, plan).items():
            engine.session.compare_digests(mine, self.theirs.seen[request], request, "kv")

    def explains(self, violation: Violation) -> bool:
        return self.strike is not None and (violation.check, violation.request) == ("digest", self.strike.request)


class Witness(Faults):
    """Rank 0: remembers the digest of each request's slots."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def after_forward(self, engine: Engine, plan: Plan) -> None:
        self.seen = digests(engine, plan)


# ---- the life of pages


class PagePlant(Plant):
    """Its reports are about any slot of the page."""

    def slots(self) -> list[int]:
        assert self.strike is not None
        return list(range(self.strike.slot, self.strike.slot + EngineConfig.page))


class EarlyFree(PagePlant):
    kind = perturb.EarlyFree

    def plant(self, engine: Engine, plan: Plan) -> None:
        work, page = self.random.choice(plan.work), engine.config.page
        spots = {p: Spot(p * page, work.request.id, c * page) for c, p in enumerate(work.request.pages)}
        used = {p: s for p, s in spots.items() if s.position < work.start}
        self.holders |= {w.request.id for w in plan.work if set(w.request.pages) & set(used)}
        self.fault.strike(used, lambda pages: engine.memory.drop(pages, work.request.id), self.step)


class DoubleFree(PagePlant):
    kind = perturb.DoubleFree

    def on_release(self, pages: list[int]) -> list[int]:
        return self.fault.strike({p: Spot(p * EngineConfig.page) for p in pages}, self.step)


PLANTS: dict[str, type[Plant]] = {
    plant.kind.kind: plant
    for plant in (
        TableEntry, UsedBytes, IdleBytes, LateBytes, SwappedTokens, Operand, SlotIndex, StaleLength, EarlyFree,
        DoubleFree, SkippedWrite, LateWrite, Nan, Scale, LostTransfer, RankSkew,
    )
}  # fmt: skip


# ---- what can be struck


def pool_of(engine: Engine) -> EnginePool:
    return engine.session.pools["kv"]


def read_spots(engine: Engine, plan: Plan) -> list[Spot]:
    """The slots that a forward reads and does not write."""
    slots = engine.memory.slots
    return [Spot(s, w.request.id, p) for w in plan.work for p, s in enumerate(slots(w.request, 0, w.start))]


def write_spots(plan: Plan) -> list[Spot]:
    """The slots that a forward writes, token after token."""
    names = [w.request.id for w in plan.work for _ in w.tokens]
    return [Spot(*spot) for spot in zip(plan.slots, names, plan.positions, strict=True)]


def cached_slots(engine: Engine) -> list[int]:
    """The slots that the prefix cache lists."""
    pages = [p for node in engine.cache._nodes() for p in node.pages] if engine.cache else []
    return engine.memory.full.slots(sorted(set(pages))).tolist()


def digests(engine: Engine, plan: Plan) -> dict[str, int]:
    """A digest of who is in each request's slots."""
    slots = engine.memory.slots
    return {w.request.id: engine.session.digest(slots(w.request, 0, w.stop), "kv") for w in plan.work}


@functools.cache
def prompts() -> list[tuple[int, ...]]:
    """The prompts of all runs; some begin alike."""
    rng = random.Random(0)

    def words(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, VOCAB) for _ in range(rng.randint(low, high)))

    heads = [(BOS, *words(7, 7)) for _ in range(3)]
    return [rng.choice([(BOS,), *heads]) + words(2, 7) for _ in range(40)]

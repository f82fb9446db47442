"""The engine: one shared paged pool, one forward a step.

Where the canary is connected, the line says ``# canary``.
"""

from __future__ import annotations

import itertools
from typing import Any

import canary
import torch
from batching import Plan
from config import EngineConfig
from draft import make_drafts
from faults import Faults
from memory import Memory
from models import CompiledModel, make_groups, make_model
from offload import HostPool, SavedKV, Store
from prefix_cache import Keys, PrefixCache
from scheduler import Scheduler
from split import piecewise
from verification import judge, settle
from workload import Request, State

import kvcanary_fx


class Engine:
    """A serving engine.

    Args:
        config: sizes and features.
        faults: where faults can be planted.
        prefill_only: requests leave for another instance (``sent``) with their first token.
        settings: of the canary (:func:`kvcanary_fx.install_canary`); ``mode="off"`` for none.

    Attributes:
        session: the canary's session, None with the canary off.
        sent: requests whose prefill is done, with their KV, for a decode instance.
        steps, tokens: steps, and tokens that were accepted; ``accepted`` of those the draft had proposed, and
            ``rejected`` others; ``moved`` were in another branch than the first.
        padding: tokens that filled batches up.
        evictions: pages that the prefix cache gave up.
    """

    def __init__(self, config: EngineConfig, faults: Faults | None = None, prefill_only: bool = False, **settings: Any):
        config = piecewise(config)
        self.config, self.faults, self.prefill_only = config, faults or Faults(), prefill_only
        self.memory, self.groups = Memory(config), make_groups(config)
        self.session = canary.install(config, self.groups, self.memory, **settings)  # canary
        backend = self.session.backend if self.session is not None else config.inner  # canary
        self.model = CompiledModel(make_model(config, self.groups), config, self.groups, backend)
        self.draft = make_drafts(config, self.memory, self.model.model, settings)
        self.cache = PrefixCache(self.memory) if config.prefix_cache else None
        self.stores = self._stores()
        self.host = HostPool(self.stores, config.device)
        self.scheduler = Scheduler(self)
        self.sent: list[tuple[Request, SavedKV]] = []
        self.steps = self.tokens = self.accepted = self.rejected = self.moved = self.padding = self.evictions = 0

    @property
    def busy(self) -> bool:
        return self.scheduler.busy or bool(self.host.pending)

    # ---- what a client does

    def add(self, request: Request) -> None:
        """A request arrives; with ``saved`` KV its prefill is done."""
        self.scheduler.waiting.append(request)

    def close(self) -> None:
        """Stop the worker, and free the prefix cache: afterwards every page is free."""
        while self.cache and self._evict():
            pass
        self.host.close()

    # ---- a step

    @torch.no_grad()
    def step(self) -> None:
        """One forward of the target, and those of the draft."""
        self.steps += 1
        self.faults.before_step(self)
        self.host.join()
        plan = self.scheduler.plan()
        if plan is None:
            return
        self.faults.after_plan(self, plan)
        with kvcanary_fx.step(self.session, plan):  # canary
            tokens = self._forward(plan)
        self._accept(plan, tokens)
        if self.draft:
            self.faults.before_draft(self, plan)
            self.draft.run(plan, self.faults)
        self._after(plan)

    def _forward(self, plan: Plan) -> list[int]:
        """The model over a plan: the token that follows each of its tokens."""
        self.faults.before_forward(self, plan)
        plan.build_reads(self.config)
        self.faults.on_reads(self, plan)
        with kvcanary_fx.forward(self.session):  # canary
            for group, reads in zip(self.groups, plan.reads, strict=True):
                if self.session is not None:
                    self.session.check_reads(reads[: len(plan.work)], plan.lengths, group.name, page_size=1)  # canary
            out, hidden = self.model(plan.tensors(self.config))
        if self.draft:
            self.draft.keep(plan, hidden)
        self.padding += len(out) - len(plan.input_ids)
        self.faults.after_forward(self, plan)
        return out[: len(plan.input_ids)].tolist()

    def _accept(self, plan: Plan, tokens: list[int]) -> None:
        """Append what the model says, as far as it confirms the proposed tokens."""
        for work, end in zip(plan.work, plan.ends, strict=True):
            request = work.request
            request.stored += work.known
            if request.stored < request.length:
                continue  # in the middle of its prefill
            said = tokens[end - len(work.tokens) : end]
            path, new = judge(work, said, request.new_tokens - len(request.output), self.faults)
            moved = settle(work, path, self.stores[: len(self.groups)], self.memory)
            if moved and self.draft:
                self.draft.move(*moved)
            request.output += new
            request.stored += len(path)
            request.proposed, request.tree = [], []
            self.tokens += len(new)
            self.accepted += len(path)
            self.rejected += len(work.tree) - len(path)
            self.moved += len(moved[0]) if moved else 0

    def _after(self, plan: Plan) -> None:
        """Cache what is new, hand on who is prefilled, let go who is done."""
        for request in [w.request for w in plan.work]:
            if request.missing > 1 or request.ended or len(request.output) == 1:
                self._remember(request)  # before the window group frees what later requests need
            if request.missing > 1:
                self.memory.slide(request)
            elif request.ended:
                self.scheduler.finish(request, State.DONE)
            elif self.prefill_only:
                self.send(request)
            else:
                self.memory.slide(request)

    # ---- the prefix cache

    def keys(self, request: Request) -> Keys:
        """What identifies each position of a request, as far as it is known."""
        tokens = request.tokens
        last = max(self.config.offsets, default=0)  # a draft's slot is made of a later token
        shifted = (itertools.islice(tokens, k, None) for k in range(last + 1))
        return list(zip(*shifted, strict=False)) if last else tokens

    def use_prefix_cache(self, request: Request) -> None:
        """Start a request behind the longest prefix that is there; one token at least is left to compute."""
        request.caught = []
        if self.cache is None:
            return
        keys = self.keys(request)[: request.length - 1]
        pages = self.memory.usable(self.cache.match(request.namespace, keys))
        pages = self.faults.on_match(self, request, pages)
        self.memory.adopt(request, pages)
        request.stored = len(pages) * self.config.page

    def _remember(self, request: Request) -> None:
        if self.cache is not None:
            self.cache.insert(request.namespace, self.keys(request)[: request.stored], request.pages)

    def make_room(self, missing: tuple[int, int]) -> bool:
        """Evict until so many pages are free; whether they are."""
        while not self.memory.fits(missing):
            if not self._evict():
                return False
        return True

    def _evict(self) -> bool:
        pages = self.cache.evict() if self.cache else []
        self.evictions += len(pages)
        self.memory.drop(self.faults.on_evict(pages), None)
        return bool(pages)

    # ---- off-load

    def save(self, request: Request) -> None:
        """A retracted request's KV goes to the host; its pages are free when it has arrived."""

        def arrived(saved: SavedKV) -> None:
            self.faults.on_offload(self, saved)
            self.scheduler.put_back(request)
            request.saved = saved

        request.state = State.SAVING
        self.host.save(request, arrived)

    def send(self, request: Request) -> None:
        """A prefilled request's KV leaves, by way of the host, for the decode instance."""

        def arrived(saved: SavedKV) -> None:
            self.scheduler.finish(request, State.SENT)
            self.sent.append((request, saved))

        request.state = State.SAVING
        self.host.save(request, arrived)

    def load(self, request: Request) -> None:
        """A request's KV comes back from the host; it runs when it has arrived."""

        def arrived() -> None:
            request.state, request.saved = State.RUNNING, None
            self.faults.on_loaded(self, request)

        assert request.saved is not None
        self.host.load(request, arrived, lost=not self.faults.on_load(self, request, request.saved))

    def _stores(self) -> list[Store]:
        """The groups, with where a request's slots are in each."""
        memory, pools = self.memory, self.session.pools if self.session is not None else {}  # canary

        def full(request: Request, length: int) -> tuple[int, torch.Tensor]:
            return 0, memory.slot_tensor(request, 0, length)

        def window(request: Request, length: int) -> tuple[int, torch.Tensor]:
            start = memory.live_from(length)
            return start, memory.slot_map[memory.slot_tensor(request, start, length)]

        found = [Store(g, window if g.window else full, pools.get(g.name)) for g in self.groups]
        return found + [Store(head.group, full, head.pool) for head in (self.draft.heads if self.draft else [])]

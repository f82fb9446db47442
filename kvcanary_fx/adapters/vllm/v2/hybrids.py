"""The guard of a Model Runner V2 whose model has running states beside attention."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm.v1.kv_cache_interface import MambaSpec

from ....config import CanaryConfig
from ....engine.layers import LayerChecks
from ....engine.session import EngineSession
from ..journal import Message
from ..pools import Group, spec_of_a_layer
from ..settings import VllmSettings
from ..state_groups import KIND, StateGroup
from ..verdict import Verdict
from .connector import Bracket
from .forwards import Forwards
from .guard import GuardV2
from .state_memory import words_of
from .states import States

log = logging.getLogger("kvcanary")

#: The part of a budget that is the states': they and attention have a session each.
SHARE = 1 / 2

_OWNER = "kvcanary warm-up"


def why_not_by_the_second(runner: Any, spec: MambaSpec) -> str | None:
    """What keeps this guard from the states of a group, as text; None if nothing does."""
    if spec.mamba_cache_mode == "none":
        return None
    sizes = [spec_of_a_layer(group.kv_cache_spec).block_size for group in runner.kv_cache_config.kv_cache_groups]
    unit = getattr(runner.vllm_config.cache_config, "prefix_match_unit", None) or math.gcd(*sizes)
    if spec.block_size > unit:
        return (
            f"{KIND} with mamba_cache_mode={spec.mamba_cache_mode}, where a prefix ends inside a block ({unit} of its "
            f"{spec.block_size} tokens) is not supported by this adapter: such blocks are copied, and counted in a way "
            "of their own; without --prefix-match-unit prefixes end where blocks do"
        )
    return None


def why_no_words(state: torch.Tensor) -> str | None:
    """Why a state ``[blocks, ...]`` cannot be guarded, as text; None if it can."""
    if words_of(state) is not None:
        return None
    return f"a state of {state.dtype} {list(state.shape[1:])} is not one row of 32-bit words in its block"


def options_of(config: CanaryConfig) -> dict[str, Any]:
    """The settings of a session of states: a fixed share is of attention's bytes, and what a budget pays for is chosen
    by :mod:`.turns`.

    The session itself compares no bytes.  It would do so where blocks are freed, and a state that was freed is not read
    again, but by who finds it in the prefix cache, where it is compared.
    """
    checks = tuple(check for check in config.checks if check != "content") or ("bounds",)
    return dict(checks=checks, budget=None, verify_fraction=None, placement="inline", mode="log", health_every=0)


class GuardOfHybridV2(GuardV2):
    """A Model Runner V2 under guard, with its states.

    Attributes:
        states: their part.
    """

    def __init__(
        self,
        runner: Any,
        settings: VllmSettings,
        self_test: bool,
        groups: list[Group],
        states: Sequence[StateGroup],
        unguarded: dict[str, str] | None = None,
    ):
        """As :class:`.GuardV2`, with the groups of states."""
        self._state_groups = states
        self._budget = settings.session_config.budget_on(runner.device)
        guarded = dict.fromkeys((group.name for group in states), "")
        super().__init__(runner, settings, self_test, groups, {**(unguarded or {}), **guarded})
        for group in states:
            self.reactions.page_sizes[group.number] = 1  # a slot is a block
        log.info("kvcanary.vllm guarded beside them: states, %s", self._describe())

    def _install(self, allocations: bool) -> EngineSession:
        session = self._session_of_states(allocations)
        self.states = States(self._runner, session, self._state_groups, self._rows)
        config = self.settings.session_config
        budget = None if self._budget is None else self._budget * SHARE
        self.states.warm_up(budget, config.verify_every, "content" in config.checks)
        session.mark_ready()
        return super()._install(allocations)

    def _session_of_states(self, allocations: bool) -> EngineSession:
        session = super()._session_of(self._state_groups, allocations, **options_of(self.settings.session_config))
        for pool in session.pools.values():
            # groups share storage, and each allocation would be told of one by one; a block that two of them have is
            # written by both, and told as changed
            pool.rivals.clear()
            pool.allocate([1], owner=_OWNER)  # compiles the kernels
            pool.share([1], owner=_OWNER)
            pool.hand_over([1], owner=_OWNER)
            for _ in range(2):
                pool.release([1], owner=_OWNER)
            pool.flush()
        return session

    def _session_of(self, *args: Any, **options: Any) -> EngineSession:
        """Of attention: it has the rest of the budget."""
        if self._budget is not None:
            options.setdefault("budget", self._budget * (1 - SHARE))
        return super()._session_of(*args, **options)

    def begin(self, allocations: bool) -> None:
        """As of :meth:`.GuardV2`; something is looked at in each step, :meth:`before_states`."""
        super().begin(allocations)
        self.lets_pass = False

    def _describe(self) -> str:
        shown = ", ".join(group.name for group in self._state_groups)
        kept = sum(len(layer) for group in self._state_groups for layer in group.layers.values())
        return f"{shown}, {kept} halves, {self.states.turns.describe(self.states.size)}"

    @property
    def sessions(self) -> list[EngineSession]:
        """That of attention, and that of the states."""
        return [*super().sessions, self.states.session]

    def _forwards_of(self, session: EngineSession, checks: LayerChecks) -> Forwards:
        checks.reserve(*self._room)  # which makes the step inputs
        self.states.guard_places(session)
        return super()._forwards_of(session, checks)

    def places(self, counts: torch.Tensor) -> None:
        """As :meth:`.GuardV2.places`: those of the states."""
        self.states.places.check(counts)

    def _take(self, scheduled: Any, told: Message, events: Sequence[tuple[Any, ...]]) -> None:
        self.states.ended((*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())))
        super()._take(scheduled, told, events)

    def _ended(self, requests: Iterable[str]) -> None:
        self.states.ended(requests)
        super()._ended(requests)

    def forget_stored(self) -> None:
        """The KV cache's memory is about to be given back: sleep mode."""
        super().forget_stored()
        self.states.forget()

    def before_states(self, batch: Any) -> None:
        """The inputs of a forward are prepared: before the model.

        Args:
            batch: vLLM's ``InputBatch``.

        Raises:
            KVCacheViolation: the engine is to end, a check of an earlier step failed, and this rank's outputs are not
                read.
        """
        states, scheduled = self.states, self.scheduled
        states.drop()
        if scheduled is None or self._disabled:
            return
        states.news.dropped += 1
        unread = states.news.unread(early=self._ends_engine)
        idle = states.idle(batch, scheduled)
        if idle and self._alike and not unread:  # most steps
            return
        with self._counts.busy(), torch.inference_mode(False):  # another thread may be reading violations
            if unread:
                self._read_states()
            states.session.flush()
            if not idle:
                states.before(batch, scheduled, self.session.begun + 1)
        if unread:
            self._end_engine()

    def _read_states(self) -> None:
        self.states.session.drain()
        self._tell_news()

    def _end_engine(self) -> None:
        if self._ends_engine:
            self.states.session.check()

    def read(self) -> Verdict | None:
        """As :meth:`.GuardV2.read`, of both sessions."""
        self.states.news.dropped = 0
        if self.states.news.news():
            with self._counts.busy():  # this may be another thread than the runner's
                self._read_states()
            self._end_engine()
        return super().read()


class BracketOfHybrid(Bracket):
    """A :class:`.Bracket` with the states' calls: before ours, as a forward of ours holds the lock of the counts until
    it ends; and behind ours, also in a step that goes on as the last one did."""

    _guard: GuardOfHybridV2

    def pre_forward(self, scheduler_output: Any, input_batch: Any = None, attn_metadata: Any = None) -> None:
        """Before the model."""
        if input_batch is not None:
            self._guard.before_states(input_batch)
        super().pre_forward(scheduler_output, input_batch, attn_metadata)

    def finish_forward(self) -> None:
        """After the model."""
        super().finish_forward()
        self._guard.states.after()

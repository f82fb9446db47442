"""The guard of one model runner: its session, and the session's inputs before each forward."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.core.sched.scheduler import Scheduler

from ...engine.layers import LayerChecks
from ...engine.session import EngineSession
from ...errors import EngineError
from ...install import install_canary
from . import ops
from .advice import ADVICE
from .batches import make_batch, mark_prompt, tables_of
from .books import Books
from .counts import Counts
from .drafts import Drafts, Proposal
from .journal import ATTRIBUTE, FILLED, Message
from .pools import Group, Pooled, draft_groups, longest_encoded, own_layers
from .reactions import Reactions
from .settings import ON_VIOLATION_VARIABLE, VllmSettings
from .tables import Ledger

log = logging.getLogger("kvcanary")


def _sessions(guard: weakref.ref[Guard]) -> list[EngineSession]:
    found = guard()
    return found.sessions if found is not None else []


class Guard:
    """A model runner under guard.

    Attributes:
        groups: the KV cache groups that are guarded.
        session: of these groups.
        drafts: the draft's layers, if there are any that can be guarded.
        in_flight: another request writes some request's prefix in this step's forward.
        books: all blocks handed out, from the first one.
        namespaces: of the requests that have one, by id.
        calls_in_graph, calls_outside: attention calls guarded by ops of a compiled graph, and by calls around
            vLLM's own ops.
        reactions: to violations.
        scheduled: the ``SchedulerOutput`` of the running step.
        batch: of the running forward, or the last one.
        counts_beside: the counts are read while forwards run.
        has_connector: KV connectors fill blocks.
    """

    counts_beside = has_connector = False

    def __init__(
        self,
        runner: Any,
        settings: VllmSettings,
        self_test: bool,
        groups: list[Group],
        unguarded: Mapping[str, str] | None = None,
        drafts: list[Group] | None = None,
    ):
        """Make the session, before the server is healthy.

        Args:
            runner: has its KV cache.
            self_test: prove the checks on scratch pools first.
            unguarded: why the other groups are not guarded, by name.
            drafts: the groups of a draft's layers, if they were looked up before.

        Raises:
            SelfTestError: a check stays silent.
            EngineError: requests are to be aborted or recomputed, and the scheduler is not vLLM's own.
        """
        self.groups, self._own = groups, own_layers(groups)
        self.drafts: Drafts | None = None
        self.in_flight = False
        self.books = Books(functools.partial(_sessions, weakref.ref(self)))  # a guard lives as long as its runner
        self.namespaces: dict[str, int] = {}
        self.calls_in_graph = self.calls_outside = 0
        self.scheduled: Any = None
        self.batch: dict[str, Any] = {}
        states = dict(unguarded or {})
        self._draft_groups = draft_groups(runner, states) if drafts is None else drafts
        self._page_sizes = [g.kv_cache_spec.block_size for g in runner.kv_cache_config.kv_cache_groups]
        self._self_test = self_test
        states.update({group.name: "" for group in (*groups, *self._draft_groups)})
        self._counts = Counts(f"{os.getpid()}-{id(self):x}", states)
        self._requests: list[str] = []  # of the forward, in batch order
        self.reactions = Reactions.of(settings, list(self._page_sizes), runner.vllm_config.parallel_config)
        with torch.inference_mode(False):
            self.ledger = self._make_ledger(runner)
        self.has_connector = getattr(runner.vllm_config, "kv_transfer_config", None) is not None
        self.begin(reports_blocks(runner.vllm_config))
        if self.has_connector:
            with torch.inference_mode(False):
                self.books.prepare_for_connectors()

    def _make_ledger(self, runner: Any) -> Ledger:
        return Ledger(runner.max_num_reqs, widths(runner, runner.num_spec_tokens), runner.device)

    def _make_layers(self, session: EngineSession) -> LayerChecks:
        return LayerChecks(session)

    def begin(self, allocations: bool) -> None:
        """Make the session, and the draft's.

        Args:
            allocations: the scheduler reports what it does to blocks.

        Raises:
            SelfTestError: a check stays silent.
            EngineError: requests are to be aborted or recomputed, and the scheduler reports nothing.
        """
        began = time.perf_counter()
        with torch.inference_mode(False):  # the counts' thread could not write tensors made in inference mode
            self._allocations, self.session = allocations, self._install(allocations)
            self._layers = self._make_layers(self.session)
            self.reactions.late = self.session.pace is not None or self.session.config.verify_every > 1
            if self._draft_groups:  # block ids belong to the target, which checks their owners
                self.drafts = Drafts(self._session_of(self._draft_groups, allocations=False), self._draft_groups)
        self._counts.write(*(session.stats() for session in self.sessions))
        self._counts.follow(*self.sessions, beside=self.counts_beside)
        said = describe(self.session, self.groups, self._draft_groups)
        log.info("kvcanary.vllm guarded: %s, made in %.1f s", said, time.perf_counter() - began)

    def _install(self, allocations: bool) -> EngineSession:
        if self.settings.contains and not allocations:
            raise EngineError(
                f"{ON_VIOLATION_VARIABLE}={self.settings.on_violation} needs vLLM's own scheduler, with KVCANARY_MODE "
                "set in its process; here only the engine can be ended: set it to raise or log"
            )
        session = self._session_of(self.groups, allocations, stats_every=1000)
        if not allocations:
            log.warning("kvcanary.vllm owner check off: the scheduler does not report what it does to blocks")
        return session

    def _session_of(
        self,
        groups: Sequence[Pooled],
        allocations: bool,
        warm_up: Callable[[EngineSession], None] | None = None,
        **options: Any,
    ) -> EngineSession:
        session = install_canary(
            *(g.pool(self.ledger.tables[g.number], allocations) for g in groups),
            config=self.settings.session_config,
            self_test=self._self_test,
            **{"on_violation": self.reactions.flag, **options},
        )
        assert session is not None  # in mode off the plugin is not loaded
        session.advice = ADVICE
        if warm_up is not None:
            warm_up(session)
        session.mark_ready()
        return session

    @property
    def settings(self) -> VllmSettings:
        """How the runner is guarded."""
        return self.reactions.settings

    @property
    def sessions(self) -> list[EngineSession]:
        """The session, and the draft's if there is one."""
        return [self.session] if self.drafts is None else [self.session, self.drafts.session]

    def step(self, scheduled: Any) -> contextlib.AbstractContextManager[None]:
        """Around one step of the runner."""
        return self._step(scheduled)

    @contextlib.contextmanager
    def _step(self, scheduled: Any) -> Iterator[None]:
        self.scheduled = scheduled
        told: Message | None = getattr(scheduled, ATTRIBUTE, None)
        if self._allocations != (told is not None):  # a scheduler of another make, or in an unguarded process
            self.begin(told is not None)
        for request in scheduled.finished_req_ids:  # whose ids may be given again
            self.namespaces.pop(request, None)
        self.books.loads.lost(scheduled)
        self.park_what_is_stored(scheduled)
        if told is not None:
            self.books.apply(told.events, told.stacks)
            self.namespaces.update(told.namespaces)
            self.compare_what_is_refilled(scheduled, told.events)
        self.ledger.take(scheduled)
        try:
            yield
        finally:
            self.scheduled = None

    def park_what_is_stored(self, scheduled: Any) -> None:
        """Keep what is known of blocks that KV connectors store, before anything is done to them in a step."""
        if self.has_connector:
            with self._counts.busy(), torch.inference_mode(False):
                self.books.begin_step(scheduled)

    def compare_what_is_refilled(self, scheduled: Any, events: Sequence[tuple[Any, ...]]) -> None:
        """Let the device compare what was released before it is filled outside of a forward.

        Of hybrids, the runner zeroes the blocks that were just handed out, and of a prefix that ends inside a block it
        copies the block: before its batch is prepared.  A KV connector fills blocks before the model, too, once the
        device has done what it was given by then.

        Args:
            events: of the step's message.
        """
        if are_refilled(scheduled, events):
            for session in self.sessions:
                session.flush()

    def forget_stored(self) -> None:
        """The KV cache's memory is about to be given back, between two steps: sleep mode."""
        with self._counts.busy(), torch.inference_mode(False):
            self.books.all_gone()
            for session in self.sessions:
                session.flush()

    @contextlib.contextmanager
    def forward(self, runner: Any, input_ids: torch.Tensor | None, positions: torch.Tensor | None) -> Iterator[None]:
        """Around the forward of the target model in a step.

        Raises:
            KVCacheViolation: mode ``raise``, and a check failed.
        """
        session = self.session
        self._requests = list(runner.input_batch.req_ids[: runner.input_batch.num_reqs])
        self.ledger.show(self._requests)
        taken_up, namespaces = self.books.taken_up, self.namespaces
        in_flight, self.in_flight = self.ledger.in_flight(self.scheduled, self._page_sizes, taken_up)
        batch = make_batch(runner, self.scheduled, self.groups, input_ids, positions, namespaces, self.in_flight)
        self.batch = batch
        self.books.settle(in_flight)
        if self.books.loads.of:
            mark = functools.partial(mark_prompt, runner)
            self.books.announce_loaded(self.scheduled, self.ledger, self.namespaces, mark)
        try:
            step, layers = session.step(batch), self._layers.publish(ops.runs_from_python(runner.vllm_config))
            with (
                self._counts.busy(),
                step,
                session.forward(),
                layers,
                ops.one_forward(defers=True, own=self._own) as guarded,
            ):
                self._check_tables(runner)
                if self.drafts is not None:
                    self.drafts.expect(get_forward_context().slot_mapping, self.scheduled.total_num_scheduled_tokens)
                yield
            self.calls_in_graph += len(guarded.in_graph)
            self.calls_outside += len(guarded.outside)
            with self._counts.busy():
                self.books.accept_loaded()
            if self.settings.contains:
                session.drain()
        finally:
            self.books.after_forward()
            self._tell_news()

    @contextlib.contextmanager
    def proposing(
        self, drafter: Any, rejected: torch.Tensor | None, batch: torch.Tensor, following: torch.Tensor
    ) -> Iterator[Proposal]:
        """Around a proposal of the draft; the arguments are those of :class:`~.drafts.Proposal`.

        Raises:
            KVCacheViolation: mode ``raise``, and a check failed.
        """
        drafts = self.drafts
        assert drafts is not None
        try:
            with self._counts.busy(), drafts.session.step():
                proposal = Proposal(
                    drafts, drafter, self._requests, rejected, batch, following, self.namespaces, self.in_flight
                )
                yield proposal
                proposal.end()
            if self.settings.contains:
                drafts.session.drain()
        finally:
            self._tell_news()

    def _tell_news(self) -> None:
        """Write a violation to the counts at once."""
        if self.reactions.news:
            self._counts.write(*(session.stats() for session in self.sessions))
            self.reactions.told()

    def _check_tables(self, runner: Any) -> None:
        """Compare the block tables that the attention kernels get with the scheduler's."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):  # a list if a batch runs in parts, each with a piece of the tables
            return
        count = runner.input_batch.num_reqs
        for group in self.groups:
            given = tables_of(group, metadata, runner.seq_lens, count)
            if given is not None:
                self.session.check_reads(*given, pool=group.name, page_size=group.kernel_page_size)


def are_refilled(scheduled: Any, events: Sequence[tuple[Any, ...]]) -> bool:
    """Whether blocks are filled outside of a forward, see :meth:`Guard.compare_what_is_refilled`."""
    if getattr(scheduled, "new_block_ids_to_zero", None) or getattr(scheduled, "kv_cache_block_copies", None):
        return True
    return FILLED in [event[0] for event in events]  # a generator would be a function for each, in steps that wait


def reports_blocks(config: Any) -> bool:
    """Whether the scheduler that a ``VllmConfig`` names is hooked: vLLM's own, or a subclass."""
    return issubclass(config.scheduler_config.get_scheduler_cls(), Scheduler)


def describe(session: EngineSession, groups: Sequence[Group], drafts: Sequence[Group]) -> str:
    """What is guarded, by which checks, and how soon a changed byte is seen, in one line."""
    halves = sum(2 * len(group.layers) for group in (*groups, *drafts))
    parts = [f"{len(groups)} group{'s' * (len(groups) != 1)}", f"{halves} halves"]
    drafted = 2 * sum(len(group.drafted) for group in groups)
    if drafts:
        parts.insert(1, f"{len(drafts)} of a draft")
    if drafted:
        parts[1] += f", {drafted} of them of a draft"
    off = {"digest", "sweep"}  # which nobody asks for here
    if not all(pool.declared.allocations for pool in session.pools.values()):
        off.add("owner")
    parts.append("checks " + " ".join(check for check in session.config.checks if check not in off))
    every = session.config.verify_every
    if session.pace is not None:
        parts.append(session.pace.describe()[0])
    else:
        parts.append("every byte each time it is read" if every == 1 else f"every byte within {every} steps")
    return ", ".join(parts)


def widths(runner: Any, drafts: int) -> list[int]:
    """Pages of the longest request that the runner accepts, in each KV cache group.

    Args:
        drafts: tokens that are drafted in a step.
    """
    most = runner.max_model_len + drafts + 1
    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    return [-(-longest_encoded(runner, spec, most) // spec.block_size) + 1 for spec in specs]

"""The guard of one model runner: its session, and what it is told before each forward."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from ...engine import install_canary
from ...engine_layers import LayerChecks
from ...engine_session import EngineSession
from ...errors import EngineError
from ...violations import Violation
from . import ops
from .batches import kernel_tables, make_batch
from .books import Books
from .counts import Counts
from .pools import Group, guarded_groups
from .settings import VllmSettings
from .tables import Ledger

log = logging.getLogger("kvcanary")


class Guard:
    """A model runner under guard.

    Attributes:
        blocks: of the block manager, as many as its block pool has.
        groups: the KV cache groups that are guarded.
        session: theirs; made at the first use, when it is known whether an allocator reports to it.
        has_allocator: the scheduler's block pool is in this process and reports what it does.
        books: which blocks it handed out, from the first on.
        namespaces: of the requests that have one, by id.
        calls_in_graph, calls_outside: attention calls that were guarded by ops of a compiled graph, and by those around
            vLLM's own ops.
        flagged: requests to be aborted, by id, that no scheduler was told about yet.
        scheduled: the ``SchedulerOutput`` of the step that is running.
    """

    def __init__(self, runner: Any, settings: VllmSettings, self_test: bool):
        self.settings = settings
        self.blocks: int = runner.kv_cache_config.num_blocks
        self.groups: list[Group] = guarded_groups(runner)
        if not self.groups:
            raise EngineError("no KV cache group of this model can be guarded (see the warnings above)")
        self.has_allocator = False
        self.books: Books | None = None
        self.namespaces: dict[str, int] = {}
        self.calls_in_graph = self.calls_outside = 0
        self.flagged: set[str] = set()
        self.scheduled: Any = None
        self.ledger = _ledger(runner)
        self._page_sizes = [g.kv_cache_spec.block_size for g in runner.kv_cache_config.kv_cache_groups]
        self._self_test = self_test
        self._session: EngineSession | None = None
        self._layers: LayerChecks | None = None
        self._counts = Counts(f"{os.getpid()}-{id(self):x}")
        self._news = False  # a violation that the counts do not have yet

    @property
    def session(self) -> EngineSession:
        if self._session is None:
            self._session = self._install()
            self._layers = LayerChecks(self._session)
        return self._session

    def _install(self) -> EngineSession:
        if self.settings.aborts_requests and not self.has_allocator:
            raise EngineError(
                "KVCANARY_VLLM_ABORT=request needs the scheduler in the worker's process, which it is with one worker; "
                "here only the engine can be ended: unset it"
            )
        pools = [g.pool(self.ledger.tables[g.number], self.has_allocator) for g in self.groups]
        session = install_canary(
            *pools,
            config=self.settings.session_config,
            on_violation=self._flag,
            stats_every=1000,
            self_test=self._self_test,
        )
        assert session is not None  # the plugin is not loaded in mode off
        session.mark_ready()
        log.info("kvcanary.vllm guards %s", "; ".join(p.describe() for p in session.pools.values()))
        if not self.has_allocator:
            log.warning("kvcanary.vllm owner check off: the scheduler's block pool is in another process")
        return session

    def _flag(self, violation: Violation) -> None:
        self._news = True
        if self.settings.aborts_requests and violation.request is not None:
            self.flagged.add(str(violation.request))
        given = self.settings.config.on_violation
        if given is not None:
            given(violation)

    def take_flagged(self) -> set[str]:
        """The requests to be aborted, once."""
        taken, self.flagged = self.flagged, set()
        return taken

    @contextlib.contextmanager
    def step(self, scheduled: Any) -> Iterator[None]:
        """Around one step of the runner."""
        self.scheduled = scheduled
        self.ledger.take(scheduled)
        for request in scheduled.finished_req_ids:
            self.namespaces.pop(request, None)
        try:
            yield
        finally:
            self.scheduled = None

    @contextlib.contextmanager
    def forward(self, runner: Any, input_ids: torch.Tensor | None, positions: torch.Tensor | None) -> Iterator[None]:
        """Around the forward of the target model in a step.

        Raises:
            KVCacheViolation: mode ``raise``, and a check failed.
        """
        session = self.session
        assert self._layers is not None
        self.ledger.show(runner.input_batch.req_ids[: runner.input_batch.num_reqs])
        in_flight = self.ledger.in_flight(self.scheduled, self._page_sizes)
        namespaces = self.namespaces
        batch = make_batch(runner, self.scheduled, self.groups, input_ids, positions, namespaces, any(in_flight))
        if self.books is not None:
            self.books.settle(in_flight)
        try:
            with session.step(batch), session.forward(), self._layers.publish(), ops.one_forward() as guarded:
                self._check_tables(runner)
                yield
            self.calls_in_graph += len(guarded.in_graph)
            self.calls_outside += len(guarded.outside)
            if self.settings.aborts_requests:
                session.drain()
        finally:
            if self.books is not None:
                self.books.after_forward()
            if self._counts.due(self._news):
                self.tell_counts()

    def tell_counts(self) -> None:
        """Leave the counts for the metrics endpoint; waits for the device."""
        self._news = False
        self._counts.write(self.session.stats())

    def _check_tables(self, runner: Any) -> None:
        """Compare the block tables that the attention kernels get with the scheduler's."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):  # a list where a batch runs in parts: each has a piece of the tables
            return
        count = runner.input_batch.num_reqs
        for group in self.groups:
            given = kernel_tables(metadata[next(iter(group.layers))], runner.seq_lens, count)
            if given is not None:
                self.session.check_reads(*given, pool=group.name, page_size=group.kernel_page_size)


def _ledger(runner: Any) -> Ledger:
    """A ledger with room for the longest request that the runner takes."""
    most = runner.max_model_len + runner.num_spec_tokens + 1
    groups = runner.kv_cache_config.kv_cache_groups
    widths = [-(-most // group.kv_cache_spec.block_size) + 1 for group in groups]
    return Ledger(runner.max_num_reqs, widths, runner.device)

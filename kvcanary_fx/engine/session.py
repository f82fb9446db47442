"""The session of a serving engine: its steps and forwards.  How an engine connects: :mod:`kvcanary_fx.install`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..compile.backend import CanaryBackend
from ..config import CanaryConfig
from ..errors import EngineError, SessionStateError
from ..kernels import side_stream
from ..kernels.context import ForwardContext
from ..kernels.side_stream import capturing
from ..kernels.slots.space import RequestPlan
from ..reports.violation import Violation
from ..runtime.binding import BoundCall, GraphBinding
from ..runtime.readback import Poll
from ..runtime.session import CanarySession, take_rows
from .batch import Inputs
from .blame import Blame
from .forward import (
    Clock,
    Forward,
    Schedule,
    beside_capture,
    check_after,
    check_before,
    check_layers,
    check_reads,
    remember,
)
from .guarded_pool import EnginePool, Pools, find_rivals
from .kv_pool import KVPool, Slots
from .observers.all import Observers
from .observers.stats import EngineStats
from .observers.windows import WindowReport
from .request_ids import RequestId, RequestIds, require_ids
from .step_view import StepView

#: The views of a step that was given no batch.
_EMPTY: Any = object()


class EngineSession(CanarySession):
    """Guards the pools of an engine: bytes, identity and ownership of every slot.

    Attributes:
        pools: the pools by name.
        inputs: the persistent buffers of a step's inputs, shared by captured and eager forwards.
        own_inputs: those of pools with batches of their own, by the batch's field.
        observers: what looks at the pools between steps; ``sweep``, ``health``, ``windows`` and ``given`` are theirs.
        backend: for ``torch.compile(model, backend=session.backend)``.
    """

    def __init__(
        self,
        pools: Sequence[KVPool],
        config: CanaryConfig,
        max_requests: int | None = None,
        max_tokens: int | None = None,
        schedule: Schedule | None = None,
    ):
        super().__init__(config)
        if not pools:
            raise EngineError("install_canary needs at least one KVPool")
        names = [p.name for p in pools]
        if len(set(names)) < len(names):
            raise EngineError(f"two pools share a name: {names}. Give each KVPool a name of its own")
        if len({p.token_offset for p in pools}) > 1:
            raise EngineError(
                "the pools have different token_offset: a draft's forwards are not the target's, so a draft pool goes "
                "into a session of its own, install_canary(KVPool(..., token_offset=1))"
            )
        self._keep_to_budget(p.device for p in pools)
        self.ids = RequestIds()
        self.pools_in = self._pools_in
        self.pools = Pools((p.name, EnginePool(p, self.registry, self.controls, config, self.ids)) for p in pools)
        self._spaces = {p.space.space_id: p for p in self.pools.values()}
        find_rivals(list(self.pools.values()))
        self._blame = Blame(self._spaces, self.registry, self.ids)
        devices = dict.fromkeys(p.device for p in pools if side_stream.can_fork(p.device))
        beside = devices if config.placement == "side" else ()
        self._sides = {d: side_stream.SideStream(d) for d in beside}  # of what a layer waits for
        self._pool_sides = {d: side_stream.SideStream(d) for d in beside}  # of what the forward's end waits for
        self._inputs = Inputs(pools, max_requests, max_tokens, self.ids)
        self.inputs, self.own_inputs = self._inputs.main, self._inputs.own
        self.backend = CanaryBackend(config, self)
        self.steps = self._begun = 0
        self.schedule = schedule or Schedule()
        self.observers = seen = Observers(self)
        self.sweep, self.health, self.windows, self.given = seen.sweep, seen.health, seen.windows, seen.given
        self._poll = Poll(self.controls)
        self._ready = self._closed = False
        self._step: Mapping[str | None, StepView] | None = None
        self._thread: threading.Thread | None = None  # that is in a step
        self._forward: Forward | None = None
        self._clock = Clock(self.controls)

    def _pools_in(self, tensor: Any) -> int:
        return self.registry.pools_in(tensor) if isinstance(tensor, torch.Tensor) else 0

    @property
    def pool(self) -> EnginePool:
        """The only pool.

        Raises:
            EngineError: there are several; take one from ``pools``.
        """
        if len(self.pools) > 1:
            raise EngineError(f"the session has the pools {list(self.pools)}: say which, session.pools[name]")
        return next(iter(self.pools.values()))

    def mark_ready(self) -> None:
        """End the warm-up: what capture and dummy batches wrote and read is forgotten, checks count from here."""
        self._require_open()
        self.drain()
        for pool in self.pools.values():
            pool.space.forget_identity()
            pool.digests.zero_()
            pool.space.counters.zero_()
            pool.scales.adopt()
        self.observers.reset()
        self._begun = 0
        self.found.clear()
        self._ready = True

    def close(self) -> None:
        """End the session: read what the devices still have; later steps are an error.

        Raises:
            SessionStateError: it is closed already, or a step is running.
        """
        self._require_open()
        if self._step is not None:
            raise SessionStateError("close() inside step(): leave the step first")
        self.drain()
        self._closed = True

    def _require_no_step(self) -> None:
        if self._thread is None:
            return
        if self._thread is not threading.current_thread():
            raise SessionStateError(
                f"thread {threading.current_thread().name!r} entered step() while thread {self._thread.name!r} is in "
                "one. A session serves one thread at a time: give each engine a session of its own, or take turns"
            )
        raise SessionStateError("step() inside step(): one step at a time; the forwards of a draft go into forward(i)")

    def _require_open(self) -> None:
        if self._closed:
            raise SessionStateError("this session is closed: install_canary(...) makes a new one")

    def step(self, batch: Any = None) -> contextlib.AbstractContextManager[EngineSession]:
        """One outer step of the engine: fills the step inputs; sweeps, drains and tells at the end.

        Raises:
            SessionStateError: a step is running already, or the session is closed.
            StepInputError: the batch does not fit.
            KVCacheViolation: mode ``raise``, and a check failed.
        """
        inner = self._run_step(batch)
        return inner if self.pace is None or not self._ready else self.pace.step(inner, *self._weight)

    @functools.cached_property
    def _weight(self) -> tuple[torch.device, int]:
        """The device of the pools, and how many ops of ours a step launches there, about."""
        pools = [p.declared for p in self.pools.values()]
        return pools[0].device, 2 * sum(len(p.layers) + 1 for p in pools)

    @contextlib.contextmanager
    def _run_step(self, batch: Any) -> Iterator[EngineSession]:
        self._require_open()
        self._require_no_step()
        self._thread = threading.current_thread()
        self._begun += 1
        try:
            self.flush()
            self._clock.begin_step(self._begun)
            self._step = self._view_of(batch) if batch is not None else _EMPTY
            yield self
            self.steps += 1
            self.observers.after_step()
            self.flush()
            self._look()
            if self.config.mode == "log" and self._poll.news():
                self.drain()
        finally:
            self._step = self._thread = None

    def forward(self, index: int = 0, batch: Any = None) -> contextlib.AbstractContextManager[None]:
        """One forward of the model: checks what it is about to read and write, remembers what it wrote.

        Nested calls with the same index belong to the outermost one.

        Args:
            index: 0 is the target's; a draft that runs several forwards counts them.  Violations have it.
            batch: what this forward reads and writes, if it is not what the step was given.

        Raises:
            SessionStateError: no step is running, or another forward is.
            KVCacheViolation: mode ``raise``, and a check failed.
        """
        inner = self._run_forward(index, batch)
        return inner if self.pace is None else self.pace.forward(inner)

    @contextlib.contextmanager
    def _run_forward(self, index: int, batch: Any) -> Iterator[None]:
        if self._forward is not None and self._thread is threading.current_thread():
            self._forward.require(index)
            yield
            return
        if self._step is None or self._thread is not threading.current_thread():
            raise SessionStateError(f"forward({index}) outside step(): with session.step(batch): comes first")
        view = self._step if batch is None else self._view_of(batch)
        self._forward = Forward(index, {} if view is _EMPTY else self._plans(view))
        try:
            self.flush()
            self._clock.begin_forward(index)
            self._before(self._forward)
            try:
                yield
            finally:
                self._join(all=True)
            self._after_forward(self._forward)
            self.observers.after_forward(self._forward.plans)
        finally:
            self._forward = None

    def flush(self) -> None:
        """Let the devices know what the allocators said so far, see :meth:`EnginePool.flush`.

        Every step, forward and look does it by itself.  Call it before a CUDA graph is captured, and before the bytes
        of slots that were just released are rewritten outside a forward.

        Raises:
            EngineError: a CUDA graph is being captured, and there is something to tell.
        """
        for pool in self.pools.values():
            pool.flush()

    def _join(self, all: bool = False) -> None:
        for side in (*self._sides.values(), *(self._pool_sides.values() if all else ())):
            side.join()

    def _view_of(self, batch: Any) -> Mapping[str | None, StepView]:
        views = self._inputs.fill(batch, self._begun)
        self.given.note(batch)
        return views

    def _before(self, running: Forward) -> None:
        with beside_capture(self._sides.values()) as beside:
            check_before(self._spaces, running.plans)
            if beside:
                remember(self._spaces, running)
        if all(p.declared.device.type != "cuda" for p in self.pools.values()):
            self._look()  # free on the CPU, and the write has not happened yet

    def _check_layers(self, running: Forward) -> None:
        check_layers(self._spaces, running, self._pool_sides, self._sides)

    def _after_forward(self, running: Forward) -> None:
        remember(self._spaces, running)
        check_after(self._spaces, running.plans, self.config)
        self._look()

    def _look(self) -> None:
        """In raise mode, raise what was found so far."""
        if self.config.mode == "raise" and not capturing():
            self.drain()
            self._raise_new()

    def _plans(self, views: Mapping[str | None, StepView]) -> dict[int, RequestPlan]:
        """What each pool is to be read and written at, by the number of its slot space."""
        plans = self._inputs.plans(views)
        return {number: plans[pool.name] for number, pool in self._spaces.items() if pool.name in plans}

    def check_reads(
        self, pages: torch.Tensor, lengths: torch.Tensor, pool: str | None = None, page_size: int | None = None
    ) -> None:
        """Compare the page table that the attention kernel gets with the request table.

        Args:
            pages: integer ``[bs, columns]``, pages of ``page_size`` slots.
            lengths: integer ``[bs]``, positions that the kernel reads.
            page_size: None for the pool's own ``table_page_size``; 1 where ``pages`` are slots.

        Raises:
            SessionStateError: no forward is running.
            EngineError: fewer rows than the forward has requests, or a pool of rings or states.
        """
        if self._forward is None:
            raise SessionStateError("check_reads() outside forward(): it compares with the plan of the running forward")
        self._join()
        self.given.called("check_reads")
        check_reads(self.pool if pool is None else self.pools[pool], self._forward, pages, lengths, page_size)

    @property
    def flag(self) -> torch.Tensor:
        """int64 ``[2]`` on the device of the first pool: violations ever, violations read.

        They differ while something waits to be read, so an engine can copy them along with the sampled tokens and
        ask for :meth:`violations` only then.
        """
        self.flush()
        return self.controls(next(iter(self.pools.values())).declared.device).flag

    def owners(self, request_ids: Sequence[RequestId]) -> torch.Tensor:
        """Request ids as a batch may have them on the device: int64 ``[bs]`` on that of the first pool.

        A captured loop of forwards reads the tensor at each replay; refill it with those of the requests to come.
        """
        device = next(iter(self.pools.values())).declared.device
        require_ids(request_ids)
        return torch.tensor(self.ids.hashes(request_ids), dtype=torch.int64, device=device)

    # ---- hooks of CanarySession

    def runner(self) -> Callable[[GraphBinding, Callable[..., Any], Sequence[Any]], Any]:
        """:meth:`run`: of an engine, steps are measured."""
        return self.run

    def _context_of(self, call: BoundCall) -> ForwardContext:
        if self._forward is None:
            self._require_forward(call)
            return call.context
        if not call.context.joins:  # its checks run in the model's stream
            self._join()
        return dataclasses.replace(
            call.context,
            requests=self._forward.plans,
            layers=self.pools.layer_records(call.context.gates),
            sides=self._sides if call.context.joins else {},
        )

    def _require_forward(self, call: BoundCall) -> None:
        """Refuse a call of a guarded graph that no forward is around."""
        if not call.opaque and all(half.space is None for half in call.halves):
            return
        if capturing():
            raise SessionStateError(
                "a CUDA graph is being captured outside session.forward(): its checks would look at nothing, and "
                "report clean for ever. Capture in `with session.step(batch), session.forward():`"
            )
        if self._ready:
            raise SessionStateError(
                "the model ran outside session.forward(): wrap each call, `with session.forward(): model(...)`, "
                "so that the canary knows what it reads and writes"
            )

    def drain(self) -> list[Violation]:
        """Read the rings of all devices; before :meth:`mark_ready`, what they hold is warm-up and dropped."""
        self.flush()
        if self._ready:
            return super().drain()
        for control in self.controls.by_device.values():
            take_rows(control)
        return []

    def _decode(self, row: Sequence[int]) -> Violation:
        running = self._forward.plans if self._forward is not None else {}
        return self._blame.decode(row, running, self.health.last_plans) or super()._decode(row)

    def checks_without_inputs(self) -> dict[str, str]:
        """The checks that cannot run in this session, each with what they lack."""
        return self.observers.checks_without_inputs()

    def checks_in_part(self) -> dict[str, str]:
        """The checks that run without some of their inputs, each with what is lost."""
        return self.observers.checks_in_part()

    def stats(self) -> EngineStats:
        """Counts since the session was ready; waits for the devices."""
        counts = self.observers.stats(super().stats())
        if self.pace is None:
            return dataclasses.replace(counts, compared_every=self.config.verify_every)
        return dataclasses.replace(counts, compared_every=self.pace.every, compared_within=self.pace.within)

    def window_report(self) -> WindowReport:
        """How the groups of a hybrid model differ, so far; waits for the devices."""
        return self.windows.report()

    def summary(self) -> str:
        """What is protected, what is off and why, and the counts so far, as text."""
        pools = "".join(f"\n  {pool.describe()}" for pool in self.pools.values())
        first, _, rest = super().summary().partition("\n")
        return f"{first}{pools}\n{rest}"

    # ---- digests

    def digest(self, slots: Slots, pool: str | None = None, what: str = "identity") -> int:
        """64 bits over slots, to be compared between ranks or the two ends of a transfer.

        Args:
            what: ``identity`` (tokens, positions, chain: equal on all ranks) or ``content`` (bytes: equal where
                ranks hold copies of the same heads).
        """
        if what not in ("identity", "content"):
            raise EngineError(f"digest(what={what!r}): it is 'identity' or 'content'")
        shadow = (self.pool if pool is None else self.pools[pool]).export(slots)
        return shadow.identity_digest() if what == "identity" else shadow.content_digest()

    def compare_digests(
        self, mine: int, theirs: int, request: RequestId | None = None, pool: str | None = None
    ) -> bool:
        """Report a violation of the digest check if two digests differ; whether they agree.

        Raises:
            KVCacheViolation: mode ``raise``, and they differ.
        """
        chosen = self.pool if pool is None else self.pools[pool]
        self.sweep.report_digest(chosen, mine, theirs, self.ids.hash(request))
        self.given.called("compare_digests")
        self._look()
        return mine == theirs

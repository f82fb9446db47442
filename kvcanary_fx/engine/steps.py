"""The steps and forwards of an engine's session: which one is running, what it reads and writes, and its checks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import torch

from ..config import CanaryConfig
from ..errors import SessionStateError
from ..kernels import side_stream
from ..kernels.slots.space import RequestPlan
from ..kernels.waiting import Waiting
from ..runtime.binding import Controls
from ..runtime.readback import Poll
from .batch import Inputs
from .forward import (
    Clock,
    Forward,
    check_after,
    check_before,
    check_layers,
    forget_written,
    may_be_stored_ahead,
    on_sides,
    remember,
    take_back,
)
from .gathered import hands_over
from .guarded_pool import Pools
from .kept_forward import KeptForward
from .observers.all import Observers
from .step_view import StepView

#: The views of a step that was given no batch.
_EMPTY: Any = object()

Session = TypeVar("Session")

#: Tells the devices the number of the step that begins; all but one, if that was told.
Begin: TypeAlias = "Callable[[int, torch.device | None], None]"


class _Step(contextlib.AbstractContextManager[Session]):
    """A step around what runs in it.  No generator: each decode step enters it, often while the GPU waits."""

    def __init__(self, steps: Steps, batch: Any, session: Session):
        self._steps, self._batch, self._session = steps, batch, session

    def __enter__(self) -> Session:
        self._steps.begin(self._batch)
        return self._session

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._steps.end()
        finally:
            self._steps.leave()


class _Forward(contextlib.AbstractContextManager[None]):
    """The same of a forward."""

    def __init__(self, steps: Steps, index: int, batch: Any):
        self._steps, self._index, self._batch = steps, index, batch

    def __enter__(self) -> None:
        self._outermost = self._steps.begin_forward(self._index, self._batch)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._outermost:
            self._steps.end_forward(kind is None)


class Steps:
    """One step at a time, in one thread at a time, and in it one forward at a time.

    Attributes:
        running: the forward that is running; None outside of one.
        begun: steps that began since the session was ready; reports carry the number.
        done: steps that ended without an error.
        ready: the warm-up ended.
        closed: no further step may begin.
        thread: the thread that is in a step; None: there is none.
        pools_by_space: the pools by the number of their slot space.
        sides: streams of the work that a layer waits for, if checks run beside the model.
    """

    def __init__(
        self,
        pools: Pools,
        inputs: Inputs,
        controls: Controls,
        config: CanaryConfig,
        observers: Observers,
        look: Callable[[], None],
        drain: Callable[[], object],
    ):
        """
        Args:
            observers: notified of batches, forwards and steps.
            look: in raise mode, raises the violations found so far.
            drain: reads the rings of all devices.
        """
        self._pools, self._inputs, self._config, self._observers = pools, inputs, config, observers
        self._look, self._drain = look, drain
        self.pools_by_space = {p.space.space_id: p for p in pools.values()}
        self._flushes = [pool.calls.flush for pool in pools.values()]
        devices = dict.fromkeys(p.declared.device for p in pools.values())
        beside = [d for d in devices if side_stream.can_fork(d)] if config.beside else []
        self.sides = {d: side_stream.SideStream(d) for d in beside}
        self._pool_sides = {d: side_stream.SideStream(d) for d in beside}  # for the forward's end
        self._on_host = all(d.type != "cuda" for d in devices)
        self._checks_after = any(map(config.verifies_after, devices))  # asked once: 2 us of each forward's host time
        self._clock, self._poll = Clock(controls), Poll(controls)
        inputs.main.clock, inputs.main.clock_word = self._clock.place(inputs.main.counts.device), self._clock.word
        self._waiting = self._let_wait()
        self.begun = self.done = 0
        self.ready = self.closed = False
        self.running: Forward | None = None
        self._step: Mapping[str | None, StepView] | None = None
        # the last plans, by the name of the pool and by the number of its slot space
        self._named: dict[str, RequestPlan] = {}
        self._numbered: dict[int, RequestPlan] = {}
        self._ahead = False  # what these write may be stored with the checks before the model
        self.thread: int | None = None

    def _let_wait(self) -> Waiting | None:
        """Let a step's numbers travel with the calls of its allocator; None where these are of several pools."""
        pools = list(self._pools.values())
        if len(pools) > 1 or not hands_over(pools[0].declared.device):
            return None
        pools[0].calls.waiting = waiting = Waiting()
        return waiting

    def mark_ready(self) -> None:
        """The warm-up ended: number the steps from here."""
        self.begun, self.done, self.ready = 0, 0, True
        self._clock.begin_step(0)

    def close(self) -> None:
        """Read what is left on the devices; later steps are an error.

        Raises:
            SessionStateError: it is closed already, or a step is running.
        """
        self.require_open()
        if self._step is not None:
            raise SessionStateError("close() inside step(): leave the step first")
        self._drain()
        self.closed = True

    def require_open(self) -> None:
        """
        Raises:
            SessionStateError: the session is closed.
        """
        if self.closed:
            raise SessionStateError("this session is closed: install_canary(...) makes a new one")

    def _require_no_step(self) -> None:
        if self.thread is None:
            return
        if self.thread != threading.get_ident():
            other = next((t.name for t in threading.enumerate() if t.ident == self.thread), "that has ended")
            raise SessionStateError(
                f"thread {threading.current_thread().name!r} entered step() while thread {other!r} is in "
                "one. A session serves one thread at a time: give each engine a session of its own, or take turns"
            )
        raise SessionStateError("step() inside step(): one step at a time; the forwards of a draft go into forward(i)")

    def step(self, batch: Any, session: Session) -> contextlib.AbstractContextManager[Session]:
        """See :meth:`.EngineSession.step`.

        Args:
            session: what ``with`` binds.
        """
        return _Step(self, batch, session)

    def begin(self, batch: Any) -> None:
        """A step begins."""
        if self.closed or self.thread is not None:
            self.require_open()
            self._require_no_step()
        self.thread = threading.get_ident()
        self.begun += 1
        try:
            if batch is None:
                self._tell(self.begun, None)
                self._step = _EMPTY
            else:
                if self._waiting is None:
                    self.flush()  # the batch says which step it is, and the calls were made before it
                self._step = self._view_of(batch, self._tell)
        except BaseException:
            self.leave()
            raise

    def end(self) -> None:
        """The step has run."""
        self.done += 1
        self._observers.after_step()
        self.flush()
        if self._config.mode == "log":
            if self._poll.news():
                self._drain()
        else:
            self._look()

    def leave(self) -> None:
        """The step is over, also if something in it raised."""
        self._step = self.thread = None
        if self._waiting is not None:
            self._waiting.drop()  # their places may be gone in the next step

    def forward(self, index: int, batch: Any) -> contextlib.AbstractContextManager[None]:
        """See :meth:`.EngineSession.forward`."""
        return _Forward(self, index, batch)

    def begin_forward(self, index: int, batch: Any) -> bool:
        """A forward begins; False if it is part of the one that is running.

        Launches only, and reads nothing back, unless mode ``raise`` looks at a CPU's rings.
        """
        here = self.thread == threading.get_ident()
        if self.running is not None and here:
            self.running.require(index)
            return False
        if self._step is None or not here:
            raise SessionStateError(f"forward({index}) outside step(): with session.step(batch): comes first")
        view = self._step if batch is None else self._view_of(batch)
        self.running = Forward(index, {} if view is _EMPTY else self._plans(view))
        try:
            self.flush()
            self._clock.begin_forward(self.running)
            self._before(self.running)
        except BaseException:
            take_back(self.pools_by_space, self.running)
            self._clock.end_forward(self.running)
            self.running = None
            raise
        return True

    def end_forward(self, ran: bool) -> None:
        """The forward is over.

        Args:
            ran: it raised nothing.
        """
        try:
            if self.sides or self._pool_sides:
                self.join(all=True)
            running = self.running
            if running is None:
                return
            if ran:
                self._after(running)
                self._observers.after_forward(running.plans)
            else:
                take_back(self.pools_by_space, running)
                forget_written(self.pools_by_space, running)
        finally:
            if self.running is not None:
                self._clock.end_forward(self.running)
            self.running = None

    @property
    def open(self) -> bool:
        """Whether a step is running that was begun by :meth:`step`."""
        return self._step is not None

    def outside_forward(self) -> SessionStateError | None:
        """What is wrong with a model that runs while no forward does; None in a warm-up."""
        if side_stream.capturing():
            return SessionStateError(
                "a CUDA graph is being captured outside session.forward(): its checks would look at nothing, and "
                "report clean for ever. Capture in `with session.step(batch), session.forward():`"
            )
        if self.ready:
            return SessionStateError(
                "the model ran outside session.forward(): wrap each call, `with session.forward(): model(...)`, "
                "so that the canary knows what it reads and writes"
            )
        return None

    def begin_kept(self, kept: KeptForward, send: Callable[[int], None], requests: int, tokens: int) -> None:
        """A step begins that has one forward, whose checks were kept; whoever calls it launches those before the model.

        See :meth:`.LayerChecks.kept`.
        """
        if self.closed or self.thread is not None:
            self.require_open()
            self._require_no_step()
        self.thread = threading.get_ident()
        self.begun += 1
        self.flush(into_step=kept.first is not None)
        send(self.begun)
        self._inputs.main.filled_by_graph(requests, tokens)
        self.running = kept.forward

    def end_kept(self, kept: KeptForward) -> None:
        """The model has run, and all checks are launched."""
        self.running = None
        self.done += 1
        self._observers.after_forward(kept.forward.plans)
        self._observers.after_step()

    def may_go_on(self) -> bool:
        """Whether nothing is to be done in a step that has all checks in the model's graph, but what
        :meth:`.LayerChecks.going_on` says."""
        return self.ready and self._observers.idle

    def leave_kept(self) -> None:
        """The step is over, also if the model raised."""
        if self.thread == threading.get_ident():
            self.running = self.thread = None

    def padded(self, requests: int, tokens: int) -> Forward:
        """A forward of no requests, for a graph whose replays run inside other forwards.  See
        :meth:`.LayerChecks.captured`."""
        return Forward(0, self._plans(self._inputs.empty(requests, tokens)), captured=False)

    def flush(self, into_step: bool = False) -> None:
        """Send the allocators' calls so far to the devices.

        Args:
            into_step: as of :meth:`.SlotEvents.flush`.
        """
        for flush in self._flushes:
            flush(into_step)

    def _tell(self, step: int, told: torch.device | None) -> None:
        """A step begins, of which the device ``told`` has its numbers, or gets them with the calls before it."""
        self.flush()
        if self._waiting is not None:
            self._waiting.send()  # no call took them along
        self._clock.begin_step(step, told)

    def join(self, all: bool = False) -> None:
        """Let the model's streams wait for the work that a layer waits for; with ``all``, also for the forward's."""
        for side in (*self.sides.values(), *(self._pool_sides.values() if all else ())):
            side.join()

    def check_layers(self, running: Forward) -> None:
        """Compare what a forward reads in all layers at once, see :func:`.forward.check_layers`."""
        check_layers(self.pools_by_space, running, self._pool_sides, self.sides)

    def _view_of(self, batch: Any, begin: Begin | None = None) -> Mapping[str | None, StepView]:
        views = self._inputs.fill(batch, self.begun, begin, None if begin is None else self._waiting)
        self._observers.given.note(batch)
        return views

    def _plans(self, views: Mapping[str | None, StepView]) -> dict[int, RequestPlan]:
        """The plan of each pool, by the number of its slot space."""
        plans = self._inputs.plans(views)
        if plans is not self._named:
            pools = self.pools_by_space.items()
            self._named, self._numbered = plans, {n: plans[pool.name] for n, pool in pools if pool.name in plans}
            self._ahead = may_be_stored_ahead(self.pools_by_space, self._numbered)
        return self._numbered

    def _before(self, running: Forward) -> None:
        if running.captured and self.sides:
            with on_sides(self.sides.values()):
                check_before(self.pools_by_space, running.plans)
                remember(self.pools_by_space, running)
        else:
            ahead = self._ahead and not running.captured and running.plans is self._numbered
            running.remembered = ahead
            check_before(self.pools_by_space, running.plans, running.stored_ahead if ahead else None)
        if self._on_host and self._config.mode != "log":
            self._look()  # free on the CPU, and the write has not happened yet

    def _after(self, running: Forward) -> None:
        remember(self.pools_by_space, running)
        if self._checks_after:
            check_after(self.pools_by_space, running.plans, self._config)
        if self._config.mode != "log":
            self._look()

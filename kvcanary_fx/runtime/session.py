"""The session: owns pools, shadows and reports, and brackets every call of a guarded graph."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..config import CanaryConfig
from ..errors import CanaryError, MissedChecksError, RecompileLimitError, first_of
from ..kernels.buffers import Count, Gate
from ..kernels.context import publish, withdraw
from ..passes.graph_plan import GraphPlan
from ..reports import summary
from ..reports.violation import KVCacheViolation, Violation
from . import status
from .alarm import Alarm
from .binding import Controls, GraphBinding
from .bound_call import BoundCall, RunningCalls
from .hooks import Hooks
from .pace import Pace
from .readback import Readback, Readbacks
from .registry import PoolRegistry


class GraphCalls(threading.local):
    """How many graphs of one session the calling thread has called, whether they failed or not.

    Attributes:
        guarded: graphs with a check in them.
        unguarded: graphs with nothing to guard.
    """

    guarded = 0
    unguarded = 0


class _Late(threading.local):
    """Of the calling thread: whether reports of its forwards may wait until the next one."""

    deferring = False


class CanarySession:
    """Guards the KV caches of the models compiled with it.

    Every model compiled with the same settings shares one session (:func:`kvcanary_fx.session`);
    :class:`kvcanary_fx.CanaryBackend` has its own.  Several threads may use a session at once, each
    with its own caches.

    Attributes:
        hooks: answer questions about calls and rows; an engine's session has its own.
    """

    #: Layers whose checks an engine calls itself, since no graph shows them.
    eager_layers: tuple[str, ...] = ()

    #: Whoever calls the compiled functions makes sure that each call is guarded.
    calls_are_judged = False

    def __init__(self, config: CanaryConfig | None = None):
        self.config = config or CanaryConfig.from_env()
        self.hooks = Hooks()
        self.registry = PoolRegistry(self.config.planes)
        self.controls = Controls(self.config.ring_capacity)
        self.advice: Mapping[str, str] | None = None  # set by an adapter: what to try with its engine
        self.pace: Pace | None = None  # set if a budget decides which share of the bytes is compared
        self.plans: list[GraphPlan] = []
        self.bindings: list[GraphBinding] = []
        self.uncovered: list[str] = []  # why coverage was lost, in words
        self.limit_hit: RecompileLimitError | None = None  # by a function being compiled for this session
        self.calls = 0  # of guarded graphs, whether they failed or not
        self.entered = GraphCalls()  # per thread
        self._warned: set[str] = set()
        self._running = RunningCalls()
        self._readbacks, self._late = Readbacks(self.controls), _Late()
        self._lock = threading.RLock()
        self._alarm = Alarm(self, self.controls, self._lock)
        self.found = self._alarm.found

    # ---- compile time

    def add_graph(self, plan: GraphPlan) -> GraphBinding:
        """Register a rewritten graph."""
        with self._lock:
            self._keep_to_budget(plan.devices)
        binding = GraphBinding(plan, self.config, self.registry, self.controls)
        with self._lock:
            self.plans.append(plan)
            self.bindings.append(binding)
        self.follow()
        if self.config.mode == "log" and self.hooks.measures_calls:  # an engine's session looks in each step
            self._alarm.drain_at_exit()
        return binding

    def follow(self) -> None:
        """Count this session in the file of the setting ``status``, from here on."""
        status.follow(self)

    def _keep_to_budget(self, devices: Iterable[torch.device]) -> None:
        """If one of the devices has a budget, let it decide which share of the bytes is compared in each step."""
        budgets = [b for b in map(self.config.budget_on, devices) if b is not None]
        if budgets and self.pace is None and "content" in self.config.checks:
            self.pace = Pace(budgets[0], self.controls)

    # ---- run time

    def runner(self) -> Callable[[GraphBinding, Callable[..., Any], Sequence[Any]], Any]:
        """:meth:`run` a graph that was just added: timed if there is a budget."""
        return self.pace.calls(self.run) if self.pace is not None and self.hooks.measures_calls else self.run

    def run(self, binding: GraphBinding, compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        """One call of a guarded graph.

        Raises:
            KVCacheViolation: mode ``raise``, and a check failed in this call.
            CoverageError: mode ``raise``, and checks of the graph did not run, in this call or, on a GPU, in one of the
                last 0.1 s (:data:`.readback.BETWEEN`).
            ConcurrentUseError: another thread is in a forward over one of the caches.
            CaptureError: a CUDA graph is being captured over a cache that was never seen.
        """
        if self._late.deferring:
            self._catch_up()
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return self._run_captured(binding, compiled, args)
        steady = binding.steady(args)
        if steady is None:
            return self._run_anew(binding, compiled, args)
        if not steady.counted:
            self._be_lenient(binding)
        out = self._enclosed(binding, steady.call, compiled, args)
        steady.remember(args)
        self._look_after(binding)
        return out

    def _run_anew(self, binding: GraphBinding, compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        """The slow path: other tensors than last time, or something wrote to them."""
        call = self._bind(binding, args, capturing=False)
        self._say_what_is_shared(binding, call)

        def prepared(*given: Any) -> Any:
            self._note_outside_writes(binding, call, args)
            return compiled(*given)

        out = self._enclosed(binding, call, prepared, args)
        self._remember_versions(call, args)
        if call.returned is not None:
            call.returned.store(out)
        binding.keep(call, args)
        self._look_after(binding)
        return out

    def _run_captured(self, binding: GraphBinding, compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        """A call under CUDA graph capture: nothing is read, and replays run no Python of ours."""
        call = self._bind(binding, args, capturing=True)
        if call.returned is not None:
            self.lose_coverage(f"{binding.plan.name}: caches that it returns are not guarded in a CUDA graph")
        return self._enclosed(binding, call, compiled, args, captured=True)

    def _bind(self, binding: GraphBinding, args: Sequence[Any], capturing: bool) -> BoundCall:
        abort = self._abort if self.config.mode == "raise" and binding.plan.devices[0].type == "cpu" else None
        return binding.bind(args, capturing, abort)

    def _enclosed(
        self,
        binding: GraphBinding,
        call: BoundCall,
        compiled: Callable[..., Any],
        args: Sequence[Any],
        captured: bool = False,
    ) -> Any:
        """The graph, with its context published, and marked as running."""
        self._running.enter(call)
        try:
            published = publish(self.hooks.context_of(call))
            binding.begin()
            try:
                self.calls += 1
                try:
                    if call.layer is not None and not captured:
                        self._running.take_turn(call, self.calls)
                    return compiled(*args, *binding.states)
                except BaseException as e:  # Ctrl-C as well: ops that it kept from running are not missing
                    self._running.break_off()
                    self._after_failure(binding, e)
                    raise
            finally:
                binding.end()
                withdraw(published)
        finally:
            self._running.leave()

    def _note_outside_writes(self, binding: GraphBinding, call: BoundCall, args: Sequence[Any]) -> None:
        """If something else wrote to a pool since our last call, let the kernels know."""
        lenient = call.returned is not None and call.returned.load(args)
        for name in call.returned.copied() if call.returned is not None else ():
            self.warn_once(
                f"copied {name}",
                f"kvcanary.unguarded {binding.plan.name}: {name} was never the tensor that a call before returned. If "
                "one cache goes from call to call as a copy (clone, to), nothing is known of the copy: pass on the "
                "tensor that the model returned.",
            )
        for storage, argument, _ in call.storages:
            version = _version(args[argument])
            if version is None or version != storage.version:
                lenient = True
                storage.suspects = {half.id for half in storage.halves.values()}
            # a write that another graph already knows of may have hit our halves
            lenient = lenient or not storage.suspects.isdisjoint(call.ids)
        if lenient:
            self._be_lenient(binding)

    def _say_what_is_shared(self, binding: GraphBinding, call: BoundCall) -> None:
        """Caches that another session guards, too: what it writes is a change from outside for this one."""
        pools = [pool for storage, _, pool in call.storages if storage.shared]
        if not pools:
            return
        for storage, _, _ in call.storages:
            storage.shared = False
        self.lose_coverage(
            f"{binding.plan.name}: another session guards {first_of(pools)}, too. Neither knows what the other "
            "recorded and takes it as it is, so what is corrupted between a call of one and a call of the other may "
            "not be found. Compile all that runs over one cache with one backend object, or with backend='kvcanary' "
            "and the same settings; protect gives each model a session of its own"
        )

    def _be_lenient(self, binding: GraphBinding) -> None:
        for gate in binding.gates.values():
            gate[Gate.LENIENT_NEXT] = 1

    def _remember_versions(self, call: BoundCall, args: Sequence[Any]) -> None:
        for storage, argument, _ in call.storages:
            storage.version = _version(args[argument])
            storage.suspects -= call.ids
            if id(storage) in call.written:
                storage.shadows.clear()  # of the tensor as an earlier call returned it

    def _look_after(self, binding: GraphBinding) -> None:
        """Read what calls reported: at once in raise mode and on the CPU, else now and then, when it has arrived."""
        try:
            readback = self._readbacks.of(binding)
            if readback.at_once or (self.config.mode == "raise" and not self._late.deferring):
                readback.start(whole=False)
                readback.wait()
                self._look_at(readback)
            elif not (self._late.deferring or readback.is_due()):
                pass  # this call is counted, and read with a later one
            elif not readback.under_way or self._look_if_arrived(readback):
                readback.start(whole=False)
        except RuntimeError as e:  # a failure on the device shows up here
            self._after_failure(binding, e)
            raise

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """In this block the thread waits for no device: violations of a forward are raised before the next one begins.

        Those of the last forward are raised at the end of the block.  For loops that return nothing before.  On the
        CPU nothing changes, and mode ``log`` does not wait anyway.

        Raises:
            KVCacheViolation: mode ``raise``, and a check failed inside.
        """
        outer = self._late.deferring
        self._late.deferring = self.config.mode == "raise"
        try:
            yield
            if self._late.deferring:
                self.look()  # also whether all checks ran
        finally:
            self._late.deferring = outer

    def look(self) -> None:
        """Report what this thread's calls have left on the devices so far; waits for these.

        Mode ``log`` looks now and then, and not after the last call: for loops that are over.
        """
        for readback in self._readbacks.far():
            readback.start()
            readback.wait()
            self._look_at(readback)

    def _catch_up(self) -> None:
        """Read what was deferred."""
        for readback in self._readbacks.under_way():
            readback.wait()
            self._look_at(readback)

    def _look_if_arrived(self, readback: Readback) -> bool:
        arrived = readback.arrived()
        if arrived:
            self._look_at(readback)
        return arrived

    def _look_at(self, readback: Readback) -> None:
        """Read the rings if they are not empty, and compare the ops that ran with those that were inserted."""
        if readback.take():
            self.drain()
            if self.config.mode == "raise":
                self._raise_new()
        if not readback.complete() and readback.alone:
            binding = readback.binding
            self.report_lost(MissedChecksError(binding.plan.name, binding.missing_checks()))

    def _raise_new(self, cause: BaseException | None = None) -> None:
        """Raise the violations that no exception has reported yet."""
        with self._lock:
            fresh, total = self.found.take_untold()
        if total:
            raise KVCacheViolation(summary.by_importance(fresh), total, self.advice) from cause

    def report_lost(self, error: CanaryError, cause: BaseException | None = None) -> None:
        """Note that something runs unguarded; in raise mode, raise it."""
        self.lose_coverage(str(error))
        if self.config.mode == "raise":
            raise error from cause

    def lose_coverage(self, why: str) -> None:
        """Note, once, that something runs unguarded."""
        if why not in self.uncovered:
            self.uncovered.append(why)
            summary.log.warning("kvcanary.coverage %s", why)

    def warn_once(self, key: str, message: str) -> None:
        """Log ``message`` at WARNING the first time, and at INFO each time ``key`` repeats."""
        summary.log.log(logging.INFO if key in self._warned else logging.WARNING, "%s", message)
        self._warned.add(key)

    # ---- reports

    def drain(self) -> list[Violation]:
        """Read the rings of all devices; returns the new violations.

        In log mode each is logged, and passed to ``on_violation``.  Waits for the device.  Before an engine is ready,
        the rings hold rows of its warm-up, which are dropped.
        """
        if not self.hooks.before_drain():
            self._alarm.drop()
            return []
        return self._alarm.drain()

    def _abort(self) -> None:
        """Called from an op on the CPU when an index is out of range, before the write runs."""
        self.drain()
        self._raise_new()

    def _after_failure(self, binding: GraphBinding, cause: BaseException) -> None:
        """A forward failed: if the rings show why, raise that instead (raise mode).

        An order to stop, such as ``KeyboardInterrupt``, is not an error: it is not replaced, and what the rings
        hold is raised after the next forward.
        """
        stopped = not isinstance(cause, Exception)
        try:
            binding.forgive_failure()
            if not stopped and not isinstance(cause, KVCacheViolation):
                self.drain()
        except RuntimeError:  # the device is lost, as after a device-side assert
            self._alarm.read_blackbox()
        if self.config.mode == "raise" and not stopped:
            self._raise_new(cause)

    def violations(self) -> list[Violation]:
        """The violations so far, after reading the devices' rings: the first 5,000 and the newest 5,000."""
        self.drain()
        return self.found.records()

    def known_violations(self) -> list[Violation]:
        """The violations that were read so far; waits for nothing."""
        return self.found.records()

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write what is known now to a file, as on a violation: docs/incidents.md.  Waits for the devices.

        Raises:
            IncidentError: it cannot be written.
            MissingExtraError: safetensors is not installed.
        """
        self.drain()
        self._alarm.snapshot(path)

    def check(self) -> None:
        """Wait for the devices and raise the violations that were not raised yet, in any mode.

        Call it after a replay of a captured graph, which runs no Python of ours.

        Raises:
            KVCacheViolation: a check failed.
            CoverageError: checks of a graph did not run.
        """
        for binding in self.bindings:
            if binding.plan.guarded:
                readback = Readback(binding, self.controls)
                readback.start()
                readback.wait()
                self._look_at(readback)
        self.drain()
        self._raise_new()

    def forget(self, *tensors: torch.Tensor) -> int:
        """Forget what is recorded about the caches that ``tensors`` belong to, after a legal rewrite.

        Returns:
            How many halves were forgotten; 0 if no tensor belongs to a guarded cache.
        """
        return sum(self.registry.forget(t) for t in tensors)

    def stats(self, drain: bool = True) -> Stats:
        """Counts since the session began; waits for what the current stream has queued on the devices.

        Args:
            drain: read the violations of the devices first.  Without it, a thread of its own may ask in a stream of its
                own, and keeps nobody waiting.
        """
        if drain:
            self.drain()
        totals = dict.fromkeys(Count, 0)
        steps = 0
        for binding in self.bindings:
            steps += sum(int(g[Gate.STEP]) for g in binding.gates.values())
            for counters in binding.counters:
                for name, value in zip(Count, counters.tolist(), strict=True):
                    totals[name] += value
        return Stats(
            steps=steps,
            checked=totals[Count.CHECKED],
            recorded=totals[Count.RECORDED],
            adopted=totals[Count.ADOPTED] + self._alarm.adopted_slots,
            violations=self.found.total,
        )

    def checks_without_inputs(self) -> dict[str, str]:
        """The checks that cannot run in this session, each with what it lacks."""
        return self.hooks.checks_without_inputs()

    def checks_in_part(self) -> dict[str, str]:
        """The checks that run without some of what they need, each with what is lost."""
        return self.hooks.checks_in_part()

    def summary(self) -> str:
        """What is protected, what is off and why, and the counts so far, as text."""
        return summary.summarise(
            self.config,
            self.pace.every if self.pace is not None else self.config.verify_every,
            str(self.stats()),
            self.plans,
            off=self.checks_without_inputs(),
            in_part=self.checks_in_part(),
            eager_layers=self.eager_layers,
            lost=self.registry.lost,
            uncovered=self.uncovered,
            budget=self.pace.describe() if self.pace is not None else (),
        )


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts of a session.  A fingerprint is one slot in one half of one layer.

    Attributes:
        steps: guarded graph calls.
        checked: fingerprints compared with the pool's bytes.
        recorded: fingerprints taken after a write.
        adopted: fingerprints taken, unverified, of slots that were written outside the compiled graphs.
        violations: failed checks.
    """

    steps: int
    checked: int
    recorded: int
    adopted: int
    violations: int

    def line(self) -> str:
        """The counts as one stable line of ``key=value`` pairs."""
        return " ".join(f"{name}={count}" for name, count in self.flat().items())

    def flat(self) -> dict[str, float]:
        """The counts by name."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return (
            f"steps {self.steps}, fingerprints checked {self.checked}, recorded {self.recorded}, "
            f"adopted {self.adopted}, violations {self.violations}"
        )


def _version(tensor: torch.Tensor) -> int | None:
    """PyTorch's count of in-place writes to a tensor; None for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version

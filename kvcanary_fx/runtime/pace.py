"""Measures calls of guarded graphs or steps of an engine, and sets on the devices which share of the bytes is due.

Nothing here waits for a device: times come from events that are polled, and a new share is written by a launch in the
model's own stream.  :mod:`.budget` decides how many calls are measured.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..kernels.host_time import HOST_TIME
from ..kernels.ring import Word
from ..kernels.side_stream import capturing
from ..kernels.staging import CurrentStream
from ..reports.summary import log
from .binding import Controls, GraphBinding
from .budget import MOST, OFTEN, SECONDS_PER_OP, START, Controller, Reading, Tour
from .ranks import Ranks, join, next_number

T = TypeVar("T")

#: First calls of a graph, which are not measured: it is warming up, or being captured.
WARM_UP = 4

#: A call that takes a device this many times as long as its launches take the host keeps the device busy.
AHEAD = 1.25

#: Calls of other graphs after which a reading is abandoned.
PATIENCE = 128


#: A call's beginning and its end on a GPU.
Events = tuple[torch.cuda.Event, torch.cuda.Event]


class Clocks:
    """What calls are timed with on one device; events are used again, as it takes longer to make them than to record
    them."""

    def __init__(self, device: torch.device):
        self._spare: list[Events] = []
        self._current = CurrentStream(device) if device.type == "cuda" else None

    def take(self) -> tuple[torch.cuda.Stream, Events] | None:
        """The current stream, and the events of a call; None: the host's clock is the device's."""
        if self._current is None:
            return None
        if self._spare:
            return self._current(), self._spare.pop()
        return self._current(), (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    def give_back(self, sample: Sample) -> None:
        """Nothing more is asked of a sample."""
        if sample.events is not None:
            self._spare.append(sample.events)


class Sample:
    """One measured call: how long it took, and how much of that the host spent on our work.

    Args:
        clocks: of the call's device.
        last: the sample of the call before.

    Attributes:
        events: of a call on a GPU.
    """

    def __init__(self, clocks: Clocks, last: Sample | None):
        HOST_TIME.measured, HOST_TIME.seconds, HOST_TIME.waited = False, 0.0, 0.0
        self.ended = False
        self.ours = 0.0  # seconds
        self._later = 0.0  # of these, behind the model or in it
        self.events: Events | None = None
        self._stream: torch.cuda.Stream | None = None
        taken = clocks.take()
        if taken is not None:
            self._stream, self.events = taken
            self.events[0].record(self._stream)
        #: the device was idle, so our work on the host keeps it waiting
        self.waited_for = last is not None and last.arrived()
        self._seconds = self._launched = 0.0  # of the host; without what it waited
        # the events are no work of a call that is not measured
        self.began = time.perf_counter()
        self._since: float | None = self.began

    def model_runs(self, behind: bool = False) -> None:
        """The work that follows is not ours, except our ops where the host launches them.

        Args:
            behind: the model had been launched before our work.
        """
        if self._since is not None:
            seconds = max(0.0, time.perf_counter() - self._since - HOST_TIME.waited)
            self.ours += seconds
            self._later += seconds if behind else 0.0
            self._since = None
        HOST_TIME.measured, HOST_TIME.seconds = True, 0.0

    def model_ran(self) -> None:
        """The work that follows is ours again."""
        self.ours += HOST_TIME.seconds
        self._later += HOST_TIME.seconds
        HOST_TIME.measured, HOST_TIME.seconds = False, 0.0
        if self._since is None:
            self._since, HOST_TIME.waited = time.perf_counter(), 0.0

    def end(self) -> None:
        """The call has been launched."""
        self.model_runs(behind=True)
        HOST_TIME.measured = False
        self._seconds = time.perf_counter() - self.began
        self._launched = self._seconds - HOST_TIME.waited
        if self.events is not None:
            self.events[1].record(self._stream)
        self.ended = True

    def after(self, other: Sample) -> float:
        """Seconds from the beginning of another call to that of this one."""
        if self.events is None or other.events is None:
            return self.began - other.began
        return float(other.events[0].elapsed_time(self.events[0])) / 1e3

    def arrived(self) -> bool:
        """Whether the device has finished the call."""
        return self.ended and (self.events is None or self.events[1].query())

    def kept_waiting(self) -> float:
        """Seconds of our work that the device waited for, once it has finished the call.

        It waited for none if it was busy when the call began.  If it was busy long after all of the call had been
        launched, it waited for what came before the model alone: as in `generate`, which waits for each token.
        """
        if not self.waited_for:
            return 0.0
        ahead = self.events is not None and self.seconds() > AHEAD * self._launched
        return self.ours - self._later if ahead else self.ours

    def seconds(self) -> float:
        """How long the call took on its device, once it has finished."""
        return self._seconds if self.events is None else self.events[0].elapsed_time(self.events[1]) / 1e3


class _Trio:
    """The calls of a reading, one after the other."""

    def __init__(self, key: Hashable, clocks: Clocks):
        self.key, self.clocks, self.thread = key, clocks, threading.get_ident()
        self.samples: list[Sample] = []
        self.stored = 0.0  # in its last call
        self.others = 0  # calls of something else in between


class _Step(contextlib.AbstractContextManager[T]):
    """A step of an engine.  No generator: most are not measured, and begin while the GPU waits for the host."""

    def __init__(
        self, pace: Pace, inner: contextlib.AbstractContextManager[T], device: torch.device, ops: int, stored: float
    ):
        self._pace, self._inner, self._given = pace, inner, (device, ops, stored)
        self._sample: Sample | None = None

    def __enter__(self) -> T:
        pace, given = self._pace, self._given
        if not pace.passes("step", given[2]):
            sample = self._sample = pace.begin("step", *given)
            if sample is not None:
                pace.measure_with(sample)
                self._inner = pace.around(sample, self._inner)
        try:
            return self._inner.__enter__()
        except BaseException:
            pace.measure_with(None)
            raise

    def __exit__(self, *error: Any) -> bool | None:
        sample = self._sample
        if sample is None:
            return self._inner.__exit__(*error)
        try:
            done = self._inner.__exit__(*error)
        finally:
            self._pace.measure_with(None)
        if error[0] is None:
            sample.end()
        return done


class Passing:
    """Calls that may begin without a look at them, see :meth:`Pace.passes`.

    Attributes:
        key: what is called.
        thread: whose calls they are.
        left: how many are left; whoever lets one through takes it off.
        of: how many there were.
        least, most: about how many tokens may be stored; more or fewer, and another N may be due.
        ranks: one that has news is looked at; None: there are no other ranks.
    """

    __slots__ = ("key", "least", "left", "most", "of", "ranks", "thread")

    def __init__(self) -> None:
        self.key: Hashable = None
        self.thread = self.left = self.of = 0
        self.least = self.most = 0.0
        self.ranks: Ranks | None = None


class Pace:
    """The share of the bytes that is compared in each step of a session, kept within a budget.

    Args:
        budget: how much longer a step may take, as a fraction.
        controls: whose words the kernels read.

    Attributes:
        passing: the calls that :meth:`passes` lets through.
    """

    def __init__(self, budget: float, controls: Controls):
        self.controller = Controller(budget)
        self._controls = controls
        self._lock = threading.Lock()
        self._tours: dict[Hashable, Tour] = {}
        self._clocks: dict[torch.device, Clocks] = {}
        self._words: list[torch.Tensor] = []  # of the devices: N
        self.passing = Passing()
        self._passing_tour: Tour | None = None  # that they count in
        self._trio: _Trio | None = None
        self._arriving: tuple[_Trio, int, int, float] | None = None  # with N, N of the probe, seconds guessed
        self._wait = 0  # calls until the next reading, or until one is looked at
        self._every, self._stored = START, 0.0  # N that the devices have, and what is stored in the running call
        self._told: int | None = None  # N that was logged
        self._warned = False
        self._running: Sample | None = None
        self._number = next_number()
        self._ranks: Ranks | None = None  # once torch.distributed has been initialised
        self._asked = False  # for them
        self._write(START)

    @property
    def every(self) -> int:
        """N of the share 1/N."""
        return self._every

    @property
    def within(self) -> float:
        """Seconds within which each slot is compared, at the current speed of steps; 0 until known."""
        return self.every * self.controller.between

    def restart(self, budget: float) -> None:
        """Keep to another budget, and measure the cost of comparing again."""
        with self._lock:
            self._count_passed()
            self.controller = Controller(budget)
            self._trio = self._arriving = self._told = None
            self._wait, self._warned = 0, False
            self._tell_ranks(0)
            self._set()

    # ---- calls of graphs

    def calls(self, run: Callable[[GraphBinding, Callable[..., Any], Any], T]) -> Callable[..., T]:
        """``run`` of a session, measured now and then."""

        def paced(binding: GraphBinding, compiled: Callable[..., Any], args: Any) -> T:
            if self.passing.left and threading.get_ident() == self.passing.thread and self.passes(binding.key, 0):
                return run(binding, compiled, args)
            plan = binding.plan
            sample = self.begin(binding.key, plan.devices[0], plan.ops)
            if sample is None:
                return run(binding, compiled, args)

            def model(*given: Any) -> Any:
                sample.model_runs()
                try:
                    return compiled(*given)
                finally:
                    sample.model_ran()

            out = run(binding, model, args)
            sample.end()
            return out

        return paced

    # ---- steps of an engine

    def step(
        self, inner: contextlib.AbstractContextManager[T], device: torch.device, ops: int, stored: float = 0
    ) -> contextlib.AbstractContextManager[T]:
        """``inner``, a step of an engine, measured now and then; arguments as of :meth:`begin`."""
        return _Step(self, inner, device, ops, stored)

    def forward(self, inner: contextlib.AbstractContextManager[T]) -> contextlib.AbstractContextManager[T]:
        """``inner``, whose start and end are our work, but not what happens inside."""
        return inner if self._running is None else self.around(self._running, inner)

    def measure_with(self, sample: Sample | None) -> None:
        """Measure the forwards of the running step; None: it is not measured, or none runs."""
        self._running = sample

    @contextlib.contextmanager
    def around(self, sample: Sample, inner: contextlib.AbstractContextManager[T]) -> Iterator[T]:
        """``inner`` in a measured step, as of :meth:`forward`."""
        sample.model_ran()
        with inner as value:
            sample.model_runs()
            yield value
            sample.model_ran()
        sample.model_runs(behind=True)

    # ---- measuring

    def passes(self, key: Hashable, stored: float) -> bool:
        """Whether a call begins that nothing is to be done for: it is counted.

        Most calls are such.  There are no locks and few other objects in it: a decode step of a small model waits for
        the host.  Not for what several threads call: of calls that another thread's interrupt, some are not counted.

        Args:
            key, stored: as of :meth:`begin`.
        """
        passing = self.passing
        if not passing.left or key != passing.key or (stored and not passing.least <= stored <= passing.most):
            return False
        if passing.ranks is not None and passing.ranks.news():
            return False
        passing.left -= 1
        return True

    def _count_passed(self) -> None:
        """Count what :meth:`passes` let through; a later call is looked at."""
        passing = self.passing
        passed, passing.of, passing.left = max(0, passing.of - passing.left), 0, 0
        if self._passing_tour is not None:
            self._passing_tour.note(self._every, passed)
        self._wait -= passed

    def begin(self, key: Hashable, device: torch.device, ops: int, stored: float = 0) -> Sample | None:
        """A call begins; returns what measures it, if it is to be measured.

        Args:
            key: what is called; a reading is of calls of one key.
            ops: of ours, that each call runs on the device.
            stored: about how many tokens it may compare; 0 if nobody knows.
        """
        with self._lock:
            self._count_passed()
            if stored:
                self._stored = stored
                if not self.passing.least <= stored <= self.passing.most and not capturing():
                    self._follow(stored)
            tour = self._tour(key)
            tour.note(self._every)
            self._wait -= 1
            trio = self._trio
            if self._ranks is not None and trio is None and not capturing() and self._ranks.changed():
                self._agree(self._ranks)
            if trio is None and self._wait <= 0 and not capturing():
                self._look(key)
            if trio is None and self._wait > 0:
                self._let_pass(key, tour)
                return None  # most calls
            if capturing():
                return None
            if trio is not None and (trio.key != key or trio.thread != threading.get_ident()):
                self._interrupt(trio)
                return None
            if trio is not None and not trio.samples[-1].ended:  # it ended in an exception
                self._give_up()
                trio = None
            if trio is None:
                if tour.calls <= WARM_UP or self._arriving is not None:
                    return None
                self._find_ranks()
                trio = self._trio = _Trio(key, self._clocks_of(device))
            return self._sample(trio, tour, device, ops)

    def _clocks_of(self, device: torch.device) -> Clocks:
        found = self._clocks.get(device)
        if found is None:
            found = self._clocks[device] = Clocks(device)
        return found

    def _let_pass(self, key: Hashable, tour: Tour) -> None:
        """Let the calls until the next reading through, if they are like this one."""
        passing, self._passing_tour = self.passing, tour
        passing.key, passing.thread = key, threading.get_ident()
        passing.of = passing.left = self._wait - 1

    def _sample(self, trio: _Trio, tour: Tour, device: torch.device, ops: int) -> Sample:
        last = trio.samples[-1] if trio.samples else None
        trio.stored = self._stored
        if len(trio.samples) == 1:
            self._write(self._probed)
        elif len(trio.samples) == 2:
            self._write(self.every)
        sample = Sample(trio.clocks, last)
        trio.samples.append(sample)
        if len(trio.samples) == 3:
            guessed = ops * SECONDS_PER_OP if device.type == "cuda" else 0.0
            self._arriving = trio, self.every, self._probed, guessed
            # calls that are looked at are longer: they wait until the reading has arrived, and some more
            self._trio, self._wait = None, OFTEN
            self._let_pass(trio.key, tour)
        return sample

    @property
    def _probed(self) -> int:
        """N of a call that compares more than those before it."""
        return max(1, self.controller.probed * self.every // self.controller.every)

    def _follow(self, stored: float) -> None:
        """So many tokens are stored now: compare a share whose cost fits, which need not be the smallest that does."""
        self.controller.note_stored(stored)
        self._wait = min(self._wait, self.controller.period)
        needed = self.controller.every_for(stored)
        if not needed <= self._every <= 4 * needed:
            self._trio = None  # its calls would not be alike
            self._every = min(needed if self._every < needed else 2 * needed, MOST)
            self._write(self._every)
        self._note_alike(stored)

    def _set(self) -> None:
        """Another N is to be in use, as the controller says."""
        self._every = self.controller.every_for(self._stored)
        self._note_alike(self._stored)
        self._write(self._every)

    def _note_alike(self, stored: float) -> None:
        """With about so much stored N need not change."""
        self.passing.least, self.passing.most = self.controller.alike(self._every, stored)

    def _interrupt(self, trio: _Trio) -> None:
        """Something else is called before a reading is complete: it must not compare the larger share."""
        if len(trio.samples) == 2:
            self._write(self.every)
        trio.others += 1
        if trio.others > PATIENCE:
            self._give_up()

    def _give_up(self) -> None:
        self._write(self.every)
        self._trio, self._wait = None, self.controller.period

    def _look(self, key: Hashable) -> None:
        """Take in a reading, if its calls have arrived by now, :data:`OFTEN` calls behind it; else so many later."""
        if self._arriving is None:
            return
        trio, every, probed, guessed = self._arriving
        before, probe, after = trio.samples
        self._wait = OFTEN
        if not all(sample.arrived() for sample in trio.samples):  # they need not be of one stream
            if not after.ended and trio.key == key and trio.thread == threading.get_ident():
                self._arriving = None  # it ended in an exception
            return
        self._arriving = None
        reading = Reading(
            before.seconds(),
            probe.seconds(),
            after.seconds(),
            every,
            probed,
            waits=(probe.kept_waiting(), after.kept_waiting()),
            guessed=guessed,
            between=probe.after(before),
            stored=trio.stored,
        )
        for sample in trio.samples:
            trio.clocks.give_back(sample)
        if self.controller.take(reading):
            self._tell_ranks(self.controller.needed)
            self._set()
            self._tell()
        self._wait = self.controller.period - OFTEN

    def _find_ranks(self) -> None:
        """Join the other ranks of the model, if there are any, before the first reading."""
        if self._asked or not (dist.is_available() and dist.is_initialized()):
            return
        self._asked, self._ranks = True, join(self._number)
        self.passing.ranks = self._ranks
        self._tell_ranks(0)
        self._set()

    def _tell_ranks(self, needed: int) -> None:
        """Tell the other ranks the N that this one needs, 0 if that is not known, and take in theirs."""
        if self._ranks is not None:
            self._ranks.tell(self.controller.budget, needed)
            self.controller.elsewhere = self._ranks.largest

    def _agree(self, ranks: Ranks) -> None:
        """Another rank has said what it needs."""
        before, self.controller.elsewhere = self.controller.every, ranks.largest
        if self.controller.every != before:
            self._set()
            self._tell()

    def _write(self, every: int) -> None:
        """Write N to the devices: one launch each, in the model's stream."""
        controls = self._controls.by_device
        if len(self._words) != len(controls):
            self._words = [control.words[Word.EVERY] for control in controls.values()]
        self._controls.every = every
        for word in self._words:
            word.fill_(every)

    def _tour(self, key: Hashable) -> Tour:
        tour = self._tours.get(key)
        if tour is None:
            tour = self._tours[key] = Tour()
        return tour

    # ---- what is said

    def new_sequence(self) -> None:
        """From here on other tokens are stored: :meth:`unseen` starts over."""
        with self._lock:
            self._count_passed()
            self._tours.clear()

    def unseen(self) -> float:
        """The share of what was stored at :meth:`new_sequence`, or at the start, that was not compared since."""
        return self._longest().unseen()

    def _longest(self) -> Tour:
        """The most frequent call: the graph of a decode step."""
        with self._lock:
            self._count_passed()
            return max(self._tours.values(), key=lambda tour: tour.calls, default=Tour())

    def promise(self) -> str:
        """What the budget buys, in words."""
        if not self.controller.settled:
            return f"every stored byte is compared within {self.every} steps until it is known what comparing costs"
        return f"every stored byte is compared within {_seconds(self.within)} ({self.every} steps)"

    def describe(self) -> list[str]:
        """The lines of the summary."""
        now = self.controller
        lines = [f"budget {_percent(now.budget)}: {self.promise()}"]
        if now.price is not None:
            took = f"of a step, comparing takes about {_percent(now.price / now.every)}, the rest {_percent(now.rest)}"
            lines.append(f"{took} seen and {_percent(now.guessed)} taken for granted")
        if now.elsewhere > now.needed and self._ranks is not None:
            lines.append(f"that is what rank {self._ranks.slowest} needs; this one would take 1/{now.needed}")
        if now.over:
            lines.append(self._excess())
        tour = self._longest()
        if tour.calls and tour.unseen():
            share = f"{100 * tour.unseen():.2g} %"
            lines.append(f"never compared, of what was stored before these {tour.calls} steps: {share}")
        return lines

    def _excess(self) -> str:
        now = self.controller
        return (
            f"what is done besides comparing bytes takes {_percent(now.rest)} of a step, more than the budget of "
            f"{_percent(now.budget)}: larger batches, or a larger budget"
        )

    def _tell(self) -> None:
        """Log what the budget buys: once it is known, and when it changes."""
        if self.controller.over and not self._warned:
            self._warned = True
            log.warning("kvcanary.budget %s", self._excess())
        told, every = self._told, self.every
        if self.controller.settled and (told is None or not told / 2 <= every <= told * 2):
            self._told = every
            level = log.warning if every == MOST else log.info
            level("kvcanary.budget %s: %s", _percent(self.controller.budget), self.promise())


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"

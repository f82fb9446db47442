"""A stream beside the model's own, on which the checks of an engine's layers run while the model goes on.

A small launch in the model's stream costs its latency in every layer.  On a side stream three things must hold, in an
eager forward as in a captured one:

* The checks of a layer start after what they read: :meth:`SideStream.start` waits for the model's stream.
* The model may reuse the memory of K and V once nothing in its graph needs them.  A join before the next layer's
  attention takes them as arguments, so that they live until there, and waits for the checks that read them, by then
  usually finished; if an engine calls the checks, :meth:`SideStream.hold` keeps them until then.  (On an H200, kernels
  that took their digests
  in the model's own stream were 62 us of a decode step of 4.9 ms.)
* A CUDA graph cannot end while work forked in it is running: the last op of a graph joins, or the end of a forward that
  is captured whole.

As long as a captured graph has two branches, each kernel in it takes longer: on an H200, of 144 in a row (2.3 ms), a
branch of one small kernel that is joined at the end adds 17 to 23 us, eight that are joined after a 24th of the way 3
to 5, and a branch beside the last ones 2 at most (``tests/benchmarks/graph_branches.py``).  So what runs at a forward's
begin is joined early (:func:`meets_at`), and what is forked after that does not depend on it a second time, which
would be a branch from the begin to there.  And a graph should begin with both branches, not with a kernel from which
they fork: it delays whichever comes second by 4 us (60 products, H200: a branch of four small kernels adds 10 us to a
replay, and 15 behind such a kernel).

And each graph with a branch has streams of its own, which the driver makes.  Once a process has used six streams
besides the default one, each of its kernels takes longer, in all graphs: 0.18 to 0.35 us on an H200, 3 % of a decode of
600 kernels (``tests/benchmarks/streams.py``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

_LOCK = threading.Lock()
_BESIDE: dict[torch.device, torch.cuda.Stream] = {}


def stream_beside(device: torch.device) -> torch.cuda.Stream:
    """The stream of a process for copies that wait for nothing else, one on each device.

    One, since each kernel of a process takes longer once it has used many (``tests/benchmarks/streams.py``).
    """
    with _LOCK:
        if device not in _BESIDE:
            _BESIDE[device] = torch.cuda.Stream(device)
        return _BESIDE[device]


class SideStream:
    """One device's stream for checks, of one session.

    Attributes:
        stream: the stream; another one after a join in a capture, since what is forked onto a stream depends on all
            that ran there before.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._forked: set[bool] = set()  # not joined yet: forked inside a capture, outside one
        self._held: list[torch.Tensor | None] = []
        # made once: an event that is recorded again has its last place
        self._here, self._there = torch.cuda.Event(), torch.cuda.Event()

    def start(self) -> None:
        """Make later launches here wait for all work queued on the model's stream so far."""
        self._here.record(torch.cuda.current_stream(self.device))
        self.stream.wait_event(self._here)
        self._forked.add(capturing(self.device))

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """Launch on the side stream, after all work queued on the model's stream so far."""
        self.start()
        with torch.cuda.stream(self.stream):
            yield

    def follow(self, other: SideStream) -> None:
        """Make later launches here wait for what was forked to another side stream and not joined."""
        if other._forked:
            self.stream.wait_stream(other.stream)

    def hold(self, *tensors: torch.Tensor | None) -> None:
        """Keep tensors that are read here alive until the model has waited for it."""
        self._held += tensors

    def release(self) -> None:
        """Make the model's stream wait for the readers of held tensors, if there are any."""
        if self._held:
            self.join()

    def join(self) -> None:
        """Make the model's stream wait for all checks that were forked from it.

        Work forked outside a capture cannot be joined inside one: the end of the forward joins it.
        """
        if not self._forked:
            return
        now = capturing(self.device)
        if now in self._forked:
            self._there.record(self.stream)
            torch.cuda.current_stream(self.device).wait_event(self._there)
            self._held.clear()
            if self._forked == {True}:  # what was forked outside of the capture is still to be joined here
                self.stream = torch.cuda.Stream(self.device)
        self._forked -= {now} if now else {True, False}


class ForkInGraph:
    """Work beside what is captured after it, in the same CUDA graph; whatever needs it joins it."""

    def __init__(self, device: torch.device, launch: Callable[[], None], first: Callable[[], None] | None = None):
        """
        Args:
            launch, first: launch it; ``first`` what can be waited for by itself, with :meth:`join_first`.
        """
        self._device, self._there = device, torch.cuda.Event()
        self._model, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        self._joined = False  # by the model's stream, which all that is forked later comes after
        self._first: torch.cuda.Event | None = None  # the model's stream has not waited for it
        stream.wait_stream(self._model)
        with torch.cuda.stream(stream):
            if first is not None:
                first()
                self._first = torch.cuda.Event()
                self._first.record()
            launch()
            self._there.record()

    def join_first(self) -> None:
        """Let the current stream wait here for what was launched first."""
        if self._first is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._first)
            if current == self._model:
                self._first = None

    def join(self) -> None:
        """Let the current stream wait here for what was launched."""
        if not self._joined:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._there)
            self._joined = current == self._model


def meets_at(layers: int) -> int:
    """Behind how many layers of a captured model its stream is to wait for checks that began with it; 0: at its end.

    A 16th of a model takes longer than checks that may take a hundredth of a step.  The shortest checks take 45 us
    (H200), longer than the first layer of a 1B model beside them, which waited for 17 us: two layers at least.  In a
    model that has few, nothing is gained.
    """
    return max(2, -(-layers // 16)) if layers >= 8 else 0


def can_fork(device: torch.device) -> bool:
    """Whether a device has streams, so that work can run in parallel."""
    return device.type == "cuda"


def capturing(device: torch.device | None = None) -> bool:
    """Whether a CUDA graph is being captured in this thread's stream, of the current device or of another."""
    if not torch.cuda.is_initialized():  # else nothing can be captured; is_available() asks the driver each time
        return False
    if device is None or device.index == torch.cuda.current_device():
        return bool(torch.cuda.is_current_stream_capturing())
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())

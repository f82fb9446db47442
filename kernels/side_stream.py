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
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from .staging import CurrentStream


class SideStream:
    """One device's stream for checks, of one session.

    Attributes:
        stream: the stream.
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
        """Make later launches here wait for all work queued on another side stream so far."""
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
        self._forked -= {now} if now else {True, False}


#: Steps between two looks at whether the device waits for the host, and looks in a row that must agree that it does.
LOOK, AGREE = 16, 2


class BesideGraph:
    """Work beside a CUDA graph that waits for it where it needs it, at each replay.

    The graph waits for an event from outside of it, as it was last recorded before the replay
    (``cudaEventWaitExternal``).

    On the host this is 70 us of a step for streams and events (H200), where a replay in the model's stream is 20.
    While the device waits for the host anyway, the work is better in front of the graph: :meth:`pays`.

    Attributes:
        open: the work was launched, and its graph was not replayed yet.
    """

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._current = CurrentStream(device)
        self._here, self._there = torch.cuda.Event(), torch.cuda.Event(external=True)
        self._there.record(self._stream)  # torch leaves out a wait for an event that never was
        self.open = False
        self._replayed, self._last = torch.cuda.Event(), -1  # in the step of this number
        self._waited = 0  # looks in a row at which the device had nothing to do

    def pays(self, step: int) -> bool:
        """Whether the step of this number, which begins, gains by work beside its graph."""
        if step == self._last + 1 and step % LOOK == 0:
            self._waited = self._waited + 1 if self._replayed.query() else 0
        return self._waited < AGREE

    def run(self, launch: Callable[[], None]) -> None:
        """Launch after all work queued on the model's stream so far; then replay the graph."""
        current = self._current()
        self._here.record(current)
        self._stream.wait_event(self._here)
        self.open = True
        torch.cuda.set_stream(self._stream)  # torch.cuda.stream() takes the host five times as long
        try:
            launch()
        finally:
            torch.cuda.set_stream(current)
        self._there.record(self._stream)

    def wait(self) -> None:
        """Let the current stream wait here for what was launched: in a capture, at each replay."""
        torch.cuda.current_stream(self._device).wait_event(self._there)

    def replayed(self, step: int) -> None:
        """The graph was replayed, in the step of this number."""
        self.open = False
        if (step + 1) % LOOK == 0:
            self._replayed.record(self._current())
            self._last = step

    def close(self) -> None:
        """Wait unless the graph does: it was not replayed."""
        if self.open:
            self.wait()
            self.open = False


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

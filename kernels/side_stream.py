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


class ForkInGraph:
    """Work beside what is captured after it, in the same CUDA graph; whatever needs it joins it."""

    def __init__(self, device: torch.device, launch: Callable[[], None]):
        self._device, self._there = device, torch.cuda.Event()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            launch()
            self._there.record()

    def join(self) -> None:
        """Let the current stream wait here for what was launched."""
        torch.cuda.current_stream(self._device).wait_event(self._there)


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

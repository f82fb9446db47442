"""A stream beside the model's own, on which the checks of an engine's layers run while the model goes on.

A small launch in the model's stream costs its latency in every layer.  Beside it three things have to hold, in an
eager forward as in a captured one:

* The checks of a layer start after what they look at: :meth:`SideStream.start` waits for the model's stream.
* The model may use the memory of K and V again once nothing in its graph needs them.  A join in front of the next
  layer's attention names them, so that they live until there, and waits for what reads them, long since done; where an
  engine calls the checks, :meth:`SideStream.hold` keeps them until then.  (On an H200, kernels that took their digests
  in the model's own stream were 62 us of a decode step of 4.9 ms.)
* A CUDA graph cannot end while work forked in it is running: the last op of a graph joins, or the end of a forward that
  is captured whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class SideStream:
    """One device's stream for checks, of one session.

    Attributes:
        stream: the stream.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._forked: set[bool] = set()  # what is not joined: forked inside of a capture, outside of one
        self._held: list[torch.Tensor | None] = []
        # made once: an event that is recorded again stands for what it was recorded at last
        self._here, self._there = torch.cuda.Event(), torch.cuda.Event()

    def start(self) -> None:
        """Let what is launched here from now on wait for all that the model's stream was given so far."""
        self._here.record(torch.cuda.current_stream(self.device))
        self.stream.wait_event(self._here)
        self._forked.add(self._capturing())

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """Launch on the side stream, after all that the model's stream was given so far."""
        self.start()
        with torch.cuda.stream(self.stream):
            yield

    def follow(self, other: SideStream) -> None:
        """Let what is launched here from now on wait for all that another side stream was given so far."""
        self.stream.wait_stream(other.stream)

    def hold(self, *tensors: torch.Tensor | None) -> None:
        """Keep tensors that are read here until the model has waited for that."""
        self._held += tensors

    def release(self) -> None:
        """Let the model's stream wait for what reads the tensors that are held, if any are."""
        if self._held:
            self.join()

    def join(self) -> None:
        """Let the model's stream wait for all checks that were forked from it.

        What was forked outside of a capture cannot be joined inside of one: the end of the forward does it.
        """
        if not self._forked:
            return
        now = self._capturing()
        if now in self._forked:
            self._there.record(self.stream)
            torch.cuda.current_stream(self.device).wait_event(self._there)
            self._held.clear()
        self._forked -= {now} if now else {True, False}

    def _capturing(self) -> bool:
        """:func:`capturing`, which asks more than is needed where there is a stream."""
        if torch.cuda.current_device() == self.device.index:
            return bool(torch.cuda.is_current_stream_capturing())
        return capturing(self.device)


def can_fork(device: torch.device) -> bool:
    """Whether a device has streams, so that work can go beside other work."""
    return device.type == "cuda"


def capturing(device: torch.device | None = None) -> bool:
    """Whether a CUDA graph is being captured in this thread's stream, of the current device or of another."""
    if not torch.cuda.is_available():
        return False
    with torch.cuda.device(device) if device is not None else contextlib.nullcontext():
        return bool(torch.cuda.is_current_stream_capturing())

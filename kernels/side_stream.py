"""A stream beside the model's own, on which the checks of an engine's layers run while the model goes on.

A small launch in the model's stream costs its latency in every layer.  Beside it three things have to hold, in an
eager forward as in a captured one:

* The checks of a layer start after what they look at: :meth:`SideStream.fork` waits for the model's stream.
* The model may use the memory of K and V again once nothing in its graph needs them.  A join in front of the next
  layer's attention names them, so that they live until there, and waits for what reads them, long since done.  (On an
  H200, kernels that took their digests in the model's own stream were 62 us of a decode step of 4.9 ms.)
* A CUDA graph cannot end while work forked in it is running: the last op of a graph joins.
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

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """Launch on the side stream, after all that the model's stream was given so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self._forked.add(capturing(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Let the model's stream wait for all checks that were forked from it.

        What was forked outside of a capture cannot be joined inside of one: the end of the forward does it.
        """
        now = capturing(self.device)
        if now in self._forked:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self._forked -= {now} if now else {True, False}


def can_fork(device: torch.device) -> bool:
    """Whether a device has streams, so that work can go beside other work."""
    return device.type == "cuda"


def capturing(device: torch.device | None = None) -> bool:
    """Whether a CUDA graph is being captured in this thread's stream, of the current device or of another."""
    if not torch.cuda.is_available():
        return False
    with torch.cuda.device(device) if device is not None else contextlib.nullcontext():
        return bool(torch.cuda.is_current_stream_capturing())

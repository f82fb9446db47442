"""Reading a session's buffers from a thread beside the one that runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from ..kernels.side_stream import stream_beside
from .binding import Controls


@contextlib.contextmanager
def streams_beside(controls: Iterable[Controls]) -> Iterator[None]:
    """Make streams that wait for no other the current ones of this thread, on all devices of the sessions that have
    these controls.

    Under a lock in the place of that, a reader kept a runner that is ahead of its device waiting until the device had
    caught up, in every reading.  All readers of a process share a device's stream.

    While a model runs, only copy to the host here.  A reader that launched seven small kernels every two seconds made
    each kernel of a served 8B follow the one before it 0.3 us later, from such a reading on until the engine was idle:
    0.17 ms of a decode step of 4.8 (H200).  With copies alone this was not seen.
    """
    with contextlib.ExitStack() as streams:
        for device in {d for each in controls for d in each.by_device if d.type == "cuda"}:
            streams.enter_context(torch.cuda.stream(stream_beside(device)))
        yield

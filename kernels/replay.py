"""Launches that come again as they are: captured into a small CUDA graph, they are one launch of the host's."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator

import torch

from .compile_ahead import compiling_ahead

#: Runs one by one before a capture: a size of a batch that comes a few times is not worth one.
ONE_BY_ONE = 8

#: Where captures are made, for each device: torch's streams are few, and another thread may use a new one.
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}

#: Held by the thread that captures.
_CAPTURING = threading.Lock()


def capture(device: torch.device, run: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
    """A graph of what ``run`` launches, whose kernels are compiled; None where there are no graphs.

    The caller keeps the memory that it reads.  ``torch.cuda.graph`` collects garbage before each capture, which takes
    longer than the capture.
    """
    if device.type != "cuda" or compiling_ahead():
        return None
    with _CAPTURING, _no_garbage():
        return _captured(device, run)


def _captured(device: torch.device, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = _STREAMS.get(device)
    if stream is None:
        stream = _STREAMS[device] = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    # what torch allocates with the first graph belongs to all: in inference mode no graph outside of it could write it
    with torch.inference_mode(False), torch.cuda.device(device), torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """What is collected in a capture may be another graph, or memory of a device, which cannot be given back there."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Replayed:
    """Runs launches one by one a few times, then captures them, and from then on replays them.

    On an H200 a launch took 12 to 15 us of the host's time, and the replay of a graph of several 12.

    Attributes:
        graph: what is replayed, once it was captured.
    """

    def __init__(self, device: torch.device):
        self._device, self._runs = device, 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, run: Callable[[], None]) -> None:
        """Launch on the current stream.

        Args:
            run: launches the same kernels with the same arguments each time, whose memory the caller keeps, and
                does nothing else.  It is not kept: it may hold what holds this.
        """
        if self.graph is not None:
            self.graph.replay()
            return
        run()
        if compiling_ahead():
            return
        self._runs += 1
        if self._runs == ONE_BY_ONE:
            self.graph = capture(self._device, run)

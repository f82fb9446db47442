"""What a launch over all layers of a graph is told of them: addresses and numbers, in memory that keeps its place."""

from __future__ import annotations

import threading
import time
from array import array

import torch

from ..side_stream import capturing, stream_beside
from ..staging import CurrentStream, Staging, lasting

#: Words about one half: a row of the table of halves, and what the launch is given of it.
WORDS_OF_HALF = 10

#: Launches over all layers in one call of a graph: before its first write, and behind the last.
BEFORE, BEHIND = 0, 1

#: Captures that there is room for before the next call is bound.
CAPTURES = 8

#: Seconds that a capture waits at most for its words to be on the device.
ARRIVES_WITHIN = 0.2


class LayerTables:
    """The words for the launches of one graph, on one device.

    What a CUDA graph is told never changes, so it is sent while the graph is captured, beside the capture.  (Two copies
    in each replay took 9 us, and kernels waited 11 more for them: a decode of 16 requests on an H200.)  Words that are
    not seen to arrive are copied by the graph itself, from pinned memory that stays as it is.

    All memory is taken between calls: within one it may come from the pool of the graph that is captured.  Each thread
    has its own: threads may run a graph over different caches at a time.
    """

    def __init__(self, device: torch.device, halves: int):
        self._device, self._most = device, halves * WORDS_OF_HALF
        self._lock = threading.Lock()
        self._called: dict[int, tuple[_Sent, _Sent]] = {}  # by the thread's ident
        self._captured: list[_Captured] = []
        self._used = 0  # words of the last of these
        self.make_room()

    def make_room(self) -> None:
        """Have memory for the calls of this thread, and for captures.  Not while a CUDA graph is captured."""
        me = threading.get_ident()
        if me not in self._called:
            self._called[me] = _Sent(self._device, self._most), _Sent(self._device, self._most)
        if self._device.type != "cuda":
            return
        with self._lock:
            if self._captured and self._room() >= 2 * self._most:
                return
            self._captured.append(_Captured(self._device, 2 * CAPTURES * self._most))
            self._used = 0

    def _room(self) -> int:
        return self._captured[-1].there.shape[0] - self._used

    def place(self, launch: int, words: array[int]) -> torch.Tensor | None:
        """Where the device finds the words, in the current stream.

        Args:
            launch: :data:`BEFORE` or :data:`BEHIND`.

        Returns:
            int64 ``[>= n]``; None if there is no room for another capture, or none was made in this thread.
        """
        if capturing(self._device):
            return self._in_graph(words)
        mine = self._called.get(threading.get_ident())
        return None if mine is None else mine[launch].send(words)

    def _in_graph(self, words: array[int]) -> torch.Tensor | None:
        with self._lock:
            if not self._captured or self._room() < len(words):
                return None
            start, memory = self._used, self._captured[-1]
            self._used += len(words) + len(words) % 2  # as aligned as the whole: kernels are compiled for that
        return memory.take(start, words)


class _Captured:
    """Memory for the words of captured graphs.

    Attributes:
        there: int64 ``[words]`` on the device.
    """

    def __init__(self, device: torch.device, words: int):
        self._device = device
        self.there = lasting(words, dtype=torch.int64, device=device)
        beside = stream_beside(device)
        if not capturing(device):
            beside.wait_stream(torch.cuda.current_stream(device))  # for whoever had this memory before
        # as it was sent, and as it came back: ours are never all zero, since there are addresses among them
        self._pinned, self._back = (
            lasting(words, dtype=torch.int64, device="cpu", pin_memory=True).zero_() for _ in range(2)
        )

    def take(self, start: int, words: array[int]) -> torch.Tensor:
        """Where the graph that is being captured finds the words: from ``start`` on, where nothing has been yet."""
        pinned, there, back = (memory[start : start + len(words)] for memory in (self._pinned, self.there, self._back))
        pinned.copy_(torch.frombuffer(words, dtype=torch.int64))
        if not self._sent(pinned, there, back):
            there.copy_(pinned, non_blocking=True)
        return there

    def _sent(self, pinned: torch.Tensor, there: torch.Tensor, back: torch.Tensor) -> bool:
        """Send the words beside the capture; whether the device has them.

        A capture may forbid to wait for another stream, or to ask an event.  It allows copies in a stream that is not
        captured, so the words are copied back to memory that is looked at.
        """
        with torch.cuda.stream(stream_beside(self._device)):
            if torch.cuda.is_current_stream_capturing():
                return False
            there.copy_(pinned, non_blocking=True)
            back.copy_(there, non_blocking=True)
        end = time.monotonic() + ARRIVES_WITHIN
        while not torch.equal(back, pinned):
            if time.monotonic() > end:
                return False
        return True


class _Sent:
    """Words that are sent if they are not those of the call before, usually the same."""

    def __init__(self, device: torch.device, most: int):
        self._there = lasting(most, dtype=torch.int64, device=device)
        self._words: array[int] | None = None
        self._staging = Staging(device)
        self._current = CurrentStream(device) if device.type == "cuda" else None
        self._stream: torch.cuda.Stream | None = None  # where they were sent, and read

    def send(self, words: array[int]) -> torch.Tensor:
        stream = self._current() if self._current is not None else None
        if stream is not None and stream is not self._stream:
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream = stream
        if self._words != words:
            self._staging.send(words, self._there)
            self._words = words
        return self._there

"""What a launch over all layers of a graph is told of them: addresses and numbers, in memory that keeps its place."""

from __future__ import annotations

from array import array

import torch

from ..side_stream import capturing
from ..staging import Staging, lasting

#: Words about one half: a row of the table of halves, and what the launch is given of it.
WORDS_OF_HALF = 10

#: Launches over all layers in one call of a graph: before its first write, and behind the last.
BEFORE, BEHIND = 0, 1

#: Captures that there is room for before the next call is bound.
CAPTURES = 8


class LayerTables:
    """The words for the launches of one graph, on one device.

    In a CUDA graph they are copied from pinned memory, by the graph itself, so that memory stays as it is.  It is made
    between calls: within one, memory may be taken from the pool of the graph that is captured.
    """

    def __init__(self, device: torch.device, halves: int):
        self._device, self._most = device, halves * WORDS_OF_HALF
        self._plain = [lasting(self._most, dtype=torch.int64, device=device) for _ in (BEFORE, BEHIND)]
        self._there: list[array[int] | None] = [None, None]
        self._staging = Staging(device)
        self._captured: list[tuple[torch.Tensor, torch.Tensor]] = []  # pinned memory, and the device's
        self._used = 0  # words of the last of these
        self.make_room()

    def make_room(self) -> None:
        """Have memory for the captures to come.  Not while a CUDA graph is captured."""
        if self._device.type != "cuda" or (self._captured and self._room() >= 2 * self._most):
            return
        words = 2 * CAPTURES * self._most
        pinned = lasting(words, dtype=torch.int64, device="cpu", pin_memory=True)
        self._captured.append((pinned, lasting(words, dtype=torch.int64, device=self._device)))
        self._used = 0

    def _room(self) -> int:
        return self._captured[-1][0].shape[0] - self._used

    def place(self, launch: int, words: array[int]) -> torch.Tensor | None:
        """Where the device finds the words, in the current stream.

        Args:
            launch: :data:`BEFORE` or :data:`BEHIND`.

        Returns:
            int64 ``[>= n]``; None if there is no room for another capture.
        """
        if capturing(self._device):
            return self._in_graph(words)
        here = self._plain[launch]
        if self._there[launch] != words:  # else those of the call before
            self._staging.send(words, here)
            self._there[launch] = words
        return here

    def _in_graph(self, words: array[int]) -> torch.Tensor | None:
        if not self._captured or self._room() < len(words):
            return None
        pinned, there = (memory[self._used : self._used + len(words)] for memory in self._captured[-1])
        self._used += len(words)
        pinned.copy_(torch.frombuffer(words, dtype=torch.int64))
        there.copy_(pinned, non_blocking=True)
        return there

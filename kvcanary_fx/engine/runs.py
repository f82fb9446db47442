"""Runs of numbers on their way to tables of a device: what changed of these in a step, in one launch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from . import gathered

if TYPE_CHECKING:
    from ..kernels.handed import Handed


class Runs:
    """Writes to tables of one device, whose rows begin at a multiple of 8 bytes.

    On a GPU a kernel reads all of them where they are on the host: no copy comes before it.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._handed: Handed | None = None
        self._waiting: list[tuple[torch.Tensor, int, int, Sequence[int]]] = []

    def add(self, table: torch.Tensor, row: int, start: int, numbers: Sequence[int]) -> None:
        """Write to a row; nothing may change the table or the numbers before :meth:`send`.

        Args:
            table: int32 ``[rows, columns]`` on the device.
            start: the first column, an even number.
            numbers: an even number of them.
        """
        self._waiting.append((table, row, start, numbers))

    def send(self) -> None:
        """Launch the writes, in the current stream."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        if not gathered.hands_over(self._device):
            for table, row, start, numbers in waiting:
                table[row, start : start + len(numbers)] = torch.tensor(numbers, dtype=torch.int32, device="cpu")
            return
        from ..kernels.handed import COLUMNS  # only where there is Triton

        said: list[int] = []
        words, first, longest = array("q"), COLUMNS * len(waiting), 1
        last, base, step = None, 0, 0
        for table, row, start, numbers in waiting:
            if table is not last:
                last, base, step = table, table.data_ptr(), 4 * table.stride(0)
            n = len(numbers) // 2  # two of them are a word of the kernel
            said += (base + row * step + 4 * start, first, n, 0)  # no tensor is copied
            if n == 1:
                words.append(numbers[0] & 0xFFFFFFFF | numbers[1] << 32)
            else:
                words.frombytes(array("i", numbers).tobytes())
                longest = max(longest, n)
            first += n
        self._launch(len(waiting), longest, array("q", said) + words)

    def _launch(self, runs: int, longest: int, words: array[int]) -> None:
        from ..kernels.handed import BLOCK, Handed

        if self._handed is None:
            self._handed = Handed(self._device)
        self._handed.launch((runs, -(-longest // BLOCK), 1), words)

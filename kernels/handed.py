"""Numbers of the host that a kernel reads where they are, and brings to their places: no copy comes before it.

One launch is in the place of a copy from pinned memory, an event that guards this memory, and a launch of torch that
scatters what was copied: a copy alone took 15 us of the host in a step of vLLM (H200).
"""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import TypeAlias

import torch

from .bound_launch import BoundLaunch
from .staging import CurrentStream, lasting, packing
from .triton_handed import scatter_kernel
from .waiting import Put

#: Bytes of a block of host memory: an event guards each, so it is the numbers of many steps.
ROOM = 1 << 18

#: Numbers of a program.
BLOCK = 256

#: Numbers of an array that are rather copied twice than by a call of the C library, which takes the host 1 us.
SHORT = 1024

#: Columns of the table before the numbers, a row a place: its address, its first number, how many, and 0, or the bytes
#: of an element of what is copied there.  Rows are written by :class:`Places`, and by :class:`.Runs` of an engine.
COLUMNS = 4

#: Numbers that say where a tensor is that is copied along: its address and its stride.
SAID = 2

#: Numbers that follow others: an array is copied, and a list becomes numbers in the memory of the device's kernels.
Part: TypeAlias = "array[int] | list[int]"


class Handed:
    """Pinned memory of one device that is written once, read by kernels of the device, and then used again."""

    def __init__(self, device: torch.device):
        self._device, self._on_gpu = device, device.type == "cuda"
        self._full: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()  # the oldest first
        self._current = CurrentStream(device)
        self._last: torch.cuda.Stream | None = None
        self._memory = self._block(ROOM)
        self._used, self._room = 0, ROOM
        self._scatter = BoundLaunch(scatter_kernel, device, {"BLOCK": BLOCK}, ("said_ptr",), 4)

    def launch(self, grid: tuple[int, int, int], *parts: Part) -> None:
        """Bring numbers to the places that the table before them says."""
        self.launch_at(grid, self.put(*parts))

    def launch_at(self, grid: tuple[int, int, int], at: int) -> None:
        """The same of those that were put last."""
        if self._scatter.ready:
            self._scatter(grid, (at,), None)
        else:
            self._scatter.first(grid, (self.numbers(at),), None)

    def put(self, *parts: Part) -> int:
        """Write numbers, part after part, to where the next launch in the current stream reads them: their address, a
        multiple of 16.

        Raises:
            struct.error: a list has something else than whole numbers of 64 bits; nothing is there to launch.
        """
        used, size = self._used, 8 * sum(map(len, parts))
        if self._on_gpu:
            self._follow()
        if used + size > self._room:
            self._turn_over(size)
            used, self._room = 0, self._memory.shape[0]
        memory, begin = self._bytes, used
        for part in parts:
            n = len(part)
            if type(part) is list:
                memory[begin : begin + 8 * n] = packing(n).pack(*part)  # pack_into copies the list once more
            elif n <= SHORT:
                memory[begin : begin + 8 * n] = part.tobytes()  # type: ignore[union-attr]
            else:
                ctypes.memmove(self._address + begin, part.buffer_info()[0], 8 * n)  # type: ignore[union-attr]
            begin += 8 * n
        self._used = (used + size + 15) & ~15
        return self._address + used

    def numbers(self, at: int) -> torch.Tensor:
        """int64: what was put last, and what is behind it."""
        return self._memory[at - self._address :].view(torch.int64)

    def _follow(self) -> None:
        """Let the current stream wait for the one before: an event in it is then behind all that read the block."""
        current, last = self._current(), self._last
        if current is not last:
            if last is not None:
                current.wait_stream(last)
            self._last = current

    def _turn_over(self, size: int) -> None:
        """Take another block; never wait for the device."""
        if self._last is not None:
            event = torch.cuda.Event()
            event.record(self._last)
            self._full.append((self._memory, event))
        read = self._full.popleft()[0] if self._full and self._full[0][1].query() else None
        if read is not None and read.shape[0] >= size:
            self._memory, self._address, self._bytes = read, read.data_ptr(), _bytes_of(read)
        else:
            self._memory = self._block(max(ROOM, 1 << (size - 1).bit_length()))

    def _block(self, room: int) -> torch.Tensor:
        memory = lasting(room, dtype=torch.uint8, device="cpu", pin_memory=self._device.type == "cuda")
        self._address, self._bytes = memory.data_ptr(), _bytes_of(memory)
        return memory


def _bytes_of(memory: torch.Tensor) -> memoryview:
    """Where numbers are written to."""
    return memoryview(memory.numpy())  # type: ignore[arg-type]


class Places:
    """Where numbers go that are handed over again and again, in one order, and tensors of the device with them.

    Attributes:
        outs: int64, contiguous, on the device.
    """

    def __init__(
        self, handed: Handed, outs: Sequence[torch.Tensor], copied: Sequence[tuple[torch.Tensor, torch.dtype]] = ()
    ):
        """
        Args:
            copied: int64 ``[n]`` on the device, n at least 1, and the dtype of what is copied there: int32 or int64.
        """
        self.outs = list(outs)
        self._handed, sizes = handed, [out.numel() for out in outs]
        targets = [out for out, _ in copied]
        entries = sizes + [out.numel() for out in targets]
        first = COLUMNS * len(entries)
        begins = accumulate(sizes + [SAID] * len(targets), initial=first)
        widths = [0] * len(sizes) + [dtype.itemsize for _, dtype in copied]
        addresses = [out.data_ptr() for out in (*self.outs, *targets)]
        rows = zip(addresses, begins, entries, widths)  # noqa: B905  there is one begin more
        self._table = array("q", chain.from_iterable(rows))
        self._grid = len(entries), -(-max(entries) // BLOCK), 1

    def fill(self, *parts: Part) -> None:
        """Launch what brings so many numbers as they hold there, in the current stream.  Not while a CUDA graph is
        captured: a replay would read what the memory holds then.

        The last of them are the address and the stride of each ``[n]`` that is copied.
        """
        self._handed.launch(self._grid, self._table, *parts)

    def put(self, *parts: Part) -> Put:
        """The same for a later launch, which comes before anything else is handed over."""
        return Put(self._handed.launch_at, self._grid, self._handed.put(self._table, *parts))

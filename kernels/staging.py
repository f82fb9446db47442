"""Numbers on their way from the host to a device, without waiting for either."""

from __future__ import annotations

import ctypes
import functools
import struct
from array import array
from collections import deque
from typing import Any

import torch

from .side_stream import capturing

#: Lengths whose views are kept, for each buffer.
SHOWN = 256

#: Lengths of lists whose formats are kept.
FORMATS = 256


@functools.lru_cache(FORMATS)
def packing(n: int) -> struct.Struct:
    """Writes so many whole numbers as int64."""
    return struct.Struct(f"{n}q")


def sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device; one of the host is copied there without waiting for the device, but for a capture."""
    if numbers.device.type == "cpu" and device.type == "cuda" and not capturing():
        return numbers.pin_memory().to(device, non_blocking=True)
    return numbers.to(device)


class CurrentStream:
    """The current stream of a GPU; the object is kept, since it takes longer to make than to look up."""

    def __init__(self, device: torch.device):
        self._device = device
        self._last: torch.cuda.Stream | None = None

    def __call__(self) -> torch.cuda.Stream:
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        if self._last is None or self._last.cuda_stream != torch._C._cuda_getCurrentRawStream(index):
            self._last = torch.cuda.current_stream(self._device)
        return self._last


class Staging:
    """Host buffers that are written and sent in turn: memory that a copy may still read is not written.

    On a GPU the memory is pinned, and there are as many buffers as the host is copies ahead of the device.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._sent: deque[tuple[_Pinned, torch.cuda.Event]] = deque()  # the oldest first
        self._current = CurrentStream(device)
        self._outs: deque[_Heads] = deque(maxlen=4)  # of the last tensors that were sent to

    def send(self, source: torch.Tensor | array[int], out: torch.Tensor) -> None:
        """Copy numbers of the host to the head of ``out``, in the current stream.

        Not while a CUDA graph is captured: a replay would copy the memory's later content.

        Args:
            source: ``[n]`` on the host, a tensor, or an array of int64; it may be written when this returns.
            out: ``[>= n]`` of the same dtype, on the device.
        """
        n, head = len(source), None
        for known in self._outs:
            if known.whole is out:
                head = known(n)
        if head is None:
            self._outs.append(_Heads(out))
            head = out[:n]
        if self._device.type != "cuda":
            head.copy_(torch.frombuffer(source, dtype=out.dtype) if isinstance(source, array) else source)
            return
        pinned, event = self._filled(source)
        head.copy_(pinned.numbers(out.dtype)(n), non_blocking=True)
        event.record(self._current())
        self._sent.append((pinned, event))

    def _filled(self, source: torch.Tensor | array[int]) -> tuple[_Pinned, torch.cuda.Event]:
        """Memory with these numbers, and an event."""
        if isinstance(source, array):
            address, n = source.buffer_info()
            size = n * source.itemsize
        else:
            source = source.contiguous()
            address, size = source.data_ptr(), source.numel() * source.element_size()
        pinned, event = self._free(size)
        ctypes.memmove(pinned.address, address, size)
        return pinned, event

    def _free(self, size: int) -> tuple[_Pinned, torch.cuda.Event]:
        """Unused memory for so many bytes, and an event."""
        if self._sent and self._sent[0][1].query():
            pinned, event = self._sent.popleft()
            if pinned.memory.shape[0] >= size:
                return pinned, event
        room = max(4096, 1 << (size - 1).bit_length())
        return _Pinned(lasting(room, dtype=torch.uint8, device="cpu", pin_memory=True)), torch.cuda.Event()


class HostRing:
    """Numbers that launches read in the host's memory, each its own entry; pinned, where there is a GPU.

    For launches whose programs read a few numbers each: a copy is a function more for the host, in steps whose other
    work has emptied its caches.  Not while a CUDA graph is captured, and all launches in one stream, or in streams that
    wait for each other.
    """

    def __init__(self, entries: int, most: int, device: torch.device):
        """
        Args:
            entries: how many launches the host may be ahead of the device; it waits then.  Even.
            most: numbers of an entry, made even: each begins at a multiple of 16 bytes.
        """
        pinned, size = device.type == "cuda", most + most % 2
        ring = lasting(entries, size, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._entries: list[torch.Tensor] = list(ring)
        self._views = [memoryview(entry.numpy()).cast("B").cast("q") for entry in ring]  # type: ignore[arg-type]
        self._turn, self._current = 0, CurrentStream(device)
        self._read = [torch.cuda.Event() for _ in "ab"] if pinned else []  # of each half of the ring

    def put(self, numbers: array[int]) -> torch.Tensor:
        """Write the entry of the next launch.

        Args:
            numbers: of type ``q``, at most as many as there is room for.

        Returns:
            int64, the entry.
        """
        turn, half = self._turn, len(self._entries) // 2
        if self._read and turn % half == 0:
            self._read[1 - turn // half].record(self._current())
            self._read[turn // half].synchronize()  # half a round ago: it is long done
        self._turn = (turn + 1) % len(self._entries)
        self._views[turn][: len(numbers)] = numbers
        return self._entries[turn]


class _Heads:
    """The first entries of a tensor.  A view takes longer to make than to look up, and sizes come again."""

    def __init__(self, whole: torch.Tensor):
        self.whole = whole
        self._shown: dict[int, torch.Tensor] = {}

    def __call__(self, n: int) -> torch.Tensor:
        head = self._shown.get(n)
        if head is None:
            if len(self._shown) >= SHOWN:
                self._shown.clear()
            head = self._shown[n] = self.whole[:n]
        return head


class _Pinned:
    """Pinned memory, uint8 ``[room]``, and where it is."""

    def __init__(self, memory: torch.Tensor):
        self.memory, self.address = memory, memory.data_ptr()
        self._typed: dict[torch.dtype, _Heads] = {}

    def numbers(self, dtype: torch.dtype) -> _Heads:
        """It as numbers of a dtype."""
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = _Heads(self.memory.view(dtype))
        return typed


def lasting(*shape: int, **options: Any) -> torch.Tensor:
    """``torch.empty``; made in inference mode, a tensor could not be written outside of it."""
    with torch.inference_mode(False):
        return torch.empty(*shape, **options)

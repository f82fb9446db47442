"""Numbers on their way from the host to a device, without waiting for either."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch


class Staging:
    """Host buffers that are written and sent in turn: memory that a copy may still read is not written.

    On a GPU the memory is pinned, and there are as many buffers as the host is copies ahead of the device.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._sent: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()  # the oldest first

    def send(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """Copy numbers of the host to the head of ``out``, in the current stream.

        Not while a CUDA graph is captured: a replay would copy the memory's later content.

        Args:
            source: ``[n]`` on the host; it may be written when this returns.
            out: ``[>= n]`` of the same dtype, on the device.
        """
        n = source.shape[0]
        if self._device.type != "cuda":
            out[:n] = source
            return
        size = source.numel() * source.element_size()
        pinned, event = self._free(size)
        typed = pinned[:size].view(source.dtype)
        typed.copy_(source)
        out[:n].copy_(typed, non_blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        self._sent.append((pinned, event))

    def _free(self, size: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """An unused uint8 ``[>= size]``, and an event."""
        if self._sent and self._sent[0][1].query():
            pinned, event = self._sent.popleft()
            if pinned.shape[0] >= size:
                return pinned, event
        room = max(4096, 1 << (size - 1).bit_length())
        return lasting(room, dtype=torch.uint8, device="cpu", pin_memory=True), torch.cuda.Event()


def lasting(*shape: int, **options: Any) -> torch.Tensor:
    """``torch.empty``; made in inference mode, a tensor could not be written outside of it."""
    with torch.inference_mode(False):
        return torch.empty(*shape, **options)

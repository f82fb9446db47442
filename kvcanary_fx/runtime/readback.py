"""Knowing that a device has something to report, without waiting for the device."""

from __future__ import annotations

import torch

from ..kernels.ring import Word
from .binding import Controls


class Poll:
    """Copies of the rings' counters on their way to the host, one per device at a time."""

    def __init__(self, controls: Controls):
        self._controls = controls
        self._copies: dict[torch.device, tuple[torch.Tensor, torch.cuda.Event]] = {}

    def news(self) -> bool:
        """Whether some ring had unread rows when its counters were last copied; starts the next copies."""
        found = False
        for device, control in self._controls.by_device.items():
            if device.type != "cuda":
                found |= _unread(control.words)
                continue
            copy = self._copies.get(device)
            if copy is not None and not copy[1].query():
                continue  # still on its way
            found |= copy is not None and _unread(copy[0])
            pinned = torch.empty(control.words.shape, dtype=control.words.dtype, device="cpu", pin_memory=True)
            event = torch.cuda.Event()
            pinned.copy_(control.words, non_blocking=True)
            event.record(torch.cuda.current_stream(device))
            self._copies[device] = (pinned, event)
        return found


def _unread(words: torch.Tensor) -> bool:
    return bool(words[Word.HEAD] != words[Word.DRAINED])

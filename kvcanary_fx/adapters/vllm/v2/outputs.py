"""Finds out whether a step had violations when its tokens are read, and not before: nothing waits for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from ....engine.session import EngineSession
from ....runtime.readback import Words


class Flags:
    """The violation counters of a session after each step, on their way to the host with the step's tokens."""

    def __init__(self, session: EngineSession):
        self._session = session
        self._free: deque[list[Words]] = deque()

    def start(self) -> list[Words]:
        """Copy the counters after all that is queued so far."""
        words = self._free.popleft() if self._free else [Words([flag]) for flag in self._tensors()]
        for each in words:
            each.start()
        return words

    def raised(self, words: list[Words]) -> bool:
        """Whether there were violations that the host had not read; the step's tokens have arrived, and so have these.

        Args:
            words: of that step; not to be used again.
        """
        for each in words:
            each.wait()
        counts = [each.read()[0] for each in words]
        self._free.append(words)
        return any(ever != read for ever, read in counts)

    def _tensors(self) -> Sequence[torch.Tensor]:
        return [control.flag for control in self._session.controls.by_device.values()]

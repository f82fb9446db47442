"""Finds out whether a step had violations when its tokens are read, and not before: nothing waits for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from ....engine.session import EngineSession
from ....runtime.readback import Words

#: Steps after which a step's tokens are taken for dropped: more than the runner is ahead of who reads them.
UNREAD = 16


class Flags:
    """The violation counters of a session after each step, on their way to the host with the step's tokens."""

    def __init__(self, session: EngineSession):
        self._session = session
        self._free: deque[list[Words]] = deque()
        self._unread: dict[int, list[Words]] = {}  # by identity, the oldest first

    def start(self) -> list[Words]:
        """Copy the counters after all that is queued so far."""
        words = self._free.popleft() if self._free else [Words([flag]) for flag in self._tensors()]
        for each in words:
            each.start()
        self._unread[id(words)] = words
        return words

    def raised(self, words: list[Words]) -> bool:
        """Whether there were violations that the host had not read; the step's tokens have arrived, and so have these.

        Args:
            words: of that step; not to be used again.
        """
        for each in words:
            each.wait()
        if self._unread.pop(id(words), None) is not None:
            self._free.append(words)
        return _differ(words)

    def unread(self, early: bool) -> bool:
        """Whether there were violations in steps whose tokens nobody has read: some ranks' outputs are dropped.

        Args:
            early: tell also of steps whose tokens may be read yet.
        """
        found = early and any(_differ(words) for words in self._unread.values() if _arrived(words))
        while len(self._unread) > UNREAD:
            words = self._unread[next(iter(self._unread))]
            if not _arrived(words):
                break
            found |= self.raised(words)
        return found

    def _tensors(self) -> Sequence[torch.Tensor]:
        return [control.flag for control in self._session.controls.by_device.values()]


def _arrived(words: Sequence[Words]) -> bool:
    return all(each.arrived() for each in words)


def _differ(words: Sequence[Words]) -> bool:
    return any(ever != read for ever, read in (each.read()[0] for each in words))

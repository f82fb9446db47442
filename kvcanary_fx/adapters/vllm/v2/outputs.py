"""Finds out whether a step had violations when its tokens are read, and not before: nothing waits for the device."""

from __future__ import annotations

from collections import deque

import torch

from ....engine.session import EngineSession
from ....kernels.staging import lasting
from ....runtime.readback import Words

#: Steps after which a step's tokens are taken for dropped: more than the runner is ahead of who reads them.
UNREAD = 16


class Flags:
    """The violation counters of a session after each step, on their way to the host with the step's tokens.

    Attributes:
        read_lately: somebody reads the tokens of steps: there is nothing for :meth:`unread` to find.
    """

    def __init__(self, session: EngineSession):
        (control,) = session.controls.by_device.values()
        self._flag = control.flag
        pinned = dict(device="cpu", pin_memory=self._flag.is_cuda)
        self._latest = lasting(2, dtype=torch.int64, **pinned).zero_()
        self._seen: memoryview[int] = memoryview(self._latest.numpy()).cast("B").cast("q")  # type: ignore[arg-type]
        self._free: deque[Words] = deque()
        self._under_way: dict[int, Words] = {}  # by identity, the oldest first
        self._dropped = 0  # steps since the last one whose tokens were read
        self.read_lately = True

    def copy(self) -> None:
        """Launch a copy of the counters to the host: the last launch of a step that :meth:`start` is told of.

        A later step may overwrite them before they are read: they only grow.
        """
        self._latest.copy_(self._flag, non_blocking=True)

    def start(self, copied: bool) -> Words | None:
        """A step has ended: copy the counters after all that is queued so far.

        Args:
            copied: :meth:`copy` was launched behind the step's checks.
        """
        self._dropped += 1
        if self._dropped > UNREAD:
            self.read_lately = False
        if copied:
            return None
        words = self._free.popleft() if self._free else Words([self._flag])
        words.start()
        self._under_way[id(words)] = words
        return words

    def raised(self, words: Words | None) -> bool:
        """Whether there were violations that the host had not read; the step's tokens have arrived, and so have these.

        Args:
            words: of that step; not to be used again.
        """
        self._dropped, self.read_lately = 0, True
        if words is None:
            return self._seen[0] != self._seen[1]
        words.wait()
        if self._under_way.pop(id(words), None) is not None:
            self._free.append(words)
        return _differ(words)

    def unread(self, early: bool) -> bool:
        """Whether there were violations in steps whose tokens nobody has read: some ranks' outputs are dropped.

        Args:
            early: tell also of steps whose tokens may be read yet.
        """
        if not early and self._dropped <= UNREAD:
            return False
        found = self._seen[0] != self._seen[1]
        found |= any(_differ(words) for words in self._under_way.values() if words.arrived())
        while len(self._under_way) > UNREAD and next(iter(self._under_way.values())).arrived():
            self._free.append(self._under_way.pop(next(iter(self._under_way))))
        return found


def _differ(words: Words) -> bool:
    return any(ever != read for ever, read in words.read())

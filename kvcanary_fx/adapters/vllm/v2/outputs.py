"""Whether there are violations to report, asked where the tokens of a step are read: nothing waits for the device."""

from __future__ import annotations

import weakref
from typing import Any

from ....engine.session import EngineSession
from ....runtime.readback import Poll

#: Forwards after which a step's tokens are taken for dropped: more than the runner is ahead of who reads them.
UNREAD = 16


class News(Poll):
    """What the host has heard of a session's violations.

    A kernel that finds one writes to the host's memory (:attr:`.Control.bell`), which is there once the step's tokens
    are.  To copy the counters to the host as the last node of each step's graph took the device 9 us (H200).

    Attributes:
        dropped: forwards since somebody last read a step's tokens.  Who begins a forward adds 1, and who reads sets 0:
            no call, in each step.
        patience: while no more were dropped, the tokens of steps are read, and there is nothing for :meth:`unread` to
            find.  Less than 0 on a rank whose outputs are dropped.
    """

    def __init__(self, session: EngineSession):
        super().__init__(session.controls)
        self.dropped, self.patience = 0, UNREAD

    def unread(self, early: bool) -> bool:
        """Whether there are some in steps whose tokens nobody has read: some ranks' outputs are dropped.

        Args:
            early: tell also of steps whose tokens may be read yet.
        """
        return (early or self.dropped > UNREAD) and self.news()


class Readers:
    """Who reads the violations of an output's step, when its tokens are read.

    In a process that has one runner, as most have, that is its guard: nothing of ours is called where tokens are
    sampled, which is one function less in each step.

    Attributes:
        only: the guard of that runner, weakly; None: each output has to say whose it is.
    """

    def __init__(self) -> None:
        self.only: weakref.ref[Any] | None = None
        self._runner: weakref.ref[Any] | None = None
        self._several = False

    def add(self, runner: Any, guard: Any) -> bool:
        """A runner got its KV cache, and a :class:`.GuardV2` unless it is unguarded; whether outputs have to say whose
        they are."""
        before = None if self._runner is None else self._runner()
        self._several = self._several or (before is not None and before is not runner)
        self._runner = weakref.ref(runner)
        alone = guard is not None and not self._several and not guard.follows_samples
        self.only = weakref.ref(guard) if alone else None
        return self._several or (guard is not None and not alone)

"""Whether there are violations to report, asked where the tokens of a step are read: nothing waits for the device."""

from __future__ import annotations

from ....engine.session import EngineSession
from ....runtime.readback import Poll

#: Steps after which a step's tokens are taken for dropped: more than the runner is ahead of who reads them.
UNREAD = 16


class News:
    """What the host has heard of a session's violations.

    A kernel that finds one writes to the host's memory (:attr:`.Control.bell`), which is there once the step's tokens
    are.  To copy the counters to the host as the last node of each step's graph took the device 9 us (H200).

    Attributes:
        read_lately: somebody reads the tokens of steps: there is nothing for :meth:`unread` to find.  Never on a rank
            whose outputs are dropped.
    """

    def __init__(self, session: EngineSession):
        self._poll = Poll(session.controls)
        self._dropped = 0  # steps since the last one whose tokens were read
        self.read_lately = True

    def step_ended(self) -> None:
        """The tokens of a step are on their way."""
        self._dropped += 1
        if self._dropped > UNREAD:
            self.read_lately = False

    def of_step(self) -> bool:
        """The tokens of a step have arrived: whether there are violations, perhaps of a later step, that the host has
        not read."""
        self._dropped, self.read_lately = 0, True
        return self._poll.news()

    def unread(self, early: bool) -> bool:
        """Whether there are some in steps whose tokens nobody has read: some ranks' outputs are dropped.

        Args:
            early: tell also of steps whose tokens may be read yet.
        """
        return (early or self._dropped > UNREAD) and self._poll.news()

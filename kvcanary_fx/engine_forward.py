"""The forward that runs inside a step, and how the devices know which one it is."""

from __future__ import annotations

import dataclasses

from .binding import Controls
from .errors import SessionStateError
from .kernels.buffers import Word
from .kernels.side_stream import capturing
from .kernels.slot_space import RequestPlan


@dataclasses.dataclass
class Forward:
    """The forward that is running.

    Attributes:
        index: as the engine counts the forwards of a step.
        plans: what each pool is read and written at, by the number of its slot space.
    """

    index: int
    plans: dict[int, RequestPlan]

    def require(self, index: int) -> None:
        """Refuse to be entered as another forward.

        Raises:
            SessionStateError: ``index`` is not the running one's.
        """
        if index != self.index:
            raise SessionStateError(
                f"forward({index}) inside forward({self.index}): leave one before entering the next; a draft model "
                "with pools of its own has a session of its own"
            )


class ForwardIndex:
    """Tells the devices which forward runs: what they report carries it, also long after in a drain."""

    def __init__(self, controls: Controls):
        self._controls, self._last, self._captured = controls, -1, False

    def tell(self, index: int) -> None:
        """A forward begins.  Launches only what changes; a captured forward tells its own index at each replay."""
        self._captured = self._captured or capturing()
        if index == self._last and not self._captured:
            return
        self._last = index
        for control in self._controls.by_device.values():
            control.words[Word.FORWARD].fill_(index)

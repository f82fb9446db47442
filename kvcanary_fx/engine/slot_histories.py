"""What the slots of an engine's pool went through, with the requests by their ids and the stacks of calls."""

from __future__ import annotations

from collections.abc import Sequence

from ..kernels.slots.space import SlotSpace
from ..reports.past import SlotHistory
from ..runtime.past import histories
from .request_ids import RequestIds
from .stacks import CallStacks


class SlotHistories:
    """Those of one pool.

    Attributes:
        stacks: takes the stacks of the allocator's calls; None: none are kept.
    """

    def __init__(self, space: SlotSpace, ids: RequestIds, stacks: int):
        """
        Args:
            stacks: how many are kept.
        """
        self._space, self._ids = space, ids
        self.stacks = CallStacks(stacks) if stacks else None

    def __call__(self, slots: Sequence[int]) -> list[SlotHistory | None]:
        """The histories of slots, None each where that is not kept.  Waits for the device."""
        stack_of = self.stacks.lines if self.stacks is not None else None
        return histories(self._space, slots, self._ids.names_of, stack_of)

"""What the history of a slot says of those who had it, for the rules that name a cause.

A history that has lost its oldest events, or names of requests, says less: then the answer is None.
"""

from __future__ import annotations

import dataclasses
import itertools

from ..past import PastEvent, SlotHistory
from ..violation import Violation

#: Events by which a request gets a slot, or shows that it has it.
_HOLDS = ("allocate", "share", "hand_over", "write", "fill")

#: Steps after its release in which a forward that had been started before may still use a slot.
IN_FLIGHT = 2


def until(past: SlotHistory, violation: Violation) -> SlotHistory:
    """A history without what came after a violation, and without the write that it reports: it is read later."""
    between = violation.phase in ("life", "sweep")  # two steps: such events have the number of the earlier one

    def before(event: PastEvent) -> bool:
        return event.step is None or event.step < violation.step + between

    written = past.written if past.written is not None and before(past.written) else None
    return dataclasses.replace(past, events=tuple(filter(before, past.events)), written=written)


@dataclasses.dataclass(frozen=True)
class Tenants:
    """Those who had a slot.

    Attributes:
        past: what the slot went through, until the violation.
    """

    past: SlotHistory

    def had(self, request: str | int | None) -> bool | None:
        """Whether a request ever had the slot."""
        holders = [event.request for event in self._all() if event.kind in _HOLDS]
        if request is not None and request in holders:
            return True
        return None if request is None or self.past.earlier or None in holders else False

    @property
    def former(self) -> bool | None:
        """Whether somebody had the slot before the one who has it now."""
        kinds = [event.kind for event in self.past.events]
        if "release" in kinds or kinds.count("allocate") > 1:
            return True
        return None if self.past.earlier or "allocate" not in kinds else False

    @property
    def allocated_twice(self) -> bool:
        """Whether it was handed out again with no release between."""
        calls = [e.kind for e in self.past.events if e.kind in ("allocate", "release", "hand_over", "forget")]
        return any(pair == ("allocate", "allocate") for pair in itertools.pairwise(calls))

    @property
    def shared(self) -> bool | None:
        """Whether anybody shared the slot, or was handed it, since it was allocated."""
        kinds = [event.kind for event in self.past.events]
        if "allocate" in kinds:
            kinds = kinds[len(kinds) - kinds[::-1].index("allocate") :]
        elif self.past.earlier:
            return None
        return "share" in kinds[:-1] or "hand_over" in kinds  # the last one is what was reported

    @property
    def released_by_its_own(self) -> bool:
        """Whether the last release was by the request to which the slot had been allocated."""
        gave = self._last("release")
        got = self._last("allocate")
        return gave is not None and got is not None and gave.request is not None and gave.request == got.request

    def settled(self, step: int) -> bool | None:
        """Whether the bytes were still right when nobody who had the slot before could be writing it any more.

        Args:
            step: in which the slot was read and its bytes were found changed.
        """
        if self.former is False:
            return True
        gave, right = self._last("release"), self.past.read_before
        if gave is None or gave.step is None or self.past.last_read != step:
            return None
        return right is not None and right > gave.step + IN_FLIGHT

    def _all(self) -> tuple[PastEvent, ...]:
        return (*self.past.events, *([self.past.written] if self.past.written is not None else []))

    def _last(self, kind: str) -> PastEvent | None:
        return next((event for event in reversed(self.past.events) if event.kind == kind), None)

"""What the plain reference finds about one slot, and its row in the ring."""

from __future__ import annotations

from ..checks import REASONS, Phase, Why
from ..ring import append
from .space import SlotSpace


class Entry:
    """The failures of one slot: the first decides what is told, all leave their bit."""

    def __init__(self, space: SlotSpace):
        self.space, self.bits, self.why, self.stored, self.found = space, 0, 0, 0, 0

    def add(self, why: Why, stored: int, found: int) -> None:
        check = REASONS[why].check
        if not check & self.space.checks:
            return
        if self.bits == 0:
            self.why, self.stored, self.found = int(why), stored, found
        self.bits |= int(check)

    def report(
        self, phase: Phase, slot: int, position: int, request: int, detail: int, source: int | None = None
    ) -> None:
        if not self.bits:
            return
        append(
            self.space.control,
            True,
            half=self.space.space_id if source is None else source,
            check=self.bits,
            phase=phase,
            slot=slot,
            stored=self.stored,
            found=self.found,
            detail=detail,
            request=request,
            position=position,
            why=self.why,
        )

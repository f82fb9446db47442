"""What the plain reference finds about one slot, and its row in the ring."""

from __future__ import annotations

from ..buffers import UNKNOWN, Check, Phase, Ring, Word
from .space import SlotSpace, Why


class Entry:
    """The failures of one slot: the first decides what is told, all leave their bit."""

    def __init__(self, space: SlotSpace):
        self.space, self.bits, self.why, self.stored, self.found = space, 0, 0, 0, 0

    def add(self, check: Check, why: Why, stored: int, found: int) -> None:
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
        control = self.space.control
        head, drained = int(control.words[Word.HEAD]), int(control.words[Word.DRAINED])
        control.words[Word.HEAD] += 1
        if head - drained >= control.capacity:
            return
        values = {
            Ring.STEP: int(control.words[Word.STEP]),
            Ring.HALF: self.space.space_id if source is None else source,
            Ring.CHECK: self.bits,
            Ring.PHASE: int(phase),
            Ring.LENIENT: 0,
            Ring.SLOT: slot,
            Ring.ORIGIN: UNKNOWN,
            Ring.STORED: self.stored,
            Ring.FOUND: self.found,
            Ring.DETAIL: detail,
            Ring.REQUEST: request,
            Ring.POSITION: position,
            Ring.WHY: self.why,
            Ring.FORWARD: int(control.words[Word.FORWARD]),
        }
        for column, value in values.items():
            control.ring[head % control.capacity, column] = value

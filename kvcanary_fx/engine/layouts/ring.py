"""A sliding window whose slots are used again: position p of a request is in column p modulo the row's length."""

from __future__ import annotations

from .base import SMALL_WINDOW, Declared, Layout, ScaledDown


class Ring(Layout):
    """A request has as many slots as its row; what the window has left is overwritten."""

    argument = "ring=True"
    ring = True
    unlike_page_tables = "has rings or states: a kernel's page table says nothing about them"

    @classmethod
    def is_declared(cls, declared: Declared) -> bool:
        return declared.ring

    def refusal(self) -> str | None:
        window = self.declared.window
        if self.declared.chunk is not None:
            return f"is a ring with chunk={self.declared.chunk}: what attention sees of a ring is a window"
        if window is not None and window <= self.room:
            return None
        return (
            f"is a ring of {self.room} slots with window={window}: a ring needs a window that fits into it, since what "
            "attention still sees must not be overwritten"
        )

    def describe(self) -> list[str]:
        return [f"rings of {self.room}"]

    def entries(self, start: int, stop: int) -> list[int | None]:
        left = stop - (self.window or self.room)
        return [p % self.room if p >= left else None for p in range(start, stop)]

    def scaled_down(self) -> ScaledDown:
        return ScaledDown({"window": SMALL_WINDOW, "ring": True}, row=SMALL_WINDOW)

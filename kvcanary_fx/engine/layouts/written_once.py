"""Caches whose slots are written once and read for long after, as those of cross-attention are."""

from __future__ import annotations

from .base import Declared, Layout, ScaledDown


class WrittenOnce(Layout):
    """One slot per token; a second write to a slot is a violation."""

    argument = "written_once=True"
    once = True

    @classmethod
    def is_declared(cls, declared: Declared) -> bool:
        return declared.written_once

    def describe(self) -> list[str]:
        return ["written once"]

    def scaled_down(self) -> ScaledDown:
        small = super().scaled_down()
        return ScaledDown({**small.fields, "written_once": True})

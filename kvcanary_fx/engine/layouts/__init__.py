"""How the tokens of a request are numbered in slots: one class for each layout.

``base.py`` is the contract, and the answers of a pool with one slot per token.
"""

from __future__ import annotations

from .base import Declared, Layout
from .compressed import Compressed
from .ring import Ring
from .state import State
from .written_once import WrittenOnce

#: Every layout but that with one slot per token, which a pool has if it declares none of them.
LAYOUTS: tuple[type[Layout], ...] = (Ring, Compressed, State, WrittenOnce)


def layouts_of(declared: Declared) -> list[Layout]:
    """The layouts that a pool declares: it can have one of them only."""
    found = [layout(declared) for layout in LAYOUTS if layout.is_declared(declared)]
    return found or [Layout(declared)]

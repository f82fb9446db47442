"""What is known not to hold yet.  To shrink to nothing: a line goes when its mend is in."""

from __future__ import annotations

from collections.abc import Callable

from fuzz.program import Program

#: By what is wrong, the programs that may fail of it.
KNOWN: dict[str, Callable[[Program], bool]] = {}


def known(program: Program) -> str | None:
    """Why a program may fail, or None."""
    return next((why for why, fits in KNOWN.items() if fits(program)), None)

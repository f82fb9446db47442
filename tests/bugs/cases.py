"""How a documented bug is written down: one function that plays it, faulty or repaired."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kvcanary_fx import EngineSession


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a played bug leaves to be looked at.

    Attributes:
        sessions: where a violation may be reported.
        slot: the slot that the report must name; None if the fault is in no one slot (a row, a length).
        request: the request that the report must name; None where nobody owns what is wrong.
    """

    sessions: tuple[EngineSession, ...]
    slot: int | None = None
    request: str | None = None


Play = Callable[[bool], Outcome]


@dataclasses.dataclass(frozen=True)
class Bug:
    """One entry of the collection.

    Attributes:
        number: ``A1``.
        source: where it is documented, ``sgl-project/sglang#25015``.
        check: the check that must report it first; None where no check of the storage can see it.
        also: other checks that may report it first.
        play: plays it, with the fault (True) or repaired (False).
    """

    number: str
    source: str
    check: str | None
    also: tuple[str, ...]
    play: Play

    @property
    def name(self) -> str:
        return f"{self.number} {self.play.__name__.replace('_', ' ')}"


BUGS: list[Bug] = []


def bug(number: str, source: str, check: str | None, also: tuple[str, ...] = ()) -> Callable[[Play], Play]:
    """Register a function as the play of a documented bug."""

    def register(play: Play) -> Play:
        BUGS.append(Bug(number, source, check, also, play))
        return play

    return register

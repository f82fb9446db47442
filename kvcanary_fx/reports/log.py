"""The violations of a session, and which get a line in the log: bounded, however long a fault persists.

A slot that stays wrong is reported each time it is read.  An exception or a callback needs all of these; a log needs
the first, and then how many there were.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence

from .violation import Violation

#: Records kept: the first ones, since they are nearest to the cause, and as many of the newest.
KEPT = 5_000

#: Maximum number of records that wait for an exception; more are only counted.
UNTOLD = 1_000

#: Lines about one group (a check and its reason in one half); later ones share a line at 10, 100, ... times.
LINES = 100

#: Places whose repetitions are counted; the oldest are forgotten first.
PLACES = 20_000


class ViolationLog:
    """The violations of one session.

    Attributes:
        total: violations so far, including those that did not fit into a full ring.
        by_check: how many of each check were read.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything, as at the end of a warm-up."""
        self.total = 0
        self.by_check: Counter[str] = Counter()
        self._first: list[Violation] = []
        self._newest: deque[Violation] = deque(maxlen=KEPT)
        self._untold: list[Violation] = []
        self._untold_total = 0
        self._places: OrderedDict[tuple[object, ...], int] = OrderedDict()
        self._groups: Counter[tuple[object, ...]] = Counter()

    def add(self, fresh: Sequence[Violation], total: int) -> None:
        """Add violations that were read.

        Args:
            total: how many there were, at least as many as ``fresh``.
        """
        self.total += total
        self._untold_total += total
        self.by_check.update(v.check for v in fresh)
        room = KEPT - len(self._first)
        self._first += fresh[:room]
        self._newest.extend(fresh[room:])
        self._untold += fresh[: UNTOLD - len(self._untold)]

    def records(self) -> list[Violation]:
        """The first :data:`KEPT` records and the newest :data:`KEPT`, in order."""
        return [*self._first, *self._newest]

    @property
    def untold(self) -> bool:
        """Whether there are violations that no exception reported yet."""
        return bool(self._untold_total)

    def take_untold(self) -> tuple[list[Violation], int]:
        """The records that no exception reported yet, at most :data:`UNTOLD`, and how many there were."""
        fresh, total = self._untold, self._untold_total
        self._untold, self._untold_total = [], 0
        return fresh, total

    def lines(self, violations: Sequence[Violation]) -> Iterator[str]:
        """Log lines for violations that were just read.

        The first at a place is its :meth:`Violation.line`.  Repetitions of it, or more than :data:`LINES` of one group,
        get one line with a count, at the 10th, 100th, 1,000th time.
        """
        for violation in violations:
            group = (violation.check, violation.why, violation.phase, violation.layer, violation.half, violation.pool)
            times = self._seen((*group, violation.slot, violation.request))
            if times > 1:
                if _round(times):
                    yield violation.line(times=times)
                continue
            self._groups[group] += 1
            number = self._groups[group]
            if number <= LINES:
                yield violation.line()
            elif _round(number):
                yield violation.line(places=number)

    def _seen(self, place: tuple[object, ...]) -> int:
        """How often a place was reported, including this time."""
        times = self._places.pop(place, 0) + 1
        self._places[place] = times
        if len(self._places) > PLACES:
            self._places.popitem(last=False)
        return times


def _round(number: int) -> bool:
    """Whether a count is 10, 100, 1,000 and so on."""
    return number >= 10 and str(number).rstrip("0") == "1"

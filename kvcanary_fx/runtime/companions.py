"""Judges the graphs of one forward together, where each of them sees the cache of one layer, or one half of it.

Layers are compiled one by one, or a graph breaks in each.  Outside code that writes a prompt changes K and V of a token
in all layers, a stray copy in one of them: a change that one graph judges legal must be in the other layers as well.
The layers that already ran in this forward have noted their changes; the others still hold other bytes than recorded.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque

#: Halves that a graph may have to see one layer only: K and V.
ONE_LAYER = 2

#: Calls that are remembered; must include those of one forward.
_MEMORY = 1024


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a graph, by what it records.

    Attributes:
        graph: identifies the graph.
        halves: ids, in order.
        frame: Dynamo's number of the frame that the graph comes from.
        place: of its first half, :attr:`.pool_half.PoolHalf.order`.
        both: its only half holds K and V.
        heads: ids that a half has, one for each head where these are written one by one.
        pools: what the graph calls its halves.
    """

    graph: int
    halves: tuple[int, ...]
    frame: int = -1
    place: int = 0
    both: bool = False
    heads: int = 1
    pools: tuple[str, ...] = ()

    def repeats(self, first: Call) -> bool:
        """Whether this is what a first layer runs, in another one: the same graph, or one of the same code."""
        return self.graph == first.graph or (self.pools != () and self.pools == first.pools)


@dataclasses.dataclass(frozen=True)
class Companions:
    """The calls of one forward, one or two per layer.

    Attributes:
        calls: in the order in which they ran.
        span: guarded calls from one forward to the next.
        ahead: guarded calls of a forward from its first one to that of this layer.
    """

    calls: tuple[Call, ...]
    span: int
    ahead: int

    def several_layers(self) -> bool:
        """Whether there are layers above the first."""
        return len(self.above_first()) < sum(len(call.halves) for call in self.calls)

    def runs_before(self, half: int, other: int) -> bool:
        """Whether the call that records a half comes before the one that records another."""
        halves = [number for call in self.calls for number in call.halves]
        return half in halves and other in halves and halves.index(half) < halves.index(other)

    def above_first(self) -> list[int]:
        """The halves that a legal rewrite of a token changes; the first layer's depend on the token alone."""
        first = self.calls[0]
        again = next((i for i, call in enumerate(self.calls) if i and call.repeats(first)), 0)
        if again:  # each layer calls it
            return [half for call in self.calls[again:] for half in call.halves]
        halves = [half for call in self.calls for half in call.halves]
        return halves[1 if first.both else ONE_LAYER * first.heads :] or halves


class LayerCalls(threading.local):
    """The calls of a thread to graphs of one layer: those between two calls with the same halves are of one forward."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], tuple[int, int]] = {}
        self._recent: deque[tuple[Call, int]] = deque(maxlen=_MEMORY)  # each with the guarded calls before it
        self._count = 0

    def note(self, call: Call, number: int) -> Companions | None:
        """A call begins.

        Args:
            number: guarded calls of the session before it.

        Returns:
            The forward that ended before it; None if unknown, or if it had one call.
        """
        before = self._last.get(call.halves)
        self._last[call.halves] = self._count, number
        self._recent.append((call, number))
        self._count += 1
        if before is None or not 2 <= self._count - 1 - before[0] < _MEMORY:
            return None
        recent = list(self._recent)[before[0] - self._count :]
        calls = _from_first(list(dict.fromkeys(one for one, _ in recent[:-1])))
        latest = {one.halves: before_it for one, before_it in recent}
        return Companions(calls, number - before[1], number - latest[calls[0].halves])

    def forget(self) -> None:
        """A forward failed before all of its layers ran."""
        self._last.clear()


def _from_first(calls: list[Call]) -> tuple[Call, ...]:
    """The calls from one to the next of the same graph, turned so that the first of a forward is in front.

    The first has the lowest frame, and among calls of one frame the lowest half.  Halves alone do not tell: seen where
    K is written at a constant position in front of a break, which the first graph takes for a cache of its own, so that
    K's half is made one forward later than V's.
    """
    first = min(range(len(calls)), key=lambda i: (calls[i].frame, calls[i].place))
    return (*calls[first:], *calls[:first])

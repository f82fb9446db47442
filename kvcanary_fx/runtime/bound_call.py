"""The sites of a graph, bound to the caches of a call, and the calls that are running."""

from __future__ import annotations

import dataclasses
import functools
import threading

from ..errors import ConcurrentUseError
from ..kernels.context import ForwardContext
from .companions import Call, LayerCalls
from .pool_half import PoolHalf
from .registry import Storage
from .returned import ReturnedCaches


@dataclasses.dataclass(frozen=True, eq=False)
class BoundCall:
    """The sites of a graph, bound to the caches of a call."""

    context: ForwardContext
    halves: tuple[PoolHalf, ...]
    storages: tuple[tuple[Storage, int, str], ...]  # each with the argument it came from and a pool's name
    opaque: bool  # the graph has attention that finds an engine's pools by itself
    together: tuple[str, ...] = ()  # the layers of such attention, if their checks are those of one op
    returned: ReturnedCaches | None = None
    written: frozenset[int] = frozenset()  # ids of the storages that the graph writes
    seen: tuple[PoolHalf, ...] = ()  # of other graphs, checked in what this one reads
    layer: Call | None = None  # what it records, of a graph that sees one layer

    @functools.cached_property
    def ids(self) -> frozenset[int]:
        """Ids of the halves that are checked."""
        return frozenset(half.id for half in (*self.halves, *self.seen))

    @functools.cached_property
    def storage_ids(self) -> frozenset[int]:
        """Identifies its storages."""
        return frozenset(id(storage) for storage, *_ in self.storages)


class RunningCalls:
    """The calls of guarded graphs that are running in one session, by thread: a cache serves one at a time.

    While only one thread is in a forward, no caches are compared.
    """

    def __init__(self) -> None:
        self._calls: dict[int, list[BoundCall]] = {}  # by the thread's ident; a draft may run inside its target
        self._layer_calls = LayerCalls()

    def enter(self, call: BoundCall) -> None:
        """The calling thread begins a call.

        Raises:
            ConcurrentUseError: another thread is in a call over one of its caches.
        """
        me = threading.get_ident()
        mine = self._calls.get(me)
        if mine is None:
            self._calls[me] = [call]
        else:
            mine.append(call)
        if len(self._calls) > 1:
            # entered before the others are compared, so that of two simultaneous threads one is refused
            try:
                self._refuse_shared(me, call)
            except ConcurrentUseError:
                self.leave()
                raise

    def leave(self) -> None:
        """The calling thread's last call ends."""
        me = threading.get_ident()
        mine = self._calls[me]
        mine.pop()
        if not mine:
            del self._calls[me]

    def take_turn(self, call: BoundCall, number: int) -> None:
        """Learn which graphs of one layer make up a forward; the shortest sequence seen is one, of those the latest.

        Args:
            number: guarded calls of the session so far.
        """
        forward = self._layer_calls.note(call.layer, number) if call.layer is not None else None
        for half in call.halves:
            half.takes_turns = True
            if forward is not None and (half.forward is None or len(forward.calls) <= len(half.forward.calls)):
                half.forward = forward

    def break_off(self) -> None:
        """A forward failed before all of its layers ran."""
        self._layer_calls.forget()

    def idle(self) -> bool:
        """Whether no thread is in a forward."""
        return not self._calls

    def _refuse_shared(self, me: int, call: BoundCall) -> None:
        for thread, theirs in list(self._calls.items()):
            for other in tuple(theirs) if thread != me else ():
                if not other.storage_ids.isdisjoint(call.storage_ids):
                    name = next(name for storage, _, name in call.storages if id(storage) in other.storage_ids)
                    owner = next((t.name for t in threading.enumerate() if t.ident == thread), "that has ended")
                    raise ConcurrentUseError(name, owner)

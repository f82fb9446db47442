"""The sites of a graph, bound to the caches of a call."""

from __future__ import annotations

import dataclasses
import functools

from ..kernels.context import ForwardContext
from .companions import Call
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
    returned: ReturnedCaches | None = None
    written: frozenset[int] = frozenset()  # ids of the storages that the graph writes
    seen: tuple[PoolHalf, ...] = ()  # of other graphs, checked in what this one reads
    layer: Call | None = None  # what it records, of a graph that sees one layer

    @functools.cached_property
    def ids(self) -> frozenset[int]:
        """The ids of the halves that are checked."""
        return frozenset(half.id for half in (*self.halves, *self.seen))

    @functools.cached_property
    def storage_ids(self) -> frozenset[int]:
        """What tells its storages from others."""
        return frozenset(id(storage) for storage, *_ in self.storages)

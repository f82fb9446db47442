"""A half of a pool: where it lies in its storage, and its shadow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch.multiprocessing.reductions import StorageWeakRef

from ..kernels.buffers import HalfBuffers, IdentityBuffers, RowState
from ..kernels.slots.space import SlotSpace
from ..kernels.writes.geometry import merged_dims
from ..kernels.writes.layout import SlotLayout
from ..passes.graph_plan import Kind
from ..reports.violation import HalfInfo
from .companions import Companions


def _reachable(distance: int, dims: list[tuple[int, int, int]]) -> bool:
    """Whether two lattices with the strides in ``dims``, shifted by ``distance``, share a point."""
    if not dims:
        return distance == 0
    (stride, mine, theirs), rest = dims[0], dims[1:]
    if stride == 0:
        return _reachable(distance, rest)
    near = distance // stride
    return any(-theirs < k < mine and _reachable(distance - k * stride, rest) for k in (near, near + 1))


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a half lies in its storage: the offset in bytes, and the layout with its strides."""

    offset: int
    strides: tuple[int, ...]
    layout: SlotLayout

    def span(self) -> tuple[int, int]:
        """First byte and one past the last."""
        reach = sum((s - 1) * st for s, st in zip(self.layout.shape, self.strides, strict=True))
        return self.offset, self.offset + (reach + 1) * self.layout.dtype.itemsize

    def same_slots(self, other: Place) -> bool:
        """Whether both cut the same bytes into the same slots."""
        return self._cut() == other._cut()

    def slot_axes_in(self, sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
        """The axes of a view of these sizes and strides that number the slots, if its axes are this half's in some
        order; else None."""
        layout, left, found = self.layout, list(range(len(sizes))), {}
        for axis, (size, stride) in enumerate(zip(layout.shape, self.strides, strict=True)):
            same = [a for a in left if sizes[a] == size and (strides[a] == stride or size == 1)]
            if not same:
                return None
            found[axis] = same[0]
            left.remove(same[0])
        axes = tuple(found[a] for a in layout.slot_axes)
        return axes if not left and tuple(sorted(axes)) == axes else None

    def _cut(self) -> tuple[object, ...]:
        """The slots and the elements of a slot, each as sizes and strides without regard to the view's axes."""
        layout = self.layout
        slots, row = (
            merged_dims([(layout.shape[a], self.strides[a]) for a in axes])
            for axes in (layout.slot_axes, layout.row_axes)
        )
        return self.offset, layout.dtype, slots, row

    def overlaps(self, other: Place) -> bool:
        """Whether a byte may belong to both.  Exact for views with the same strides, such as the layers of
        one interleaved pool; views with other strides overlap as soon as their spans do."""
        (a, b), (c, d) = self.span(), other.span()
        if a >= d or c >= b:
            return False
        size = self.layout.dtype.itemsize
        if self.strides != other.strides or self.layout.dtype != other.layout.dtype or (a - c) % size:
            return True
        dims = sorted(zip(self.strides, self.layout.shape, other.layout.shape, strict=True), reverse=True)
        return _reachable((c - a) // size, dims)


@dataclasses.dataclass(eq=False)
class PoolHalf:
    """One half of one layer in one cache, and its shadow.

    Attributes:
        layer_number: orders layers; K and V of layer 0 depend on the token alone.
        address: data pointer of the half.
        takes_turns: a graph that records it has one layer, so that others may make up a forward with it.
        forward: those graphs, one layer each; None if unknown, or if one graph has several.
        changed: slots that were found changed while it takes turns, each with the number of the call that found it.
        reported: slots whose bytes were found wrong and not repaired since, each with the digest of the right ones.
        kind: what it holds; ``"read"`` while no graph of the session writes it.
        peers: ids of the halves of the same slot space, this one included, with their layer numbers.
        latest: the storage of the tensor that holds what a graph returned last, and where in it.
        beside: while no graph writes it, ids of the halves of its layer that its graphs write.
        exchanges_rows: its rows change by a beam search alone: each then holds what one of them held before.
        order: of the halves of a forward: its number, or that of the half whose bytes it took over.
    """

    id: int
    info: HalfInfo
    place: Place
    buffers: HalfBuffers
    seeds: tuple[int, int]
    layer_number: int
    address: int
    kind: Kind = "kv"
    identity: IdentityBuffers | None = None
    space: SlotSpace | None = None  # of an engine's pool
    peers: dict[int, int] = dataclasses.field(default_factory=dict)
    reported: dict[int, int] = dataclasses.field(default_factory=dict)
    takes_turns: bool = False
    forward: Companions | None = None
    changed: dict[int, int] = dataclasses.field(default_factory=dict)
    latest: tuple[StorageWeakRef, Place] | None = None
    beside: set[int] = dataclasses.field(default_factory=set)
    exchanges_rows: bool = False
    order: int = -1

    def __post_init__(self) -> None:
        if self.order < 0:
            self.order = self.id

    def last_written(self, slot: int) -> int | None:
        """Index of the last slot written in the row of ``slot``; None without rows, or before any write."""
        layout = self.place.layout
        if not layout.has_rows or slot < 0:
            return None
        return int(self.buffers.rows[slot // layout.positions, RowState.NEXT]) - 1

    def forget(self) -> None:
        """Forget everything recorded, in place."""
        self.buffers.reset()
        if self.identity is not None:
            self.identity.reset()

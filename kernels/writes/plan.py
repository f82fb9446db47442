"""Which slots a write goes to, and which part of its operand belongs to each: the runtime half.

The passes read a write in the graph and leave a :class:`WritePlan`; the ops resolve it with the index
tensors and slice bounds of the step.
"""

from __future__ import annotations

import dataclasses
import enum

import torch

from ..buffers import NOT_WRITTEN
from .layout import SlotLayout


class Select(enum.Enum):
    """How a write chooses along one slot axis."""

    ALL = "all"  # every index of the axis
    RANGE = "range"  # a slice: operand is the position of (start, stop) in the extents
    INT = "int"  # one index: operand is its position in the extents
    TENSOR = "tensor"  # advanced indexing: operand is the position in the index tensors
    GRID = "grid"  # scatter: an index tensor of the view's rank, constant along the row
    FLAT = "flat"  # slot numbers over all slot axes at once (a custom op's slot_mapping)


@dataclasses.dataclass(frozen=True)
class Selector:
    kind: Select
    operand: int = 0


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A write's slots, for one step.

    Attributes:
        slots: int64 ``[n]``, where each token goes as PyTorch resolves it; -1 if nowhere.
        raw: int64 ``[n]``, equal to ``slots`` where the index was in range, else the index as given.
        grid: shape of the token grid that ``slots`` flattens, the axes in the view's order.
    """

    slots: torch.Tensor
    raw: torch.Tensor
    grid: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class AxisIndex:
    """What a write chooses along one slot axis: an index tensor, or the numbers from ``start`` on.

    Attributes:
        tensor: integer, shaped to broadcast over the write's result (row axes of size 1), or None.
        start, count: ``count`` numbers, along dimension ``dim`` of the result.
        shape: of the indices, in the result.
    """

    tensor: torch.Tensor | None
    start: int
    count: int
    dim: int
    shape: tuple[int, ...]

    def values(self, device: torch.device) -> torch.Tensor:
        """The indices, int64 of this shape."""
        if self.tensor is not None:
            return self.tensor.to(torch.int64)
        return torch.arange(self.start, self.start + self.count, device=device).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class WritePlan:
    """One write, as read in the graph.

    Attributes:
        selectors: one per slot axis of the layout, or a single ``FLAT`` one.
        write_id: number of the write in its graph.
        ahead: its slots are known, and its bounds checked, before it runs.
        own_rows: only the rows of this write are checked then; other writes of the graph go to the others.
        wraps: a negative index counts from the end (indexing does, index_copy_ and scatter_ do not).
        skips: -1 means "no slot", as in a serving engine's slot_mapping.
    """

    selectors: tuple[Selector, ...]
    write_id: int
    ahead: bool = False
    own_rows: bool = False
    wraps: bool = True
    skips: bool = False

    @property
    def covers_all(self) -> bool:
        """The write reaches every slot."""
        return all(s.kind is Select.ALL for s in self.selectors)

    def resolve(
        self, layout: SlotLayout, index: list[torch.Tensor], extent: list[int], device: torch.device
    ) -> Resolved:
        """The slots of this step's write.

        Args:
            index: the write's index tensors, any integer dtype.
            extent: the write's slice bounds and integer indices.
        """
        if self.selectors[0].kind is Select.FLAT:
            given = index[0].to(torch.int64).reshape(-1)
            return self._bounded(given, given, layout.slots, tuple(index[0].shape))
        per_axis = [axis.values(device) for axis in self.axes(layout, index, extent)]
        shape = torch.broadcast_shapes(*(t.shape for t in per_axis))
        slot = torch.zeros((), dtype=torch.int64, device=device)
        raw = torch.zeros((), dtype=torch.int64, device=device)
        outside = torch.zeros((), dtype=torch.bool, device=device)
        lost = torch.zeros((), dtype=torch.bool, device=device)
        for given, axis in zip(per_axis, layout.slot_axes, strict=True):
            size = layout.shape[axis]
            wrapped = torch.where(given < 0, given + size, given) if self.wraps else given
            bad = (given < 0) | (given >= size)
            lost = lost | (wrapped < 0) | (wrapped >= size)
            slot = slot * size + wrapped
            raw = torch.where(outside, raw, torch.where(bad, given, raw * size + given))
            outside = outside | bad
        slot = torch.where(lost, -1, slot).expand(shape)
        raw = torch.where(outside, raw, slot).expand(shape)
        return Resolved(slot.reshape(-1), raw.reshape(-1), tuple(shape))

    def resolve_in_range(
        self, layout: SlotLayout, index: list[torch.Tensor], extent: list[int], device: torch.device
    ) -> Resolved | None:
        """:meth:`resolve` with fewer operations where every index is in range and counts from the start; None where
        one does not.  It waits for the device."""
        if self.selectors[0].kind is Select.FLAT:
            return None
        slot: torch.Tensor | None = None
        for axis, along in zip(layout.slot_axes, self.axes(layout, index, extent), strict=True):
            given, size = along.values(device), layout.shape[axis]
            if along.tensor is not None and not _all_within(given, size):
                return None
            if along.tensor is None and not 0 <= along.start <= along.start + along.count <= size:
                return None
            slot = given if slot is None else slot * size + given
        assert slot is not None
        flat = slot.reshape(-1)
        return Resolved(flat, flat, tuple(slot.shape))

    def _bounded(self, given: torch.Tensor, raw: torch.Tensor, slots: int, grid: tuple[int, ...]) -> Resolved:
        inside = (given >= 0) & (given < slots)
        slot = torch.where(inside, given, -1)
        if self.skips:
            raw = torch.where(given == -1, slot, raw)
        return Resolved(slot, raw, grid)

    def axes(self, layout: SlotLayout, index: list[torch.Tensor], extent: list[int]) -> list[AxisIndex]:
        """What the write chooses along each slot axis; not for a ``FLAT`` one."""
        return [
            self._along(selector, axis, layout, index, extent)
            for selector, axis in zip(self.selectors, layout.slot_axes, strict=True)
        ]

    def _along(
        self, selector: Selector, axis: int, layout: SlotLayout, index: list[torch.Tensor], extent: list[int]
    ) -> AxisIndex:
        ndim, lead, tensor_dims = self._result_axes(layout, index)
        if selector.kind in (Select.TENSOR, Select.GRID):
            given = index[selector.operand]
            if selector.kind is Select.TENSOR:
                before, after = lead + tensor_dims - given.dim(), ndim - lead - tensor_dims
                given = given.reshape((1,) * before + given.shape + (1,) * after)
            else:
                for row_axis in layout.row_axes:
                    given = given.narrow(row_axis, 0, 1)
            return AxisIndex(given, 0, 0, 0, tuple(given.shape))
        if selector.kind is Select.INT:
            return AxisIndex(None, extent[selector.operand], 1, 0, (1,) * ndim)
        size = layout.shape[axis]
        start, stop = 0, size
        if selector.kind is Select.RANGE:
            start, stop, _ = slice(extent[selector.operand], extent[selector.operand + 1]).indices(size)
        dim, count = self._dim_of(axis, layout, lead, tensor_dims), max(start, stop) - start
        return AxisIndex(None, start, count, dim, tuple(count if d == dim else 1 for d in range(ndim)))

    def _result_axes(self, layout: SlotLayout, index: list[torch.Tensor]) -> tuple[int, int, int]:
        """``(rank, where the advanced dims start, how many)`` of the result of indexing the view.

        The rule is NumPy's: adjacent advanced indices stay in place, separated ones move to the front.
        """
        ndim = len(layout.shape)
        tensors = [a for a, s in zip(layout.slot_axes, self.selectors, strict=True) if s.kind is Select.TENSOR]
        if not tensors:
            return ndim, 0, 0
        dims = max(t.dim() for t in index) if index else 0
        adjacent = tensors[-1] - tensors[0] == len(tensors) - 1
        return ndim - len(tensors) + dims, tensors[0] if adjacent else 0, dims

    def _dim_of(self, axis: int, layout: SlotLayout, lead: int, tensor_dims: int) -> int:
        """The dimension of the result that holds the view's ``axis``, which is not an advanced one."""
        tensors = [a for a, s in zip(layout.slot_axes, self.selectors, strict=True) if s.kind is Select.TENSOR]
        place = axis - sum(1 for a in tensors if a < axis)
        return place if place < lead else place + tensor_dims

    def rows(self, layout: SlotLayout, value: torch.Tensor, resolved: Resolved) -> torch.Tensor:
        """The operand as ``[n, *row_shape]`` in the pool's dtype, in the order of ``resolved.slots``."""
        return self.rows_of(layout, value, resolved.slots.shape[0], resolved.grid)

    def rows_of(self, layout: SlotLayout, value: torch.Tensor, n: int, grid: tuple[int, ...]) -> torch.Tensor:
        """:meth:`rows` of ``n`` tokens in a grid of this shape."""
        value = value.to(layout.dtype)
        if self.selectors[0].kind is Select.FLAT:
            return value.reshape(-1, *layout.row_shape)[:n]  # as many rows as slots; the rest is padding
        if any(s.kind is Select.GRID for s in self.selectors):
            for dim, size in enumerate(grid):
                size = layout.shape[dim] if dim in layout.row_axes else size
                value = value.narrow(dim, 0, size)
        dims, shape = self._row_dims(layout, grid)
        value = self._restore_int_dims(layout, value)
        value = value.expand(shape)
        front = [d for d in range(len(shape)) if d not in dims]
        return value.permute(*front, *dims).reshape(n, *layout.row_shape)

    def _row_dims(self, layout: SlotLayout, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """``(dims of the result that hold the row, full shape of the result)``."""
        grid = list(shape)
        tensors = [a for a, s in zip(layout.slot_axes, self.selectors, strict=True) if s.kind is Select.TENSOR]
        tensor_dims = len(grid) - len(layout.shape) + len(tensors)
        adjacent = not tensors or tensors[-1] - tensors[0] == len(tensors) - 1
        lead = tensors[0] if tensors and adjacent else 0
        dims = [self._dim_of(axis, layout, lead, tensor_dims if tensors else 0) for axis in layout.row_axes]
        for dim, axis in zip(dims, layout.row_axes, strict=True):
            grid[dim] = layout.shape[axis]
        return dims, grid

    def _restore_int_dims(self, layout: SlotLayout, value: torch.Tensor) -> torch.Tensor:
        """Put back, as size 1, the axes that an integer index dropped from the operand."""
        pairs = list(zip(self.selectors, layout.slot_axes, strict=True))
        for selector, axis in reversed(pairs):  # from the right: what follows an axis is then complete
            if selector.kind is Select.INT:
                missing = len(layout.shape) - axis - 1
                if value.dim() >= missing:
                    value = value.unsqueeze(value.dim() - missing)
        return value


def first_positions(layout: SlotLayout, slots: torch.Tensor) -> torch.Tensor | None:
    """int32 ``[rows]``: the lowest position written in each row, ``NOT_WRITTEN`` where none is."""
    if not layout.has_rows:
        return None
    if slots.numel() == 1 and slots.device.type == "cpu":  # a token of one request, as most often
        lowest = torch.full((layout.rows,), NOT_WRITTEN, dtype=torch.int32)
        slot = int(slots)
        if slot >= 0:
            lowest[slot // layout.positions] = slot % layout.positions
        return lowest
    first = torch.full((layout.rows + 1,), NOT_WRITTEN, dtype=torch.int64, device=slots.device)
    row = torch.where(slots >= 0, slots // layout.positions, layout.rows)
    first.scatter_reduce_(0, row, torch.where(slots >= 0, slots % layout.positions, NOT_WRITTEN), "amin")
    return first[:-1].to(torch.int32)


def _all_within(given: torch.Tensor, size: int) -> bool:
    """Whether all indices are in ``[0, size)``."""
    if given.numel() == 0:
        return True
    low, high = torch.aminmax(given)
    return int(low) >= 0 and int(high) < size

"""A strided view as the kernels address it: slot strides, row dimensions, the width of one load, and its device."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch

#: Row dimensions that the kernels unroll; contiguous neighbours are merged first.
MAX_ROW_DIMS = 4


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Addresses of rows, in units of ``unit`` bytes from ``base``.

    Attributes:
        base: a tensor of the unit's integer type that starts where the view starts.
        slot_strides: strides of the (one or two) slot dimensions; a missing one is 0.
        sizes, strides: the row's dimensions, merged, padded at the end to MAX_ROW_DIMS with (1, 0): of a row that is
            dense, Triton then sees that it is.
        unit: bytes of one load: 4 where rows allow it, else the element size.
    """

    base: torch.Tensor
    slot_strides: tuple[int, int]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    unit: int

    def alike(self, other: Geometry) -> bool:
        """Whether one kernel launch can take both: they differ in where they start, if at all."""
        return dataclasses.replace(self, base=other.base) == other

    def rows_alike(self, other: Geometry) -> bool:
        """Whether one launch can take the rows of both: they differ in where they start and in the step to the next."""
        return dataclasses.replace(self, base=other.base, slot_strides=other.slot_strides) == other

    @property
    def units(self) -> int:
        """Loads in one row."""
        total = 1
        for size in self.sizes:
            total *= size
        return total


_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def geometry_of(view: torch.Tensor, slot_axes: tuple[int, ...]) -> Geometry:
    """The geometry of ``view`` with these slot axes (one or two).

    Raises:
        ValueError: the row has more dimensions than the kernels unroll.
    """
    size = view.element_size()
    row_axes = [a for a in range(view.dim()) if a not in slot_axes]
    dims = merged_dims([(view.shape[a], view.stride(a)) for a in row_axes])
    slots = [view.stride(a) for a in slot_axes]
    unit = size
    if size == 8:  # two words an element
        dims, slots, unit = [*((n, 2 * s) for n, s in dims), (2, 1)], [2 * s for s in slots], 4
        dims = merged_dims(dims)
    elif size < 4 and _fits_words(view, dims, slots):
        factor = 4 // size
        inner, _ = dims[-1]
        dims = [*((n, s // factor) for n, s in dims[:-1]), (inner // factor, 1)]
        slots, unit = [s // factor for s in slots], 4
    if len(dims) > MAX_ROW_DIMS:
        raise ValueError(f"a slot's bytes lie in {len(dims)} separate dimensions; the kernels take {MAX_ROW_DIMS}")
    pad = MAX_ROW_DIMS - len(dims)
    return Geometry(
        base=_reinterpreted(view, unit),
        slot_strides=(slots[0], slots[1]) if len(slots) == 2 else (0, slots[0]),
        sizes=tuple(n for n, _ in dims) + (1,) * pad,
        strides=tuple(s for _, s in dims) + (0,) * pad,
        unit=unit,
    )


def merged_dims(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """``(size, stride)`` of the same addresses in the same order with as few dimensions as possible; at least one."""
    merged: list[tuple[int, int]] = []
    for size, stride in dims:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged or [(1, 1)]


def _fits_words(view: torch.Tensor, dims: list[tuple[int, int]], slots: list[int]) -> bool:
    """Whether every aligned group of 4 bytes of a row is contiguous and 4-byte aligned in memory."""
    size = view.element_size()
    inner, stride = dims[-1]
    outer = [s for _, s in dims[:-1]] + slots
    aligned = all(s * size % 4 == 0 for s in outer) and view.data_ptr() % 4 == 0
    return aligned and stride == 1 and inner * size % 4 == 0


def _reinterpreted(view: torch.Tensor, unit: int) -> torch.Tensor:
    """A one-element integer tensor at the view's first byte: the kernels only take its address."""
    storage, start = view.untyped_storage(), view.storage_offset() * view.element_size()
    base = torch.empty(0, dtype=_INTEGER[unit], device=view.device)
    return base.set_(storage, start // unit, (1,), (1,))


def on_device(tensor: torch.Tensor) -> Any:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()

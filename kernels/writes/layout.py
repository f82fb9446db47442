"""How a pool tensor is cut into slots: which axes number the slots and which hold a slot's bytes."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

#: Element types whose bytes we can digest.  Integer pools are quantised caches.
FLOAT_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
POOL_DTYPES = (*FLOAT_DTYPES, torch.uint8, torch.int8)


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """One half of one layer's pool, seen as slots times rows.

    ``shape`` is the shape of the view that the write addresses, ``slot_axes`` the one or two axes that
    number its slots; every other axis holds a slot's bytes.  With two slot axes, slot = first * positions
    + second.  The first is a *row axis* (each row holds one sequence, position by position), unless the
    pool is ``paged``: then it numbers pages, and a page says nothing about sequences.

    Strides are not part of a layout: they are read from the tensor at hand, because a functionalising
    backend hands the ops a copy with strides of its own.

    Examples: ``[B, H, S, D]`` with slot axes ``(0, 2)``; ``[slots, H, D]`` with ``(0,)``;
    ``[pages, page_size, H, D]`` with ``(0, 1)``, paged.
    """

    shape: tuple[int, ...]
    slot_axes: tuple[int, ...]
    dtype: torch.dtype
    paged: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.slot_axes) <= 2:
            raise ValueError(f"a pool has one or two slot axes, not {len(self.slot_axes)}: {self.slot_axes}")
        if not all(0 <= a < len(self.shape) for a in self.slot_axes):
            raise ValueError(f"slot axes {self.slot_axes} do not exist in a view of shape {list(self.shape)}")
        if tuple(sorted(set(self.slot_axes))) != self.slot_axes:
            raise ValueError(f"slot axes must ascend without repeats, not {self.slot_axes}")

    @functools.cached_property
    def slots(self) -> int:
        """Number of slots."""
        return math.prod(self.shape[a] for a in self.slot_axes)

    @functools.cached_property
    def positions(self) -> int:
        """Slots along the last slot axis: those of one row, of one page, or all."""
        return self.shape[self.slot_axes[-1]]

    @property
    def rows(self) -> int:
        """Sequences, one a row; 1 where the pool has no row axis."""
        return self.shape[self.slot_axes[0]] if self.has_rows else 1

    @property
    def two_axes(self) -> bool:
        """Whether a slot's address takes two indices."""
        return len(self.slot_axes) == 2

    @property
    def has_rows(self) -> bool:
        """Whether the first slot axis is a row axis."""
        return self.two_axes and not self.paged

    @functools.cached_property
    def row_axes(self) -> tuple[int, ...]:
        """The axes that hold a slot's own elements, in order."""
        return tuple(a for a in range(len(self.shape)) if a not in self.slot_axes)

    @functools.cached_property
    def row_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[a] for a in self.row_axes)

    @functools.cached_property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * self.dtype.itemsize

    @functools.cached_property
    def words(self) -> int:
        """32-bit words in a row, the last one padded."""
        return -(-self.row_bytes // 4)

    def slots_first(self, view: torch.Tensor) -> torch.Tensor:
        """``view`` permuted to ``[*slot axes, *row axes]``; no copy."""
        return view.permute(*self.slot_axes, *self.row_axes)

    def gather(self, view: torch.Tensor, slots: torch.Tensor, ascending: bool = False) -> torch.Tensor:
        """The rows of ``slots`` (int64 ``[n]``), copied: ``[n, *row_shape]``.

        Args:
            ascending: the slots are in order, and none is named twice.
        """
        first = self.slots_first(view)
        if self.two_axes and (first.shape[0] == 1 or first.stride(0) == first.stride(1) * self.positions):
            first = first.flatten(0, 1)  # no copy
        elif self.two_axes:
            return first[slots // self.positions, slots % self.positions]
        if view.device.type == "cpu":  # indexing takes four times as long for rows of 4 KiB
            run = _run(first, slots) if ascending else None
            return first.index_select(0, slots) if run is None else run.clone(memory_format=torch.contiguous_format)
        return first[slots]


def _run(first: torch.Tensor, slots: torch.Tensor) -> torch.Tensor | None:
    """The rows of slots that ascend, if these follow one another, as most do that are stored; else None.

    To copy 520 rows of 64 bytes took a CPU core a third as long as to select them, and of 2 KiB half as long.
    """
    n = slots.numel()
    if n < 2:
        return None
    begin = int(slots[0])
    return first[begin : begin + n] if int(slots[-1]) == begin + n - 1 else None


def poison_mask(dtype: torch.dtype) -> tuple[int, int]:
    """``(mask, bits)``: an element is NaN or Inf when ``element & mask == bits``; ``(0, 1)`` if it never is.

    For 8-byte elements the mask applies to the high word.
    """
    table = {
        torch.float64: (0x7FF00000, 0x7FF00000),
        torch.float32: (0x7F800000, 0x7F800000),
        torch.float16: (0x7C00, 0x7C00),
        torch.bfloat16: (0x7F80, 0x7F80),
        torch.float8_e5m2: (0x7C, 0x7C),
        torch.float8_e4m3fn: (0x7F, 0x7F),
        torch.float8_e4m3fnuz: (0xFF, 0x80),
        torch.float8_e5m2fnuz: (0xFF, 0x80),
    }
    return table.get(dtype, (0, 1))

"""Replaces one division of a cache into slots by another, and carries over what is recorded.

Two graphs may divide the same bytes in different ways: one was compiled for a position that was a constant, one writes
pages and the other a flat view of them.  A digest of one cut says nothing about a slot of another.  So the bytes are
compared once by the old cut, and fingerprinted by the new one where all of a slot was recorded.  If they differ, the
new slot gets a digest that no bytes have: the next check finds it, and decides whether the change was legal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..kernels.buffers import RowState
from ..kernels.content.cpu import digest_rows
from ..kernels.content.digest import empty_digest

if TYPE_CHECKING:
    from .pool_half import PoolHalf

#: Limit of a storage's elements: each takes a byte of marks.
LARGEST = 1 << 28

_UNKNOWN, _AS_RECORDED, _CHANGED = 0, 1, 2


def carry_over(tensor: torch.Tensor, gone: Sequence[PoolHalf], kept: Sequence[PoolHalf]) -> list[str]:
    """Record in the halves of the new cut what is recorded in those of the old one.

    Args:
        tensor: of the storage that they all are in.
        gone, kept: the halves of the old cut and of the new one.

    Returns:
        The names of the pools where nothing could be carried over.
    """
    base, start = _elements(tensor, [*gone, *kept])
    if base is None:
        return sorted({half.info.pool for half in gone})
    marks = torch.zeros(base.shape, dtype=torch.uint8, device=base.device)
    found = [(half, *_compared(base, start, half)) for half in gone]
    for mark, number in ((_AS_RECORDED, 1), (_CHANGED, 2)):
        for half, *slots in found:
            _mark(_slots_first(marks, start, half), half, slots[number - 1], mark)
    for half in kept:
        _take(base, start, marks, half)
        _continue_rows(half, gone)
    return []


def _elements(tensor: torch.Tensor, halves: Sequence[PoolHalf]) -> tuple[torch.Tensor | None, int]:
    """The flat elements of a storage that contain some halves, and the number of the first; None if they cannot be
    compared."""
    spans = [half.place.span() for half in halves]
    low, high = min(a for a, _ in spans), max(b for _, b in spans)
    size = tensor.element_size()
    same = all(half.place.layout.dtype == tensor.dtype for half in halves)
    if not same or low % size or (high - low) // size > LARGEST:
        return None, 0
    return tensor.as_strided(((high - low) // size,), (1,), low // size), low // size


def _view(flat: torch.Tensor, start: int, half: PoolHalf) -> torch.Tensor:
    place = half.place
    first = place.offset // place.layout.dtype.itemsize - start
    return flat.as_strided(place.layout.shape, place.strides, flat.storage_offset() + first)


def _slots_first(flat: torch.Tensor, start: int, half: PoolHalf) -> torch.Tensor:
    return half.place.layout.slots_first(_view(flat, start, half))


def _compared(base: torch.Tensor, start: int, half: PoolHalf) -> tuple[torch.Tensor, torch.Tensor]:
    """The recorded slots of a half whose bytes are as recorded, and those whose bytes are not."""
    digest, layout = half.buffers.digest, half.place.layout
    slots = digest[0].nonzero().squeeze(1)
    now = digest_rows(layout, _view(base, start, half), slots, half.seeds, digest.shape[0])
    same = (now == digest[:, slots]).all(0)
    return slots[same], slots[~same]


def _mark(marks: torch.Tensor, half: PoolHalf, slots: torch.Tensor, mark: int) -> None:
    layout = half.place.layout
    if layout.two_axes:
        marks[slots // layout.positions, slots % layout.positions] = mark
    else:
        marks[slots] = mark


def _take(base: torch.Tensor, start: int, marks: torch.Tensor, half: PoolHalf) -> None:
    """Fingerprint the slots of a half that were recorded, all of each or with bytes that have changed."""
    digest, layout = half.buffers.digest, half.place.layout
    slotwise = _slots_first(marks, start, half).reshape(layout.slots, -1)
    changed = (slotwise == _CHANGED).any(1)
    known = (slotwise != _UNKNOWN).all(1) | changed
    slots = (known & (digest[0] == 0)).nonzero().squeeze(1)
    found = digest_rows(layout, _view(base, start, half), slots, half.seeds, digest.shape[0])
    wrong = changed[slots]
    found[0, wrong] = torch.where(found[0, wrong] == -1, 1, found[0, wrong] + 1)
    digest[:, slots] = found


def _continue_rows(half: PoolHalf, gone: Sequence[PoolHalf]) -> None:
    """Continue the rows of a half where those of the old cut ended, or after the last slot recorded that is not empty:
    what only read the cache has recorded empty slots as well."""
    layout, rows = half.place.layout, half.buffers.rows
    if not layout.has_rows or bool(rows[:, RowState.NEXT].any()):
        return
    for other in gone:
        theirs = other.place.layout
        written = theirs.has_rows and bool(other.buffers.rows[:, RowState.NEXT].any())
        if written and (theirs.rows, theirs.positions) == (layout.rows, layout.positions):
            rows.copy_(other.buffers.rows)
            return
    digest = half.buffers.digest[0]
    recorded = ((digest != 0) & (digest != empty_digest(half.seeds)[0])).view(layout.rows, layout.positions)
    ends = torch.arange(1, layout.positions + 1, dtype=rows.dtype, device=rows.device)
    rows[:, RowState.NEXT] = (recorded * ends).amax(1)

"""Triton kernels that lead from a write's indices to its slots and rows: :mod:`.plan` and :mod:`.row_state`.

The same in plain torch is some thirty launches for each half of each layer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..words import (
    NOWHERE_WRITTEN,
    ROW_COLUMNS,
    ROW_LENGTH,
    ROW_NEXT,
    ROW_ORIGIN,
    UNKNOWN,
)

#: Where a row's origin comes from: its last token's position, its own indices, or how far a rolling window moved.
FROM_POSITIONS, FROM_INDICES, FROM_WINDOW = 0, 1, 2
_FROM_POSITIONS: tl.constexpr = tl.constexpr(FROM_POSITIONS)
_FROM_INDICES: tl.constexpr = tl.constexpr(FROM_INDICES)

#: What differs between writes and steps, see :data:`.content.triton_half.PER_SITE`.
PER_WRITE = [
    "n", "n1", "n2", "a_start", "a0", "a1", "a2", "a_size", "b_start", "b0", "b1", "b2", "b_size", "last_stride",
    "moved", "rows",
]  # fmt: skip


@triton.jit
def _index(ptr, start, i0, i1, i2, s0, s1, s2, live, HAS_TENSOR: tl.constexpr):
    """Indices along one slot axis: loaded, or counted from ``start``."""
    offset = i0 * s0 + i1 * s1 + i2 * s2
    if HAS_TENSOR:
        given = tl.load(ptr + offset, mask=live, other=0).to(tl.int64)
    else:
        given = start + offset
    return given


@triton.jit
def _step_in(given, size, slot, raw, outside, lost, WRAPS: tl.constexpr):
    """Take one axis into the slot number; see :meth:`.plan.WritePlan.resolve`."""
    wrapped = given
    if WRAPS:
        wrapped = tl.where(given < 0, given + size, given)
    bad = (given < 0) | (given >= size)
    lost = lost | (wrapped < 0) | (wrapped >= size)
    raw = tl.where(outside, raw, tl.where(bad, given, raw * size + given))
    return slot * size + wrapped, raw, outside | bad, lost


@triton.jit
def slots_of_tokens(
    i, n, n1, n2, a_ptr, a_start, a0, a1, a2, a_size, b_ptr, b_start, b0, b1, b2, b_size,
    A_TENSOR: tl.constexpr, B_TENSOR: tl.constexpr, TWO_AXES: tl.constexpr, WRAPS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Slots of the tokens ``i``, int64, and what the write was given where that is out of range; -1 from ``n`` on."""
    live = i < n
    i0, i1, i2 = i // (n1 * n2), i // n2 % n1, i % n2
    slot = tl.zeros_like(i)
    raw = tl.zeros_like(i)
    outside = live & (i < 0)
    lost = outside
    given = _index(a_ptr, a_start, i0, i1, i2, a0, a1, a2, live, A_TENSOR)
    slot, raw, outside, lost = _step_in(given, a_size, slot, raw, outside, lost, WRAPS)
    if TWO_AXES:
        given = _index(b_ptr, b_start, i0, i1, i2, b0, b1, b2, live, B_TENSOR)
        slot, raw, outside, lost = _step_in(given, b_size, slot, raw, outside, lost, WRAPS)
    slot = tl.where(lost, -1, slot)
    raw = tl.where(outside, raw, slot)
    if SKIPS:
        raw = tl.where(given == -1, slot, raw)
    return tl.where(live, slot, -1), tl.where(live, raw, -1)


@triton.jit(do_not_specialize=PER_WRITE)
def resolve_kernel(
    slot_ptr, raw_ptr, n, n1, n2,  # int64 [n] each; the grid of tokens is [n // (n1 * n2), n1, n2]
    a_ptr, a_start, a0, a1, a2, a_size,  # the first slot axis: an index tensor and strides, or a start and steps
    b_ptr, b_start, b0, b1, b2, b_size,
    A_TENSOR: tl.constexpr, B_TENSOR: tl.constexpr, TWO_AXES: tl.constexpr, WRAPS: tl.constexpr, SKIPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The slots of a write, and what it was given where that is out of range."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot, raw = slots_of_tokens(
        i, n, n1, n2, a_ptr, a_start, a0, a1, a2, a_size, b_ptr, b_start, b0, b1, b2, b_size,
        A_TENSOR, B_TENSOR, TWO_AXES, WRAPS, SKIPS,
    )  # fmt: skip
    tl.store(slot_ptr + i, slot, mask=i < n)
    tl.store(raw_ptr + i, raw, mask=i < n)


@triton.jit(do_not_specialize=PER_WRITE)
def first_kernel(slot_ptr, n, first_ptr, positions, BLOCK: tl.constexpr):  # int64 [n], int32 [rows]
    """The lowest position written in each row; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    lowest = tl.full([BLOCK], NOWHERE_WRITTEN, tl.int64)
    for i0 in range(0, n, BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        slot = tl.load(slot_ptr + i, mask=i < n, other=-1)
        mine = (slot >= 0) & (slot // positions == row)
        lowest = tl.minimum(lowest, tl.where(mine, slot % positions, NOWHERE_WRITTEN))
    tl.store(first_ptr + row, tl.min(lowest, axis=0).to(tl.int32))


@triton.jit(do_not_specialize=PER_WRITE)
def rows_kernel(
    slot_ptr, n, rows_ptr, positions,  # int64 [n], int32 [rows, _ROW_COLUMNS]
    last_ptr, last_stride, moved,  # integer [rows]
    SOURCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Note a write in the rows it touched; one program a row.  See :func:`.row_state.update_rows`."""
    row = tl.program_id(0).to(tl.int64)
    highest = tl.full([BLOCK], -1, tl.int64)
    written = tl.zeros([BLOCK], tl.int64)
    for i0 in range(0, n, BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        slot = tl.load(slot_ptr + i, mask=i < n, other=-1)
        mine = (slot >= 0) & (slot // positions == row)
        highest = tl.maximum(highest, tl.where(mine, slot % positions, -1))
        written += mine.to(tl.int64)
    last = tl.max(highest, axis=0)
    length = tl.sum(written, axis=0)
    at = rows_ptr + row * ROW_COLUMNS
    if SOURCE == _FROM_POSITIONS:
        origin = tl.load(last_ptr + row * last_stride).to(tl.int64) - last
    elif SOURCE == _FROM_INDICES:
        origin = tl.zeros_like(last)
    else:
        before = tl.load(at + ROW_ORIGIN).to(tl.int64)
        known = (before != UNKNOWN) & (moved > 0)
        origin = tl.where(known, before + tl.load(at + ROW_NEXT) + moved - positions, UNKNOWN)
    if moved >= 0:
        length = tl.zeros_like(last) + moved
    if last >= 0:
        tl.store(at + ROW_NEXT, (last + 1).to(tl.int32))
        tl.store(at + ROW_ORIGIN, origin.to(tl.int32))
        tl.store(at + ROW_LENGTH, length.to(tl.int32))

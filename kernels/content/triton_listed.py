"""The content check of an engine's pool: the slots that a forward reads, from the list that its walk left.

Before each layer's attention, or of all layers at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..slots.triton_shared import entry_of
from ..words import (
    CHECK_CONTENT,
    CHECK_POISON,
    COLUMN_FLAGS,
    COUNT_CHECKED,
    COUNT_VERIFY_RUNS,
    FLAG_NAMELESS,
    GATE_OPS,
    PHASE_PRE,
    ROW_NEXT,
    SPACE_COLUMNS,
    WHY_NEVER_WRITTEN,
)
from .triton_digest import digest_of_rows
from .triton_half import PER_SITE, packed, report_of
from .triton_pool import half_of


@triton.jit
def check_listed(
    base, digest_ptr, rows_ptr, counters_ptr, half, seed1, seed2,
    listed_ptr, count_ptr, block_ptr, wide_ptr, planned_ptr, clock_ptr, ahead, coef_ptr,
    words_ptr, ring_ptr, capacity, slots_total, words_in_row, positions, slot_stride0, slot_stride1,
    units, n1, n2, n3, d0, d1, d2, d3,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, UNIT: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_WORDS: tl.constexpr, NEVER: tl.constexpr,
):  # fmt: skip
    """One half: the grid's first row loops over the list, whatever its length, so that the launch can be captured."""
    if tl.program_id(0) == 0:
        tl.atomic_add(counters_ptr + COUNT_VERIFY_RUNS, tl.full([], 1, tl.int64), sem="relaxed")
    count = tl.load(count_ptr)
    checked = tl.full([], 0, tl.int64)
    for i0 in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        slot = tl.load(listed_ptr + i, mask=i < count, other=0).to(tl.int64)
        stored1 = tl.load(digest_ptr + slot, mask=i < count, other=0)
        due = stored1 != 0
        work = due
        if NEVER:
            lost = (i < count) & (stored1 == 0)
            if tl.max(lost.to(tl.int32), axis=0) != 0:
                lost = lost & (tl.load(rows_ptr + ROW_NEXT) != 0)
                flags = tl.load(block_ptr + slot * SPACE_COLUMNS + COLUMN_FLAGS, mask=lost, other=0)
                number = tl.load(planned_ptr + slot, mask=lost, other=0)
                number += (tl.load(clock_ptr).to(tl.int64) + 1) << 32
                coming = (ahead != 0) & (number >= 0) & (number < 4294967296)
                lost = lost & ((flags & FLAG_NAMELESS) == 0) & (coming == 0)
                work = due | lost
        if tl.max(work.to(tl.int32), axis=0) != 0:
            if TWO_AXES:
                start = slot // positions * slot_stride0 + slot % positions * slot_stride1
            else:
                start = slot * slot_stride1
            h1, h2, _ = digest_of_rows(
                base, start, work, coef_ptr, seed1, seed2, words_in_row, units, n1, n2, n3, d0, d1, d2, d3,
                UNIT, PLANES, BLOCK, BLOCK_WORDS, 0, 1, UNIT,
            )  # fmt: skip
            stored2 = h2
            if PLANES == 2:
                stored2 = tl.load(digest_ptr + slots_total + slot, mask=due, other=0)
            bad = due & ((h1 != stored1) | (h2 != stored2))
            if tl.max(bad.to(tl.int32), axis=0) != 0:
                _token, where, _flags, _seen, _chain, owner = entry_of(wide_ptr, slot, bad)
                report_of(
                    words_ptr, ring_ptr, capacity, rows_ptr, positions, half, PHASE_PRE, CHECK_CONTENT, 0, bad, slot,
                    packed(stored1, stored2, PLANES), packed(h1, h2, PLANES), tl.zeros_like(slot), owner, where,
                    0, HAS_ROWS,
                )  # fmt: skip
                tl.store(digest_ptr + slot, h1, mask=bad)
                if PLANES == 2:
                    tl.store(digest_ptr + slots_total + slot, h2, mask=bad)
            if NEVER:
                missing = work & (stored1 == 0)
                if tl.max(missing.to(tl.int32), axis=0) != 0:
                    _token, place, _flags, _seen, _chain, holder = entry_of(wide_ptr, slot, missing)
                    zero = tl.zeros_like(slot)
                    report_of(
                        words_ptr, ring_ptr, capacity, rows_ptr, positions, half, PHASE_PRE, CHECK_POISON, 0, missing,
                        slot, zero, zero, zero, holder, place, WHY_NEVER_WRITTEN, HAS_ROWS,
                    )  # fmt: skip
                    tl.store(digest_ptr + slot, h1, mask=missing)
                    if PLANES == 2:
                        tl.store(digest_ptr + slots_total + slot, h2, mask=missing)
            checked += tl.sum(due.to(tl.int64), axis=0)
    if checked > 0:
        tl.atomic_add(counters_ptr + COUNT_CHECKED, checked, sem="relaxed")


@triton.jit(do_not_specialize=PER_SITE)
def verify_listed_kernel(
    base, other_base,  # first units of the view, and of another half's that is like it, for the grid's second row
    gate_ptr,  # int64 [len(Gate)]
    counters_ptr, other_counters_ptr,  # int64 [len(Count)]
    listed_ptr, count_ptr,  # int32 [slots_total], int32 [1]
    block_ptr, wide_ptr,  # int32 [slots_total + 1, 8], the same as int64: who is in the slots
    planned_ptr, clock_ptr, ahead,  # int64 [slots_total + 1], int32 [1]
    coef_ptr,  # int32 [2, words_in_row]
    digest_ptr, other_digest_ptr,  # int32 [PLANES, slots_total]
    words_ptr, ring_ptr, capacity, rows_ptr, other_rows_ptr,
    slots_total, seed1, seed2, other_seed1, other_seed2, words_in_row, half, other_half, positions, ops,
    slot_stride0, slot_stride1,
    units, n1, n2, n3, d0, d1, d2, d3,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, UNIT: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_WORDS: tl.constexpr, NEVER: tl.constexpr,
):  # fmt: skip
    """The halves of a layer."""
    other = tl.program_id(1) == 1
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.atomic_add(gate_ptr + GATE_OPS, tl.full([], 0, tl.int64) + ops, sem="relaxed")
    check_listed(
        tl.where(other, other_base, base), tl.where(other, other_digest_ptr, digest_ptr),
        tl.where(other, other_rows_ptr, rows_ptr), tl.where(other, other_counters_ptr, counters_ptr),
        tl.where(other, other_half, half), tl.where(other, other_seed1, seed1), tl.where(other, other_seed2, seed2),
        listed_ptr, count_ptr, block_ptr, wide_ptr, planned_ptr, clock_ptr, ahead, coef_ptr,
        words_ptr, ring_ptr, capacity, slots_total, words_in_row, positions, slot_stride0, slot_stride1,
        units, n1, n2, n3, d0, d1, d2, d3,
        HAS_ROWS, TWO_AXES, UNIT, PLANES, BLOCK, BLOCK_WORDS, NEVER,
    )  # fmt: skip


@triton.jit(do_not_specialize=PER_SITE)
def verify_pool_kernel(
    table_ptr,  # int64 [halves, TABLE_COLUMNS], see :mod:`.gpu_pool`
    listed_ptr, count_ptr,  # int32 [slots_total], int32 [1]
    block_ptr, wide_ptr,  # int32 [slots_total + 1, 8], the same as int64: who is in the slots
    planned_ptr, clock_ptr, ahead,  # int64 [slots_total + 1], int32 [1]
    coef_ptr,  # int32 [2, words_in_row]
    words_ptr, ring_ptr, capacity, slots_total, words_in_row, positions, slot_stride0, slot_stride1,
    units, n1, n2, n3, d0, d1, d2, d3,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, UNIT: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_WORDS: tl.constexpr, NEVER: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The halves of all layers, a row of the grid each."""
    base, digest_ptr, seed1, seed2, half, rows_ptr, counters_ptr = half_of(table_ptr, UNIT, ALIGNED)
    check_listed(
        base, digest_ptr, rows_ptr, counters_ptr, half, seed1, seed2,
        listed_ptr, count_ptr, block_ptr, wide_ptr, planned_ptr, clock_ptr, ahead, coef_ptr,
        words_ptr, ring_ptr, capacity, slots_total, words_in_row, positions, slot_stride0, slot_stride1,
        units, n1, n2, n3, d0, d1, d2, d3,
        HAS_ROWS, TWO_AXES, UNIT, PLANES, BLOCK, BLOCK_WORDS, NEVER,
    )  # fmt: skip

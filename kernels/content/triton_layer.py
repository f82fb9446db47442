"""Triton kernels of what a forward writes: fingerprints of the slots, and of what the write was given."""

from __future__ import annotations

import triton
import triton.language as tl

from ..words import (
    CHECK_OPERAND,
    COLUMN_FLAGS,
    COUNT_RECORD_RUNS,
    COUNT_RECORDED,
    FLAG_RESERVED,
    GATE_OPS,
    PHASE_POST,
    ROW_NEXT,
    SPACE_COLUMNS,
    WORD_STEP,
)
from .triton_digest import add_words, any_bits, digest_of_rows, digests_of_sums, load_words
from .triton_half import PER_SITE, packed, report, report_poison
from .triton_pool import half_at, units_at


@triton.jit
def digest_and_compare(
    base, start, live, coef_ptr, seed1, seed2, words_in_row, units, n1, n2, n3, d0, d1, d2, d3,
    value_base, value_start, v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3,
    UNIT: tl.constexpr, OPERAND_UNIT: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_WORDS: tl.constexpr, POISON_MASK: tl.constexpr, POISON_BITS: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """:func:`digest_of_rows`, and the rows [BLOCK] among which one differs from the operand's.

    Row and operand are read side by side.  Digested one after the other, a record of 64 slots waited for memory twice,
    and delayed the matrix product after it: 39 us of a decode step of 32 layers (H200).
    """
    sum1 = tl.zeros([BLOCK, BLOCK_WORDS], tl.int32)
    sum2 = tl.zeros([BLOCK, BLOCK_WORDS], tl.int32)
    hits = tl.zeros([BLOCK_WORDS], tl.uint32)
    unlike = tl.zeros([BLOCK_WORDS], tl.uint32)
    for w0 in range(0, words_in_row, BLOCK_WORDS):
        word = w0 + tl.arange(0, BLOCK_WORDS)
        w = load_words(base, start, live, word, units, n1, n2, n3, d0, d1, d2, d3, words_in_row, UNIT)
        v = load_words(
            value_base, value_start, live, word, v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3, words_in_row,
            OPERAND_UNIT,
        )  # fmt: skip
        unlike = any_bits(unlike, w ^ v)
        sum1, sum2, hits = add_words(
            sum1, sum2, hits, w, word, coef_ptr, words_in_row, PLANES, POISON_MASK, POISON_BITS, ELEMENT
        )  # fmt: skip
    h1, h2, suspect = digests_of_sums(sum1, sum2, hits, live, seed1, seed2, POISON_MASK)
    return h1, h2, suspect, live & (tl.max(unlike, axis=0) != 0)


@triton.jit
def rows_unlike(
    base, start, live, words_in_row, units, n1, n2, n3, d0, d1, d2, d3,
    value_base, value_start, v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3,
    UNIT: tl.constexpr, OPERAND_UNIT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Which rows [BLOCK] differ from those of the operand.  Looked at where :func:`digest_and_compare` saw one."""
    unlike = tl.zeros([BLOCK, BLOCK_WORDS], tl.int32)
    for w0 in range(0, words_in_row, BLOCK_WORDS):
        word = w0 + tl.arange(0, BLOCK_WORDS)
        w = load_words(base, start, live, word, units, n1, n2, n3, d0, d1, d2, d3, words_in_row, UNIT)
        v = load_words(
            value_base, value_start, live, word, v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3, words_in_row,
            OPERAND_UNIT,
        )  # fmt: skip
        unlike |= w ^ v
    return live & (tl.max((unlike != 0).to(tl.int32), axis=1) != 0)


@triton.jit
def record_slots(
    i, slot, live, kept, twice, base, value_base, stamp_ptr, stamp_count, write_id, block_ptr, coef_ptr, digest_ptr,
    words_ptr, ring_ptr, capacity, rows_ptr, slots_total, seed1, seed2, words_in_row, half, positions,
    slot_stride0, slot_stride1, token_stride, units, n1, n2, n3, d0, d1, d2, d3,
    v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, OPERAND: tl.constexpr, HAS_SPACE: tl.constexpr,
    UNIT: tl.constexpr, OPERAND_UNIT: tl.constexpr, ELEMENT: tl.constexpr, PLANES: tl.constexpr,
    POISON_MASK: tl.constexpr, POISON_BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    STAMPED: tl.constexpr,
):  # fmt: skip
    """Fingerprint the slots [BLOCK] of the tokens ``i``, and keep the digests of those that are ``kept``.

    Which of them several tokens go to, ``twice`` says, or with STAMPED the stamps.
    """
    at = tl.maximum(slot, 0)
    if TWO_AXES:
        start = (at // positions) * slot_stride0 + (at % positions) * slot_stride1
    else:
        start = at * slot_stride1
    if OPERAND:
        h1, h2, suspect, bad = digest_and_compare(
            base, start, live, coef_ptr, seed1, seed2, words_in_row, units, n1, n2, n3, d0, d1, d2, d3,
            value_base, i * token_stride, v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3,
            UNIT, OPERAND_UNIT, PLANES, BLOCK, BLOCK_WORDS, POISON_MASK, POISON_BITS, ELEMENT,
        )  # fmt: skip
    else:
        h1, h2, suspect = digest_of_rows(
            base, start, live, coef_ptr, seed1, seed2, words_in_row, units, n1, n2, n3, d0, d1, d2, d3,
            UNIT, PLANES, BLOCK, BLOCK_WORDS, POISON_MASK, POISON_BITS, ELEMENT,
        )  # fmt: skip
    if POISON_MASK != 0:
        report_poison(
            words_ptr, ring_ptr, capacity, rows_ptr, positions, half, suspect, slot, base, start, words_in_row,
            units, n1, n2, n3, d0, d1, d2, d3,
            UNIT, BLOCK, BLOCK_WORDS, POISON_MASK, POISON_BITS, ELEMENT, HAS_ROWS,
        )  # fmt: skip
    if OPERAND:
        if tl.max(bad.to(tl.int32), axis=0) != 0:
            bad = rows_unlike(
                base, start, bad, words_in_row, units, n1, n2, n3, d0, d1, d2, d3,
                value_base, i * token_stride, v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3,
                UNIT, OPERAND_UNIT, BLOCK, BLOCK_WORDS,
            )  # fmt: skip
            if STAMPED:
                epoch = tl.load(words_ptr + WORD_STEP) * 65536 + write_id
                twice = tl.load(stamp_ptr + stamp_count + at, mask=bad, other=0) == epoch
            bad = bad & (twice == 0)
            if HAS_SPACE:  # a store kernel may leave reserved slots alone
                flags = tl.load(block_ptr + at * SPACE_COLUMNS + COLUMN_FLAGS, mask=bad, other=0)
                bad = bad & ((flags & FLAG_RESERVED) == 0)
            v1, v2, _ = digest_of_rows(
                value_base, i * token_stride, bad, coef_ptr, seed1, seed2, words_in_row, v_units, v_n1, v_n2, v_n3,
                v_d0, v_d1, v_d2, v_d3, OPERAND_UNIT, PLANES, BLOCK, BLOCK_WORDS, 0, 1, ELEMENT,
            )  # fmt: skip
            report(
                words_ptr, ring_ptr, capacity, rows_ptr, positions, half, PHASE_POST, CHECK_OPERAND, 0, bad, slot,
                packed(v1, v2, PLANES), packed(h1, h2, PLANES), tl.zeros_like(slot), HAS_ROWS,
            )  # fmt: skip
    tl.store(digest_ptr + at, h1, mask=kept)
    if PLANES == 2:
        tl.store(digest_ptr + slots_total + at, h2, mask=kept)


@triton.jit
def record_half(
    base, value_base, token_stride, counters_ptr, digest_ptr, rows_ptr, seed1, seed2, half,
    slot_ptr, n, gate_ptr, ops, stamp_ptr, stamp_count, write_id, block_ptr, planned_ptr, clock_ptr, coef_ptr,
    words_ptr, ring_ptr, capacity, slots_total, words_in_row, positions, slot_stride0, slot_stride1,
    units, n1, n2, n3, d0, d1, d2, d3, v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, OPERAND: tl.constexpr, HAS_SPACE: tl.constexpr,
    UNIT: tl.constexpr, OPERAND_UNIT: tl.constexpr, ELEMENT: tl.constexpr, PLANES: tl.constexpr,
    POISON_MASK: tl.constexpr, POISON_BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    PLANNED: tl.constexpr,
):  # fmt: skip
    """One half.

    A bounded number of programs loops over the slots: with one each, their atomic adds were serialised.
    """
    if tl.program_id(0) == 0:
        tl.atomic_add(counters_ptr + COUNT_RECORD_RUNS, tl.full([], 1, tl.int64), sem="relaxed")
        if HAS_SPACE:
            tl.store(rows_ptr + ROW_NEXT, tl.full([], 1, tl.int32))
        if tl.program_id(1) == 0:
            tl.atomic_add(gate_ptr + GATE_OPS, tl.full([], 0, tl.int64) + ops, sem="relaxed")
    recorded = tl.full([], 0, tl.int64)
    for i0 in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = i0 + tl.arange(0, BLOCK).to(tl.int64)
        slot = tl.load(slot_ptr + i, mask=i < n, other=-1)
        live = slot >= 0
        at = tl.maximum(slot, 0)
        kept = live
        if PLANNED:  # received by the write but not planned: keeps its digest
            number = tl.load(planned_ptr + at, mask=live, other=0) + ((tl.load(clock_ptr).to(tl.int64) + 1) << 32)
            kept = live & (number >= 0) & (number < 4294967296)
        recorded += tl.sum(live.to(tl.int64), axis=0)
        record_slots(
            i, slot, live, kept, live, base, value_base, stamp_ptr, stamp_count, write_id, block_ptr, coef_ptr,
            digest_ptr, words_ptr, ring_ptr, capacity, rows_ptr, slots_total, seed1, seed2, words_in_row, half,
            positions, slot_stride0, slot_stride1, token_stride, units, n1, n2, n3, d0, d1, d2, d3,
            v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3,
            HAS_ROWS, TWO_AXES, OPERAND, HAS_SPACE, UNIT, OPERAND_UNIT, ELEMENT, PLANES, POISON_MASK, POISON_BITS,
            BLOCK, BLOCK_WORDS, True,
        )  # fmt: skip
    if recorded > 0:
        tl.atomic_add(counters_ptr + COUNT_RECORDED, recorded, sem="relaxed")


@triton.jit(do_not_specialize=PER_SITE)
def record_kernel(
    base, value_base,  # first units of the pool's view and of the operand
    other_base, other_value_base,  # those of another half that is like it, for the second row of the grid
    slot_ptr, n,  # int64 [n]
    gate_ptr, ops,  # int64 [len(Gate)]
    counters_ptr, other_counters_ptr,  # int64 [len(Count)]
    stamp_ptr, stamp_count, write_id,  # int64 [2, stamp_count]
    block_ptr, planned_ptr, clock_ptr,  # of an engine's pool: int32 [slots + 1, 8], int64 [slots + 1], int32 [1]
    coef_ptr,  # int32 [2, words_in_row]
    digest_ptr, other_digest_ptr,  # int32 [PLANES, slots_total]
    words_ptr, ring_ptr, capacity, rows_ptr, other_rows_ptr,
    slots_total, seed1, seed2, other_seed1, other_seed2, words_in_row, half, other_half, positions,
    slot_stride0, slot_stride1, token_stride, other_token_stride,
    units, n1, n2, n3, d0, d1, d2, d3,
    v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, OPERAND: tl.constexpr, HAS_SPACE: tl.constexpr,
    UNIT: tl.constexpr, OPERAND_UNIT: tl.constexpr, ELEMENT: tl.constexpr, PLANES: tl.constexpr,
    POISON_MASK: tl.constexpr, POISON_BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    PLANNED: tl.constexpr,
):  # fmt: skip
    """The halves of a layer."""
    other = tl.program_id(1) == 1
    base = tl.where(other, other_base, base)
    value_base = tl.where(other, other_value_base, value_base)
    token_stride = tl.where(other, other_token_stride, token_stride)
    counters_ptr = tl.where(other, other_counters_ptr, counters_ptr)
    digest_ptr = tl.where(other, other_digest_ptr, digest_ptr)
    rows_ptr = tl.where(other, other_rows_ptr, rows_ptr)
    seed1, seed2 = tl.where(other, other_seed1, seed1), tl.where(other, other_seed2, seed2)
    half = tl.where(other, other_half, half)
    record_half(
        base, value_base, token_stride, counters_ptr, digest_ptr, rows_ptr, seed1, seed2, half,
        slot_ptr, n, gate_ptr, ops, stamp_ptr, stamp_count, write_id, block_ptr, planned_ptr, clock_ptr, coef_ptr,
        words_ptr, ring_ptr, capacity, slots_total, words_in_row, positions, slot_stride0, slot_stride1,
        units, n1, n2, n3, d0, d1, d2, d3, v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3,
        HAS_ROWS, TWO_AXES, OPERAND, HAS_SPACE, UNIT, OPERAND_UNIT, ELEMENT, PLANES, POISON_MASK, POISON_BITS, BLOCK,
        BLOCK_WORDS, PLANNED,
    )  # fmt: skip


@triton.jit(do_not_specialize=PER_SITE)
def record_pool_kernel(
    table_ptr,  # int64 [halves, TABLE_COLUMNS], see :mod:`.gpu_pool`
    given_ptr,  # int64 [rows of the grid, 3]: row of the table, address of the operand, its units from token to token
    slot_ptr, n,  # int64 [n]
    gate_ptr, ops,  # int64 [len(Gate)]
    stamp_ptr, stamp_count, write_id,  # int64 [2, stamp_count]
    block_ptr, planned_ptr, clock_ptr,  # int32 [slots + 1, 8], int64 [slots + 1], int32 [1]
    coef_ptr,  # int32 [2, words_in_row]
    words_ptr, ring_ptr, capacity, slots_total, words_in_row, positions, slot_stride0, slot_stride1,
    units, n1, n2, n3, d0, d1, d2, d3,
    v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, OPERAND: tl.constexpr, HAS_SPACE: tl.constexpr,
    UNIT: tl.constexpr, OPERAND_UNIT: tl.constexpr, ELEMENT: tl.constexpr, PLANES: tl.constexpr,
    POISON_MASK: tl.constexpr, POISON_BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    PLANNED: tl.constexpr, ALIGNED: tl.constexpr, OPERANDS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """The halves of several layers, a row of the grid each."""
    given = given_ptr + tl.program_id(1) * 3
    base, digest_ptr, seed1, seed2, half, rows_ptr, counters_ptr = half_at(table_ptr, tl.load(given), UNIT, ALIGNED)
    value_base = units_at(tl.load(given + 1), OPERAND_UNIT, OPERANDS_ALIGNED)
    record_half(
        base, value_base, tl.load(given + 2), counters_ptr, digest_ptr, rows_ptr, seed1, seed2, half,
        slot_ptr, n, gate_ptr, ops, stamp_ptr, stamp_count, write_id, block_ptr, planned_ptr, clock_ptr, coef_ptr,
        words_ptr, ring_ptr, capacity, slots_total, words_in_row, positions, slot_stride0, slot_stride1,
        units, n1, n2, n3, d0, d1, d2, d3, v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3,
        HAS_ROWS, TWO_AXES, OPERAND, HAS_SPACE, UNIT, OPERAND_UNIT, ELEMENT, PLANES, POISON_MASK, POISON_BITS, BLOCK,
        BLOCK_WORDS, PLANNED,
    )  # fmt: skip

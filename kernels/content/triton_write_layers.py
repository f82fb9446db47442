"""The kernels of :mod:`.triton_write` for the halves of all layers, a row of the grid each."""

from __future__ import annotations

import triton
import triton.language as tl

from ..words import (
    CHECK_CONTENT,
    COUNT_ADOPTED,
    COUNT_CHECKED,
    GATE_LENIENT_NOW,
    GATE_STEP,
    NOWHERE_WRITTEN,
    PHASE_PRE,
    ROW_COLUMNS,
    ROW_NEXT,
    WORD_EVERY,
)
from ..writes.triton_resolve import PER_WRITE, slots_of_tokens
from .triton_digest import digest_of_rows
from .triton_half import PER_SITE, packed, report
from .triton_pool import TABLE_COLUMNS, half_at, units_at
from .triton_write import check_before_write, record_written, starts_elsewhere

#: What a launch is given of each half, behind the table of them: the address of its operand, the units from token to
#: token there, and the number of its layer.
GIVEN_COLUMNS = 3

_TABLE: tl.constexpr = tl.constexpr(TABLE_COLUMNS)
_GIVEN: tl.constexpr = tl.constexpr(GIVEN_COLUMNS)

#: Of these, what is a size of a row for :func:`verify_turns_kernel`: constants, which Triton 3.6 does not take twice.
_CONSTANT_SIZES = ("n1", "n2")

_NOT_SPECIALISED = [*PER_SITE, *PER_WRITE, "a_layer", "b_layer"]


@triton.jit
def some_row_asks(goes, rows_ptr, rows, positions, LENIENT: tl.constexpr, ROWS: tl.constexpr):
    """Whether slots of any row are due out of turn, given the slots of all tokens; ``ROWS`` at a time."""
    asked = rows < 0
    for row0 in range(0, rows, ROWS):
        row = row0 + tl.arange(0, ROWS)
        ours = (goes >= 0)[None, :] & ((goes // positions)[None, :] == row[:, None])
        begins = tl.min(tl.where(ours, (goes % positions)[None, :], NOWHERE_WRITTEN), axis=1)
        after = tl.load(rows_ptr + row * ROW_COLUMNS + ROW_NEXT, mask=row < rows, other=0)
        asks = starts_elsewhere(begins, after, LENIENT)
        asked = asked | (tl.max(asks.to(tl.int32), axis=0) != 0)
    return asked


@triton.jit(do_not_specialize=_NOT_SPECIALISED)
def verify_layers_kernel(
    table_ptr,  # int64 [halves, TABLE_COLUMNS], and then [halves, GIVEN_COLUMNS]
    a_ptr, b_ptr, a_layer, b_layer,  # the index tensors of the first layer, and the way to the next one's
    gate_ptr, ops,  # as for :func:`.triton_write.verify_write_kernel` from here on
    stamp_ptr, stamp_count, write_id,
    box_ptr,
    coef_ptr,
    words_ptr, ring_ptr, capacity,
    slots_total, words_in_row, positions, every,
    slot_stride0, slot_stride1,
    units, n1, n2, n3, d0, d1, d2, d3,
    scanners,
    n, g1, g2,
    a_start, a0, a1, a2, a_size, b_start, b0, b1, b2, b_size,
    A_TENSOR: tl.constexpr, B_TENSOR: tl.constexpr, WRITE_AXES: tl.constexpr, WRAPS: tl.constexpr, SKIPS: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, OWN_ROWS: tl.constexpr, BY_BUDGET: tl.constexpr,
    LENIENT: tl.constexpr, CONTENT: tl.constexpr, CHECK: tl.constexpr, BOUNDS: tl.constexpr,
    HAS_BOX: tl.constexpr, UNIT: tl.constexpr, ELEMENT: tl.constexpr, PLANES: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Before the first write of a graph: the bounds of all writes, and the bytes of slots that are due out of turn.

    Few programs share those that :func:`.triton_write.check_before_write` has for each piece of a row, and first look
    whether any row asks for it: usually none does.  (A program for each piece, 4,160 for 64 halves of 16 rows of 4,096
    slots, took 36 us of an H200 to find that out.)  No half keeps digests of before the write: that takes all pieces.
    """
    row = tl.program_id(1)
    base, digest_ptr, seed1, seed2, half, rows_ptr, counters_ptr = half_at(table_ptr, row, UNIT, ALIGNED)
    layer = tl.load(table_ptr + tl.num_programs(1) * _TABLE + row * _GIVEN + 2)
    a_ptr += layer * a_layer
    b_ptr += layer * b_layer
    writers = tl.cdiv(n, BLOCK)
    first = tl.zeros([], tl.int64) + tl.program_id(0)
    stop, step = first + 1, tl.zeros([], tl.int64) + 1
    if first >= writers:
        step = tl.zeros([], tl.int64) + tl.num_programs(0) - writers
        stop = tl.zeros([], tl.int64) + writers + scanners
        token = tl.arange(0, TOKENS).to(tl.int64)
        goes, _raw = slots_of_tokens(
            token, n, g1, g2, a_ptr, a_start, a0, a1, a2, a_size, b_ptr, b_start, b0, b1, b2, b_size,
            A_TENSOR, B_TENSOR, WRITE_AXES == 2, WRAPS, SKIPS,
        )  # fmt: skip
        asked = tl.load(gate_ptr + GATE_LENIENT_NOW) != 0
        if HAS_ROWS:
            asked = asked | some_row_asks(goes, rows_ptr, slots_total // positions, positions, LENIENT, ROWS)
        if asked == 0:
            stop = first
    for program in range(first, stop, step):
        check_before_write(
            program, writers + scanners,
            base, counters_ptr, digest_ptr, digest_ptr, rows_ptr, seed1, seed2, half, gate_ptr,
            tl.where(row == 0, ops, 0), row >= 0, row % 2 == 0,
            stamp_ptr, stamp_count, write_id, box_ptr, coef_ptr, words_ptr, ring_ptr, capacity,
            slots_total, words_in_row, positions, every, slot_stride0, slot_stride1, units, n1, n2, n3, d0, d1, d2, d3,
            scanners, n, g1, g2, a_ptr, a_start, a0, a1, a2, a_size, b_ptr, b_start, b0, b1, b2, b_size,
            A_TENSOR, B_TENSOR, WRITE_AXES, WRAPS, SKIPS, TOKENS, HAS_ROWS, TWO_AXES, OWN_ROWS, BY_BUDGET, False,
            LENIENT, CONTENT, CHECK, BOUNDS, HAS_BOX, UNIT, ELEMENT, PLANES, WIDE, BLOCK, BLOCK_WORDS, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=[name for name in _NOT_SPECIALISED if name not in _CONSTANT_SIZES])
def verify_turns_kernel(
    table_ptr,  # int64 [halves, TABLE_COLUMNS], and then [halves, GIVEN_COLUMNS]
    a_ptr, b_ptr, a_layer, b_layer,
    gate_ptr,
    coef_ptr,
    words_ptr, ring_ptr, capacity,
    slots_total, positions, every,
    slot_stride0, slot_stride1,
    d0, d1, d2, d3,
    n, g1, g2,
    a_start, a0, a1, a2, a_size, b_start, b0, b1, b2, b_size,
    words_in_row: tl.constexpr, units: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr, n3: tl.constexpr,
    A_TENSOR: tl.constexpr, B_TENSOR: tl.constexpr, WRITE_AXES: tl.constexpr, WRAPS: tl.constexpr, SKIPS: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, OWN_ROWS: tl.constexpr, BY_BUDGET: tl.constexpr,
    LENIENT: tl.constexpr, CONTENT: tl.constexpr, UNIT: tl.constexpr, ELEMENT: tl.constexpr, PLANES: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Before the first write of a graph: the bytes of the slots whose turn it is, one of ``every``.

    Sizes of a row are constants, so that its loads are wide, and slots are numbers of 32 bits, whose divisions are
    short.
    """
    row_of_grid = tl.program_id(1)
    base, digest_ptr, seed1, seed2, half, rows_ptr, counters_ptr = half_at(table_ptr, row_of_grid, UNIT, ALIGNED)
    layer = tl.load(table_ptr + tl.num_programs(1) * _TABLE + row_of_grid * _GIVEN + 2)
    share = (tl.load(words_ptr + WORD_EVERY) if BY_BUDGET else tl.zeros([], tl.int64) + every).to(tl.int32)
    call = (tl.load(gate_ptr + GATE_STEP) % share).to(tl.int32)
    first_due = (share - call) % share
    due_count = tl.maximum(slots_total - first_due + share - 1, 0) // share
    if tl.program_id(0) * BLOCK >= due_count:
        return
    now = tl.load(gate_ptr + GATE_LENIENT_NOW) != 0
    token = tl.arange(0, TOKENS).to(tl.int64)
    goes, _raw = slots_of_tokens(
        token, n, g1, g2, a_ptr + layer * a_layer, a_start, a0, a1, a2, a_size, b_ptr + layer * b_layer, b_start,
        b0, b1, b2, b_size, A_TENSOR, B_TENSOR, WRITE_AXES == 2, WRAPS, SKIPS,
    )  # fmt: skip
    goes = goes.to(tl.int32)
    goes_row = tl.where(goes >= 0, goes // positions, -1)
    goes_to = goes - goes_row * positions
    checked, taken_in = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for k0 in range(tl.program_id(0) * BLOCK, due_count, tl.num_programs(0) * BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        inside = k < due_count
        slot = tl.where(inside, first_due + k * share, 0)
        stored1 = tl.load(digest_ptr + slot, mask=inside, other=0)
        stored2 = tl.zeros_like(stored1)
        if PLANES == 2:
            stored2 = tl.load(digest_ptr + slots_total + slot, mask=inside, other=0)
        row = slot // positions
        position = slot - row * positions
        due = inside & (stored1 != 0)
        shifted, adopted = inside & (slot < 0), inside & (slot < 0)
        if HAS_ROWS:
            ours = row[:, None] == goes_row[None, :]
            first = tl.min(tl.where(ours, goes_to[None, :], NOWHERE_WRITTEN), axis=1)
            coming = first != NOWHERE_WRITTEN
            adopted = inside & (stored1 == 0) & coming & (position < first)
            if OWN_ROWS:
                due = due & coming
            shifted = coming & (first != tl.load(rows_ptr + row * ROW_COLUMNS + ROW_NEXT, mask=coming, other=0))
        if not CONTENT:
            due = due & (slot < 0)
        work = due | adopted
        if tl.max(work.to(tl.int32), axis=0) != 0:
            if TWO_AXES:
                start = row.to(tl.int64) * slot_stride0 + position.to(tl.int64) * slot_stride1
            else:
                start = slot.to(tl.int64) * slot_stride1
            h1, h2, _ = digest_of_rows(
                base, start, work, coef_ptr, seed1, seed2, words_in_row, units, n1, n2, n3, d0, d1, d2, d3,
                UNIT, PLANES, BLOCK, BLOCK_WORDS, 0, 1, ELEMENT,
            )  # fmt: skip
            bad = due & (h1 != stored1)
            if PLANES == 2:
                bad = bad | (due & (h2 != stored2))
            if tl.max((bad | adopted).to(tl.int32), axis=0) != 0:
                at, lenient = slot.to(tl.int64), now | LENIENT
                legal = bad & shifted & lenient
                report(
                    words_ptr, ring_ptr, capacity, rows_ptr, positions, half, PHASE_PRE, CHECK_CONTENT,
                    lenient.to(tl.int64), bad & (legal == 0), at, packed(stored1, stored2, PLANES),
                    packed(h1, h2, PLANES), tl.zeros_like(at), HAS_ROWS,
                )  # fmt: skip
                tl.store(digest_ptr + slot, h1, mask=bad | adopted)
                if PLANES == 2:
                    tl.store(digest_ptr + slots_total + slot, h2, mask=bad | adopted)
                taken_in += tl.sum((legal | adopted).to(tl.int32), axis=0)
            checked += tl.sum(due.to(tl.int32), axis=0)
    if checked > 0:
        tl.atomic_add(counters_ptr + COUNT_CHECKED, checked.to(tl.int64), sem="relaxed")
    if taken_in > 0:
        tl.atomic_add(counters_ptr + COUNT_ADOPTED, taken_in.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=_NOT_SPECIALISED)
def record_layers_kernel(
    table_ptr,  # int64 [halves, TABLE_COLUMNS], and then [halves, GIVEN_COLUMNS]
    last_ptr, last_stride,
    a_ptr, b_ptr, a_layer, b_layer,
    gate_ptr, ops,  # as for :func:`.triton_write.record_write_kernel` from here on
    coef_ptr,
    words_ptr, ring_ptr, capacity,
    slots_total, words_in_row, positions,
    slot_stride0, slot_stride1,
    units, n1, n2, n3, d0, d1, d2, d3,
    v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3,
    n, g1, g2,
    a_start, a0, a1, a2, a_size, b_start, b0, b1, b2, b_size,
    A_TENSOR: tl.constexpr, B_TENSOR: tl.constexpr, WRITE_AXES: tl.constexpr, WRAPS: tl.constexpr, SKIPS: tl.constexpr,
    TOKENS: tl.constexpr, HAS_LAST: tl.constexpr,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, OPERAND: tl.constexpr,
    UNIT: tl.constexpr, OPERAND_UNIT: tl.constexpr, ELEMENT: tl.constexpr, PLANES: tl.constexpr,
    POISON_MASK: tl.constexpr, POISON_BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    ALIGNED: tl.constexpr, OPERANDS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Behind the last write of a graph: the fingerprints of what all layers wrote."""
    row = tl.program_id(1)
    base, digest_ptr, seed1, seed2, half, rows_ptr, counters_ptr = half_at(table_ptr, row, UNIT, ALIGNED)
    given = table_ptr + tl.num_programs(1) * _TABLE + row * _GIVEN
    layer = tl.load(given + 2)
    record_written(
        base, units_at(tl.load(given), OPERAND_UNIT, OPERANDS_ALIGNED), counters_ptr, digest_ptr, rows_ptr, seed1,
        seed2, half, gate_ptr, ops, row == 0, last_ptr, last_stride,
        coef_ptr, words_ptr, ring_ptr, capacity,
        slots_total, words_in_row, positions, slot_stride0, slot_stride1, tl.load(given + 1),
        units, n1, n2, n3, d0, d1, d2, d3, v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3,
        n, g1, g2, a_ptr + layer * a_layer, a_start, a0, a1, a2, a_size, b_ptr + layer * b_layer, b_start,
        b0, b1, b2, b_size,
        A_TENSOR, B_TENSOR, WRITE_AXES, WRAPS, SKIPS, TOKENS, HAS_LAST, HAS_ROWS, TWO_AXES, OPERAND, UNIT, OPERAND_UNIT,
        ELEMENT, PLANES, POISON_MASK, POISON_BITS, BLOCK, BLOCK_WORDS,
    )  # fmt: skip

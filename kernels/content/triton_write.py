"""Triton kernels of the checks around a write that a graph shows, of so few tokens that every program takes them all.

One launch before the write and one after it, for K and V: with kernels for the slots, for their bounds, and for the
rows that they are in, it was nine for each half, and each took its latency in a captured decode step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..slots.triton_shared import mix
from ..words import (
    COUNT_RECORD_RUNS,
    COUNT_RECORDED,
    GATE_LENIENT_NOW,
    GATE_OPS,
    GATE_STEP,
    NOWHERE_WRITTEN,
    PHASE_PRE,
    ROW_COLUMNS,
    ROW_LENGTH,
    ROW_NEXT,
    ROW_ORIGIN,
    SEED,
    UNKNOWN,
    WORD_EVERY,
    WORD_STEP,
)
from ..writes.triton_resolve import PER_WRITE, slots_of_tokens
from .triton_half import PER_SITE, VERIFY, count_run, put_into_box, report, scan_slots, slots_due
from .triton_layer import record_slots

_VERIFY: tl.constexpr = tl.constexpr(VERIFY)

#: Tokens that are compared with all others at a time.
_COMPARED: tl.constexpr = tl.constexpr(16)

_NOT_SPECIALISED = [*PER_SITE, *PER_WRITE]

#: What a program of the check before a write looks at.
_REPLACED: tl.constexpr = tl.constexpr(0)
_OTHERS: tl.constexpr = tl.constexpr(1)
_DUE: tl.constexpr = tl.constexpr(2)


@triton.jit
def starts_elsewhere(begins, after, LENIENT: tl.constexpr):
    """Whether a write to come, from ``begins`` on, is not where its row goes on, so that slots out of turn are due."""
    return (begins != NOWHERE_WRITTEN) & ((begins > after) | (LENIENT & (begins != after)))


@triton.jit
def check_before_write(
    program, programs,
    base, counters_ptr, baseline_ptr, digest_ptr, rows_ptr, seed1, seed2, half, gate_ptr, ops, stamps, boxes,
    stamp_ptr, stamp_count, write_id, box_ptr, coef_ptr, words_ptr, ring_ptr, capacity,
    slots_total, words_in_row, positions, every, slot_stride0, slot_stride1, units, n1, n2, n3, d0, d1, d2, d3,
    scanners, n, g1, g2, a_ptr, a_start, a0, a1, a2, a_size, b_ptr, b_start, b0, b1, b2, b_size,
    A_TENSOR: tl.constexpr, B_TENSOR: tl.constexpr, WRITE_AXES: tl.constexpr, WRAPS: tl.constexpr, SKIPS: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, OWN_ROWS: tl.constexpr, BY_BUDGET: tl.constexpr,
    KEEPS: tl.constexpr, LENIENT: tl.constexpr, CONTENT: tl.constexpr, CHECK: tl.constexpr, BOUNDS: tl.constexpr,
    HAS_BOX: tl.constexpr, UNIT: tl.constexpr, ELEMENT: tl.constexpr, PLANES: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Of one half, the bounds of a write to come, and the bytes of all slots that are due.

    The first programs take the slots that are replaced, ``BLOCK`` tokens each.  The next ``scanners`` look for those
    that were written elsewhere or must be compared now, among ``WIDE`` slots of a row each: usually none.  The rest
    share the slots whose turn it is, one of ``every``, without looking at others.  (With a program for each 8
    slots, of which one in eight had its turn, the two halves of 65,536 slots took 65 us of an H200.)

    Args:
        program, programs: which of how many this is.
        stamps: whether this half marks where the write goes; halves of a layer mark the same slots.
        boxes: whether it leaves an index outside in host memory.
        TURNS: whether there are programs for the slots whose turn it is.
    """
    share = tl.load(words_ptr + WORD_EVERY) if BY_BUDGET else tl.zeros([], tl.int64) + every
    call = tl.load(gate_ptr + GATE_STEP)
    writers = tl.cdiv(n, BLOCK)
    part = program - writers
    first_due = (share - call % share) % share
    due_count = tl.maximum(slots_total - first_due + share - 1, 0) // share
    if TURNS:
        if (part - scanners) * BLOCK >= due_count:  # never the first program of all
            return
    token = tl.arange(0, TOKENS).to(tl.int64)
    goes, raw = slots_of_tokens(
        token, n, g1, g2, a_ptr, a_start, a0, a1, a2, a_size, b_ptr, b_start, b0, b1, b2, b_size,
        A_TENSOR, B_TENSOR, WRITE_AXES == 2, WRAPS, SKIPS,
    )  # fmt: skip
    reached = goes >= 0
    if program == 0:
        step = tl.load(words_ptr + WORD_STEP)
        before = tl.zeros([TOKENS], tl.int32)  # tokens before this one that go to the same slot
        for j0 in range(0, n, _COMPARED):
            j = j0 + tl.arange(0, _COMPARED).to(tl.int64)
            theirs, _raw = slots_of_tokens(
                j, n, g1, g2, a_ptr, a_start, a0, a1, a2, a_size, b_ptr, b_start, b0, b1, b2, b_size,
                A_TENSOR, B_TENSOR, WRITE_AXES == 2, WRAPS, SKIPS,
            )  # fmt: skip
            same = (goes[:, None] == theirs[None, :]) & (j[None, :] < token[:, None])
            before += tl.sum(same.to(tl.int32), axis=1)
        twice = reached & (before > 0)
        if stamps:
            epoch = tl.zeros([TOKENS], tl.int64) + step * 65536 + write_id
            tl.store(stamp_ptr + goes, epoch, mask=reached)
            tl.store(stamp_ptr + stamp_count + goes, epoch, mask=twice)
        if BOUNDS:
            outside = (token < n) & (raw != goes)
            again = twice & (before == 1)
            if not HAS_ROWS:  # slot 0 takes the padding
                again = again & (goes != 0)
            for what in range(2):  # two reports, of which one is compiled
                told = tl.where(what == 0, outside, again)
                if tl.max(told.to(tl.int32), axis=0) != 0:
                    report(
                        words_ptr, ring_ptr, capacity, rows_ptr, positions, half, PHASE_PRE, CHECK, 0, told, goes,
                        tl.where(what == 0, raw, goes), goes, tl.zeros_like(goes) + what, HAS_ROWS,
                    )  # fmt: skip
            if HAS_BOX:
                first_half = outside & boxes
                put_into_box(box_ptr, words_ptr, first_half, goes, raw, step, half, CHECK, PHASE_PRE)
        count_run(gate_ptr, counters_ptr, ops, _VERIFY)
    # the part of this program, and which k it takes of it
    zero = tl.zeros([], tl.int64)
    kind, origin = zero + _REPLACED, zero
    k_first, k_stop, k_step = zero + program * BLOCK, zero + n, zero + n + BLOCK
    if part >= scanners:
        kind = zero + _DUE
        origin, k_stop = first_due, due_count
        k_first = zero + (part - scanners) * BLOCK
        k_step = zero + (programs - writers - scanners) * BLOCK
    elif part >= 0:
        kind = zero + _OTHERS
        span = positions if HAS_ROWS else slots_total
        row = part // tl.cdiv(span, WIDE)
        at = part % tl.cdiv(span, WIDE) * WIDE
        origin = row.to(tl.int64) * span + at
        k_first, k_stop, k_step = zero, zero + tl.minimum(span - at, WIDE), zero + BLOCK
        # in most steps each row goes on where it ended, and nobody else wrote: no slot is looked at
        begins = zero
        wanted = tl.load(gate_ptr + GATE_LENIENT_NOW) != 0
        if HAS_ROWS:
            ours = reached & (goes // positions == row)
            begins = tl.min(tl.where(ours, goes % positions, NOWHERE_WRITTEN), axis=0)
            after = tl.load(rows_ptr + row * ROW_COLUMNS + ROW_NEXT)
            wanted = wanted | starts_elsewhere(begins, after, LENIENT)
        if wanted | KEEPS:
            slot = origin + tl.arange(0, WIDE)
            slot = tl.where(tl.arange(0, WIDE) < k_stop, slot, slots_total)
            first = slot
            if HAS_ROWS:
                first = tl.zeros_like(slot) + begins
            inside = slot < slots_total
            stored = tl.load(digest_ptr + slot, mask=inside, other=0)
            mine = (slot + call) % share != 0
            due, adopted, _shifted = slots_due(
                slot, first, inside, stored, gate_ptr, words_ptr, rows_ptr, slots_total, positions, every,
                HAS_ROWS, OWN_ROWS, False, BY_BUDGET, NOWHERE_WRITTEN, LENIENT, CONTENT,  # no matter which are replaced
            )  # fmt: skip
            if KEEPS:  # of the slots of other programs these store it
                replaced = tl.max((slot[:, None] == goes[None, :]).to(tl.int32), axis=1) != 0
                tl.store(baseline_ptr + slot, stored, mask=inside & mine & (replaced == 0))
                tl.debug_barrier()
            if tl.sum((mine & (due | adopted)).to(tl.int32), axis=0) == 0:
                k_stop = zero
        else:
            k_stop = zero
    for k0 in range(k_first, k_stop, k_step):
        k = k0 + tl.arange(0, BLOCK).to(tl.int64)
        slot = origin + k
        if kind == _DUE:
            slot = origin + k * share
        if kind == _REPLACED:
            slot = tl.sum(tl.where(token[None, :] == k[:, None], goes[None, :], 0), axis=1)
        same = slot[:, None] == goes[None, :]
        replaced = tl.max(same.to(tl.int32), axis=1) != 0
        taken = (k < k_stop) & (slot >= 0)
        if kind != _DUE:
            taken = taken & ((slot + call) % share != 0)
        if kind == _OTHERS:
            taken = taken & (replaced == 0)
        if kind == _REPLACED:  # by the first of the tokens that go there
            taken = taken & (tl.max((same & (token[None, :] < k[:, None])).to(tl.int32), axis=1) == 0)
        slot = tl.where(taken, slot, slots_total)
        first = slot
        if HAS_ROWS:
            ours = reached[None, :] & ((slot // positions)[:, None] == (goes // positions)[None, :])
            first = tl.min(tl.where(ours, (goes % positions)[None, :], NOWHERE_WRITTEN), axis=1)
        scan_slots(
            slot, first, replaced, base, gate_ptr, counters_ptr, baseline_ptr, digest_ptr, coef_ptr, digest_ptr,
            words_ptr, ring_ptr, capacity, rows_ptr, slots_total, seed1, seed2, words_in_row, half, positions, every,
            slot_stride0, slot_stride1, units, n1, n2, n3, d0, d1, d2, d3,
            HAS_ROWS, TWO_AXES, HAS_ROWS, OWN_ROWS, True, BY_BUDGET, KEEPS, True, False, False, NOWHERE_WRITTEN,
            LENIENT, CONTENT, _VERIFY, UNIT, ELEMENT, PLANES, 0, 1, BLOCK, BLOCK_WORDS,
        )  # fmt: skip


@triton.jit(do_not_specialize=_NOT_SPECIALISED)
def verify_write_kernel(
    base, other_base,  # first units of the view, and of another half's that is like it, for the grid's second row
    gate_ptr, ops,  # int64 [len(Gate)]
    counters_ptr, other_counters_ptr,  # int64 [len(Count)]
    baseline_ptr, other_baseline_ptr,  # int32 [slots_total]
    stamp_ptr, stamp_count, write_id,  # int64 [2, stamp_count]
    box_ptr,  # int64 [ring columns + 1] in host memory
    coef_ptr,  # int32 [2, words_in_row]
    digest_ptr, other_digest_ptr,  # int32 [PLANES, slots_total]
    words_ptr, ring_ptr, capacity, rows_ptr, other_rows_ptr,  # int32 [rows, _ROW_COLUMNS]
    slots_total, seed1, seed2, other_seed1, other_seed2, words_in_row, half, other_half, positions, every,
    slot_stride0, slot_stride1,
    units, n1, n2, n3, d0, d1, d2, d3,
    scanners,
    n, g1, g2,  # the grid of tokens is [n // (g1 * g2), g1, g2], see :mod:`..writes.triton_resolve`
    a_ptr, a_start, a0, a1, a2, a_size, b_ptr, b_start, b0, b1, b2, b_size,
    A_TENSOR: tl.constexpr, B_TENSOR: tl.constexpr, WRITE_AXES: tl.constexpr, WRAPS: tl.constexpr, SKIPS: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, OWN_ROWS: tl.constexpr, BY_BUDGET: tl.constexpr,
    KEEPS: tl.constexpr, LENIENT: tl.constexpr, CONTENT: tl.constexpr, CHECK: tl.constexpr, BOUNDS: tl.constexpr,
    HAS_BOX: tl.constexpr, UNIT: tl.constexpr, ELEMENT: tl.constexpr, PLANES: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """The halves of a layer, see :func:`check_before_write`."""
    other = tl.program_id(1) == 1
    base = tl.where(other, other_base, base)
    counters_ptr = tl.where(other, other_counters_ptr, counters_ptr)
    baseline_ptr = tl.where(other, other_baseline_ptr, baseline_ptr)
    digest_ptr = tl.where(other, other_digest_ptr, digest_ptr)
    rows_ptr = tl.where(other, other_rows_ptr, rows_ptr)
    seed1, seed2 = tl.where(other, other_seed1, seed1), tl.where(other, other_seed2, seed2)
    half = tl.where(other, other_half, half)
    check_before_write(
        tl.program_id(0), tl.num_programs(0),
        base, counters_ptr, baseline_ptr, digest_ptr, rows_ptr, seed1, seed2, half, gate_ptr, tl.where(other, 0, ops),
        tl.program_id(1) == tl.num_programs(1) - 1, tl.program_id(1) == 0,  # of two halves the last one's stamps stay
        stamp_ptr, stamp_count, write_id, box_ptr, coef_ptr, words_ptr, ring_ptr, capacity,
        slots_total, words_in_row, positions, every, slot_stride0, slot_stride1, units, n1, n2, n3, d0, d1, d2, d3,
        scanners, n, g1, g2, a_ptr, a_start, a0, a1, a2, a_size, b_ptr, b_start, b0, b1, b2, b_size,
        A_TENSOR, B_TENSOR, WRITE_AXES, WRAPS, SKIPS, TOKENS, HAS_ROWS, TWO_AXES, OWN_ROWS, BY_BUDGET, KEEPS, LENIENT,
        CONTENT, CHECK, BOUNDS, HAS_BOX, UNIT, ELEMENT, PLANES, WIDE, BLOCK, BLOCK_WORDS, True,
    )  # fmt: skip


@triton.jit
def record_written(
    base, value_base, counters_ptr, digest_ptr, rows_ptr, seed1, seed2, half, gate_ptr, ops, counts, last_ptr,
    last_stride, coef_ptr, words_ptr, ring_ptr, capacity,
    slots_total, words_in_row, positions, slot_stride0, slot_stride1, token_stride, units, n1, n2, n3, d0, d1, d2, d3,
    v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3,
    n, g1, g2, a_ptr, a_start, a0, a1, a2, a_size, b_ptr, b_start, b0, b1, b2, b_size,
    A_TENSOR: tl.constexpr, B_TENSOR: tl.constexpr, WRITE_AXES: tl.constexpr, WRAPS: tl.constexpr, SKIPS: tl.constexpr,
    TOKENS: tl.constexpr, HAS_LAST: tl.constexpr,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, OPERAND: tl.constexpr,
    UNIT: tl.constexpr, OPERAND_UNIT: tl.constexpr, ELEMENT: tl.constexpr, PLANES: tl.constexpr,
    POISON_MASK: tl.constexpr, POISON_BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Of one half, fingerprints of the slots just written, and how far the rows go that they are in.

    Args:
        counts: whether this half counts the ops.
    """
    if tl.program_id(0) == 0:
        tl.atomic_add(counters_ptr + COUNT_RECORD_RUNS, tl.full([], 1, tl.int64), sem="relaxed")
        if counts:
            tl.atomic_add(gate_ptr + GATE_OPS, tl.full([], 0, tl.int64) + ops, sem="relaxed")
    token = tl.arange(0, TOKENS).to(tl.int64)
    goes, _raw = slots_of_tokens(
        token, n, g1, g2, a_ptr, a_start, a0, a1, a2, a_size, b_ptr, b_start, b0, b1, b2, b_size,
        A_TENSOR, B_TENSOR, WRITE_AXES == 2, WRAPS, SKIPS,
    )  # fmt: skip
    recorded = tl.full([], 0, tl.int64)
    for i0 in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = i0 + tl.arange(0, BLOCK).to(tl.int64)
        slot, _given = slots_of_tokens(
            i, n, g1, g2, a_ptr, a_start, a0, a1, a2, a_size, b_ptr, b_start, b0, b1, b2, b_size,
            A_TENSOR, B_TENSOR, WRITE_AXES == 2, WRAPS, SKIPS,
        )  # fmt: skip
        live = slot >= 0
        twice = tl.sum((slot[:, None] == goes[None, :]).to(tl.int32), axis=1) > 1
        if HAS_ROWS:  # programs with tokens of one row store the same, each before it reports one of them
            row = tl.maximum(slot, 0) // positions
            mine = (goes >= 0)[None, :] & (row[:, None] == (goes // positions)[None, :])
            last = tl.max(tl.where(mine, (goes % positions)[None, :], -1), axis=1)
            origin = tl.zeros_like(last)
            if HAS_LAST:
                origin = tl.load(last_ptr + row * last_stride, mask=live, other=0).to(tl.int64) - last
            at = rows_ptr + row * ROW_COLUMNS
            tl.store(at + ROW_NEXT, (last + 1).to(tl.int32), mask=live)
            tl.store(at + ROW_ORIGIN, origin.to(tl.int32), mask=live)
            tl.store(at + ROW_LENGTH, tl.sum(mine.to(tl.int32), axis=1), mask=live)
            tl.debug_barrier()
        recorded += tl.sum(live.to(tl.int64), axis=0)
        record_slots(
            i, slot, live, live, twice, base, value_base, words_ptr, 0, 0, rows_ptr, coef_ptr, digest_ptr,
            words_ptr, ring_ptr, capacity, rows_ptr, slots_total, seed1, seed2, words_in_row, half, positions,
            slot_stride0, slot_stride1, token_stride, units, n1, n2, n3, d0, d1, d2, d3,
            v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3,
            HAS_ROWS, TWO_AXES, OPERAND, False, UNIT, OPERAND_UNIT, ELEMENT, PLANES, POISON_MASK, POISON_BITS,
            BLOCK, BLOCK_WORDS, False,
        )  # fmt: skip
    if recorded > 0:
        tl.atomic_add(counters_ptr + COUNT_RECORDED, recorded, sem="relaxed")


@triton.jit(do_not_specialize=_NOT_SPECIALISED)
def record_write_kernel(
    base, other_base,  # first units of the pool's view and of another half's that is like it
    value_base, other_value_base,  # those of the operands
    last_ptr, last_stride,  # integer [rows], the position of each row's last token
    gate_ptr, ops,  # int64 [len(Gate)]
    counters_ptr, other_counters_ptr,  # int64 [len(Count)]
    coef_ptr,  # int32 [2, words_in_row]
    digest_ptr, other_digest_ptr,  # int32 [PLANES, slots_total]
    words_ptr, ring_ptr, capacity, rows_ptr, other_rows_ptr,  # int32 [rows, _ROW_COLUMNS]
    slots_total, seed1, seed2, other_seed1, other_seed2, words_in_row, half, other_half, positions,
    slot_stride0, slot_stride1, token_stride, other_token_stride,
    units, n1, n2, n3, d0, d1, d2, d3,
    v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3,
    n, g1, g2,  # as for :func:`verify_write_kernel`
    a_ptr, a_start, a0, a1, a2, a_size, b_ptr, b_start, b0, b1, b2, b_size,
    A_TENSOR: tl.constexpr, B_TENSOR: tl.constexpr, WRITE_AXES: tl.constexpr, WRAPS: tl.constexpr, SKIPS: tl.constexpr,
    TOKENS: tl.constexpr, HAS_LAST: tl.constexpr,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, OPERAND: tl.constexpr,
    UNIT: tl.constexpr, OPERAND_UNIT: tl.constexpr, ELEMENT: tl.constexpr, PLANES: tl.constexpr,
    POISON_MASK: tl.constexpr, POISON_BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """The halves of a layer, see :func:`record_written`."""
    other = tl.program_id(1) == 1
    base = tl.where(other, other_base, base)
    value_base = tl.where(other, other_value_base, value_base)
    counters_ptr = tl.where(other, other_counters_ptr, counters_ptr)
    digest_ptr = tl.where(other, other_digest_ptr, digest_ptr)
    rows_ptr = tl.where(other, other_rows_ptr, rows_ptr)
    seed1, seed2 = tl.where(other, other_seed1, seed1), tl.where(other, other_seed2, seed2)
    half = tl.where(other, other_half, half)
    record_written(
        base, value_base, counters_ptr, digest_ptr, rows_ptr, seed1, seed2, half, gate_ptr, ops, tl.program_id(1) == 0,
        last_ptr, last_stride, coef_ptr, words_ptr, ring_ptr, capacity,
        slots_total, words_in_row, positions, slot_stride0, slot_stride1,
        tl.where(other, other_token_stride, token_stride),
        units, n1, n2, n3, d0, d1, d2, d3, v_units, v_n1, v_n2, v_n3, v_d0, v_d1, v_d2, v_d3,
        n, g1, g2, a_ptr, a_start, a0, a1, a2, a_size, b_ptr, b_start, b0, b1, b2, b_size,
        A_TENSOR, B_TENSOR, WRITE_AXES, WRAPS, SKIPS, TOKENS, HAS_LAST, HAS_ROWS, TWO_AXES, OPERAND, UNIT, OPERAND_UNIT,
        ELEMENT, PLANES, POISON_MASK, POISON_BITS, BLOCK, BLOCK_WORDS,
    )  # fmt: skip


@triton.jit(do_not_specialize=_NOT_SPECIALISED)
def identify_write_kernel(
    token_ptr, token_stride, position_ptr, position_stride,  # integer [n]: a token for each row that is written
    gate_ptr, ops,  # int64 [len(Gate)]
    who_ptr, where_ptr, chain_ptr,  # int32, int32 and int64 [slots + 1], see :class:`..buffers.IdentityBuffers`
    words_ptr, ring_ptr, capacity, rows_ptr, half, positions,
    n, g1, g2,  # as for :func:`verify_write_kernel`
    a_ptr, a_start, a0, a1, a2, a_size, b_ptr, b_start, b0, b1, b2, b_size,
    A_TENSOR: tl.constexpr, B_TENSOR: tl.constexpr, WRITE_AXES: tl.constexpr, WRAPS: tl.constexpr, SKIPS: tl.constexpr,
    TOKENS: tl.constexpr, HAS_POSITIONS: tl.constexpr, REPORT: tl.constexpr, CHECK: tl.constexpr,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr,
):  # fmt: skip
    """Does each token's position follow its predecessor's?  Then who is in the slots; see :mod:`..slots.identity`.

    One program, so that all predecessors are read before a slot is written.
    """
    i = tl.arange(0, TOKENS).to(tl.int64)
    live = i < n
    slot, _raw = slots_of_tokens(
        i, n, g1, g2, a_ptr, a_start, a0, a1, a2, a_size, b_ptr, b_start, b0, b1, b2, b_size,
        A_TENSOR, B_TENSOR, WRITE_AXES == 2, WRAPS, SKIPS,
    )  # fmt: skip
    usable = slot >= 0
    at = tl.maximum(slot, 0)
    before = tl.maximum(at - 1, 0)
    row = rows_ptr + at // positions * ROW_COLUMNS
    token = tl.load(token_ptr + i * token_stride, mask=live, other=0).to(tl.int64)
    position = at % positions
    if HAS_POSITIONS:
        position = tl.load(position_ptr + i * position_stride, mask=live, other=0).to(tl.int64)
    last = tl.load(where_ptr + before, mask=usable, other=UNKNOWN)
    follows = usable & (at % positions > 0) & (last != UNKNOWN)
    follows = follows & (at % positions == tl.load(row + ROW_NEXT, mask=usable, other=0))
    if REPORT:
        expected = last.to(tl.int64) + 1
        bad = follows & (tl.load(row + ROW_LENGTH, mask=usable, other=0) == 1) & (position != expected)
        bad = bad & (tl.load(gate_ptr + GATE_LENIENT_NOW) == 0)
        report(
            words_ptr, ring_ptr, capacity, rows_ptr, positions, half, PHASE_PRE, CHECK, 0, bad, at, expected, position,
            token, HAS_ROWS,
        )  # fmt: skip
    start = tl.load(chain_ptr + before, mask=follows, other=0)
    chain = tl.where(follows, start, tl.zeros_like(start) + SEED) + mix(token, position)
    tl.debug_barrier()
    tl.store(who_ptr + at, token.to(tl.int32), mask=usable)
    tl.store(where_ptr + at, position.to(tl.int32), mask=usable)
    tl.store(chain_ptr + at, chain, mask=usable)
    tl.atomic_add(gate_ptr + GATE_OPS, tl.full([], 0, tl.int64) + ops, sem="relaxed")

"""Triton kernels of the checks.

Every pointer is to elements, offsets are int64 before they are multiplied, shapes are in the comments of
the parameters.  Sums of int32 wrap, on a GPU as in Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_ring import append
from ..words import (
    CHECK_CONTENT,
    CHECK_INDEX,
    CHECK_POISON,
    COLUMN_FLAGS,
    COUNT_ADOPTED,
    COUNT_CHECKED,
    COUNT_RECORD_RUNS,
    COUNT_RECORDED,
    COUNT_VERIFY_RUNS,
    FLAG_RESERVED,
    GATE_LENIENT_NEXT,
    GATE_LENIENT_NOW,
    GATE_OPS,
    GATE_STEP,
    PHASE_POST,
    PHASE_PRE,
    RING_CHECK,
    RING_COLUMNS,
    RING_FORWARD,
    RING_FOUND,
    RING_HALF,
    RING_PHASE,
    RING_POSITION,
    RING_SLOT,
    RING_STEP,
    RING_STORED,
    ROW_COLUMNS,
    ROW_NEXT,
    ROW_ORIGIN,
    SPACE_COLUMNS,
    UNKNOWN,
    WORD_BOXED,
    WORD_EVERY,
    WORD_FORWARD,
    WORD_STEP,
    ZERO_STANDS_FOR,
)
from .digest import as_int32
from .triton_digest import NO_POISON, digest_of_rows, first_poison

VERIFY, ADOPT, SNAPSHOT, CHANGED = 0, 1, 2, 3

_VERIFY: tl.constexpr = tl.constexpr(VERIFY)
_ADOPT: tl.constexpr = tl.constexpr(ADOPT)
_SNAPSHOT: tl.constexpr = tl.constexpr(SNAPSHOT)
_CHANGED: tl.constexpr = tl.constexpr(CHANGED)


#: Arguments that differ between the sites and steps of one model.  Triton compiles a kernel anew for a value of
#: 1 and for a multiple of 16: without this list a decode step of 8 layers compiled 16 kernels instead of 4.
PER_SITE = ["n", "half", "other_half", "seed1", "seed2", "other_seed1", "other_seed2", "write_id", "ops", "ahead"]


def as_signed(x: int) -> int:
    """A 32-bit word as the signed integer that a kernel argument takes."""
    return as_int32(x)


@triton.jit
def packed(h1, h2, PLANES: tl.constexpr):
    low = h1.to(tl.int64) & 0xFFFFFFFF
    if PLANES == 2:
        low |= h2.to(tl.int64) << 32
    return low


@triton.jit
def report(
    words_ptr, ring_ptr, capacity, rows_ptr, positions, half, phase, check, lenient, mask, slot, stored, found,
    detail, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """Append a ring row for every masked lane; rows without room are counted and dropped."""
    nobody, nowhere = tl.zeros_like(slot), tl.zeros_like(slot) + UNKNOWN
    report_of(
        words_ptr, ring_ptr, capacity, rows_ptr, positions, half, phase, check, lenient, mask, slot, stored, found,
        detail, nobody, nowhere, 0, HAS_ROWS,
    )  # fmt: skip


@triton.jit
def report_of(
    words_ptr, ring_ptr, capacity, rows_ptr, positions, half, phase, check, lenient, mask, slot, stored, found,
    detail, request, where, WHY: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """:func:`report`, of slots whose request and token position are known."""
    if HAS_ROWS:
        row = tl.maximum(slot, 0) // positions
    else:
        row = tl.zeros_like(slot)
    origin = tl.load(rows_ptr + row * ROW_COLUMNS + ROW_ORIGIN, mask=mask, other=0).to(tl.int64)
    append(
        words_ptr, ring_ptr, capacity, mask, half, check, phase, lenient, slot, origin, stored, found, detail, request,
        where, WHY,
    )  # fmt: skip


@triton.jit
def report_poison(
    words_ptr, ring_ptr, capacity, rows_ptr, positions, half, suspect, slot, base, start, words_in_row,
    units, n1, n2, n3, d0, d1, d2, d3,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr, POISON_MASK: tl.constexpr,
    POISON_BITS: tl.constexpr, ELEMENT: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """Report the written slots with a NaN or an Inf among those that are suspect, each with the first that it has."""
    if tl.max(suspect.to(tl.int32), axis=0) != 0:
        poison = first_poison(
            base, start, suspect, words_in_row, units, n1, n2, n3, d0, d1, d2, d3,
            UNIT, BLOCK, BLOCK_WORDS, POISON_MASK, POISON_BITS, ELEMENT,
        )  # fmt: skip
        report(
            words_ptr, ring_ptr, capacity, rows_ptr, positions, half, PHASE_POST, CHECK_POISON, 0,
            suspect & (poison != NO_POISON), slot, tl.zeros_like(slot), poison & 0xFFFFFFFF, poison >> 32, HAS_ROWS,
        )  # fmt: skip


@triton.jit
def begin_kernel(
    words_ptr,  # int64 [len(Word)]
    gate_ptr,  # int64 [len(Gate)]
    counts_ptr,  # int64 [3], where COUNTED: of a plan, which may be that of no forward
    COUNTED: tl.constexpr,
):
    if COUNTED:
        if tl.load(counts_ptr) < 0:
            return
    tl.store(words_ptr + WORD_STEP, tl.load(words_ptr + WORD_STEP) + 1)
    tl.store(gate_ptr + GATE_STEP, tl.load(gate_ptr + GATE_STEP) + 1)
    tl.store(gate_ptr + GATE_LENIENT_NOW, tl.load(gate_ptr + GATE_LENIENT_NEXT))
    tl.store(gate_ptr + GATE_LENIENT_NEXT, tl.zeros([], tl.int64))
    tl.store(gate_ptr + GATE_OPS, tl.load(gate_ptr + GATE_OPS) + 1)


@triton.jit(do_not_specialize=PER_SITE)
def report_kernel(
    mask_ptr, slot_ptr, stored_ptr, found_ptr, detail_ptr, n,  # bool [n], int64 [n] each
    words_ptr, ring_ptr, capacity, rows_ptr, half, positions, phase, check,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    mask = (tl.load(mask_ptr + i, mask=live, other=0) != 0) & live
    slot = tl.load(slot_ptr + i, mask=live, other=0)
    stored = tl.load(stored_ptr + i, mask=live, other=0)
    found = tl.load(found_ptr + i, mask=live, other=0)
    detail = tl.load(detail_ptr + i, mask=live, other=0)
    report(
        words_ptr, ring_ptr, capacity, rows_ptr, positions, half, phase, check, 0, mask, slot, stored, found, detail,
        HAS_ROWS,
    )  # fmt: skip


@triton.jit
def put_into_box(box_ptr, words_ptr, outside, slot, raw, step, half, check, phase):
    """Leave the first index outside in host memory, which a device that is lost does not take along."""
    zero = tl.zeros_like(slot)
    before = tl.atomic_add(words_ptr + WORD_BOXED + zero, zero + 1, mask=outside, sem="relaxed")
    mine = outside & (before == 0)
    for column in range(RING_POSITION):  # as in :func:`..triton_ring.append`; position and reason stay unknown
        value = zero
        value = tl.where(column == RING_STEP, step, value)
        value = tl.where(column == RING_HALF, half, value)
        value = tl.where(column == RING_CHECK, check, value)
        value = tl.where(column == RING_PHASE, phase, value)
        value = tl.where(column == RING_SLOT, slot, value)
        value = tl.where(column == RING_STORED, raw, value)
        value = tl.where(column == RING_FOUND, slot, value)
        tl.store(box_ptr + column + zero, value, mask=mine)
    tl.store(box_ptr + RING_FORWARD + zero, tl.load(words_ptr + WORD_FORWARD) + zero, mask=mine)
    tl.store(box_ptr + RING_COLUMNS + zero, zero + 1, mask=mine)


@triton.jit(do_not_specialize=PER_SITE)
def plan_kernel(
    slot_ptr, raw_ptr, n,  # int64 [n] each
    stamp_ptr, stamp_count,  # int64 [2, stamp_count]
    block_ptr,  # int32 [slots + 1, 8], of an engine's pool
    write_id,
    box_ptr,  # int64 [ring columns + 1] in host memory
    words_ptr, ring_ptr, capacity, rows_ptr, half, positions, phase,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, CHECK: tl.constexpr, REPORT: tl.constexpr,
    HAS_BOX: tl.constexpr, HAS_SPACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    slot = tl.load(slot_ptr + i, mask=live, other=-1)
    raw = tl.load(raw_ptr + i, mask=live, other=-1)
    step = tl.load(words_ptr + WORD_STEP)
    epoch = tl.full([BLOCK], 0, tl.int64) + step * 65536 + write_id
    reached = live & (slot >= 0)
    at = tl.maximum(slot, 0)
    seen = tl.atomic_xchg(stamp_ptr + at, epoch, mask=reached, sem="relaxed")
    twice = reached & (seen == epoch)
    told = tl.atomic_xchg(stamp_ptr + stamp_count + at, epoch, mask=twice, sem="relaxed")
    if REPORT:
        outside = live & (raw != slot)
        report(
            words_ptr, ring_ptr, capacity, rows_ptr, positions, half, phase, CHECK, 0, outside, slot, raw, slot,
            tl.zeros_like(slot), HAS_ROWS,
        )  # fmt: skip
        first = twice & (told != epoch)
        if HAS_SPACE:
            first = first & (
                (tl.load(block_ptr + at * SPACE_COLUMNS + COLUMN_FLAGS, mask=reached, other=0) & FLAG_RESERVED) == 0
            )
        elif not HAS_ROWS:
            first = first & (slot != 0)
        report(
            words_ptr, ring_ptr, capacity, rows_ptr, positions, half, phase, CHECK, 0, first, slot, slot, slot,
            tl.full(slot.shape, 1, tl.int64), HAS_ROWS,
        )  # fmt: skip
        if HAS_BOX:
            put_into_box(box_ptr, words_ptr, outside, slot, raw, step, half, CHECK, phase)


@triton.jit
def slots_due(
    slot, first, stamped, stored, gate_ptr, words_ptr, rows_ptr, slots_total, positions, every,
    HAS_FIRST: tl.constexpr, OWN_ROWS: tl.constexpr, COMING: tl.constexpr, BY_BUDGET: tl.constexpr,
    NOT_WRITTEN: tl.constexpr, LENIENT: tl.constexpr, CONTENT: tl.constexpr,
):  # fmt: skip
    """Of slots with these digests: which are compared, which are adopted, and which are in rows that were shifted.

    An unrecorded slot below a write is adopted if the write leaves a gap behind the last one, so that the others of its
    row need not be looked at in each step; or in its turn, if it was forgotten by itself.

    Arguments as for :func:`scan_slots`.
    """
    inside = slot < slots_total
    now = tl.load(gate_ptr + GATE_LENIENT_NOW) != 0
    shifted = inside & (slot < 0)
    below, gap = shifted, shifted
    checked = inside
    if HAS_FIRST:
        after = tl.load(rows_ptr + slot // positions * ROW_COLUMNS + ROW_NEXT, mask=inside, other=0)
        coming = inside & (first != NOT_WRITTEN)
        shifted = coming & (first != after)
        below = coming & (slot % positions < first)
        gap = coming & (first > after)
        if OWN_ROWS:
            checked = coming
    share = tl.load(words_ptr + WORD_EVERY) if BY_BUDGET else every
    turn = (slot + tl.load(gate_ptr + GATE_STEP)) % share == 0
    adopted = below & (stored == 0) & (gap | turn | now)
    if COMING:  # slots that the coming write replaces are always due
        turn = turn | stamped
    due = checked & (stored != 0) & (now | turn | ((now | LENIENT) & shifted))
    if not CONTENT:
        due = due & (slot < 0)
    return due, adopted, shifted


@triton.jit
def count_run(gate_ptr, counters_ptr, ops, MODE: tl.constexpr):
    """By one program of a launch."""
    if MODE == _VERIFY:
        tl.atomic_add(counters_ptr + COUNT_VERIFY_RUNS, tl.full([], 1, tl.int64), sem="relaxed")
        tl.atomic_add(gate_ptr + GATE_OPS, tl.full([], 0, tl.int64) + ops, sem="relaxed")
    if MODE == _CHANGED:
        tl.atomic_add(counters_ptr + COUNT_RECORD_RUNS, tl.full([], 1, tl.int64), sem="relaxed")


@triton.jit
def scan_slots(
    slot, first, stamped, base, gate_ptr, counters_ptr, baseline_ptr, planned_ptr, coef_ptr, digest_ptr, words_ptr,
    ring_ptr, capacity, rows_ptr, slots_total, seed1, seed2, words_in_row, half, positions, every, slot_stride0,
    slot_stride1, units, n1, n2, n3, d0, d1, d2, d3,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, HAS_FIRST: tl.constexpr, OWN_ROWS: tl.constexpr,
    COMING: tl.constexpr, BY_BUDGET: tl.constexpr, KEEPS: tl.constexpr, ADOPTS: tl.constexpr, PLANNED: tl.constexpr,
    INDEX: tl.constexpr,
    NOT_WRITTEN: tl.constexpr, LENIENT: tl.constexpr, CONTENT: tl.constexpr, MODE: tl.constexpr,
    UNIT: tl.constexpr, ELEMENT: tl.constexpr, PLANES: tl.constexpr, POISON_MASK: tl.constexpr,
    POISON_BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """The slots [BLOCK] of one tile.

    ``first`` is where the write to come begins in the row of each slot, and ``stamped`` whether it reaches the slot.
    """
    inside = slot < slots_total
    stored1 = tl.load(digest_ptr + slot, mask=inside, other=0)
    stored2 = tl.zeros_like(stored1)
    if PLANES == 2:
        stored2 = tl.load(digest_ptr + slots_total + slot, mask=inside, other=0)
    row = slot // positions
    position = slot % positions
    lenient = (tl.load(gate_ptr + GATE_LENIENT_NOW) != 0) | LENIENT
    due, adopted, shifted = slots_due(
        slot, first, stamped, stored1, gate_ptr, words_ptr, rows_ptr, slots_total, positions, every,
        HAS_FIRST, OWN_ROWS, COMING, BY_BUDGET, NOT_WRITTEN, LENIENT, CONTENT and MODE == _VERIFY,
    )  # fmt: skip
    recorded = inside & (stored1 != 0)
    work = due | adopted
    if (MODE == _SNAPSHOT) or (MODE == _CHANGED):
        work = inside
    before = stored1
    if tl.sum(work.to(tl.int32), axis=0) > 0:
        if TWO_AXES:
            start = row * slot_stride0 + position * slot_stride1
        else:
            start = slot * slot_stride1
        h1, h2, suspect = digest_of_rows(
            base, start, work, coef_ptr, seed1, seed2, words_in_row, units, n1, n2, n3, d0, d1, d2, d3,
            UNIT, PLANES, BLOCK, BLOCK_WORDS, POISON_MASK if MODE == _CHANGED else 0, POISON_BITS, ELEMENT,
        )  # fmt: skip
        if MODE == _SNAPSHOT:
            tl.store(baseline_ptr + slot, h1, mask=work)
            if ADOPTS:
                filled = h1 != tl.where(seed1 == 0, ZERO_STANDS_FOR, seed1)
                if PLANES == 2:
                    filled = filled | (h2 != seed2)
                fresh = filled & inside & (stored1 == 0)
                tl.store(digest_ptr + slot, h1, mask=fresh)
                if PLANES == 2:
                    tl.store(digest_ptr + slots_total + slot, h2, mask=fresh)
                tl.atomic_add(counters_ptr + COUNT_ADOPTED, tl.sum(fresh.to(tl.int64), axis=0), sem="relaxed")
        elif MODE == _CHANGED:
            changed = work & (h1 != tl.load(baseline_ptr + slot, mask=inside, other=0))
            if PLANNED:
                stray = changed & (tl.load(planned_ptr + slot, mask=inside, other=0) == 0)
                changed = changed & (stray == 0)
                if INDEX:
                    report(
                        words_ptr, ring_ptr, capacity, rows_ptr, positions, half, PHASE_POST, CHECK_INDEX, 0, stray,
                        slot, packed(stored1, stored2, PLANES), packed(h1, h2, PLANES), tl.zeros_like(slot), HAS_ROWS,
                    )  # fmt: skip
            else:
                changed = changed | (recorded & (h1 != stored1))
            tl.store(digest_ptr + slot, h1, mask=changed)
            if PLANES == 2:
                tl.store(digest_ptr + slots_total + slot, h2, mask=changed)
            tl.atomic_add(counters_ptr + COUNT_RECORDED, tl.sum(changed.to(tl.int64), axis=0), sem="relaxed")
            report_poison(
                words_ptr, ring_ptr, capacity, rows_ptr, positions, half, suspect & changed, slot, base, start,
                words_in_row, units, n1, n2, n3, d0, d1, d2, d3,
                UNIT, BLOCK, BLOCK_WORDS, POISON_MASK, POISON_BITS, ELEMENT, HAS_ROWS,
            )  # fmt: skip
        else:
            bad = due & ((h1 != stored1) | (h2 != stored2)) if PLANES == 2 else due & (h1 != stored1)
            taken = bad & lenient & shifted
            report(
                words_ptr, ring_ptr, capacity, rows_ptr, positions, half, PHASE_PRE, CHECK_CONTENT,
                lenient.to(tl.int64), bad & (taken == 0), slot, packed(stored1, stored2, PLANES),
                packed(h1, h2, PLANES), tl.zeros_like(slot), HAS_ROWS,
            )  # fmt: skip
            tl.store(digest_ptr + slot, h1, mask=bad | adopted)
            if PLANES == 2:
                tl.store(digest_ptr + slots_total + slot, h2, mask=bad | adopted)
            before = tl.where(bad | adopted, h1, before)
            tl.atomic_add(counters_ptr + COUNT_CHECKED, tl.sum(due.to(tl.int64), axis=0), sem="relaxed")
            tl.atomic_add(counters_ptr + COUNT_ADOPTED, tl.sum((taken | adopted).to(tl.int64), axis=0), sem="relaxed")
    if KEEPS:
        if MODE == _VERIFY:
            tl.store(baseline_ptr + slot, before, mask=inside)
        if MODE == _ADOPT:
            tl.store(baseline_ptr + slot, before, mask=adopted)


@triton.jit(do_not_specialize=PER_SITE)
def scan_kernel(
    base,  # the view's first unit
    gate_ptr,  # int64 [len(Gate)]
    counters_ptr,  # int64 [len(Count)]
    first_ptr,  # int32 [rows]
    baseline_ptr,  # int32 [slots_total]
    stamp_ptr,  # int64 [2, at least slots_total]
    planned_ptr,  # bool [slots_total + 1]
    coef_ptr,  # int32 [2, words_in_row]
    digest_ptr,  # int32 [PLANES, slots_total]
    words_ptr, ring_ptr, capacity, rows_ptr,  # int32 [rows, _ROW_COLUMNS]
    slots_total, seed1, seed2, words_in_row, half, positions, every, write_id, ops, slot_stride0, slot_stride1,
    units, n1, n2, n3, d0, d1, d2, d3,
    HAS_ROWS: tl.constexpr, TWO_AXES: tl.constexpr, HAS_FIRST: tl.constexpr, OWN_ROWS: tl.constexpr,
    COMING: tl.constexpr, BY_BUDGET: tl.constexpr, KEEPS: tl.constexpr, ADOPTS: tl.constexpr, PLANNED: tl.constexpr,
    INDEX: tl.constexpr,
    NOT_WRITTEN: tl.constexpr, LENIENT: tl.constexpr, CONTENT: tl.constexpr, MODE: tl.constexpr,
    UNIT: tl.constexpr, ELEMENT: tl.constexpr, PLANES: tl.constexpr, POISON_MASK: tl.constexpr,
    POISON_BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 0:
        count_run(gate_ptr, counters_ptr, ops, MODE)
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = slot
    if HAS_FIRST:
        first = tl.load(first_ptr + slot // positions, mask=slot < slots_total, other=NOT_WRITTEN)
    stamped = slot < 0
    if COMING:
        epoch = tl.load(words_ptr + WORD_STEP) * 65536 + write_id
        stamped = tl.load(stamp_ptr + slot, mask=slot < slots_total, other=-1) == epoch
    scan_slots(
        slot, first, stamped, base, gate_ptr, counters_ptr, baseline_ptr, planned_ptr, coef_ptr, digest_ptr, words_ptr,
        ring_ptr, capacity, rows_ptr, slots_total, seed1, seed2, words_in_row, half, positions, every,
        slot_stride0, slot_stride1, units, n1, n2, n3, d0, d1, d2, d3,
        HAS_ROWS, TWO_AXES, HAS_FIRST, OWN_ROWS, COMING, BY_BUDGET, KEEPS, ADOPTS, PLANNED, INDEX, NOT_WRITTEN,
        LENIENT, CONTENT, MODE, UNIT, ELEMENT, PLANES, POISON_MASK, POISON_BITS, BLOCK, BLOCK_WORDS,
    )  # fmt: skip

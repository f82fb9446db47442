"""The content check of listed slots in all tensors of an engine's pool, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from ..slots.triton_shared import entry_of, tell
from ..words import (
    CHECK_CONTENT,
)
from .triton_digest import digest_of_rows
from .triton_half import packed

#: Columns of the table of a launch, a row a half: addresses of the view's first unit and of its digests, two seeds, the
#: half's number, and the addresses of its rows and counters.
TABLE_COLUMNS = 7

_COLUMNS: tl.constexpr = tl.constexpr(TABLE_COLUMNS)


@triton.jit
def units_at(address, UNIT: tl.constexpr, ALIGNED: tl.constexpr):
    """Memory of elements of ``UNIT`` bytes.

    The compiler does not know the alignment of an address from memory: with ALIGNED the caller promises 16 bytes.
    """
    if UNIT == 4:
        base = address.to(tl.pointer_type(tl.int32))
    elif UNIT == 2:
        base = address.to(tl.pointer_type(tl.int16))
    else:
        base = address.to(tl.pointer_type(tl.int8))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return base


@triton.jit
def half_of(table_ptr, UNIT: tl.constexpr, ALIGNED: tl.constexpr):
    """What the table says of the half that this row of the grid is for."""
    return half_at(table_ptr, tl.program_id(1), UNIT, ALIGNED)


@triton.jit
def half_at(table_ptr, row, UNIT: tl.constexpr, ALIGNED: tl.constexpr):
    """:func:`half_of`, of a row of the table."""
    entry = table_ptr + row * _COLUMNS
    base = units_at(tl.load(entry), UNIT, ALIGNED)
    digest_ptr = tl.load(entry + 1).to(tl.pointer_type(tl.int32))
    rows_ptr = tl.load(entry + 5).to(tl.pointer_type(tl.int32))
    counters_ptr = tl.load(entry + 6).to(tl.pointer_type(tl.int64))
    seed1, seed2 = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32)
    return base, digest_ptr, seed1, seed2, tl.load(entry + 4), rows_ptr, counters_ptr


@triton.jit(do_not_specialize=["n", "capacity", "slots_total"])
def verify_slots_kernel(
    table_ptr,  # int64 [halves, TABLE_COLUMNS]
    slots_ptr, count_ptr, n,  # integer [n], negative ones are skipped; int32 [1]
    owners_ptr, places_ptr,  # int64 [n] each: whose the slots are, and the positions in them
    wide_ptr,  # int64 [slots_total + 1, 4], who is in the slots
    coef_ptr,  # int32 [2, words_in_row]
    words_ptr, ring_ptr, capacity,
    slots_total, words_in_row, positions, slot_stride0, slot_stride1,
    units, n1, n2, n3, d0, d1, d2, d3,
    HAS_COUNT: tl.constexpr, HAS_OWNERS: tl.constexpr, HAS_PLACES: tl.constexpr, TWO_AXES: tl.constexpr,
    UNIT: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr, PHASE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """A fixed number of programs for each half loops over the list, whatever its length."""
    base, digest_ptr, seed1, seed2, half, _rows, _counters = half_of(table_ptr, UNIT, ALIGNED)
    count = tl.zeros([], tl.int32) + n
    if HAS_COUNT:
        count = tl.minimum(tl.load(count_ptr), count)
    for i0 in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        slot = tl.load(slots_ptr + i, mask=i < count, other=-1).to(tl.int64)
        at = tl.maximum(slot, 0)
        stored1 = tl.load(digest_ptr + at, mask=slot >= 0, other=0)
        due = stored1 != 0
        if tl.max(due.to(tl.int32), axis=0) != 0:
            if TWO_AXES:
                start = at // positions * slot_stride0 + at % positions * slot_stride1
            else:
                start = at * slot_stride1
            h1, h2, _ = digest_of_rows(
                base, start, due, coef_ptr, seed1, seed2, words_in_row, units, n1, n2, n3, d0, d1, d2, d3,
                UNIT, PLANES, BLOCK, BLOCK_WORDS, 0, 1, UNIT,
            )  # fmt: skip
            stored2 = h2
            if PLANES == 2:
                stored2 = tl.load(digest_ptr + slots_total + at, mask=due, other=0)
            bad = due & ((h1 != stored1) | (h2 != stored2))
            if tl.max(bad.to(tl.int32), axis=0) != 0:
                _token, where, _flags, _seen, _chain, owner = entry_of(wide_ptr, at, bad)
                if HAS_OWNERS:
                    owner = tl.load(owners_ptr + i, mask=bad, other=0)
                if HAS_PLACES:
                    where = tl.load(places_ptr + i, mask=bad, other=0)
                bits = tl.where(bad, CHECK_CONTENT, 0).to(tl.int64)
                tell(
                    words_ptr, ring_ptr, capacity, half, bits, tl.zeros_like(bits), packed(stored1, stored2, PLANES),
                    packed(h1, h2, PLANES), at, where, owner, 0, PHASE,
                )  # fmt: skip
                tl.store(digest_ptr + at, h1, mask=bad)
                if PLANES == 2:
                    tl.store(digest_ptr + slots_total + at, h2, mask=bad)


@triton.jit(do_not_specialize=["n", "slots_total"])
def fingerprint_slots_kernel(
    table_ptr,  # int64 [halves, TABLE_COLUMNS]
    slots_ptr, n,  # integer [n], those that the pool does not have are skipped
    coef_ptr,  # int32 [2, words_in_row]
    slots_total, words_in_row, positions, slot_stride0, slot_stride1,
    units, n1, n2, n3, d0, d1, d2, d3,
    TWO_AXES: tl.constexpr, UNIT: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Keep the digests of listed slots as they are."""
    base, digest_ptr, seed1, seed2, _half, _rows, _counters = half_of(table_ptr, UNIT, ALIGNED)
    for i0 in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        slot = tl.load(slots_ptr + i, mask=i < n, other=-1).to(tl.int64)
        there = (slot >= 0) & (slot < slots_total)
        at = tl.where(there, slot, 0)
        if TWO_AXES:
            start = at // positions * slot_stride0 + at % positions * slot_stride1
        else:
            start = at * slot_stride1
        h1, h2, _ = digest_of_rows(
            base, start, there, coef_ptr, seed1, seed2, words_in_row, units, n1, n2, n3, d0, d1, d2, d3,
            UNIT, PLANES, BLOCK, BLOCK_WORDS, 0, 1, UNIT,
        )  # fmt: skip
        tl.store(digest_ptr + at, h1, mask=there)
        if PLANES == 2:
            tl.store(digest_ptr + slots_total + at, h2, mask=there)

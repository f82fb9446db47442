"""Triton kernels of what a forward writes: one lane per added token.

The chain is a sum, which has no order, so a prefill of a hundred thousand tokens is no loop: every block of tokens
adds up its own links, and the sums of the blocks before it.  What is checked is said in :mod:`.naive`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..words import (
    COLUMN_FLAGS,
    COLUMN_POSITION,
    COLUMN_TOKEN,
    FLAG_NAMELESS,
    FLAG_PLANNED,
    FLAG_REJECTED,
    FLAG_RESERVED,
    FLAG_WRITTEN,
    PHASE_POST,
    PHASE_PRE,
    REASON_NOT_THE_PLANNED_SLOT,
    REASON_OUT_OF_RANGE,
    REASON_OVERWRITE,
    REASON_PADDING_WRITES,
    REASON_PLANNED_TWICE,
    REASON_RESERVED_SLOT,
    REASON_TABLE_DIFFERS,
    REASON_WRITE_AFTER_FREE,
    REASON_WRITE_SHARED,
    REASON_WRITTEN_BEFORE,
    REASON_WRONG_POSITION,
    REASON_WRONG_TOKEN,
    REFERENCE,
    SPACE_COLUMNS,
    SPACE_RECORDED,
    SPACE_WIDE,
    WIDE_CHAIN,
)
from .triton_history import note_write
from .triton_shared import (
    PER_STEP,
    entry_of,
    expected_token,
    find_ends,
    kept_bits,
    mix,
    namespace_seed,
    note,
    of_padding,
    plan_writes,
    table_slot,
    tell,
    token_request,
)


@triton.jit(do_not_specialize=PER_STEP)
def ends_kernel(
    counts_ptr, bs, extend_ptr, ends_ptr,  # int64 [bs]
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Where each request's added tokens end, for a plan that no walk began with."""
    find_ends(counts_ptr, extend_ptr, ends_ptr, bs, BLOCK)


@triton.jit(do_not_specialize=PER_STEP)
def plan_kernel(
    block_ptr, planned_ptr, clock_ptr, slots,  # int32 [slots + 1, 8], int64 [slots + 1], int32 [1]
    counts_ptr, bs, steps, ends_ptr, row_ptr, padding, slot_ptr, n, mark,
    HAS_PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Before the walk: note the slots that the forward writes, where they are more than one program takes."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, _, real = token_request(i, n, counts_ptr, ends_ptr, bs, steps, row_ptr, padding, HAS_PADDING)
    slot = tl.load(slot_ptr + i, mask=real, other=-1).to(tl.int64)
    plan_writes(planned_ptr, block_ptr, tl.load(clock_ptr), slots, i, slot, real, mark)


@triton.jit(do_not_specialize=PER_STEP)
def writes_kernel(
    block_ptr, wide_ptr, planned_ptr, clock_ptr, slots,
    counts_ptr, bs, steps, ends_ptr, row_ptr, padding, prefix_ptr, extend_ptr, owner_ptr,
    token_ptr, slot_ptr, position_ptr, real_ptr, n,  # integer [n] each
    table_ptr, row_stride, page_stride, table_rows, columns, map_ptr, map_size,
    history_ptr, history_stride, history_step, history_width, history_rows, history_lens_ptr, offset,
    window, chunk, once,
    words_ptr, ring_ptr, capacity, source, checks,
    PAGE: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_MAP: tl.constexpr, RING: tl.constexpr,
    HAS_HISTORY: tl.constexpr, BY_ROW: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Before a forward, after the walk: may its tokens go where they are planned to go?"""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    request, place, counted = token_request(i, n, counts_ptr, ends_ptr, bs, steps, row_ptr, padding, False)
    padded = of_padding(row_ptr, request, counted, padding, HAS_PADDING)
    real = counted & (padded == 0)
    slot = tl.load(slot_ptr + i, mask=counted, other=0).to(tl.int64)
    position = tl.load(prefix_ptr + request, mask=counted, other=0).to(tl.int64) + place
    owner = tl.load(owner_ptr + request, mask=counted, other=0)
    token = kept_bits(tl.load(token_ptr + i, mask=counted, other=0))
    outside = (slot < 0) | (slot >= slots)
    forward = tl.load(counts_ptr) >= 0  # else another forward's are there
    tl.store(real_ptr + i, tl.where(real & (outside == 0), slot, -1), mask=(i < n) & forward)
    at = tl.where(outside, slots, slot)
    _, _, flags, _, _, holder = entry_of(wide_ptr, at, counted)
    reserved = (flags & FLAG_RESERVED) != 0
    # the walk is over
    tl.store(block_ptr + at * SPACE_COLUMNS + COLUMN_FLAGS, flags & (-1 - FLAG_PLANNED), mask=real & (outside == 0))

    # tokens of a long prefill that no later forward reads are rightly stored nowhere
    newest = tl.load(prefix_ptr + request, mask=real, other=0).to(tl.int64) - 1
    newest += tl.load(extend_ptr + request, mask=real, other=0).to(tl.int64)
    nowhere = (reserved & (outside == 0)) | (slot == -1)
    behind = (position <= newest - tl.maximum(window - 1, 1)) | (
        position < tl.minimum((newest + 1) // chunk * chunk, newest)
    )
    real = real & ((nowhere & behind) == 0)

    zero = tl.zeros_like(i)
    bits, why, stored, found = zero, zero, zero, zero
    if HAS_PADDING:
        astray = padded & (outside == 0) & (reserved == 0)
        bits, why, stored, found = note(
            bits, why, stored, found, counted, astray, slot, slot, checks, REASON_PADDING_WRITES
        )
    bits, why, stored, found = note(
        bits, why, stored, found, real, outside, slot, zero - 1, checks, REASON_OUT_OF_RANGE
    )
    bits, why, stored, found = note(
        bits, why, stored, found, real, reserved & (outside == 0), slot, slot, checks, REASON_RESERVED_SLOT
    )
    there = real & (outside == 0) & (reserved == 0)
    epoch = (tl.load(clock_ptr).to(tl.int64) + 1) << 32
    earlier = tl.load(planned_ptr + at, mask=there, other=0) + epoch < i
    bits, why, stored, found = note(bits, why, stored, found, there, earlier, slot, slot, checks, REASON_PLANNED_TWICE)
    free, shared = flags < REFERENCE, flags >= 2 * REFERENCE
    foreign = (holder != 0) & (owner != 0) & (holder != owner) & (free == 0) & (shared == 0)
    bits, why, stored, found = note(bits, why, stored, found, there, free, owner, zero, checks, REASON_WRITE_AFTER_FREE)
    bits, why, stored, found = note(bits, why, stored, found, there, shared, owner, holder, checks, REASON_WRITE_SHARED)
    bits, why, stored, found = note(bits, why, stored, found, there, foreign, owner, holder, checks, REASON_OVERWRITE)
    rewritten = ((flags & FLAG_WRITTEN) != 0) & (once != 0)
    bits, why, stored, found = note(
        bits, why, stored, found, there, rewritten, owner, holder, checks, REASON_WRITTEN_BEFORE
    )
    if HAS_TABLE:
        row = tl.load(row_ptr + request, mask=there, other=-1).to(tl.int64)
        fits = there & (row >= 0) & (row < table_rows)
        if not RING:
            fits = fits & (position < columns * PAGE)
        planned = table_slot(
            table_ptr, row, row_stride, page_stride, table_rows, columns, position, map_ptr, map_size, fits,
            PAGE, HAS_MAP, RING,
        )  # fmt: skip
        bits, why, stored, found = note(
            bits,
            why,
            stored,
            found,
            there,
            fits & (planned != slot),
            slot,
            planned,
            checks,
            REASON_TABLE_DIFFERS,
        )
    if HAS_POSITIONS:
        given = tl.load(position_ptr + i, mask=there, other=0).to(tl.int64)
        bits, why, stored, found = note(
            bits, why, stored, found, there, given != position, position, given, checks, REASON_WRONG_POSITION
        )
    if HAS_HISTORY:
        valid, expected = expected_token(
            history_ptr, history_stride, history_step, history_width, history_rows, history_lens_ptr, row_ptr, request,
            position, offset, there, BY_ROW,
        )  # fmt: skip
        bits, why, stored, found = note(
            bits, why, stored, found, there, valid & (token != expected), expected, token,
            checks, REASON_WRONG_TOKEN,
        )  # fmt: skip
    tell(words_ptr, ring_ptr, capacity, source, bits, why, stored, found, slot, position, owner, token, PHASE_PRE)


@triton.jit
def kept_tokens(block_ptr, slots, slot_ptr, i, real):
    """``(slot, whether the token is stored)``: nothing is stored in reserved slots, nor outside of the pool."""
    slot = tl.load(slot_ptr + i, mask=real, other=-1).to(tl.int64)
    kept = real & (slot >= 0) & (slot < slots)
    at = tl.where(kept, slot, slots)
    return at, kept & (
        (tl.load(block_ptr + at * SPACE_COLUMNS + COLUMN_FLAGS, mask=kept, other=0) & FLAG_RESERVED) == 0
    )


@triton.jit
def store_tokens(
    number, block_ptr, wide_ptr, counters_ptr, slots, links_ptr, sums_ptr, before_ptr,
    counts_ptr, bs, steps, ends_ptr, row_ptr, padding, prefix_ptr, token_ptr, slot_ptr, position_ptr, n,
    past_ptr, words_ptr, owner_ptr,  # int32 [slots + 1, columns], int64 [len(Word)], int64 [bs]
    HAS_POSITIONS: tl.constexpr, HAS_PADDING: tl.constexpr, BLOCK: tl.constexpr, SUM_BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Remember who is in the slots of one block of tokens, with what :func:`links_kernel` found."""
    begin = number * BLOCK
    i = begin + tl.arange(0, BLOCK)
    request, place, real = token_request(i, n, counts_ptr, ends_ptr, bs, steps, row_ptr, padding, HAS_PADDING)
    at, kept = kept_tokens(block_ptr, slots, slot_ptr, i, real)
    token = tl.load(token_ptr + i, mask=kept, other=0)
    if HAS_POSITIONS:
        position = tl.load(position_ptr + i, mask=kept, other=0).to(tl.int64)
    else:
        position = tl.load(prefix_ptr + request, mask=kept, other=0).to(tl.int64) + place
    # the links from a request's first token on: those up to this token, less those before the request
    last = i - place - 1  # the token before the request's first
    inside = tl.load(links_ptr + last, mask=kept & (last >= begin), other=0)
    chain = tl.load(links_ptr + i, mask=kept, other=0) - inside
    head = tl.min(tl.where(real, last + 1, begin), axis=0)  # only one request can have begun in an earlier block
    if head < begin:
        carry = tl.zeros([SUM_BLOCK], tl.int64)
        for b0 in range(head // BLOCK, number, SUM_BLOCK):
            b = b0 + tl.arange(0, SUM_BLOCK)
            carry += tl.load(sums_ptr + b, mask=b < number, other=0)
        skipped = tl.load(links_ptr + head - 1, mask=head % BLOCK != 0, other=0)
        chain += tl.where(last + 1 < begin, tl.sum(carry, axis=0) - skipped, 0)
    chain += tl.load(before_ptr + request, mask=kept, other=0)
    entry = block_ptr + at * SPACE_COLUMNS
    flags = tl.load(entry + COLUMN_FLAGS, mask=kept, other=0)
    tl.store(entry + COLUMN_TOKEN, token.to(tl.int32), mask=kept)
    tl.store(entry + COLUMN_POSITION, position.to(tl.int32), mask=kept)
    tl.store(entry + COLUMN_FLAGS, (flags | FLAG_WRITTEN) & (-1 - FLAG_NAMELESS - FLAG_REJECTED), mask=kept)
    tl.store(wide_ptr + at * SPACE_WIDE + WIDE_CHAIN, chain, mask=kept)
    if KEPT > 0:
        note_write(past_ptr, words_ptr, at, tl.load(owner_ptr + request, mask=kept, other=0), kept, KEPT)
    tl.atomic_add(counters_ptr + SPACE_RECORDED, tl.sum(kept.to(tl.int64), axis=0), sem="relaxed")


@triton.jit(do_not_specialize=PER_STEP)
def links_kernel(
    block_ptr, wide_ptr, counters_ptr, slots, links_ptr, sums_ptr, before_ptr,  # ..., int64 [n], [blocks], [bs]
    counts_ptr, bs, steps, ends_ptr, row_ptr, padding, prefix_ptr, spaces_ptr,
    token_ptr, slot_ptr, position_ptr, n,
    table_ptr, row_stride, page_stride, table_rows, columns, map_ptr, map_size,
    past_ptr, words_ptr, owner_ptr,
    PAGE: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_SPACES: tl.constexpr, HAS_MAP: tl.constexpr, RING: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_PADDING: tl.constexpr, BLOCK: tl.constexpr, SUM_BLOCK: tl.constexpr,
    ALL: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """What :func:`store_kernel` needs of other tokens: sums of their links, and the chain before each request.

    Of a batch that one program takes (``ALL``), such as most decode steps, it stores them as well: a launch less.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    request, place, real = token_request(i, n, counts_ptr, ends_ptr, bs, steps, row_ptr, padding, HAS_PADDING)
    _, kept = kept_tokens(block_ptr, slots, slot_ptr, i, real)
    token = kept_bits(tl.load(token_ptr + i, mask=kept, other=0))
    if HAS_POSITIONS:
        position = tl.load(position_ptr + i, mask=kept, other=0).to(tl.int64)
    else:
        position = tl.load(prefix_ptr + request, mask=kept, other=0).to(tl.int64) + place
    link = tl.where(kept, mix(token, position), 0)
    tl.store(links_ptr + i, tl.cumsum(link, axis=0), mask=i < n)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(link, axis=0))

    mine = i < bs
    chain = namespace_seed(spaces_ptr, i, mine, HAS_SPACES)
    if HAS_TABLE:
        prefix = tl.load(prefix_ptr + i, mask=mine, other=0).to(tl.int64)
        row = tl.load(row_ptr + i, mask=mine, other=0).to(tl.int64)
        slot = table_slot(
            table_ptr, row, row_stride, page_stride, table_rows, columns, tl.maximum(prefix - 1, 0), map_ptr, map_size,
            mine, PAGE, HAS_MAP, RING,
        )  # fmt: skip
        known = mine & (prefix > 0) & (slot >= 0) & (slot < slots)
        last = tl.load(wide_ptr + tl.where(known, slot, slots) * SPACE_WIDE + WIDE_CHAIN, mask=known, other=0)
        chain = tl.where(known, last, chain)
    tl.store(before_ptr + i, chain, mask=mine)
    if ALL:
        tl.debug_barrier()  # the lanes read what others found, and nothing is stored before all have looked
        store_tokens(
            tl.program_id(0).to(tl.int64), block_ptr, wide_ptr, counters_ptr, slots, links_ptr, sums_ptr, before_ptr,
            counts_ptr, bs, steps, ends_ptr, row_ptr, padding, prefix_ptr, token_ptr, slot_ptr, position_ptr, n,
            past_ptr, words_ptr, owner_ptr, HAS_POSITIONS, HAS_PADDING, BLOCK, SUM_BLOCK, KEPT,
        )  # fmt: skip


@triton.jit(do_not_specialize=PER_STEP)
def store_kernel(
    block_ptr, wide_ptr, counters_ptr, slots, links_ptr, sums_ptr, before_ptr,
    counts_ptr, bs, steps, ends_ptr, row_ptr, padding, prefix_ptr, token_ptr, slot_ptr, position_ptr, n,
    past_ptr, words_ptr, owner_ptr,  # int32 [slots + 1, columns], int64 [len(Word)], int64 [bs]
    HAS_POSITIONS: tl.constexpr, HAS_PADDING: tl.constexpr, BLOCK: tl.constexpr, SUM_BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """After a forward, after :func:`links_kernel`: remember who is in the slots that it wrote."""
    store_tokens(
        tl.program_id(0).to(tl.int64), block_ptr, wide_ptr, counters_ptr, slots, links_ptr, sums_ptr, before_ptr,
        counts_ptr, bs, steps, ends_ptr, row_ptr, padding, prefix_ptr, token_ptr, slot_ptr, position_ptr, n,
        past_ptr, words_ptr, owner_ptr, HAS_POSITIONS, HAS_PADDING, BLOCK, SUM_BLOCK, KEPT,
    )  # fmt: skip


@triton.jit(do_not_specialize=PER_STEP)
def received_kernel(
    block_ptr, slots,  # int32 [slots + 1, 8]
    counts_ptr, bs, steps, ends_ptr, row_ptr, padding, prefix_ptr, owner_ptr, token_ptr, slot_ptr, n,
    received_ptr, received_count,  # int64 [received_count]
    words_ptr, ring_ptr, capacity, source, checks,
    HAS_PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In a layer's write: are the slots it received the planned ones, in the order of the tokens?"""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    request, place, counted = token_request(i, n, counts_ptr, ends_ptr, bs, steps, row_ptr, padding, False)
    planned = tl.load(slot_ptr + i, mask=counted, other=0).to(tl.int64)
    got = tl.load(received_ptr + i, mask=counted & (i < received_count), other=-1).to(tl.int64)
    live = counted
    if HAS_PADDING:  # padding may have got any reserved slot, or none
        inside = counted & (got >= 0) & (got < slots)
        flags = tl.load(
            block_ptr + tl.where(inside, got, slots) * SPACE_COLUMNS + COLUMN_FLAGS, mask=inside, other=FLAG_RESERVED
        )
        padded = of_padding(row_ptr, request, counted, padding, HAS_PADDING)
        live = counted & ((padded == 0) | ((flags & FLAG_RESERVED) == 0))
    zero = tl.zeros_like(i)
    bits, why, stored, found = zero, zero, zero, zero
    bits, why, stored, found = note(
        bits, why, stored, found, live, got != planned, planned, got, checks, REASON_NOT_THE_PLANNED_SLOT
    )
    failed = bits != 0
    position = tl.load(prefix_ptr + request, mask=failed, other=0).to(tl.int64) + place
    owner = tl.load(owner_ptr + request, mask=failed, other=0)
    token = kept_bits(tl.load(token_ptr + i, mask=failed, other=0))
    tell(words_ptr, ring_ptr, capacity, source, bits, why, stored, found, planned, position, owner, token, PHASE_POST)

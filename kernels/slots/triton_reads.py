"""Triton kernels of what a forward reads: one lane per position of each request, one launch for the whole batch.

What is checked is said in :mod:`.naive`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..words import (
    CHECK_BOUNDS,
    CHECK_CONTENT,
    COLUMN_FLAGS,
    COLUMN_READS,
    FLAG_DUE,
    FLAG_NAMELESS,
    FLAG_PLANNED,
    FLAG_REJECTED,
    FLAG_RESERVED,
    FLAG_WRITTEN,
    PHASE_PRE,
    REASON_FOREIGN_READ,
    REASON_LENGTH_DIFFERS,
    REASON_NEVER_WRITTEN,
    REASON_NO_SUCH_ROW,
    REASON_OTHER_NAMESPACE,
    REASON_OUT_OF_RANGE,
    REASON_READ_AFTER_FREE,
    REASON_READ_DIFFERS,
    REASON_READ_WHILE_WRITTEN,
    REASON_REJECTED_TOKEN,
    REASON_RESERVED_SLOT,
    REASON_ROW_TOO_NARROW,
    REASON_WRONG_POSITION,
    REASON_WRONG_PREDECESSOR,
    REASON_WRONG_TOKEN,
    REFERENCE,
    SPACE_CHECKED,
    SPACE_COLUMNS,
    SPACE_FORWARDS,
    SPACE_WIDE,
    UNKNOWN,
    WIDE_CHAIN,
    WORD_EVERY,
)
from .triton_history import note_read
from .triton_shared import (
    PER_STEP,
    entry_of,
    expected_token,
    find_ends,
    mix,
    namespace_seed,
    note,
    plan_writes,
    table_slot,
    tell,
    token_request,
)


@triton.jit(do_not_specialize=PER_STEP)
def open_kernel(
    block_ptr, planned_ptr, slots,  # int32 [slots + 1, 8], int64 [slots + 1]
    clock_ptr, counters_ptr, listed_count_ptr,  # int32 [1], int64 [len(SpaceCount)], int32 [1]
    counts_ptr, bs, steps, row_ptr, padding, prefix_ptr, extend_ptr, owner_ptr, ends_ptr,  # integer [bs] each
    slot_ptr, n, mark,  # integer [n]
    table_rows, width,
    words_ptr, ring_ptr, capacity, source, checks,
    HAS_PADDING: tl.constexpr, PLAN: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A forward begins: count it, note the slots that it writes, if they are few, and look at the rows of the request
    table that it names."""
    if tl.program_id(0) == 0:
        tl.store(listed_count_ptr, tl.zeros([], tl.int32))
    if (tl.program_id(0) == 0) & (tl.load(counts_ptr) >= 0):
        total = find_ends(counts_ptr, extend_ptr, ends_ptr, bs, BLOCK)
        clock = tl.load(clock_ptr) + 1
        tl.store(clock_ptr, clock)
        tl.store(counters_ptr + SPACE_FORWARDS, tl.load(counters_ptr + SPACE_FORWARDS) + 1)
        if PLAN:
            i = tl.arange(0, TOKENS).to(tl.int64)
            real = (i < n) & (i < tl.load(counts_ptr + 1)) & (i < total)
            slot = tl.load(slot_ptr + i, mask=real, other=-1).to(tl.int64)
            if HAS_PADDING:
                tl.debug_barrier()  # the ends
                _, _, real = token_request(i, n, counts_ptr, ends_ptr, bs, steps, row_ptr, padding, HAS_PADDING)
            plan_writes(planned_ptr, block_ptr, clock, slots, i, slot, real, mark)
    if (CHECK_BOUNDS & checks) != 0:
        request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        live = (request < bs) & (request < tl.load(counts_ptr))
        row = tl.load(row_ptr + request, mask=live, other=0).to(tl.int64)
        live = live & (row != padding)
        length = tl.load(prefix_ptr + request, mask=live, other=0).to(tl.int64)
        length += tl.load(extend_ptr + request, mask=live, other=0).to(tl.int64)
        zero = tl.zeros_like(request)
        bits, why, stored, found = zero, zero, zero, zero
        bits, why, stored, found = note(
            bits, why, stored, found, live, (row < 0) | (row >= table_rows), zero + table_rows, row,
            checks, REASON_NO_SUCH_ROW,
        )  # fmt: skip
        bits, why, stored, found = note(
            bits,
            why,
            stored,
            found,
            live,
            length > width,
            zero + width,
            length,
            checks,
            REASON_ROW_TOO_NARROW,
        )
        owner = tl.load(owner_ptr + request, mask=live, other=0)
        tell(words_ptr, ring_ptr, capacity, source, bits, why, stored, found, -1, UNKNOWN, owner, -1, PHASE_PRE)


@triton.jit
def is_named(block_ptr, slots, slot, mask):
    """Whether slots of the request table hold tokens with names."""
    known = mask & (slot >= 0) & (slot < slots)
    flags = tl.load(block_ptr + tl.where(known, slot, slots) * SPACE_COLUMNS + COLUMN_FLAGS, mask=known, other=0)
    return known & ((flags & FLAG_WRITTEN) != 0) & ((flags & FLAG_NAMELESS) == 0)


@triton.jit
def chain_before(block_ptr, wide_ptr, slots, slot, mask, otherwise):
    """The chain in the slot of one position, or ``otherwise`` where that position cannot be compared with."""
    near = tl.where(mask & (slot >= 0) & (slot < slots), slot, slots)
    chain = tl.load(wide_ptr + near * SPACE_WIDE + WIDE_CHAIN)  # beside the flags, not after them
    return tl.where(is_named(block_ptr, slots, slot, mask), chain, otherwise)


@triton.jit
def list_due(
    at, sound, turns, flags, seen, clock,  # a block: slots, which are sound, whose turn it is; the forward's number
    block_ptr, listed_ptr, listed_count_ptr, past_ptr, words_ptr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """List the sound slots that are due for the layers' content checks: once, however many requests share them."""
    idle = (flags & FLAG_DUE) != 0
    due = sound & (turns | idle)
    tl.atomic_and(
        block_ptr + at * SPACE_COLUMNS + COLUMN_FLAGS,
        tl.zeros_like(flags) + (-1 - FLAG_DUE),
        mask=due & idle,
        sem="relaxed",
    )
    due = due & (seen != clock)
    read = tl.atomic_xchg(
        block_ptr + at * SPACE_COLUMNS + COLUMN_READS, tl.zeros_like(flags) + clock, mask=due, sem="relaxed"
    )
    fresh = (due & (read != clock)).to(tl.int32)
    count = tl.sum(fresh, axis=0)
    if count > 0:
        place = tl.atomic_add(listed_count_ptr, count, sem="relaxed") + tl.cumsum(fresh, axis=0) - 1
        tl.store(listed_ptr + place, at.to(tl.int32), mask=fresh != 0)
        if KEPT > 0:
            note_read(past_ptr, words_ptr, at, fresh != 0, KEPT)


@triton.jit(do_not_specialize=PER_STEP)
def walk_kernel(
    block_ptr, wide_ptr, clock_ptr, counters_ptr,  # int32 [slots + 1, 8], the same as int64, int32 [1], int64
    listed_ptr, listed_count_ptr,  # int32 [slots], int32 [1]
    past_ptr,  # int32 [slots + 1, columns]
    planned_ptr,  # int64 [slots + 1]
    slots, counts_ptr, row_ptr, padding, prefix_ptr, owner_ptr, spaces_ptr,  # integer [bs] each
    ends_ptr, bs, steps, n,  # int64 [bs]
    table_ptr, row_stride, page_stride, table_rows, columns, map_ptr, map_size,
    history_ptr, history_stride, history_step, history_width, history_rows, history_lens_ptr,
    stop, window, chunk, offset, every,
    words_ptr, ring_ptr, capacity, source, checks,
    PAGE: tl.constexpr, HAS_SPACES: tl.constexpr, HAS_MAP: tl.constexpr, RING: tl.constexpr,
    HAS_HISTORY: tl.constexpr, BY_ROW: tl.constexpr, HAS_PADDING: tl.constexpr, BY_BUDGET: tl.constexpr,
    BLOCK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Before a forward: is every slot that attention will read the one it should be?

    The programs of a request take turns with its blocks: tables are as wide as the longest request may be, and a
    program for each block of each row of the table would be a program for nothing, mostly.  The walk waits for memory:
    what does not depend on a slot's entry is loaded before it.
    """
    request = tl.program_id(1).to(tl.int64)
    prefix = tl.load(prefix_ptr + request).to(tl.int64)
    row = tl.load(row_ptr + request).to(tl.int64)
    exists = (request < tl.load(counts_ptr)) & (row >= 0) & (row < table_rows) & (row != padding)
    owner = tl.load(owner_ptr + request)
    clock = tl.load(clock_ptr)
    share = tl.load(words_ptr + WORD_EVERY).to(tl.int32) if BY_BUDGET else every
    turn = (tl.load(counts_ptr + 2) % share).to(tl.int32)
    first = tl.maximum(tl.maximum(prefix - window + 1, prefix // chunk * chunk), 0)
    start_at = first if RING else tl.zeros_like(first)  # the positions in a ring have no end, those in a window have
    # the first block of this program that the window reaches, and where the request ends
    reached = start_at if RING else first // BLOCK * BLOCK
    end = tl.where(exists, tl.minimum(prefix, start_at + stop), 0)
    checked = tl.full([], 0, tl.int64)
    for begin in range(reached + tl.program_id(0).to(tl.int64) * BLOCK, end, tl.num_programs(0).to(tl.int64) * BLOCK):
        position = begin + tl.arange(0, BLOCK)
        live = (position >= first) & (position < end)
        slot = table_slot(
            table_ptr, row, row_stride, page_stride, table_rows, columns, position, map_ptr, map_size, live,
            PAGE, HAS_MAP, RING,
        )  # fmt: skip
        enters = tl.maximum(begin, first)
        entered_from = table_slot(
            table_ptr, row, row_stride, page_stride, table_rows, columns, enters - 1, map_ptr, map_size, enters > first,
            PAGE, HAS_MAP, RING,
        )  # fmt: skip
        zero = tl.zeros_like(position)
        if HAS_HISTORY:
            valid, given = expected_token(
                history_ptr, history_stride, history_step, history_width, history_rows, history_lens_ptr, row_ptr,
                request + zero, position, offset, live, BY_ROW,
            )  # fmt: skip
        outside = (slot < 0) | (slot >= slots)
        at = tl.where(outside, slots, slot)
        token, where, flags, seen, chain, holder = entry_of(wide_ptr, at, live)
        link = mix(token, where)
        # A chain is a sum of links.  Where all slots have names, each follows its predecessor if the sums over the
        # block agree, and no predecessor but the block's own has to be looked up.
        entered = tl.sum(tl.where(position == enters, chain - link, 0), axis=0)
        base = chain_before(block_ptr, wide_ptr, slots, entered_from, enters > first, entered)

        reserved = (flags & FLAG_RESERVED) != 0
        there = live & (outside == 0) & (reserved == 0)
        free = flags < REFERENCE
        foreign = (holder != 0) & (owner != 0) & (holder != owner) & (flags < 2 * REFERENCE) & (free == 0)
        written = (flags & FLAG_WRITTEN) != 0
        named = there & written & ((flags & FLAG_NAMELESS) == 0)
        rejected = there & written & ((flags & FLAG_REJECTED) != 0)
        planned = there & ((flags & FLAG_PLANNED) != 0)
        expected, wrong = token, named & (slots < 0)
        if HAS_HISTORY:
            expected, wrong = given, named & valid & (token != given)
        misplaced = where != position
        start = namespace_seed(spaces_ptr, request + zero, named, HAS_SPACES) + link
        strange = (position == 0) & (misplaced == 0) & (chain != start)
        torn = chain != base + tl.cumsum(tl.where(live, link, 0), axis=0)
        suspect = live & ((named == 0) | free | foreign | rejected | planned | wrong | misplaced | strange | torn)
        if tl.max(suspect.to(tl.int32), axis=0) != 0:  # details only where something may be wrong
            follows = named & (position > first)
            before = table_slot(
                table_ptr, row, row_stride, page_stride, table_rows, columns, position - 1, map_ptr, map_size, follows,
                PAGE, HAS_MAP, RING,
            )  # fmt: skip
            comparable = follows & is_named(block_ptr, slots, before, follows)
            after = tl.load(wide_ptr + tl.where(comparable, before, slots) * SPACE_WIDE + WIDE_CHAIN) + link
            broken = comparable & (chain != after)
            bits, why, stored, found = zero, zero, zero, zero
            bits, why, stored, found = note(
                bits, why, stored, found, live, outside, slot, zero - 1, checks, REASON_OUT_OF_RANGE
            )
            bits, why, stored, found = note(
                bits,
                why,
                stored,
                found,
                live,
                reserved & (outside == 0),
                slot,
                slot,
                checks,
                REASON_RESERVED_SLOT,
            )
            bits, why, stored, found = note(
                bits, why, stored, found, there, free, zero + owner, zero, checks, REASON_READ_AFTER_FREE
            )
            bits, why, stored, found = note(
                bits, why, stored, found, there, foreign, zero + owner, holder, checks, REASON_FOREIGN_READ
            )
            bits, why, stored, found = note(
                bits, why, stored, found, there, written == 0, zero, zero, checks, REASON_NEVER_WRITTEN
            )
            # which of the batch's requests writes the slot; two entries with one owner are one request
            number = tl.load(planned_ptr + at, mask=planned, other=0) + ((clock.to(tl.int64) + 1) << 32)
            fresh = planned & (number >= 0) & (number < n)
            writer, _, fresh = token_request(
                tl.where(fresh, number, n), n, counts_ptr, ends_ptr, bs, steps, row_ptr, padding, HAS_PADDING
            )
            whose = tl.load(owner_ptr + writer, mask=fresh, other=0)
            rival = fresh & (writer != request) & ((owner == 0) | (whose != owner))
            bits, why, stored, found = note(
                bits, why, stored, found, there, rival, zero + owner, whose, checks, REASON_READ_WHILE_WRITTEN
            )
            bits, why, stored, found = note(
                bits, why, stored, found, there, rejected, zero, token, checks, REASON_REJECTED_TOKEN
            )
            bits, why, stored, found = note(
                bits, why, stored, found, named, wrong, expected, token, checks, REASON_WRONG_TOKEN
            )
            bits, why, stored, found = note(
                bits, why, stored, found, named, misplaced, position, where, checks, REASON_WRONG_POSITION
            )
            bits, why, stored, found = note(
                bits, why, stored, found, named, strange, start, chain, checks, REASON_OTHER_NAMESPACE
            )
            bits, why, stored, found = note(
                bits, why, stored, found, named, broken, after, chain, checks, REASON_WRONG_PREDECESSOR
            )
            detail = tl.where(outside, -1, token)
            tell(
                words_ptr,
                ring_ptr,
                capacity,
                source,
                bits,
                why,
                stored,
                found,
                slot,
                position,
                owner,
                detail,
                PHASE_PRE,
            )
        if (CHECK_CONTENT & checks) != 0:
            turns = (at.to(tl.int32) + turn) % share == 0
            sound = live & (outside == 0) & written & (flags >= REFERENCE)
            list_due(
                at, sound, turns, flags, seen, clock, block_ptr, listed_ptr, listed_count_ptr, past_ptr, words_ptr, KEPT
            )
        checked += tl.sum(live.to(tl.int64), axis=0)
    if checked > 0:
        tl.atomic_add(counters_ptr + SPACE_CHECKED, checked, sem="relaxed")


@triton.jit
def tell_other_slots(
    got, live, position, row, owner,  # a block: slots that attention reads at positions of one request
    table_ptr, row_stride, page_stride, table_rows, columns, map_ptr, map_size,
    words_ptr, ring_ptr, capacity, source, checks,
    PAGE: tl.constexpr, HAS_MAP: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Report those that are not the request table's."""
    slot = table_slot(
        table_ptr, row, row_stride, page_stride, table_rows, columns, position, map_ptr, map_size, live,
        PAGE, HAS_MAP, RING,
    )  # fmt: skip
    zero = tl.zeros_like(position)
    bits, why, stored, found = note(
        zero, zero, zero, zero, live, got != slot, slot, got, checks, REASON_READ_DIFFERS
    )  # fmt: skip
    tell(words_ptr, ring_ptr, capacity, source, bits, why, stored, found, slot, position, owner, -1, PHASE_PRE)


@triton.jit(do_not_specialize=PER_STEP)
def reads_kernel(
    counts_ptr, row_ptr, padding, prefix_ptr, extend_ptr, owner_ptr,
    table_ptr, row_stride, page_stride, table_rows, columns, map_ptr, map_size,
    pages_ptr, pages_stride, pages_step, lengths_ptr, room, window, chunk,  # integer [bs, room // SIZE], integer [bs]
    words_ptr, ring_ptr, capacity, source, checks,
    PAGE: tl.constexpr, SIZE: tl.constexpr, HAS_MAP: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Before attention: does the page table that its kernel gets say what the request table says?"""
    request = tl.program_id(1).to(tl.int64)
    row = tl.load(row_ptr + request).to(tl.int64)
    if (request < tl.load(counts_ptr)) & (row >= 0) & (row < table_rows) & (row != padding):
        owner = tl.load(owner_ptr + request)
        given = tl.load(lengths_ptr + request).to(tl.int64)
        total = tl.load(prefix_ptr + request).to(tl.int64) + tl.load(extend_ptr + request).to(tl.int64)
        lanes = tl.arange(0, BLOCK).to(tl.int64)
        zero = tl.zeros_like(lanes)
        if tl.program_id(0) == 0:
            once = lanes == 0
            bits, why, stored, found = zero, zero, zero, zero
            bits, why, stored, found = note(
                bits, why, stored, found, once, given > room + zero, zero + room, zero + given,
                checks, REASON_ROW_TOO_NARROW,
            )  # fmt: skip
            bits, why, stored, found = note(
                bits, why, stored, found, once, given + zero != total, zero + total, zero + given,
                checks, REASON_LENGTH_DIFFERS,
            )  # fmt: skip
            tell(words_ptr, ring_ptr, capacity, source, bits, why, stored, found, -1, UNKNOWN, owner, -1, PHASE_PRE)
        first = tl.maximum(tl.maximum(total - window, (total - 1) // chunk * chunk), 0)
        end = tl.minimum(tl.minimum(given, total), room)
        begins = first // BLOCK * BLOCK + tl.program_id(0).to(tl.int64) * BLOCK
        for begin in range(begins, end, tl.num_programs(0).to(tl.int64) * BLOCK):
            position = begin + lanes
            live = (position >= first) & (position < end)
            page = tl.load(
                pages_ptr + request * pages_stride + position // SIZE * pages_step, mask=live, other=0
            ).to(tl.int64)  # fmt: skip
            got = page * SIZE + position % SIZE
            tell_other_slots(
                got, live, position, row, owner,
                table_ptr, row_stride, page_stride, table_rows, columns, map_ptr, map_size,
                words_ptr, ring_ptr, capacity, source, checks, PAGE, HAS_MAP, RING,
            )  # fmt: skip


@triton.jit
def slot_of_memory(index, unit, stride):
    """The slot of a row of an engine's memory, see :func:`.checks.slots_of_memory`."""
    page = index // stride
    offset = index - page * stride
    return tl.where((index >= 0) & (offset < unit), page * unit + offset, -1)


@triton.jit(do_not_specialize=PER_STEP)
def memory_kernel(index_ptr, out_ptr, n, unit, stride, BLOCK: tl.constexpr):
    """Slots of rows of an engine's memory: int64 ``[n]`` each."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + i, mask=i < n, other=0).to(tl.int64)
    tl.store(out_ptr + i, slot_of_memory(index, unit, stride), mask=i < n)


@triton.jit(do_not_specialize=PER_STEP)
def indices_kernel(
    counts_ptr, row_ptr, padding, prefix_ptr, extend_ptr, owner_ptr,
    table_ptr, row_stride, page_stride, table_rows, columns, map_ptr, map_size,
    index_ptr, index_count, unit, stride,  # integer [index_count]
    words_ptr, ring_ptr, capacity, source, checks,
    PAGE: tl.constexpr, HAS_MAP: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Before attention: are the rows of memory that it gathers those of the request table?"""
    request = tl.program_id(1).to(tl.int64)
    row = tl.load(row_ptr + request).to(tl.int64)
    if (request < tl.load(counts_ptr)) & (row >= 0) & (row < table_rows) & (row != padding):
        owner = tl.load(owner_ptr + request)
        total = tl.load(prefix_ptr + request).to(tl.int64) + tl.load(extend_ptr + request).to(tl.int64)
        lanes = tl.arange(0, BLOCK).to(tl.int64)
        zero = tl.zeros_like(lanes)
        before = zero
        for start in range(0, request, BLOCK):
            earlier = start + lanes < request
            before += tl.load(prefix_ptr + start + lanes, mask=earlier, other=0).to(tl.int64)
            before += tl.load(extend_ptr + start + lanes, mask=earlier, other=0).to(tl.int64)
        first = tl.sum(before, axis=0)
        for begin in range(tl.program_id(0).to(tl.int64) * BLOCK, total, tl.num_programs(0).to(tl.int64) * BLOCK):
            position = begin + lanes
            live = position < total
            index = tl.load(
                index_ptr + first + position, mask=live & (first + position < index_count), other=-1
            ).to(tl.int64)  # fmt: skip
            got = slot_of_memory(index, unit, stride)
            tell_other_slots(
                got, live, position, row, owner,
                table_ptr, row_stride, page_stride, table_rows, columns, map_ptr, map_size,
                words_ptr, ring_ptr, capacity, source, checks, PAGE, HAS_MAP, RING,
            )  # fmt: skip

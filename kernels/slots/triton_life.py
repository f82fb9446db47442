"""The Triton kernel of what an allocator does to slots: one lane per slot that is named, all calls in one launch.

What each call does and reports is said in :mod:`.naive_life`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_ring import append
from ..words import (
    CALL_BEGIN,
    CALL_COLUMNS,
    CALL_EVENT,
    CALL_KINDS,
    CALL_OWNER,
    COLUMN_FLAGS,
    COLUMN_POSITION,
    COLUMN_TOKEN,
    EVENT_ALLOCATE,
    EVENT_FORGET,
    EVENT_HAND_OVER,
    EVENT_REJECT,
    EVENT_RELEASE,
    EVENT_SHARE,
    FLAG_DUE,
    FLAG_NAMELESS,
    FLAG_REJECTED,
    FLAG_RESERVED,
    FLAG_WRITTEN,
    PAST_EVENTS,
    PAST_HEAD,
    PAST_STACK_UNIT,
    PAST_TOLD,
    PHASE_LIFE,
    REASON_DOUBLE_ALLOCATE,
    REASON_DOUBLE_FREE,
    REASON_FOREIGN_FREE,
    REASON_OUT_OF_RANGE,
    REASON_RESERVED_SLOT,
    REASON_SHARE_AFTER_FREE,
    REFERENCE,
    SPACE_COLUMNS,
    SPACE_WIDE,
    UNKNOWN,
    WIDE_CHAIN,
    WIDE_OWNER,
)
from .triton_history import forget_reads, past_row, put_event, step_now
from .triton_shared import entry_of, note

#: Arguments that differ between launches and pools, see :mod:`.triton_shared`.
PER_LAUNCH = ["slots", "rows", "steps", "n", "page", "told", "planes", "capacity", "source", "checks"]


@triton.jit
def call_of(rows_ptr, rows, steps, entry, mask):
    """The row of the call that an entry belongs to: the last one that begins no later."""
    low = tl.zeros_like(entry)
    high = low + rows
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = mask & (low < high)
        begin = tl.load(rows_ptr + middle * CALL_COLUMNS + CALL_BEGIN, mask=open_, other=0)
        later = open_ & (begin <= entry)
        low = tl.where(later, middle + 1, low)
        high = tl.where(open_ & (later == 0), middle, high)
    return low - 1


@triton.jit(do_not_specialize=PER_LAUNCH)
def life_kernel(
    block_ptr, wide_ptr, slots,  # int32 [slots + 1, 8], the same as int64
    rows_ptr, rows, steps, entries_ptr, n, page,  # int64 [rows, 3], halvings until one of them is left, int64 [n]
    gone_ptr, holders_ptr, places_ptr, told,  # int64 [n * page] each, where told: of what became free the slot or -1,
    # whose it was, and the position in it
    digests_ptr, planes, imported_ptr,  # int32 [planes, slots], uint8 [slots + 1]
    past_ptr,  # int32 [slots + 1, columns]
    words_ptr, ring_ptr, capacity, source, checks,
    counts_ptr,  # int64 [2], where COUNTED: how many of the rows and of the entries there are
    KEPT: tl.constexpr, HAS_IMPORTED: tl.constexpr, COUNTED: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """What an allocator's calls do to slots, in the order of the calls.

    The program with the first entry of a page applies all calls to its slots, so that no program waits for another: it
    searches the later entries for the page.

    Where told, bytes of what became free are compared behind this, and :func:`renew_kernel` forgets those of what was
    handed out.  What became free after it was handed out here has no bytes to compare.
    """
    if COUNTED:
        rows, n = tl.load(counts_ptr), tl.load(counts_ptr + 1)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    j = begin + tl.arange(0, BLOCK)
    number = tl.load(entries_ptr + j, mask=j < n, other=0)
    earlier = tl.zeros([BLOCK], tl.int32)
    for c0 in range(0, begin + BLOCK, SCAN):
        c = c0 + tl.arange(0, SCAN).to(tl.int64)
        other = tl.load(entries_ptr + c, mask=c < n, other=0)
        same = (other[None, :] == number[:, None]) & (c[None, :] < j[:, None])
        earlier = tl.maximum(earlier, tl.max(same.to(tl.int32), axis=1))
    first = (j < n) & (earlier == 0)
    if tl.max(first.to(tl.int32), axis=0) != 0:
        offset = tl.program_id(1).to(tl.int64) * LANES + tl.arange(0, LANES)
        slot = number[:, None] * page + offset[None, :]
        live = first[:, None] & (offset < page)[None, :]
        outside = (slot < 0) | (slot >= slots)
        at = tl.where(outside, slots, slot)
        token, position, flags, _seen, chain, holder = entry_of(wide_ptr, at, live)
        inside = live & (outside == 0)
        reserved = (flags & FLAG_RESERVED) != 0
        named = inside & (reserved == 0)
        zero = tl.zeros_like(slot)
        blank = zero.to(tl.int32)
        # a call reports the state from before the call, also for a slot that it names twice
        call, flags0, holder0, token0, position0 = tl.zeros_like(j) - 1, flags, holder, token, position
        done = j - 1
        past, step = past_row(past_ptr, at, KEPT), step_now(words_ptr) + zero.to(tl.int32)
        happened = tl.load(past + PAST_EVENTS, mask=named & (KEPT > 0), other=0)
        for c0 in range(begin // SCAN * SCAN, n, SCAN):
            c = c0 + tl.arange(0, SCAN).to(tl.int64)
            other = tl.load(entries_ptr + c, mask=c < n, other=0)
            same = first[:, None] & (other[None, :] == number[:, None]) & (c < n)[None, :]
            entry = tl.min(tl.where(same & (c[None, :] > done[:, None]), c[None, :], n), axis=1)
            while tl.min(entry, axis=0) < n:
                go = entry < n
                row = call_of(rows_ptr, rows, steps, entry, go)
                base = rows_ptr + row * CALL_COLUMNS
                what = tl.load(base + CALL_EVENT, mask=go, other=CALL_KINDS - 1)[:, None]
                event = what % CALL_KINDS
                owner = tl.load(base + CALL_OWNER, mask=go, other=0)[:, None] + zero
                again = (go & (row == call))[:, None]
                begins = (go & (row != call))[:, None]
                flags0 = tl.where(begins, flags, flags0)
                holder0 = tl.where(begins, holder, holder0)
                token0 = tl.where(begins, token, token0)
                position0 = tl.where(begins, position, position0)
                call = tl.where(go, row, call)
                now = go[:, None] & live

                allocate, release = named & (event == EVENT_ALLOCATE), named & (event == EVENT_RELEASE)
                share, hand_over = named & (event == EVENT_SHARE), named & (event == EVENT_HAND_OVER)
                shared = flags0 >= 2 * REFERENCE
                free = (flags0 < REFERENCE) | (again & (shared == 0))
                strange = (holder0 != 0) & (holder0 != owner) & (owner != 0) & (shared == 0) & (free == 0)
                bits, why, stored, found = zero, zero, zero, zero
                bits, why, stored, found = note(
                    bits, why, stored, found, now, outside, slot, zero - 1, checks, REASON_OUT_OF_RANGE
                )
                bits, why, stored, found = note(
                    bits, why, stored, found, now & inside, reserved & (event != EVENT_FORGET), slot, slot, checks,
                    REASON_RESERVED_SLOT,
                )  # fmt: skip
                bits, why, stored, found = note(
                    bits, why, stored, found, allocate, (flags0 >= REFERENCE) | again,
                    tl.where(again, owner, holder0), owner, checks, REASON_DOUBLE_ALLOCATE,
                )  # fmt: skip
                bits, why, stored, found = note(
                    bits, why, stored, found, release, free, holder0, owner, checks, REASON_DOUBLE_FREE
                )
                bits, why, stored, found = note(
                    bits, why, stored, found, release, strange, holder0, owner, checks, REASON_FOREIGN_FREE
                )
                bits, why, stored, found = note(
                    bits, why, stored, found, share | hand_over, flags0 < REFERENCE, owner, zero, checks,
                    REASON_SHARE_AFTER_FREE,
                )  # fmt: skip
                if tl.max(tl.max(bits, axis=1), axis=0) != 0:
                    about = named & (event <= EVENT_HAND_OVER)
                    append(
                        words_ptr, ring_ptr, capacity, bits != 0, source, bits, PHASE_LIFE, 0, slot, UNKNOWN, stored,
                        found, tl.where(about, token0, -1), owner, tl.where(about, position0, UNKNOWN), why,
                    )  # fmt: skip

                left = tl.maximum(flags // REFERENCE - 1, 0) * REFERENCE
                after = tl.where(left > 0, left + flags % REFERENCE, 0)
                gone = release & (flags >= REFERENCE) & (after < REFERENCE) & (blank == 0)
                lane = entry[:, None] * page + offset[None, :]
                tl.store(gone_ptr + lane, tl.where(gone, slot, -1), mask=now & (told != 0))
                tl.store(holders_ptr + lane, holder0, mask=now & (told != 0))
                tl.store(places_ptr + lane, position + zero, mask=now & (told != 0))

                # after its owner's release, a shared slot has no particular owner
                leaves = (shared & ((owner == 0) | (holder0 == owner))) | (left == 0)
                holder = tl.where(release & leaves, 0, tl.where(allocate | hand_over, owner, holder))
                flags = tl.where(release, after, tl.where(share, flags + REFERENCE, flags))
                flags = tl.where(share | hand_over, flags | FLAG_DUE, flags)
                flags = tl.where(allocate, REFERENCE, flags)
                written = (flags & FLAG_WRITTEN) != 0
                flags = tl.where(named & (event == EVENT_REJECT) & written, flags | FLAG_REJECTED, flags)
                unnamed = (flags & (-1 - FLAG_REJECTED)) | FLAG_WRITTEN | FLAG_NAMELESS
                flags = tl.where(named & (event == EVENT_FORGET) & (flags >= REFERENCE), unnamed, flags)
                token = tl.where(allocate, -1, token)
                position = tl.where(allocate, UNKNOWN, position)
                chain = tl.where(allocate, 0, chain)
                blank = tl.where(inside & ((event == EVENT_ALLOCATE) | (event == EVENT_FORGET)), 1, blank)

                if KEPT > 0:
                    noted = now & named
                    kind = (event + what // CALL_KINDS * PAST_STACK_UNIT + zero).to(tl.int32)
                    place = past + PAST_HEAD + happened % KEPT * PAST_TOLD
                    put_event(place, step, kind, owner.to(tl.int32), noted)
                    forget_reads(past, noted & (event == EVENT_ALLOCATE))
                    happened += noted.to(tl.int32)

                done = tl.where(go, entry, done)
                entry = tl.min(tl.where(same & (c[None, :] > done[:, None]), c[None, :], n), axis=1)

        own = block_ptr + at * SPACE_COLUMNS
        tl.store(own + COLUMN_TOKEN, token.to(tl.int32), mask=named)
        tl.store(own + COLUMN_POSITION, position.to(tl.int32), mask=named)
        tl.store(own + COLUMN_FLAGS, flags, mask=named)
        tl.store(wide_ptr + at * SPACE_WIDE + WIDE_CHAIN, chain, mask=named)
        tl.store(wide_ptr + at * SPACE_WIDE + WIDE_OWNER, holder, mask=named)
        if KEPT > 0:
            tl.store(past + PAST_EVENTS, happened, mask=named)
        if (told == 0) & (tl.max(tl.max(blank, axis=1), axis=0) != 0):  # their bytes belong to no request
            if HAS_IMPORTED:
                tl.store(imported_ptr + at, blank - blank, mask=blank != 0)
            for plane in range(planes):
                tl.store(digests_ptr + plane * slots.to(tl.int64) + at, blank - blank, mask=blank != 0)


@triton.jit(do_not_specialize=["slots", "rows", "steps", "n", "page", "planes"])
def renew_kernel(
    slots,
    rows_ptr, rows, steps, entries_ptr, n, page,  # as of life_kernel
    digests_ptr, planes, imported_ptr,
    counts_ptr,
    HAS_IMPORTED: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The bytes of slots that were handed out, or are rewritten by somebody else, belong to no request."""
    if COUNTED:
        rows, n = tl.load(counts_ptr), tl.load(counts_ptr + 1)
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = j < n
    number = tl.load(entries_ptr + j, mask=live, other=0)
    row = call_of(rows_ptr, rows, steps, j, live)
    what = tl.load(rows_ptr + row * CALL_COLUMNS + CALL_EVENT, mask=live, other=EVENT_RELEASE) % CALL_KINDS
    renews = live & ((what == EVENT_ALLOCATE) | (what == EVENT_FORGET))
    if tl.max(renews.to(tl.int32), axis=0) != 0:
        offset = tl.program_id(1).to(tl.int64) * LANES + tl.arange(0, LANES)
        slot = number[:, None] * page + offset[None, :]
        inside = renews[:, None] & (offset < page)[None, :] & (slot >= 0) & (slot < slots)
        nothing = tl.zeros_like(slot).to(tl.int32)
        if HAS_IMPORTED:
            tl.store(imported_ptr + slot, nothing, mask=inside)
        for plane in range(planes):
            tl.store(digests_ptr + plane * slots.to(tl.int64) + slot, nothing, mask=inside)

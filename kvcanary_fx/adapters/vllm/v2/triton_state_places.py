"""The Triton kernel of :mod:`.state_places`, whose :class:`~.state_places.StatePlaces` is its reference on a CPU."""

from __future__ import annotations

import triton
import triton.language as tl

from ....kernels.slots.triton_shared import note, tell
from ....kernels.words import (
    COLUMN_FLAGS,
    PHASE_PRE,
    REASON_NOT_THE_PLANNED_SLOT,
    REASON_OVERWRITE,
    REASON_WRITE_AFTER_FREE,
    REASON_WRITE_SHARED,
    REFERENCE,
    SPACE_COLUMNS,
    SPACE_WIDE,
    UNKNOWN,
    WIDE_OWNER,
    WORD_FORWARD,
)

#: Columns of the table of groups: address of the runner's block table, entries of a row of it, the same of the
#: scheduler's, columns of both, address of who has the blocks, how many blocks, the numbers of the first half and of
#: the slot space.
_TABLE: tl.constexpr = tl.constexpr(9)


@triton.jit(do_not_specialize=["page", "capacity", "checks"])
def places_kernel(
    counts_ptr,  # int64 [3]: requests, tokens, the number of the step
    row_ptr, owner_ptr, prefix_ptr, extend_ptr,  # int64 [requests] each
    page,  # tokens of a block, or 0
    table_ptr,  # int64 [GROUPS, 9]
    checks, words_ptr, ring_ptr, capacity,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program."""
    requests = tl.load(counts_ptr)
    if requests < 0:
        return
    tl.store(words_ptr + WORD_FORWARD, tl.load(counts_ptr + 2) << 32)
    tl.debug_barrier()  # reports carry it
    for r0 in range(0, requests, BLOCK):
        r = r0 + tl.arange(0, BLOCK).to(tl.int64)
        there = r < requests
        row, owner = tl.load(row_ptr + r, mask=there, other=0), tl.load(owner_ptr + r, mask=there, other=0)
        tokens = tl.load(prefix_ptr + r, mask=there, other=0) + tl.load(extend_ptr + r, mask=there, other=1)
        column = tl.where(page > 0, (tokens - 1) // tl.maximum(page, 1), 0)
        for group in range(GROUPS):
            entry = table_ptr + group * _TABLE
            said = tl.load(entry + 2).to(tl.pointer_type(tl.int32)) + row * tl.load(entry + 3) + column
            within = there & (column < tl.load(entry + 4))
            planned = tl.load(said, mask=within, other=0).to(tl.int64)
            space, slots = tl.load(entry + 5), tl.load(entry + 6)
            live = within & (planned > 0) & (planned < slots)
            at = tl.where(live, planned, 0)
            blocks = tl.load(entry).to(tl.pointer_type(tl.int32))
            given = tl.load(blocks + r * tl.load(entry + 1) + column, mask=live, other=0).to(tl.int64)
            none = tl.zeros_like(planned)
            bits, why, stored, found = note(
                none, none, none, none, live, given != planned, planned, given, checks, REASON_NOT_THE_PLANNED_SLOT
            )  # fmt: skip
            nowhere = none + UNKNOWN
            tell(
                words_ptr, ring_ptr, capacity, tl.load(entry + 7), bits, why, stored, found, at, nowhere, owner, 0,
                PHASE_PRE,
            )  # fmt: skip
            flags = tl.load(space.to(tl.pointer_type(tl.int32)) + at * SPACE_COLUMNS + COLUMN_FLAGS, mask=live, other=0)
            whose = tl.load(space.to(tl.pointer_type(tl.int64)) + at * SPACE_WIDE + WIDE_OWNER, mask=live, other=0)
            free, shared = flags < REFERENCE, flags >= 2 * REFERENCE
            foreign = (whose != 0) & (owner != 0) & (whose != owner) & (free == 0) & (shared == 0)
            bits, why, stored, found = note(
                none, none, none, none, live, free, owner, none, checks, REASON_WRITE_AFTER_FREE
            )  # fmt: skip
            bits, why, stored, found = note(
                bits, why, stored, found, live, shared, owner, whose, checks, REASON_WRITE_SHARED
            )  # fmt: skip
            bits, why, stored, found = note(
                bits, why, stored, found, live, foreign, owner, whose, checks, REASON_OVERWRITE
            )  # fmt: skip
            tell(
                words_ptr, ring_ptr, capacity, tl.load(entry + 8), bits, why, stored, found, at, nowhere, owner, 0,
                PHASE_PRE,
            )  # fmt: skip

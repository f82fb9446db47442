"""The Triton kernel that copies what is known of pages to memory elsewhere, a row of it for each page."""

from __future__ import annotations

import triton
import triton.language as tl

from ..words import (
    COLUMN_FLAGS,
    COLUMN_POSITION,
    COLUMN_TOKEN,
    FLAG_NAMELESS,
    FLAG_REJECTED,
    FLAG_WRITTEN,
    SPACE_COLUMNS,
    SPACE_WIDE,
    WIDE_CHAIN,
)


@triton.jit(do_not_specialize=["n", "page", "slots", "planes"])
def park_kernel(
    n, entries_ptr,  # int64 [2, n]: pages, and the addresses of their rows
    page,  # slots of one
    block_ptr, wide_ptr, slots,  # the pool's
    digests_ptr, planes,  # int32 [planes, slots]
    PLANES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A row is int32: tokens, positions, both halves of each link of the chain, marks, and the digests by planes.

    The programs along the second axis copy who is in the slots, the first one, and some planes, each of the others.
    """
    number = tl.load(entries_ptr + tl.program_id(0))
    row = tl.load(entries_ptr + n + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    part = tl.program_id(1)
    lane = tl.program_id(2) * LANES + tl.arange(0, LANES)
    inside = lane < page
    slot = number * page + lane
    exists = inside & (slot >= 0) & (slot < slots)
    if part == 0:
        own = block_ptr + slot * SPACE_COLUMNS
        flags = tl.load(own + COLUMN_FLAGS, mask=exists, other=0)
        chain = tl.load(wide_ptr + slot * SPACE_WIDE + WIDE_CHAIN, mask=exists, other=0)
        link = row + 2 * page + 2 * lane  # a row may begin at any multiple of 4 bytes
        tl.store(row + lane, tl.load(own + COLUMN_TOKEN, mask=exists, other=-1), mask=inside)
        tl.store(row + page + lane, tl.load(own + COLUMN_POSITION, mask=exists, other=-1), mask=inside)
        tl.store(link, chain.to(tl.int32), mask=inside)
        tl.store(link + 1, (chain >> 32).to(tl.int32), mask=inside)
        tl.store(row + 4 * page + lane, flags & (FLAG_WRITTEN | FLAG_NAMELESS | FLAG_REJECTED), mask=inside)
    else:
        plane = (part - 1) * PLANES + tl.arange(0, PLANES)
        wanted = (plane < planes)[:, None]
        held = digests_ptr + plane.to(tl.int64)[:, None] * slots + slot[None, :]
        place = row + 5 * page + plane[:, None] * page + lane[None, :]
        tl.store(place, tl.load(held, mask=wanted & exists[None, :], other=0), mask=wanted & inside[None, :])

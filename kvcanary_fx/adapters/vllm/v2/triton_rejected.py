"""The Triton kernel of :mod:`.rejected`, whose :func:`~.rejected.naive` is its reference."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["requests", "mapping_stride"])
def rejected_kernel(
    start_ptr, rejected_ptr, requests,  # integer [bs + 1], integer [bs]
    mapping_ptr, mapping_stride,  # int64 [groups, >= n]
    space_ptr,  # int64 [GROUPS, 3]: address of the block, slots, number of the group
    DRAFTS: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, FLAGS: tl.constexpr,
    WRITTEN: tl.constexpr, REJECTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program: a block of drafted tokens, ``DRAFTS`` for each request, its last one first."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    request, back = i // DRAFTS, i % DRAFTS
    live = request < requests
    gone = live & (back < tl.load(rejected_ptr + request, mask=live, other=0))
    row = tl.load(start_ptr + request + 1, mask=gone, other=0).to(tl.int64) - 1 - back
    for group in tl.static_range(GROUPS):
        block = tl.load(space_ptr + 3 * group).to(tl.pointer_type(tl.int32))
        slots = tl.load(space_ptr + 3 * group + 1)
        number = tl.load(space_ptr + 3 * group + 2)
        slot = tl.load(mapping_ptr + number * mapping_stride + row, mask=gone, other=-1)
        there = gone & (slot >= 0) & (slot < slots)
        entry = block + slot * COLUMNS + FLAGS
        flags = tl.load(entry, mask=there, other=0)
        tl.store(entry, flags | REJECTED, mask=there & ((flags & WRITTEN) != 0))

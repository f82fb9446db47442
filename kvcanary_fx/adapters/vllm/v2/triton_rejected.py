"""The Triton kernel of :mod:`.rejected`, whose :func:`~.rejected.naive` is its reference."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["requests", "most"])
def rejected_kernel(
    start_ptr, rejected_ptr, requests,  # integer [> bs], integer [bs]
    pool_ptr, most,  # int64 [POOLS, 4 + most]: the block, slots, the tokens' slots, digests; addresses of these
    DRAFTS: tl.constexpr, POOLS: tl.constexpr, COLUMNS: tl.constexpr, FLAGS: tl.constexpr,
    WRITTEN: tl.constexpr, REJECTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program: a block of drafted tokens, ``DRAFTS`` for each request, its last one first."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    request, back = i // DRAFTS, i % DRAFTS
    live = request < requests
    gone = live & (back < tl.load(rejected_ptr + request, mask=live, other=0))
    row = tl.load(start_ptr + request + 1, mask=gone, other=0).to(tl.int64) - 1 - back
    for pool in tl.static_range(POOLS):
        words = pool_ptr + pool * (4 + most)
        block, slots = tl.load(words).to(tl.pointer_type(tl.int32)), tl.load(words + 1)
        slot = tl.load(tl.load(words + 2).to(tl.pointer_type(tl.int64)) + row, mask=gone, other=-1)
        there = gone & (slot >= 0) & (slot < slots)
        entry = block + slot * COLUMNS + FLAGS
        flags = tl.load(entry, mask=there, other=0)
        there = there & ((flags & WRITTEN) != 0)
        tl.store(entry, flags | REJECTED, mask=there)
        for digest in range(tl.load(words + 3)):
            known = tl.load(words + 4 + digest).to(tl.pointer_type(tl.int32))
            tl.store(known + slot, flags - flags, mask=there)

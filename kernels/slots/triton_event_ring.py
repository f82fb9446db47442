"""The Triton kernel of :mod:`.event_ring`, whose :func:`~.event_ring.naive` is its reference."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["size", "due_size"])
def land_kernel(
    ring_ptr, size,  # int64 [AHEAD, size], in the host's memory
    turn_ptr, out_ptr,  # int64 [2], int64 [size]
    due_ptr, due_size, due_turn_ptr,  # of a :class:`~.events.Due`: int64 [n, due_size], int64 [1]
    AHEAD: tl.constexpr, HEAD: tl.constexpr, FIRST_PAGE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_DUE: tl.constexpr, DUE: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Each program: a block of words; those that the entry does not have stay as they were."""
    due = tl.full([], 1, tl.int64)
    if HAS_DUE:
        due = tl.load(due_ptr + tl.load(due_turn_ptr) * due_size + DUE)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if due == 0:
        tl.store(out_ptr + i, tl.zeros_like(i), mask=i < COUNTS)
    else:
        turn = tl.load(turn_ptr)
        said = ring_ptr + turn * size
        calls, pages = tl.load(said), tl.load(said + 1)
        live = (i < HEAD + calls * COLUMNS) | ((i >= FIRST_PAGE) & (i < FIRST_PAGE + pages))
        tl.store(out_ptr + i, tl.load(said + i, mask=live, other=0), mask=live)
        tl.debug_barrier()  # all of this program have read whose turn it is
        if tl.atomic_add(turn_ptr + 1, tl.full([], 1, tl.int64)) == tl.num_programs(0) - 1:
            tl.store(turn_ptr + 1, tl.full([], 0, tl.int64))
            tl.store(turn_ptr, (turn + 1) % AHEAD)
            tl.store(said, tl.full([], 0, tl.int64))  # tells the host

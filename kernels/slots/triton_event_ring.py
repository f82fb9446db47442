"""The Triton kernel of :mod:`.event_ring`, whose :func:`~.event_ring.naive` is its reference."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def land_handed_out(
    row_ptr, count, holder, page_size, out_ptr, i,
    HEAD: tl.constexpr, FIRST_PAGE: tl.constexpr, COLUMNS: tl.constexpr, RECORD: tl.constexpr,
    ALLOCATE: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """The calls of pages in a step's row: whoever had all of them releases them, and each gets its owner."""
    released = (holder != 0).to(tl.int64)
    calls, pages = count + released, count + released * count
    head = tl.where(i == 0, calls, tl.where(i == 1, pages, tl.where(i == 2, pages * page_size, 0)))
    call, column = (i - HEAD) // COLUMNS, (i - HEAD) % COLUMNS
    record = call - released
    in_calls = (i >= HEAD) & (call < calls)
    owner = tl.load(row_ptr + RECORD * record + 3, mask=in_calls & (record >= 0), other=0)
    release = tl.where(column == 0, RELEASE, tl.where(column == 1, 0, holder))
    allocate = tl.where(column == 0, ALLOCATE, tl.where(column == 1, released * count + record, owner))
    at = i - FIRST_PAGE
    in_pages = (at >= 0) & (at < pages)
    page = tl.load(row_ptr + RECORD * tl.where(at < count, at, at - count) + 2, mask=in_pages, other=0)
    word = tl.where(i < HEAD, head, tl.where(in_pages, page, tl.where(record < 0, release, allocate)))
    tl.store(out_ptr + i, word, mask=(i < HEAD) | in_calls | in_pages)


@triton.jit(do_not_specialize=["size", "due_size", "page_size"])
def land_kernel(
    ring_ptr, size,  # int64 [AHEAD, size], in the host's memory
    turn_ptr, out_ptr,  # int64 [2], int64 [size]
    due_ptr, due_size, due_turn_ptr, page_size,  # of a :class:`~.events.Due`: int64 [n, due_size], int64 [1]
    AHEAD: tl.constexpr, HEAD: tl.constexpr, FIRST_PAGE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_DUE: tl.constexpr, DUE: tl.constexpr, COUNTS: tl.constexpr, COUNT: tl.constexpr, HOLDER: tl.constexpr,
    RECORDS: tl.constexpr, RECORD: tl.constexpr, HANDED_OUT: tl.constexpr, ALLOCATE: tl.constexpr,
    RELEASE: tl.constexpr,
):  # fmt: skip
    """Each program: a block of words; those that the entry does not have stay as they were."""
    due, row_ptr = tl.full([], 1, tl.int64), due_ptr
    if HAS_DUE:
        row_ptr += tl.load(due_turn_ptr) * due_size
        due = tl.load(row_ptr + DUE)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if due == 0:
        tl.store(out_ptr + i, tl.zeros_like(i), mask=i < COUNTS)
    elif HAS_DUE and due == HANDED_OUT:
        land_handed_out(
            row_ptr + RECORDS, tl.load(row_ptr + COUNT), tl.load(row_ptr + HOLDER), page_size, out_ptr, i,
            HEAD, FIRST_PAGE, COLUMNS, RECORD, ALLOCATE, RELEASE,
        )  # fmt: skip
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

"""The Triton kernel of :mod:`.take_in`, whose :func:`~.take_in.naive` is its reference."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def field_of(said_ptr, kept_ptr, fresh, live):
    """A field of the requests: what the host says, which is kept for later steps, or what was kept."""
    field = tl.load(said_ptr, mask=live & fresh, other=0)
    field += tl.load(kept_ptr, mask=live & (fresh == 0), other=0)
    tl.store(kept_ptr, field, mask=live & fresh)
    return field


@triton.jit(do_not_specialize=["size", "room", "mapping_stride", "tables"])
def take_in_kernel(
    ring_ptr, size,  # int64 [AHEAD, size], in the host's memory; size = HEAD + RECORD * PAGES + FIELDS * room
    turn_ptr, kept_ptr, room,  # int64 [2], int64 [FIELDS * room]
    counts_ptr, live_ptr, clock_ptr,  # int64 [3] each, int64 [1]
    row_ptr, owner_ptr, space_ptr, prefix_ptr, extend_ptr,  # int64 [bs] each
    stored_ptr, start_ptr,  # integer [states], integer [> bs]
    given_token_ptr, given_position_ptr,  # integer [>= n] each
    mapping_ptr, mapping_stride,  # int64 [groups, >= n]
    token_ptr, position_ptr,  # int64 [n] each
    address_ptr, tables,  # int64 [GROUPS + tables + GROUPS]: of the slots, of the tables, the groups' numbers
    AHEAD: tl.constexpr, HEAD: tl.constexpr, DUE: tl.constexpr, PAGES: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """Each program: a block of requests, of tokens and of pages."""
    turn = tl.load(turn_ptr)
    landing_ptr = ring_ptr + turn * size
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    requests, tokens = tl.load(landing_ptr), tl.load(landing_ptr + 1)
    step, pages, fresh = tl.load(landing_ptr + 2), tl.load(landing_ptr + 3), tl.load(landing_ptr + 4) != 0
    goes_on = requests == 0
    if goes_on:
        requests, tokens, step = tl.load(live_ptr), tl.load(live_ptr + 1), tl.load(live_ptr + 2) + 1
        pages, fresh = tl.zeros_like(pages), fresh & (goes_on == 0)

    live = i < requests
    said, kept = landing_ptr + HEAD + RECORD * PAGES + i, kept_ptr + i
    tl.store(row_ptr + i, field_of(said, kept, fresh, live), mask=live)
    tl.store(owner_ptr + i, field_of(said + room, kept + room, fresh, live), mask=live)
    tl.store(space_ptr + i, field_of(said + 2 * room, kept + 2 * room, fresh, live), mask=live)
    index = field_of(said + 3 * room, kept + 3 * room, fresh, live)
    tl.store(prefix_ptr + i, tl.load(stored_ptr + index, mask=live, other=0).to(tl.int64), mask=live)
    added = field_of(said + 4 * room, kept + 4 * room, fresh, live)
    begin = tl.load(start_ptr + i, mask=live, other=0).to(tl.int64)
    span = tl.load(start_ptr + i + 1, mask=live, other=0).to(tl.int64) - begin
    tl.store(extend_ptr + i, tl.where(added < 0, span, added), mask=live)

    there = i < tokens
    tl.store(token_ptr + i, tl.load(given_token_ptr + i, mask=there, other=0).to(tl.int64), mask=there)
    tl.store(position_ptr + i, tl.load(given_position_ptr + i, mask=there, other=0).to(tl.int64), mask=there)
    for group in tl.static_range(GROUPS):
        out = tl.load(address_ptr + group).to(tl.pointer_type(tl.int64))
        number = tl.load(address_ptr + GROUPS + tables + group)
        slot = tl.load(mapping_ptr + number * mapping_stride + i, mask=there, other=-1)
        tl.store(out + i, slot, mask=there)

    new = i < pages
    page = landing_ptr + HEAD + RECORD * i
    table = tl.load(address_ptr + GROUPS + tl.load(page, mask=new, other=0), mask=new, other=0)
    place = tl.load(page + 1, mask=new, other=0)
    entry = (table + 4 * place).to(tl.pointer_type(tl.int32))
    tl.store(entry, tl.load(page + 2, mask=new, other=0).to(tl.int32), mask=new)

    tl.debug_barrier()  # all of this program have read whose turn it is, and how the last launch went
    if tl.atomic_add(turn_ptr + 1, tl.full([], 1, tl.int64)) == tl.num_programs(0) - 1:
        tl.store(live_ptr, requests)
        tl.store(live_ptr + 1, tokens)
        tl.store(live_ptr + 2, step)
        if requests >= 0:
            tl.store(counts_ptr, requests)
            tl.store(counts_ptr + 1, tokens)
            tl.store(counts_ptr + 2, step)
            tl.store(clock_ptr, step << 32)  # the forward is the step's first
        tl.store(turn_ptr + 1, tl.full([], 0, tl.int64))
        tl.store(landing_ptr + DUE, tl.full([], 0, tl.int64))
        tl.store(turn_ptr, (turn + 1) % AHEAD)
        tl.store(landing_ptr, tl.full([], 0, tl.int64))  # tells the host

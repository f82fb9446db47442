"""The Triton kernel of :mod:`.take_in`, whose :func:`~.take_in.naive` is its reference."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["room", "mapping_stride", "tables"])
def take_in_kernel(
    landing_ptr, room,  # int64 [HEAD + 3 * PAGES + FIELDS * room]
    counts_ptr, clock_ptr,  # int64 [3], int64 [1]
    row_ptr, owner_ptr, space_ptr, prefix_ptr, extend_ptr,  # int64 [bs] each
    stored_ptr, start_ptr,  # integer [states], integer [> bs]
    given_token_ptr, given_position_ptr,  # integer [>= n] each
    mapping_ptr, mapping_stride,  # int64 [groups, >= n]
    token_ptr, position_ptr,  # int64 [n] each
    address_ptr, tables,  # int64 [GROUPS + tables + GROUPS]: of the slots, of the tables, the groups' numbers
    HEAD: tl.constexpr, PAGES: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program: a block of requests, of tokens and of pages."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    requests, tokens = tl.load(landing_ptr), tl.load(landing_ptr + 1)
    step, pages = tl.load(landing_ptr + 2), tl.load(landing_ptr + 3)
    if tl.program_id(0) == 0:
        tl.store(counts_ptr, requests)
        tl.store(counts_ptr + 1, tokens)
        tl.store(counts_ptr + 2, step)
        tl.store(clock_ptr, step << 32)  # the forward is the step's first

    live = i < requests
    fields = landing_ptr + HEAD + 3 * PAGES + i
    tl.store(row_ptr + i, tl.load(fields, mask=live, other=0), mask=live)
    tl.store(owner_ptr + i, tl.load(fields + room, mask=live, other=0), mask=live)
    tl.store(space_ptr + i, tl.load(fields + 2 * room, mask=live, other=0), mask=live)
    index = tl.load(fields + 3 * room, mask=live, other=0)
    tl.store(prefix_ptr + i, tl.load(stored_ptr + index, mask=live, other=0).to(tl.int64), mask=live)
    added = tl.load(fields + 4 * room, mask=live, other=0)
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
    page = landing_ptr + HEAD + 3 * i
    table = tl.load(address_ptr + GROUPS + tl.load(page, mask=new, other=0), mask=new, other=0)
    place = tl.load(page + 1, mask=new, other=0)
    entry = (table + 4 * place).to(tl.pointer_type(tl.int32))
    tl.store(entry, tl.load(page + 2, mask=new, other=0).to(tl.int32), mask=new)

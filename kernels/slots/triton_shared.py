"""What the Triton kernels of the identity checks share: the words they read, and how a failure is reported.

The kernels are in :mod:`.triton_reads` and :mod:`.triton_writes`, their launches in :mod:`.gpu`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_ring import append
from ..words import (
    COLUMN_FLAGS,
    MIX_A,
    MIX_B,
    MIX_C,
    REASONS_BELOW,
    SEED,
    SPACE_COLUMNS,
    SPACE_WIDE,
    UNKNOWN,
    WIDE_CHAIN,
)

#: Arguments that differ between steps, pools and sessions: Triton would compile a kernel anew for each value of 1 and
#: for each multiple of 16.
PER_STEP = [
    "bs", "n", "steps", "stop", "slots", "map_size", "history_width", "history_stride", "history_step", "history_rows",
    "table_rows",
    "row_stride", "page_stride", "columns", "received_count", "room", "pages_stride", "pages_step", "window", "chunk",
    "offset", "capacity", "source", "checks", "width", "every", "once",
    "padding", "mark", "index_count", "unit", "stride",
]  # fmt: skip


@triton.jit
def mix(token, position):
    """:func:`.chain.mix_tensor`: shifts of int64 are arithmetic, so what they bring in is masked."""
    x = token * MIX_A + position * MIX_B
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_B
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_C
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def kept_bits(token):
    """See :func:`.tokens.kept_bits`."""
    return token.to(tl.int32).to(tl.int64)


@triton.jit
def namespace_seed(spaces_ptr, request, mask, HAS_SPACES: tl.constexpr):
    """Where each request's chain starts."""
    seed = tl.zeros_like(request) + SEED
    if HAS_SPACES:
        space = tl.load(spaces_ptr + request, mask=mask, other=0).to(tl.int64)
        seed = tl.where(space == 0, seed, seed + mix(space, tl.zeros_like(space) - 1))
    return seed


@triton.jit
def table_slot(
    table_ptr, row, row_stride, page_stride, table_rows, columns, position, map_ptr, map_size, mask,
    PAGE: tl.constexpr, HAS_MAP: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """The slot that the request table gives for a position, in this pool's index space."""
    row = tl.minimum(tl.maximum(row, 0), table_rows - 1)
    page = tl.maximum(position, 0) // PAGE
    page = page % columns if RING else tl.minimum(page, columns - 1)
    raw = tl.load(table_ptr + row * row_stride + page * page_stride, mask=mask, other=0).to(tl.int64)
    slot = raw * PAGE + position % PAGE
    if HAS_MAP:
        known = mask & (slot >= 0) & (slot < map_size)
        slot = tl.load(map_ptr + tl.where(known, slot, 0), mask=known, other=-1).to(tl.int64)
    return slot


@triton.jit
def note(bits, why, stored, found, live, bad, expected, got, checks, REASON: tl.constexpr):
    """Note a failed check, if it is one of ``checks``: each sets its bit, the first one gives the reason."""
    CHECK: tl.constexpr = REASON // REASONS_BELOW
    WHY: tl.constexpr = REASON % REASONS_BELOW
    bad = bad & live & ((checks & CHECK) != 0)
    # not (bits == 0): Triton 3.6 compiled that to false for some checks on an H200; the random plans show it
    first = bad & (why == 0)
    bits = bits | tl.where(bad, CHECK, 0).to(tl.int64)
    why = tl.where(first, WHY, why)
    stored = tl.where(first, expected, stored)
    found = tl.where(first, got, found)
    return bits, why, stored, found


@triton.jit
def tell(
    words_ptr, ring_ptr, capacity, source, bits, why, stored, found, slot, position, request, detail,
    PHASE: tl.constexpr,
):  # fmt: skip
    """Append a ring row for each lane with a failure; rows without room are counted and dropped."""
    if tl.max(bits, axis=0) != 0:
        append(
            words_ptr, ring_ptr, capacity, bits != 0, source, bits, PHASE, 0, slot, UNKNOWN, stored, found, detail,
            request, position, why,
        )  # fmt: skip


@triton.jit
def expected_token(
    history_ptr, history_stride, history_step, history_width, history_rows, history_lens_ptr, row_ptr, request,
    position, offset, mask,
    BY_ROW: tl.constexpr,
):  # fmt: skip
    """``(whether the request's history has the position, its token there)``."""
    place = position + offset
    length = tl.load(history_lens_ptr + request, mask=mask, other=0).to(tl.int64)
    valid = mask & (place < tl.minimum(length, history_width))
    of = request
    if BY_ROW:
        row = tl.load(row_ptr + request, mask=mask, other=0).to(tl.int64)
        of = tl.minimum(tl.maximum(row, 0), history_rows - 1)
    at = history_ptr + of * history_stride + tl.minimum(place, history_width - 1) * history_step
    return valid, kept_bits(tl.load(at, mask=valid, other=0))


@triton.jit
def token_request(i, n, counts_ptr, ends_ptr, bs, steps, row_ptr, padding, HAS_PADDING: tl.constexpr):
    """``(request, place, real)`` of added tokens, see :func:`.tokens.token_requests`; int64, int64, bool.

    Args:
        ends_ptr: int64 ``[bs]``, where each request's tokens end, as :func:`find_ends` leaves it.
        steps: halvings until one of ``bs`` requests is left.
        padding: the row that means padding, where there is one.
    """
    # a captured launch has a larger bs than the step: only the ends of real requests are known
    requests = tl.minimum(tl.load(counts_ptr), bs)
    total = tl.load(ends_ptr + tl.maximum(requests - 1, 0), mask=requests > 0, other=0)
    real = (i < n) & (i < tl.load(counts_ptr + 1)) & (i < total)
    # a decode batch has one token each: the first guess is right
    request, guess = i, real & (i < requests)
    begin = tl.load(ends_ptr + i - 1, mask=guess & (i > 0), other=0)
    right = guess & (begin <= i) & (i < tl.load(ends_ptr + i, mask=guess, other=0))
    if tl.min((right | (real == 0)).to(tl.int32), axis=0) == 0:
        request = tl.zeros_like(i)
        last = request + requests
        for _ in range(steps):
            middle = (request + last) // 2
            open_ = real & (request < last)
            later = open_ & (tl.load(ends_ptr + middle, mask=open_, other=0) <= i)
            request = tl.where(later, middle + 1, request)
            last = tl.where(later, last, middle)
        begin = tl.load(ends_ptr + request - 1, mask=real & (request > 0), other=0)
    request = tl.where(real, request, 0)
    return request, i - begin, real & (of_padding(row_ptr, request, real, padding, HAS_PADDING) == 0)


@triton.jit
def of_padding(row_ptr, request, mask, padding, HAS_PADDING: tl.constexpr):
    """bool: requests that are padding by their row."""
    if HAS_PADDING:
        return mask & (tl.load(row_ptr + request, mask=mask, other=0).to(tl.int64) == padding)
    return mask & (request < 0)


@triton.jit
def find_ends(counts_ptr, extend_ptr, ends_ptr, bs, BLOCK: tl.constexpr):
    """Where each request's added tokens end, and their number; by one program."""
    requests = tl.load(counts_ptr)
    total = tl.full([], 0, tl.int64)
    for r0 in range(0, bs, BLOCK):
        r = r0 + tl.arange(0, BLOCK)
        lens = tl.load(extend_ptr + r, mask=(r < bs) & (r < requests), other=0).to(tl.int64)
        tl.store(ends_ptr + r, total + tl.cumsum(lens, axis=0), mask=r < bs)
        total += tl.sum(lens, axis=0)
    return total


@triton.jit
def plan_writes(planned_ptr, block_ptr, clock, slots, i, slot, real, mark):
    """Leave in each slot that a forward writes the first token that goes there, and the mark ``PLANNED`` or none.

    What an earlier forward left in ``planned`` is larger.
    """
    real = real & (slot >= 0) & (slot < slots)
    at = tl.where(real, slot, slots)
    tl.atomic_min(planned_ptr + at, i - ((clock.to(tl.int64) + 1) << 32), mask=real, sem="relaxed")
    tl.atomic_or(
        block_ptr + at * SPACE_COLUMNS + COLUMN_FLAGS, tl.zeros_like(at).to(tl.int32) + mark, mask=real, sem="relaxed"
    )


@triton.jit
def entry_of(wide_ptr, at, mask):
    """``(token, position, flags, forward that read it, chain, owner)`` of slots, in two loads of sixteen bytes.

    Four loads of eight bytes took 12.0 us instead of 11.6 for the walk of 64 requests of 4,096 tokens.  A tile of all
    32 bytes of a slot, taken apart afterwards, was slower than those: 20.4 us against 15.7 (H200, Triton 3.6).
    """
    pair = tl.arange(0, 2)
    base = tl.expand_dims(wide_ptr + at * SPACE_WIDE, -1) + pair
    both = tl.expand_dims(mask, -1) & (pair >= 0)
    who, state = tl.split(tl.load(base, mask=both, other=0))
    chain, owner = tl.split(tl.load(base + WIDE_CHAIN, mask=both, other=0))
    return who.to(tl.int32).to(tl.int64), who >> 32, state.to(tl.int32), (state >> 32).to(tl.int32), chain, owner

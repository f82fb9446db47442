"""The Triton kernels of :mod:`.state_checks`, whose :class:`~.state_checks.StateChecks` is their reference on a CPU."""

from __future__ import annotations

import triton
import triton.language as tl

from ....kernels.content.triton_digest import add_words
from ....kernels.content.triton_half import packed
from ....kernels.slots.triton_shared import tell
from ....kernels.words import (
    CHECK_CONTENT,
    COUNT_CHECKED,
    COUNT_RECORDED,
    PHASE_PRE,
    WORD_FORWARD,
    ZERO_STANDS_FOR,
)

#: Columns of the table of states: address of the first block, words from block to block and in a state, address of the
#: digests, entries of a plane of these, two seeds, the half's number, address of its counters, its group.
COLUMNS = 10

_COLUMNS: tl.constexpr = tl.constexpr(COLUMNS)


@triton.jit
def digested(
    entry, request, mine, known, block, stored1, words_ptr, ring_ptr, capacity,
    PLANES: tl.constexpr, COMPARES: tl.constexpr,
):  # fmt: skip
    """All parts of a state have been summed up: compare the digest, or keep it, and leave zeros for the next launch."""
    digest_ptr, plane = tl.load(entry + 3).to(tl.pointer_type(tl.int32)), tl.load(entry + 4)
    counters_ptr = tl.load(entry + 8).to(tl.pointer_type(tl.int64))
    h1 = tl.atomic_xchg(mine, 0) + tl.load(entry + 5).to(tl.int32)
    h1 = tl.where(h1 == 0, ZERO_STANDS_FOR, h1)
    h2, stored2 = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    if PLANES == 2:
        h2 = tl.atomic_xchg(mine + 1, 0) + tl.load(entry + 6).to(tl.int32)
        stored2 = tl.load(digest_ptr + plane + known)
    tl.atomic_xchg(mine + 2, 0)
    count = tl.full([], 1, tl.int64)
    if COMPARES:
        one = tl.zeros([1], tl.int64)
        bad = (one == 0) & ((h1 != stored1) | (h2 != stored2))
        bits = tl.where(bad, CHECK_CONTENT, 0).to(tl.int64)
        tell(
            words_ptr, ring_ptr, capacity, tl.load(entry + 7), bits, one, one + packed(stored1, stored2, PLANES),
            one + packed(h1, h2, PLANES), one + block, one + tl.load(request + 1), one + tl.load(request), 0, PHASE_PRE,
        )  # fmt: skip
        if known == block:  # the step rewrites it
            tl.store(digest_ptr + known, 0)
        tl.atomic_add(counters_ptr + COUNT_CHECKED, count, sem="relaxed")
    else:
        tl.store(digest_ptr + block, h1)
        if PLANES == 2:
            tl.store(digest_ptr + plane + block, h2)
        tl.atomic_add(counters_ptr + COUNT_RECORDED, count, sem="relaxed")


@triton.jit(do_not_specialize=["first", "capacity", "coef_words", "halves"])
def states_kernel(
    step_ptr, first,  # int64 [HEAD + requests * (ROW + 2 * GROUPS)]; the first request of the launch
    half_ptr, halves,  # int64 [halves, COLUMNS]
    coef_ptr, coef_words,  # int32 [2, coef_words]
    sums_ptr,  # int32 [requests, halves, 4]: two sums, and the programs that have added to them; zeros between launches
    words_ptr, ring_ptr, capacity,
    GROUPS: tl.constexpr, HEAD: tl.constexpr, ROW: tl.constexpr, PLANES: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, ALIGNED: tl.constexpr, COMPARES: tl.constexpr,
):  # fmt: skip
    """Each program: a part of one state of one request; the last of a state does what is done with the digest."""
    entry = half_ptr + tl.program_id(1) * _COLUMNS
    words, group = tl.load(entry + 2), tl.load(entry + 9)
    begin = tl.program_id(0) * CHUNK
    if begin >= words:
        return
    if COMPARES:  # reports carry it; all programs write the same
        tl.store(words_ptr + WORD_FORWARD, tl.load(step_ptr) << 32)
    request = step_ptr + HEAD + (first + tl.program_id(2)) * (ROW + 2 * GROUPS)
    known, block = tl.load(request + ROW + group), tl.load(request + ROW + GROUPS + group)
    stored1 = tl.load(tl.load(entry + 3).to(tl.pointer_type(tl.int32)) + known)
    if COMPARES:  # noqa: SIM102  for the compiler, and not of a value
        if stored1 == 0:
            return
    base, start = tl.load(entry).to(tl.pointer_type(tl.int32)), block * tl.load(entry + 1)
    if ALIGNED:
        base, start = tl.multiple_of(base, 16), tl.multiple_of(start, 4)
    sum1, sum2 = tl.zeros([1, TILE], tl.int32), tl.zeros([1, TILE], tl.int32)
    hits = tl.zeros([TILE], tl.uint32)
    for w0 in range(0, CHUNK, TILE):
        word = begin + w0 + tl.arange(0, TILE)
        w = tl.load(base + start + word, mask=word < words, other=0)[None, :]
        sum1, sum2, hits = add_words(sum1, sum2, hits, w, word, coef_ptr, coef_words, PLANES, 0, 0, 4)

    mine = sums_ptr + (tl.program_id(2) * halves + tl.program_id(1)).to(tl.int64) * 4
    tl.atomic_add(mine, tl.sum(tl.sum(sum1, axis=1), axis=0), sem="relaxed")
    if PLANES == 2:
        tl.atomic_add(mine + 1, tl.sum(tl.sum(sum2, axis=1), axis=0), sem="relaxed")
    tl.debug_barrier()
    parts = (words + CHUNK - 1) // CHUNK
    if tl.atomic_add(mine + 2, 1, sem="acq_rel").to(tl.int64) == parts - 1:
        digested(
            entry, request, mine, known, block, stored1, words_ptr, ring_ptr, capacity, PLANES, COMPARES,
        )  # fmt: skip

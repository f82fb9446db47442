"""The one writer of a ring row in Triton; :func:`.ring.append` is the one in torch."""

from __future__ import annotations

import triton
import triton.language as tl

from .words import (
    RING_CHECK,
    RING_COLUMNS,
    RING_DETAIL,
    RING_FORWARD,
    RING_FOUND,
    RING_HALF,
    RING_LENIENT,
    RING_ORIGIN,
    RING_PHASE,
    RING_POSITION,
    RING_REQUEST,
    RING_SLOT,
    RING_STEP,
    RING_STORED,
    RING_WHY,
    WORD_BELL,
    WORD_DRAINED,
    WORD_FORWARD,
    WORD_HEAD,
    WORD_STEP,
)


@triton.jit
def append(
    words_ptr, ring_ptr, capacity, mask, half, check, phase, lenient, slot, origin, stored, found, detail, request,
    position, why,
):  # fmt: skip
    """Append a row for every lane of ``mask``, and tell the host; rows without room are counted and dropped.

    ``stored`` has a value for each lane, the others that or one for all.
    """
    zero = tl.full(stored.shape, 0, tl.int64)
    number = tl.atomic_add(words_ptr + WORD_HEAD + zero, zero + 1, mask=mask, sem="relaxed")
    keep = mask & (number - tl.load(words_ptr + WORD_DRAINED) < capacity)
    at = ring_ptr + (number % capacity) * RING_COLUMNS
    tl.store(at + RING_STEP, tl.load(words_ptr + WORD_STEP) + zero, mask=keep)
    tl.store(at + RING_HALF, zero + half, mask=keep)
    tl.store(at + RING_CHECK, zero + check, mask=keep)
    tl.store(at + RING_PHASE, zero + phase, mask=keep)
    tl.store(at + RING_LENIENT, zero + lenient, mask=keep)
    tl.store(at + RING_SLOT, zero + slot, mask=keep)
    tl.store(at + RING_ORIGIN, zero + origin, mask=keep)
    tl.store(at + RING_STORED, zero + stored, mask=keep)
    tl.store(at + RING_FOUND, zero + found, mask=keep)
    tl.store(at + RING_DETAIL, zero + detail, mask=keep)
    tl.store(at + RING_REQUEST, zero + request, mask=keep)
    tl.store(at + RING_POSITION, zero + position, mask=keep)
    tl.store(at + RING_WHY, zero + why, mask=keep)
    tl.store(at + RING_FORWARD, tl.load(words_ptr + WORD_FORWARD) + zero, mask=keep)
    # last, and not before the row has its number: the host may look for it as soon as it hears of it
    bell = tl.load(words_ptr + WORD_BELL)
    tl.store(bell.to(tl.pointer_type(tl.int64)) + zero, number + 1, mask=mask & (bell != 0))

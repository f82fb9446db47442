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
    # a store in a loop stands for several: with fourteen, Triton took a third longer to compile a kernel that has one
    for column in range(RING_HALF, RING_LENIENT + 1):
        value = tl.where(column == RING_CHECK, check, tl.where(column == RING_PHASE, phase, half))
        tl.store(at + column, zero + tl.where(column == RING_LENIENT, lenient, value), mask=keep)
    for column in range(RING_SLOT, RING_POSITION + 1):
        value = tl.where(column == RING_ORIGIN, origin, zero + slot)
        value = tl.where(column == RING_STORED, stored, value)
        value = tl.where(column == RING_FOUND, found, value)
        value = tl.where(column == RING_DETAIL, detail, value)
        value = tl.where(column == RING_REQUEST, request, value)
        tl.store(at + column, tl.where(column == RING_POSITION, position, value), mask=keep)
    tl.store(at + RING_STEP, tl.load(words_ptr + WORD_STEP) + zero, mask=keep)
    tl.store(at + RING_WHY, zero + why, mask=keep)
    tl.store(at + RING_FORWARD, tl.load(words_ptr + WORD_FORWARD) + zero, mask=keep)
    # last, and not before the row has its number: the host may look for it as soon as it hears of it
    bell = tl.load(words_ptr + WORD_BELL)
    tl.store(bell.to(tl.pointer_type(tl.int64)) + zero, number + 1, mask=mask & (bell != 0))

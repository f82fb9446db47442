"""What Triton kernels write into the history of slots; :mod:`.naive_history` says what that is."""

from __future__ import annotations

import triton
import triton.language as tl

from ..words import (
    KIND_WRITE,
    PAST_EVENTS,
    PAST_FIRST_READ,
    PAST_FORWARD_UNIT,
    PAST_FORWARDS,
    PAST_HEAD,
    PAST_LAST_READ,
    PAST_READ_BEFORE,
    PAST_READS,
    PAST_TOLD,
    PAST_WRITE,
    TOLD_OWNER,
    TOLD_STEP,
    TOLD_WHAT,
    WORD_FORWARD,
)


@triton.jit
def step_now(words_ptr):
    """The number of the engine's step, int32."""
    return (tl.load(words_ptr + WORD_FORWARD) >> 32).to(tl.int32)


@triton.jit
def past_row(past_ptr, at, KEPT: tl.constexpr):
    """Where the history of each slot begins."""
    return past_ptr + at.to(tl.int64) * (PAST_HEAD + PAST_TOLD * KEPT)


@triton.jit
def put_event(place, step, what, owner, mask):
    """One event, a place for each lane."""
    tl.store(place + TOLD_STEP, step, mask=mask)
    tl.store(place + TOLD_WHAT, what, mask=mask)
    tl.store(place + TOLD_OWNER, owner, mask=mask)


@triton.jit
def note_write(past_ptr, words_ptr, at, owner, mask, KEPT: tl.constexpr):
    """A forward wrote slots, each once; ``owner`` int64, of each lane."""
    row = past_row(past_ptr, at, KEPT)
    step = step_now(words_ptr) + tl.zeros_like(at).to(tl.int32)
    forward = (tl.load(words_ptr + WORD_FORWARD) & (PAST_FORWARDS - 1)).to(tl.int32)
    what = KIND_WRITE + forward * PAST_FORWARD_UNIT + tl.zeros_like(step)
    owner = owner.to(tl.int32)
    number = tl.load(row + PAST_EVENTS, mask=mask, other=0)
    newest = row + PAST_HEAD + tl.maximum(number - 1, 0) % KEPT * PAST_TOLD
    written = tl.load(newest + TOLD_WHAT, mask=mask, other=0) % PAST_FORWARD_UNIT == KIND_WRITE
    same = tl.load(newest + TOLD_OWNER, mask=mask, other=0) == owner
    number = tl.where((number > 0) & written & same, number - 1, number)
    put_event(row + PAST_HEAD + number % KEPT * PAST_TOLD, step, what, owner, mask)
    put_event(row + PAST_WRITE, step, what, owner, mask)
    tl.store(row + PAST_EVENTS, number + 1, mask=mask)


@triton.jit
def note_read(past_ptr, words_ptr, at, mask, KEPT: tl.constexpr):
    """The bytes of slots are compared for a forward that reads them; each slot is in one lane of all programs."""
    row = past_row(past_ptr, at, KEPT)
    step = step_now(words_ptr) + tl.zeros_like(at).to(tl.int32)
    reads = tl.load(row + PAST_READS, mask=mask, other=0)
    tl.store(row + PAST_FIRST_READ, step, mask=mask & (reads == 0))
    tl.store(row + PAST_READ_BEFORE, tl.load(row + PAST_LAST_READ, mask=mask, other=0), mask=mask)
    tl.store(row + PAST_LAST_READ, step, mask=mask)
    tl.store(row + PAST_READS, reads + 1, mask=mask)


@triton.jit
def forget_reads(row, mask):
    """Slots were allocated: they have not been read since."""
    none = tl.zeros_like(mask.to(tl.int32)) - 1
    tl.store(row + PAST_FIRST_READ, none, mask=mask)
    tl.store(row + PAST_LAST_READ, none, mask=mask)
    tl.store(row + PAST_READ_BEFORE, none, mask=mask)
    tl.store(row + PAST_READS, none + 1, mask=mask)

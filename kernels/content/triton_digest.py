"""The digest of rows, in Triton: words gathered through strides, mixed and summed.  See :mod:`.digest`."""

from __future__ import annotations

import triton
import triton.language as tl

from ..words import (
    ZERO_STANDS_FOR,
)

NO_POISON: tl.constexpr = tl.constexpr(2**62)


@triton.jit
def load_words(
    base, start, live, word, units, n1, n2, n3, d0, d1, d2, d3, words_in_row, UNIT: tl.constexpr
):  # fmt: skip
    """32-bit words ``word`` [W] of the rows that begin ``start`` [B] units after ``base``: int32 [B, W]."""
    per_word: tl.constexpr = 4 // UNIT
    out = tl.zeros([start.shape[0], word.shape[0]], tl.int32)
    for k in tl.static_range(per_word):
        e = word * per_word + k
        offset = (e // (n1 * n2 * n3)).to(tl.int64) * d0 + (e // (n2 * n3) % n1).to(tl.int64) * d1
        offset += (e // n3 % n2).to(tl.int64) * d2 + (e % n3).to(tl.int64) * d3
        mask = live[:, None] & ((e < units) & (word < words_in_row))[None, :]
        x = tl.load(base + start[:, None] + offset[None, :], mask=mask, other=0).to(tl.int32)
        if UNIT == 4:
            out = x
        else:
            out |= (x & ((1 << (8 * UNIT)) - 1)) << (8 * UNIT * k)
    return out


@triton.jit
def _poisoned(w, word, MASK: tl.constexpr, BITS: tl.constexpr, ELEMENT: tl.constexpr):
    """Whether words hold a NaN or an Inf."""
    if ELEMENT >= 4:
        bad = (w & MASK) == BITS
        if ELEMENT == 8:
            bad = bad & ((word % 2) == 1)[None, :]
    else:
        bad = w != w
        for k in tl.static_range(4 // ELEMENT):
            bad = bad | (((w >> (8 * ELEMENT * k)) & MASK) == BITS)
    return bad


@triton.jit
def _poison_in(w, word, MASK: tl.constexpr, BITS: tl.constexpr, ELEMENT: tl.constexpr):
    """int32, not 0 for words that hold a NaN or an Inf: :func:`_poisoned` of all elements of a word at once.

    Where an exponent of ones, the bits of the mask, is just below the sign, adding the mask's lowest bit carries into
    the sign.  With two comparisons for each word of bf16 a record of 262,144 slots took 172 us instead of 159 (H200).
    """
    LOWEST: tl.constexpr = MASK & (-MASK)
    CARRIES: tl.constexpr = (ELEMENT <= 4) and (MASK == BITS) and (MASK + LOWEST == 2 ** (8 * ELEMENT - 1))
    if CARRIES:
        EACH: tl.constexpr = (2**32 - 1) // (2 ** (8 * ELEMENT) - 1)  # times an element is a word of such elements
        SIGNS: tl.constexpr = EACH * 2 ** (8 * ELEMENT - 1) - 2**32
        hit = ((w & (MASK * EACH)) + LOWEST * EACH) & SIGNS
    else:
        hit = _poisoned(w, word, MASK, BITS, ELEMENT).to(tl.int32)
    return hit


@triton.jit
def any_bits(hits, bits):
    """uint32 [W], not 0 where ``hits`` [W] is not, or a row of ``bits`` [B, W] has a bit there.

    In a tile's shape it would take as many registers as a sum of digests: with one for poison and one for the operand a
    record of 262,144 slots took 323 us instead of 275 (H200).
    """
    return tl.maximum(hits, tl.max(bits.to(tl.uint32, bitcast=True), axis=0))


@triton.jit
def _mixed(w, a, b):
    """The bijection of :func:`.digest.mixed`; shifts of int32 are arithmetic, so what they bring in is masked."""
    u = (w ^ ((w >> 16) & 0xFFFF)) * a
    return (u ^ ((u >> 15) & 0x1FFFF)) * b


@triton.jit
def digest_of_rows(
    base, start, live, coef_ptr, seed1, seed2, words_in_row, units, n1, n2, n3, d0, d1, d2, d3,
    UNIT: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    POISON_MASK: tl.constexpr, POISON_BITS: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """``(h1, h2, suspect)`` of rows [BLOCK]: int32 digests, and those among which a row holds a NaN or an Inf."""
    sum1 = tl.zeros([BLOCK, BLOCK_WORDS], tl.int32)
    sum2 = tl.zeros([BLOCK, BLOCK_WORDS], tl.int32)
    hits = tl.zeros([BLOCK_WORDS], tl.uint32)
    for w0 in range(0, words_in_row, BLOCK_WORDS):
        word = w0 + tl.arange(0, BLOCK_WORDS)
        w = load_words(base, start, live, word, units, n1, n2, n3, d0, d1, d2, d3, words_in_row, UNIT)
        sum1, sum2, hits = add_words(
            sum1, sum2, hits, w, word, coef_ptr, words_in_row, PLANES, POISON_MASK, POISON_BITS, ELEMENT
        )  # fmt: skip
    return digests_of_sums(sum1, sum2, hits, live, seed1, seed2, POISON_MASK)


@triton.jit
def add_words(
    sum1, sum2, hits, w, word, coef_ptr, words_in_row,
    PLANES: tl.constexpr, POISON_MASK: tl.constexpr, POISON_BITS: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """What :func:`digest_of_rows` has summed up, int32 [B, W] and uint32 [W], and the words ``w``, number ``word``."""
    c = tl.load(coef_ptr + word, mask=word < words_in_row, other=0)[None, :]
    d = tl.load(coef_ptr + words_in_row + word, mask=word < words_in_row, other=0)[None, :]
    sum1 += _mixed(w, c, d)
    if PLANES == 2:
        sum2 += _mixed(w, d, c)
    if POISON_MASK != 0:
        hits = any_bits(hits, _poison_in(w, word, POISON_MASK, POISON_BITS, ELEMENT))  # what was not loaded is 0
    return sum1, sum2, hits


@triton.jit
def digests_of_sums(sum1, sum2, hits, live, seed1, seed2, POISON_MASK: tl.constexpr):
    """The result of :func:`digest_of_rows` out of its sums."""
    suspect = live & (live == 0)
    if POISON_MASK != 0:
        suspect = live & (tl.max(hits, axis=0) != 0)
    h1 = tl.sum(sum1, axis=1) + seed1
    h1 = tl.where(h1 == 0, ZERO_STANDS_FOR, h1)
    return h1, tl.sum(sum2, axis=1) + seed2, suspect


@triton.jit
def first_poison(
    base, start, live, words_in_row, units, n1, n2, n3, d0, d1, d2, d3,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    POISON_MASK: tl.constexpr, POISON_BITS: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """The lowest poisoned word << 32 | its bits, of rows [BLOCK]; :data:`NO_POISON` where there is none.

    Looked for only where :func:`digest_of_rows` saw one: to keep it along with the digest made the record of a prefill
    1.8 times as long (247 against 134 us for 262,144 slots, H200).
    """
    poison = tl.full([BLOCK], NO_POISON, tl.int64)
    for w0 in range(0, words_in_row, BLOCK_WORDS):
        word = w0 + tl.arange(0, BLOCK_WORDS)
        w = load_words(base, start, live, word, units, n1, n2, n3, d0, d1, d2, d3, words_in_row, UNIT)
        bad = _poisoned(w, word, POISON_MASK, POISON_BITS, ELEMENT) & (word < words_in_row)[None, :]
        key = (word.to(tl.int64) << 32)[None, :] | (w.to(tl.int64) & 0xFFFFFFFF)
        poison = tl.minimum(poison, tl.min(tl.where(bad, key, NO_POISON), axis=1))
    return poison

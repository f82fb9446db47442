"""The content digest of a slot: its definition, in words, and the plain reference.

Every other implementation (vectorised torch on the CPU, Triton on a GPU) must equal this one bit for
bit, so nothing here is clever.

A *row* is the bytes of one slot in one half (K or V) of one layer, gathered over the view's strides in
index order.  It is cut into 32-bit little-endian words ``w_0, w_1, ...``; the last word is padded with
zero bytes.  Then, modulo 2**32, with logical shifts::

    mixed(w, a, b) = (u ^ (u >> 15)) * b    where u = (w ^ (w >> 16)) * a
    h1 = seed1 + sum(mixed(w_i, c_i, d_i))
    h2 = seed2 + sum(mixed(w_i, d_i, c_i))  c_i and d_i odd, fixed by i

Each step of ``mixed`` is a bijection of 32 bits, so a change confined to one word changes ``h1`` with
certainty.  That covers every flipped bit.  Changes of several words are missed by ``h1`` with a chance of
about 2**-32, by ``(h1, h2)`` of about 2**-64.  Sums have no order, so a kernel may reduce in any tile
shape.  (Multilinear hashing: Lemire and Kaser, "Strongly universal string hashing is fast", 2013; the
mixing is that of MurmurHash3's finaliser, Appleby.)

The words are mixed before they are summed, because a plain ``sum(c_i * w_i)`` keeps what differs in the top
bits of words in the top bits of the sum: it missed every pair of flipped signs of float32 (an odd multiple of
2**31 is 2**31), and one in a hundred pairs of words that were set to zero, where the values were small integers.

``h1`` is what the shadow stores; ``h2`` is stored beside it when ``digest_bits=64``.  Zero in the first
plane means "nothing recorded", so an ``h1`` of zero is stored as :data:`ZERO_STANDS_FOR`.
"""

from __future__ import annotations

import functools

import torch

MASK32 = 0xFFFFFFFF

#: Stored in place of an h1 of zero, because zero means "nothing recorded" in the shadow.
ZERO_STANDS_FOR = 0x9E3779B9


def mix32(x: int) -> int:
    """A 32-bit permutation with good avalanche: the finaliser of MurmurHash3 (Appleby, public domain)."""
    x &= MASK32
    x ^= x >> 16
    x = (x * 0x85EBCA6B) & MASK32
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)


def coefficient(i: int, stream: int) -> int:
    """The odd multiplier of word ``i`` in stream 0 (``c_i``) or stream 1 (``d_i``)."""
    return mix32(2 * i + stream + 1) | 1


def seeds(layer: int, half: int) -> tuple[int, int]:
    """``(seed1, seed2)`` of one half of one layer, so that a row moved to another half is a mismatch."""
    key = (layer << 8) | half
    return mix32(0x6B766331 ^ key), mix32(0x6B766332 ^ (key << 1))


def mixed(w: int, a: int, b: int) -> int:
    """A bijection of the 32-bit words, for odd ``a`` and ``b``."""
    u = ((w ^ (w >> 16)) * a) & MASK32
    return ((u ^ (u >> 15)) * b) & MASK32


def digest_reference(row: bytes, seed1: int, seed2: int) -> tuple[int, int]:
    """``(h1, h2)`` of one row, unsigned, as defined at the top of this module."""
    h1, h2 = seed1, seed2
    padded = row + b"\0" * (-len(row) % 4)
    for i in range(len(padded) // 4):
        w = int.from_bytes(padded[4 * i : 4 * i + 4], "little")
        c, d = coefficient(i, 0), coefficient(i, 1)
        h1 += mixed(w, c, d)
        h2 += mixed(w, d, c)
    return h1 & MASK32, h2 & MASK32


def stored_form(h1: int) -> int:
    """What the shadow keeps for ``h1``: itself, but never zero."""
    return h1 or ZERO_STANDS_FOR


def empty_digest(seeds: tuple[int, int]) -> tuple[int, int]:
    """What the shadow keeps for a row of zeros, signed: words of zero add nothing to the seeds."""
    return as_int32(stored_form(seeds[0])), as_int32(seeds[1])


def as_int32(x: int) -> int:
    """The signed 32-bit integer with the bits of the unsigned ``x``."""
    x &= MASK32
    return x - (1 << 32) if x >> 31 else x


@functools.cache  # never dropped: captured graphs hold the address
def coefficients(words: int, device: torch.device) -> torch.Tensor:
    """The multipliers of a row of ``words`` words, int32 ``[2, words]``: ``c`` then ``d``."""
    table = [[as_int32(coefficient(i, stream)) for i in range(words)] for stream in (0, 1)]
    return torch.tensor(table, dtype=torch.int32, device=device)

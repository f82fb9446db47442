"""The content digest of a slot: its definition, in words, and the plain reference.

Every other implementation (vectorised torch on the CPU, Triton on a GPU) must equal this one bit for
bit, so nothing here is clever.

A *row* is the bytes of one slot in one half (K or V) of one layer, gathered over the view's strides in
index order.  It is cut into 32-bit little-endian words ``w_0, w_1, ...``; the last word is padded with
zero bytes.  Then, modulo 2**32::

    h1 = seed1 + sum(c_i * w_i)                      c_i odd, fixed by i
    h2 = seed2 + sum(d_i * (w_i ^ (w_i >> 16)))      d_i odd, fixed by i, logical shift

``c_i`` is odd and therefore invertible modulo 2**32: a change confined to one word changes ``c_i * w_i``
and nothing else, so ``h1`` finds it with certainty.  That covers every flipped bit.  A change of several
words is missed by ``h1`` with a chance of about 2**-32, by ``(h1, h2)`` of about 2**-64.  Sums have no
order, so a kernel may reduce in any tile shape.  (Multilinear hashing: Lemire and Kaser, "Strongly
universal string hashing is fast", 2013.)

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


def digest_reference(row: bytes, seed1: int, seed2: int) -> tuple[int, int]:
    """``(h1, h2)`` of one row, unsigned, as defined at the top of this module."""
    h1, h2 = seed1, seed2
    padded = row + b"\0" * (-len(row) % 4)
    for i in range(len(padded) // 4):
        w = int.from_bytes(padded[4 * i : 4 * i + 4], "little")
        h1 += coefficient(i, 0) * w
        h2 += coefficient(i, 1) * (w ^ (w >> 16))
    return h1 & MASK32, h2 & MASK32


def stored_form(h1: int) -> int:
    """What the shadow keeps for ``h1``: itself, but never zero."""
    return h1 or ZERO_STANDS_FOR


def as_int32(x: int) -> int:
    """The signed 32-bit integer with the bits of the unsigned ``x``."""
    x &= MASK32
    return x - (1 << 32) if x >> 31 else x


@functools.cache  # never dropped: captured graphs hold the address
def coefficients(words: int, device: torch.device) -> torch.Tensor:
    """The multipliers of a row of ``words`` words, int32 ``[2, words]``: ``c`` then ``d``."""
    table = [[as_int32(coefficient(i, stream)) for i in range(words)] for stream in (0, 1)]
    return torch.tensor(table, dtype=torch.int32, device=device)

"""The Triton kernel of :mod:`.handed`: what torch does with a copy of each part is its reference."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scatter_kernel(said_ptr, BLOCK: tl.constexpr):
    """Each program: a block of one place.

    ``said_ptr``, in the host's memory, is int64: a row for each place, that is its address, its first number and how
    many; behind the rows are the numbers.
    """
    _scatter(said_ptr, BLOCK)


@triton.jit
def scatter_from_kernel(at_ptr, BLOCK: tl.constexpr):
    """The same of numbers whose address the device is told: ``at_ptr`` is int64 ``[1]`` there."""
    _scatter(tl.load(at_ptr).to(tl.pointer_type(tl.int64)), BLOCK)


@triton.jit
def _scatter(said_ptr, BLOCK: tl.constexpr):
    row = said_ptr + 3 * tl.program_id(0)
    out = tl.load(row).to(tl.pointer_type(tl.int64))
    begin, n = tl.load(row + 1), tl.load(row + 2)
    i = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(said_ptr + begin + i, mask=i < n, other=0), mask=i < n)

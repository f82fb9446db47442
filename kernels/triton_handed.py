"""The Triton kernel of :mod:`.handed`: what torch does with a copy of each part is its reference."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scatter_kernel(said_ptr, BLOCK: tl.constexpr):
    """Each program: a block of one place.

    ``said_ptr``, in the host's memory, is int64: a row for each place, that is its address, its first number, how many,
    and 0; behind the rows are the numbers.  If the last one is not 0, it is the bytes of an element of a tensor of the
    device that is copied to the place, and its first numbers are the address and the stride of that.
    """
    _scatter(said_ptr, BLOCK)


@triton.jit
def scatter_from_kernel(at_ptr, BLOCK: tl.constexpr):
    """The same of numbers whose address the device is told: ``at_ptr`` is int64 ``[1]`` there."""
    _scatter(tl.load(at_ptr).to(tl.pointer_type(tl.int64)), BLOCK)


@triton.jit
def _scatter(said_ptr, BLOCK: tl.constexpr):
    row = said_ptr + 4 * tl.program_id(0)
    out = tl.load(row).to(tl.pointer_type(tl.int64))
    begin, n, size = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    i = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if size == 0:
        tl.store(out + i, tl.load(said_ptr + begin + i, mask=i < n, other=0), mask=i < n)
    else:
        source, stride = tl.load(said_ptr + begin), tl.load(said_ptr + begin + 1)
        if size == 4:
            value = tl.load(source.to(tl.pointer_type(tl.int32)) + i * stride, mask=i < n, other=0).to(tl.int64)
        else:
            value = tl.load(source.to(tl.pointer_type(tl.int64)) + i * stride, mask=i < n, other=0)
        tl.store(out + i, value, mask=i < n)

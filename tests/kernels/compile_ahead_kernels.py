"""Kernels that another process can import, for compile_ahead_scenes.py."""

import triton
import triton.language as tl


@triton.jit
def triple_kernel(out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 3 * tl.load(out_ptr + at, mask=at < n), mask=at < n)

"""Look for copies of a pool in the code that Inductor wrote.

A copy of the pool each step costs more than everything else the canary does, and it hides corruption: a
check that reads the copy says nothing about the pool.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch

_ALLOCATION = re.compile(r"(\w+) = empty_strided_(\w+)\(\(([^)]*)\), \([^)]*\), (torch\.\w+)\)")


def pool_sized_buffers(source: str, pool_bytes: Sequence[int]) -> list[str]:
    """One line per buffer in ``source`` that is as large as a pool half.

    Args:
        source: the Python module that Inductor generated.
        pool_bytes: sizes of the guarded halves, in bytes.
    """
    smallest = min(pool_bytes, default=0)
    found = []
    for name, device, shape, dtype in _ALLOCATION.findall(source):
        sizes = [s.strip() for s in shape.split(",") if s.strip()]
        if not all(s.isdigit() for s in sizes):
            continue  # symbolic: its size is not known here
        size = math.prod(int(s) for s in sizes) * getattr(torch, dtype.removeprefix("torch.")).itemsize
        if smallest and size >= smallest and size in _multiples(pool_bytes):
            found.append(
                f"buffer {name} on {device} has {size} bytes, the size of a pool: the code copies the pool each step. "
                "kvcanary.rewrite_writes=True replaces such writes by one that stays in place."
            )
    return found


def _multiples(pool_bytes: Sequence[int]) -> set[int]:
    """Sizes that a copied pool can have: one half, K and V together, or all layers of a stacked pool."""
    counts = {1, 2, len(pool_bytes)}
    return {size * n for size in pool_bytes for n in counts}

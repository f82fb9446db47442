"""Look for copies of a pool in the code that Inductor wrote.

A copy of the pool each step costs more than everything else the canary does, and it hides corruption: a
check that reads the copy says nothing about the pool.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import torch

_ALLOCATION = re.compile(r"(\w+) = empty_strided_(\w+)\(\(([^)]*)\), \([^)]*\), (torch\.\w+)\)")


@dataclasses.dataclass(frozen=True)
class PoolCopy:
    """A buffer in generated code that is as large as a guarded half, or several."""

    name: str
    device: str
    size: int  # bytes

    def __str__(self) -> str:
        return (
            f"buffer {self.name} on {self.device} has {self.size} bytes, the size of a pool: the code copies the pool "
            "each step. kvcanary.rewrite_writes=True replaces such writes by one that stays in place."
        )


def pool_sized_buffers(source: str, pool_bytes: Sequence[int]) -> list[PoolCopy]:
    """The buffers in ``source`` that are as large as one pool half or a whole number of them.

    Args:
        source: the Python module that Inductor generated.
        pool_bytes: sizes of the guarded halves, in bytes.
    """
    sizes = {half * n for half in pool_bytes for n in range(1, len(pool_bytes) + 1)}
    found = []
    for name, device, shape, dtype in _ALLOCATION.findall(source):
        dims = [s.strip() for s in shape.split(",") if s.strip()]
        if not all(d.isdigit() for d in dims):
            continue  # symbolic: its size is not known here
        size = math.prod(int(d) for d in dims) * getattr(torch, dtype.removeprefix("torch.")).itemsize
        if size in sizes:
            found.append(PoolCopy(name, device, size))
    return found

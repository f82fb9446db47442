"""The identity chain of a row: who is in a slot, and who came before.

``chain_j = chain_{j-1} + mix(token_j, position_j)`` modulo 2**64, started by the namespace's seed.  A sum has no order,
so a whole prefill is one parallel prefix sum where SGLang's kv-canary walks the tokens one by one.
"""

from __future__ import annotations

import torch

MASK64 = (1 << 64) - 1
_A = 0x9E3779B97F4A7C15
_B = 0xBF58476D1CE4E5B9
_C = 0x94D049BB133111EB


def as_int64(x: int) -> int:
    """The low 64 bits as a signed number."""
    x &= MASK64
    return x - (1 << 64) if x >> 63 else x


def mix_constants() -> tuple[int, int, int]:
    """The factors of :func:`mix` as signed 64-bit integers, for kernels."""
    return as_int64(_A), as_int64(_B), as_int64(_C)


def mix(token: int, position: int) -> int:
    """64 bits from who is in a slot: SplitMix64 (Steele, Lea and Flood, 2014) over both numbers."""
    x = (token * _A + position * _B) & MASK64
    x = ((x ^ (x >> 30)) * _B) & MASK64
    x = ((x ^ (x >> 27)) * _C) & MASK64
    return x ^ (x >> 31)


#: Where the chain of the default namespace starts, as a signed 64-bit integer.
SEED = as_int64(mix(-1, -1))


def mix_tensor(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """:func:`mix` of int64 tensors, as int64 with the same bits."""
    x = tokens * as_int64(_A) + positions * as_int64(_B)
    x = (x ^ _shift(x, 30)) * as_int64(_B)
    x = (x ^ _shift(x, 27)) * as_int64(_C)
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, n: int) -> torch.Tensor:
    """Logical shift right: torch's ``>>`` on int64 is arithmetic."""
    return (x >> n) & ((1 << (64 - n)) - 1)

"""The token oracle: a model whose next token is a hash of the bytes it finds in the KV pool.

K and V of a token say its id, its position and its namespace.  Any wrong byte in the context, of any layer,
gives another hash and another token: the output is the ground truth about whether a fault mattered, and
:mod:`expected` says without any engine what it must be.
"""

from __future__ import annotations

import torch
from kv_store import KV, write
from torch import nn
from workload import VOCAB

DIGITS = 8
ROW = (1, DIGITS)

#: Odd multipliers of the hash: of a position, of the state.
BASE, MIX1, MIX2 = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def digits(device: torch.device | str = "cpu") -> torch.Tensor:
    """The embedding: float32 ``[16]``, numbers that float8 holds exactly."""
    return torch.arange(1.0, 17.0, device=device)


def encode(
    ids: torch.Tensor, positions: torch.Tensor, namespaces: torch.Tensor, salt: int, embedding: torch.Tensor
) -> torch.Tensor:
    """K or V of tokens, ``[..., DIGITS]``.

    Args:
        salt: number of the layer and half, below 16.
        embedding: float32 ``[16]``.
    """
    parts = [ids, ids >> 4, ids >> 8, positions, positions >> 4, namespaces, torch.full_like(ids, salt)]
    return embedding[torch.stack([*parts, ids ^ positions], -1) & 15]


def decode(k: torch.Tensor) -> torch.Tensor:
    """The token ids in rows of K, ``[..., DIGITS]``; what is no row gives some number."""
    digits = k[..., :3].nan_to_num(0.0).clamp(1, 16).to(torch.int64) - 1
    return digits[..., 0] | digits[..., 1] << 4 | digits[..., 2] << 8


def scales(ids: torch.Tensor) -> torch.Tensor:
    """The scale of a token's row in float8, ``[..., 1]``: a power of two, so that digits stay exact."""
    return (0.25 * (torch.ones_like(ids) << (ids & 3))).unsqueeze(-1)


def weigh(rows: torch.Tensor, salt: int) -> torch.Tensor:
    """A hash of the bytes of rows, ``[..., elements]`` -> int64 ``[...]``."""
    words = rows.contiguous().view(torch.int32 if rows.dtype == torch.float32 else torch.uint8).to(torch.int64)
    place = torch.arange(1, words.shape[-1] + 1, device=rows.device) + 64 * salt
    return (words * ((place * MIX1 ^ place >> 7) | 1)).sum(-1)


def powers(width: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 ``[width]``: what each position counts."""
    return torch.full((width,), BASE, dtype=torch.int64, device=device).cumprod(0)


def next_token(state: torch.Tensor) -> torch.Tensor:
    """The token that a state of the hash stands for."""
    mixed = (state ^ (state >> 29)) * MIX2
    return 2 + ((mixed ^ (mixed >> 32)) & 0x7FFFFFFF) % (VOCAB - 2)


def written(
    ids: torch.Tensor, positions: torch.Tensor, namespaces: torch.Tensor, number: int, fp8: bool
) -> list[torch.Tensor]:
    """What layer ``number`` stores for tokens: K, V and in float8 two scales, each ``[..., elements]``."""
    kind, embedding = torch.float8_e4m3fn if fp8 else torch.float32, digits(ids.device)
    halves = [encode(ids, positions, namespaces, 2 * number + h, embedding).to(kind) for h in range(2)]
    return halves + [scales(ids)] * 2 if fp8 else halves


def weight(stored: list[torch.Tensor], number: int) -> torch.Tensor:
    """What one layer's rows add to the hash, before their position counts."""
    return torch.stack([weigh(t, 4 * number + i) for i, t in enumerate(stored)]).sum(0)


class Oracle(nn.Module):
    """The model; called like :class:`~llama.Llama`."""

    def __init__(self, windows: list[list[int | None]], width: int):
        super().__init__()
        self.windows = windows
        self.register_buffer("powers", powers(width))
        self.register_buffer("digits", digits())

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        namespaces: torch.Tensor,
        request: torch.Tensor,
        slots: list[torch.Tensor],
        reads: list[torch.Tensor],
        pools: list[KV],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 ``[n]`` each: the token that follows each token, and what it is made of, for a draft."""
        state, number = torch.zeros_like(ids), 0
        for group, windows in enumerate(self.windows):
            for window, pool in zip(windows, pools[group], strict=True):
                store(pool, slots[group], ids, positions, namespaces, number, self.digits)
                found = weight([t[reads[group]].flatten(2) for t in pool], number)  # [bs, width]
                state = state + sum_seen(found * self.powers, request, positions, window)
                number += 1
        return next_token(state), state


def store(
    pool: list[torch.Tensor],
    slots: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    namespaces: torch.Tensor,
    number: int,
    embedding: torch.Tensor,
) -> None:
    """Write the tokens' K and V of one layer."""
    scale = scales(ids) if len(pool) > 2 else None
    k, v = (encode(ids, positions, namespaces, 2 * number + h, embedding).unsqueeze(1) for h in range(2))
    if scale is not None:
        k, v = k * scale.unsqueeze(1), v * scale.unsqueeze(1)
    write(pool, slots, k, v, scale)


def sum_seen(weights: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """For tokens at ``positions`` of ``rows`` the sum of ``weights`` over what they see, modulo 2**64: int64 ``[n]``.

    Args:
        weights: int64 ``[bs, width]``; what lies behind a token's position does not count.
        rows, positions: int64 ``[n]``.
    """
    upto = weights.cumsum(1)
    total = upto[rows, positions]
    if window is None:
        return total
    gone = positions - window
    return total - torch.where(gone >= 0, upto[rows, gone.clamp(min=0)], 0)


def weights_of(
    ids: torch.Tensor, positions: torch.Tensor, namespaces: torch.Tensor, windows: list[list[int | None]], fp8: bool
) -> dict[int | None, torch.Tensor]:
    """What tokens add to the hash, from the tokens themselves, before their position counts.

    Returns:
        for each size of window int64, shaped like ``ids``: the sum over the layers with that window.
    """
    found: dict[int | None, torch.Tensor] = {}
    for number, window in enumerate(w for group in windows for w in group):
        added = weight(written(ids, positions, namespaces, number, fp8), number)
        found[window] = found[window] + added if window in found else added
    return found

"""Attention over a paged pool, in the two builds of the llama.

``Visible`` has the KV tensors in the graph.  ``Opaque`` is what serving engines do: one op that finds them by the
layer's name, in what the engine left for the forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from kv_store import read, seen, write
from torch import nn


class Place(NamedTuple):
    """Where a layer's K and V are.

    Attributes:
        pool: the layer's tensors.
        slots: int64 ``[n]``, where the tokens' K and V go.
        reads: int64 ``[n, width]``, the slot of each position of each token's request.
        positions: int64 ``[n]``.
    """

    pool: list[torch.Tensor]
    slots: torch.Tensor
    reads: torch.Tensor
    positions: torch.Tensor


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: Place, window: int | None) -> torch.Tensor:
    """Store K and V, then attend: ``[n, heads, dim]``."""
    write(place.pool, place.slots, k, v)
    keys, values = (t.transpose(1, 2) for t in read(place.pool, place.reads))  # [n, kv heads, width, dim]
    mask = seen(place.positions, place.reads.shape[1], window)[:, None, None]
    attended = F.scaled_dot_product_attention(q.unsqueeze(2), keys, values, attn_mask=mask, enable_gqa=True)
    return attended.squeeze(2)


class Visible(nn.Module):
    """The graph shows the KV tensors, their writes and their reads."""

    def __init__(self, window: int | None):
        super().__init__()
        self.window = window

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: Place) -> torch.Tensor:
        return attend(q, k, v, place, self.window)


class Opaque(nn.Module):
    """The graph shows one op and the layer's name.

    Args:
        name: a string, or an object of an opaque type, which becomes an input of the graph.
    """

    def __init__(self, op: Any, name: Any):
        super().__init__()
        self.op, self.name = op, name

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: None) -> torch.Tensor:
        output = torch.empty_like(q)
        self.op(q.contiguous(), k.contiguous(), v.contiguous(), output, self.name)
        return output

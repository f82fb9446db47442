"""A tiny random Llama in plain PyTorch over packed tokens.  How its attention finds K and V is up to the build."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from attention import Place
from kv_store import KV
from torch import nn
from workload import VOCAB

DIM, HEADS, KV_HEADS, HEAD_DIM, NAMESPACES = 32, 4, 2, 8, 4
ROW = (KV_HEADS, HEAD_DIM)


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``[n, heads, HEAD_DIM]``."""
    half = HEAD_DIM // 2
    angle = positions.unsqueeze(1) * 10000.0 ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Layer(nn.Module):
    """Grouped-query attention over a paged pool, and a gated MLP.

    Args:
        attention: called with q, k, v, ``[n, heads, HEAD_DIM]``, and where they go; gives ``[n, HEADS, HEAD_DIM]``.
    """

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.q, self.o = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False), nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.kv = nn.Linear(DIM, 2 * KV_HEADS * HEAD_DIM, bias=False)
        self.lora = nn.Parameter(torch.randn(NAMESPACES, DIM))  # what a namespace adds before K and V
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(DIM) for _ in range(2)])

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, namespaces: torch.Tensor, place: Place | None
    ) -> torch.Tensor:
        """``x``: ``[n, DIM]``."""
        h = self.norms[0](x)
        q = rotate(self.q(h).unflatten(-1, (HEADS, HEAD_DIM)), positions)
        k, v = self.kv(h + F.embedding(namespaces, self.lora)).unflatten(-1, (2, KV_HEADS, HEAD_DIM)).unbind(1)
        x = x + self.o(self.attention(q, rotate(k, positions), v, place).flatten(1))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """The decoder.  Layers of the last group come last.

    Args:
        attentions: for each layer of each group its attention.
    """

    def __init__(self, attentions: list[list[nn.Module]], seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.sizes = [len(group) for group in attentions]
        self.embed = nn.Parameter(torch.randn(VOCAB, DIM))
        self.layers = nn.ModuleList([Layer(attention) for group in attentions for attention in group])
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, namespaces: torch.Tensor, *kv: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 ``[n]``, the token that follows each token, and float32 ``[n, DIM]``, its hidden state, for a draft.

        Args:
            kv: what :meth:`places` takes where attention sees its KV, nothing where it finds it by itself.
        """
        x, places = F.embedding(ids, self.embed), self.places(positions, *kv) if kv else [None] * len(self.layers)
        for layer, place in zip(self.layers, places, strict=True):
            x = layer(x, positions, namespaces, place)
        return self.head(self.norm(x)).argmax(-1), x

    def places(
        self,
        positions: torch.Tensor,
        request: torch.Tensor,
        slots: list[torch.Tensor],
        reads: list[torch.Tensor],
        pools: list[KV],
    ) -> list[Place | None]:
        """Where each layer's K and V are."""
        return [
            Place(layer, slots[group], reads[group][request], positions)
            for group, pool in enumerate(pools)
            for layer in pool
        ]

"""A tiny random Llama in plain PyTorch: packed tokens, K and V in paged pools that are inputs of the graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kv_store import KV, read, seen, write
from torch import nn
from workload import VOCAB

DIM, HEADS, KV_HEADS, HEAD_DIM, NAMESPACES = 32, 4, 2, 8, 4
ROW = (KV_HEADS, HEAD_DIM)


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``[n, heads, HEAD_DIM]``."""
    half = HEAD_DIM // 2
    angle = positions.unsqueeze(1) * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Layer(nn.Module):
    """Grouped-query attention over a paged pool, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False), nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.kv = nn.Linear(DIM, 2 * KV_HEADS * HEAD_DIM, bias=False)
        self.lora = nn.Embedding(NAMESPACES, DIM)  # what a namespace adds before K and V
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(DIM) for _ in range(2)])

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        namespaces: torch.Tensor,
        slots: torch.Tensor,
        reads: torch.Tensor,
        mask: torch.Tensor,
        pool: list[torch.Tensor],
    ) -> torch.Tensor:
        """``x``: ``[n, DIM]``; ``reads`` and ``mask``: ``[n, width]``, of each token."""
        h = self.norms[0](x)
        q = rotate(self.q(h).unflatten(-1, (HEADS, HEAD_DIM)), positions)
        k, v = self.kv(h + self.lora(namespaces)).unflatten(-1, (2, KV_HEADS, HEAD_DIM)).unbind(1)
        write(pool, slots, rotate(k, positions), v)
        keys, values = (t.transpose(1, 2) for t in read(pool, reads))  # [n, KV_HEADS, width, HEAD_DIM]
        attended = F.scaled_dot_product_attention(
            q.unsqueeze(2), keys, values, attn_mask=mask[:, None, None], enable_gqa=True
        )
        x = x + self.o(attended.flatten(1))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """The decoder.  Layers of the last group come last.

    Args:
        windows: for each layer of each group the tokens it sees, None for all.
    """

    def __init__(self, windows: list[list[int | None]], seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.windows = windows
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Layer() for group in windows for _ in group])
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        namespaces: torch.Tensor,
        request: torch.Tensor,
        slots: list[torch.Tensor],
        reads: list[torch.Tensor],
        pools: list[KV],
    ) -> torch.Tensor:
        """int64 ``[n]``: the token that follows each token."""
        x, layers = self.embed(ids), iter(self.layers)
        for group, windows in enumerate(self.windows):
            table = reads[group][request]
            for window, pool in zip(windows, pools[group], strict=True):
                mask = seen(positions, table.shape[1], window)
                x = next(layers)(x, positions, namespaces, slots[group], table, mask, pool)
        return self.head(self.norm(x)).argmax(-1)

"""A small decoder with a cache of [B, H, S, D] a layer, for tests of the runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from kvcanary_fx import CanaryBackend, CanaryConfig, protect, session_of

VOCAB, DIM, HEADS, HEAD_DIM = 50, 16, 2, 8


def write_at_index(cache: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> None:
    cache.index_copy_(2, index, new)


def write_where(cache: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> None:
    """All of the cache, the new tokens in their places."""
    hit = (torch.arange(cache.shape[2], device=index.device).unsqueeze(1) == index).any(1)
    cache.copy_(torch.where(hit.view(1, 1, -1, 1), cache.index_copy(2, index, new), cache))


def write_rolled(cache: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> None:
    """A window: the newest token is always in the last slot."""
    cache.copy_(torch.cat((cache, new), dim=2)[:, :, -cache.shape[2] :])


def write_in_subgraph(cache: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> None:
    """Where the graph does not show the slots, only the axis."""
    checkpoint(write_at_index, cache, index, new, use_reentrant=False)


def write_mapped(cache: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> None:
    """Each sequence at places of its own, under torch.vmap."""
    torch.vmap(lambda row, at, k: row.index_copy_(1, at, k))(cache, index.expand(len(cache), -1), new)


@torch.library.custom_op("toys::store", mutates_args=("cache",))
def write_by_op(cache: torch.Tensor, where: torch.Tensor, new: torch.Tensor) -> None:
    """Where the graph shows nothing."""
    cache.index_copy_(2, where, new)


write_by_op.register_fake(lambda cache, where, new: None)


def weight(*shape: int) -> nn.Parameter:
    """Of a product or an embedding.  With modules for these, Dynamo needs a sixth more time for the model."""
    return nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)


class Layer(nn.Module):
    def __init__(self, write: Callable[..., None] = write_at_index) -> None:
        super().__init__()
        self.write = write
        self.qkv = weight(3 * HEADS * HEAD_DIM, DIM)
        self.out = weight(DIM, HEADS * HEAD_DIM)

    def forward(self, x, cache, index, mask):
        q, k, v = F.linear(x, self.qkv).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        self.write(cache[0], index, k)
        self.write(cache[1], index, v)
        y = F.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=mask)
        return x + F.linear(y.transpose(1, 2).flatten(-2), self.out)


class Decoder(nn.Module):
    """Logits of the last token; writes K and V of each token at ``index`` of every row."""

    def __init__(
        self, layers: int = 2, break_at: int | None = None, write: Callable[..., None] = write_at_index
    ) -> None:
        super().__init__()
        self.embed = weight(VOCAB, DIM)
        self.places = weight(64, DIM)
        self.layers = nn.ModuleList([Layer(write) for _ in range(layers)])
        self.head = weight(VOCAB, DIM)
        self.break_at = break_at

    def forward(self, input_ids, position_ids, index, caches):
        x = F.embedding(input_ids, self.embed) + F.embedding(position_ids, self.places)
        length = caches[0][0].shape[2]
        mask = torch.arange(length, device=x.device) <= index.unsqueeze(1)
        for i, layer in enumerate(self.layers):
            if i == self.break_at:
                torch._dynamo.graph_break()
            x = layer(x, caches[i], index, mask)
        return F.linear(x[:, -1], self.head)


@dataclasses.dataclass
class Rig:
    """A model, its guarded and plain ways to run, and a cache to run it over."""

    model: Decoder
    backend: CanaryBackend
    guarded: Any
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    length: int = 0

    @classmethod
    def build(
        cls,
        layers: int = 2,
        batch: int = 2,
        slots: int = 24,
        device: str = "cpu",
        break_at: int | None = None,
        write: Callable[..., None] = write_at_index,
        compile_options: dict[str, Any] | None = None,
        backend: CanaryBackend | None = None,
        **settings: Any,
    ) -> Rig:
        torch.manual_seed(0)
        model = Decoder(layers, break_at, write).to(device).eval()
        settings = {"inner": "eager", **settings}
        backend = backend or CanaryBackend(CanaryConfig(**settings))
        guarded = torch.compile(model, backend=backend, **(compile_options or {}))
        return cls(model, backend, guarded, new_caches(layers, batch, slots, device))

    @classmethod
    def protected_model(cls, break_at: int | None = None, **settings: Any) -> Rig:
        """A model that is guarded by ``protect`` instead."""
        rig = cls.build(break_at=break_at)
        rig.guarded = protect(rig.model, **{"inner": "eager", **settings})
        return rig

    @property
    def session(self):
        return self.backend.session if self.guarded is not self.model else session_of(self.model)

    def step(self, tokens: int = 1, guarded: bool = True, at: int | None = None, positions: Any = None) -> torch.Tensor:
        """Run one forward; ``guarded=False`` is code outside the compiled graph."""
        at = self.length if at is None else at
        k = self.caches[0][0]
        index = torch.arange(at, at + tokens, device=k.device)
        ids = torch.randint(0, VOCAB, (k.shape[0], tokens), device=k.device)
        positions = index.expand(k.shape[0], tokens) if positions is None else positions
        run = self.guarded if guarded else self.model
        with torch.no_grad():
            logits = run(ids, positions, index, self.caches)
        self.length = at + tokens
        return logits

    def reset(self) -> None:
        """What ``cache.reset()`` does: zero in place and start over."""
        for pair in self.caches:
            for tensor in pair:
                tensor.zero_()
        self.length = 0

    def flip(self, layer: int = 0, half: int = 0, row: int = 0, position: int = 1, by_op: bool = False) -> None:
        """Flip one bit of one slot; unless ``by_op``, unseen by PyTorch's version counter."""
        tensor = self.caches[layer][half]
        tensor = tensor if by_op else tensor.data
        tensor.view(torch.int32)[row, 0, position, 3] ^= 1 << 4

    def found(self) -> list[tuple[str, str, str, int | None, int]]:
        return [(v.check, v.layer, v.half, v.row, v.index) for v in self.session.violations()]


def new_caches(layers: int = 2, batch: int = 2, slots: int = 24, device: str = "cpu"):
    shape = (batch, HEADS, slots, HEAD_DIM)
    return [(torch.zeros(shape, device=device), torch.zeros(shape, device=device)) for _ in range(layers)]

"""Models with the shapes of real ones and random weights, whose attention is one opaque op over a pool of KV slots.

As in serving engines, the graph shows neither pools nor slots: the op looks the layer's pool up by name, writes the
step's K and V into it, and attends.  Each request owns a run of neighbouring slots, so a pool is also
``[requests, length, heads, dim]``, and PyTorch's own attention reads it without a copy.

There is no rotary embedding, and the weights are noise: neither changes what a forward costs by much.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kvcanary_fx import register_attention_op
from kvcanary_fx.engine.layers import EagerLayers


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a model.

    Attributes:
        rows: ``(heads, dim)`` of what one slot holds in each tensor of a layer: K and V, or an MLA latent alone.
        latent: of an MLA row's ``dim``, how many values attention sums; the rest is the rotary key.  0: K and V.
        nope: values of each MLA query before they are taken into the latent space.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    mlp: int
    vocab: int
    rows: tuple[tuple[int, int], ...]
    latent: int = 0
    nope: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def tensors(self) -> int:
        """KV tensors of all layers."""
        return self.layers * len(self.rows)

    @property
    def row_bytes(self) -> list[int]:
        """Bytes of a slot in each tensor of a layer."""
        return [heads * dim * self.dtype.itemsize for heads, dim in self.rows]

    @property
    def layer_names(self) -> list[str]:
        return [f"layers.{i}" for i in range(self.layers)]

    def pools(self, slots: int, device: torch.device | str) -> list[tuple[torch.Tensor, ...]]:
        """Each layer's tensors, ``[slots, heads, dim]``, with whatever the memory holds."""
        return [
            tuple(torch.empty(slots, *row, dtype=self.dtype, device=device) for row in self.rows)
            for _ in range(self.layers)
        ]


GQA = Shape("gqa", 32, 4096, 32, 14336, 128256, ((8, 128), (8, 128)))
MLA = Shape("mla", 27, 2048, 16, 10944, 102400, ((1, 576),), latent=512)
TINY_GQA = Shape("tiny gqa", 2, 64, 4, 128, 512, ((2, 16), (2, 16)))
TINY_MLA = Shape("tiny mla", 2, 64, 4, 128, 512, ((1, 40),), latent=32, nope=16)


@dataclasses.dataclass
class Step:
    """What an engine leaves for its attention op before a forward.

    Attributes:
        pools: tensors ``[slots, heads, dim]`` by the layer's name.
        slots: int64 ``[n]``, where the step's tokens go.
        requests, length: how many requests there are, and how many slots each owns.
        first: the first slot of the first request.
        checks: calls the checks of a layer around its attention, as an engine does that compiles by itself; None where
            a graph has them, or nothing.
    """

    pools: dict[str, tuple[torch.Tensor, ...]] = dataclasses.field(default_factory=dict)
    slots: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    requests: int = 0
    length: int = 0
    first: int = 0
    checks: EagerLayers | None = None

    def by_request(self, pool: torch.Tensor) -> torch.Tensor:
        """The slots that the requests own, ``[requests, length, heads, dim]``, as a view."""
        owned = pool[self.first : self.first + self.requests * self.length]
        return owned.view(self.requests, self.length, *pool.shape[1:])


STEP = Step()


def gqa_attention(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, layer_name: str
) -> None:
    """``q`` and ``output`` are ``[n, heads, dim]``, ``key`` and ``value`` ``[n, KV heads, dim]``."""
    pools, checks = STEP.pools[layer_name], STEP.checks
    if checks is not None:
        checks.verify(layer_name)
    for pool, rows in zip(pools, (key, value), strict=True):
        pool.index_copy_(0, STEP.slots, rows)
    k, v = (STEP.by_request(pool).transpose(1, 2) for pool in pools)
    added = q.shape[0] // STEP.requests
    by_request = q.view(STEP.requests, added, *q.shape[1:]).transpose(1, 2)
    # a request that adds several tokens has none before: see Case
    out = F.scaled_dot_product_attention(by_request, k, v, is_causal=added > 1, enable_gqa=True)
    output.copy_(out.transpose(1, 2).reshape(output.shape))
    if checks is not None:
        checks.record(layer_name, key, value)


def mla_attention(q: torch.Tensor, latent: torch.Tensor, output: torch.Tensor, layer_name: str) -> None:
    """One token of each request: ``q`` is ``[n, heads, latent + rope]``, ``latent`` ``[n, 1, latent + rope]``,
    ``output`` ``[n, heads, latent]``."""
    (pool,) = STEP.pools[layer_name]
    pool.index_copy_(0, STEP.slots, latent)
    stored = STEP.by_request(pool).squeeze(2)
    weights = torch.bmm(q, stored.transpose(1, 2)).softmax(-1)
    output.copy_(torch.bmm(weights, stored[:, :, : output.shape[2]]))


_LIBRARY = torch.library.Library("kvcanary_benchmark", "FRAGMENT")
for _name, _body, _written in (
    ("gqa_attention", gqa_attention, "Tensor key, Tensor value"),
    ("mla_attention", mla_attention, "Tensor latent"),
):
    _LIBRARY.define(f"{_name}(Tensor q, {_written}, Tensor(a!) output, str layer_name) -> ()")
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _body, _device)
    torch.library.register_fake(f"kvcanary_benchmark::{_name}", lambda *_: None, lib=_LIBRARY)
register_attention_op("kvcanary_benchmark::gqa_attention")
register_attention_op("kvcanary_benchmark::mla_attention", key="latent", value=None)


def weight(shape: Shape, device: torch.device | str, *sizes: int) -> nn.Parameter:
    made = torch.empty(*sizes, dtype=shape.dtype, device=device).normal_(std=0.01)
    return nn.Parameter(made, requires_grad=False)


def normed(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:])


class GqaAttention(nn.Module):
    """Grouped-query attention: K and V of fewer heads than the queries have."""

    def __init__(self, shape: Shape, name: str, device: torch.device | str):
        super().__init__()
        self.name, self.heads, self.row = name, shape.heads, shape.rows[0]
        kv_heads, dim = self.row
        self.sizes = [shape.heads * dim, kv_heads * dim, kv_heads * dim]
        self.qkv = weight(shape, device, shape.hidden, sum(self.sizes))
        self.out = weight(shape, device, shape.heads * dim, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ self.qkv).split(self.sizes, -1)
        q = q.view(-1, self.heads, self.row[1])
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        rows = (k.view(-1, *self.row), v.view(-1, *self.row))
        torch.ops.kvcanary_benchmark.gqa_attention(q, *rows, output, self.name)
        return output.flatten(1) @ self.out


class MlaAttention(nn.Module):
    """Multi-head latent attention as engines decode it: queries taken into the latent space, values out of it."""

    def __init__(self, shape: Shape, name: str, device: torch.device | str):
        super().__init__()
        self.name, self.heads, self.nope, self.latent = name, shape.heads, shape.nope, shape.latent
        ((_, self.width),) = shape.rows
        self.rope = self.width - shape.latent
        self.q = weight(shape, device, shape.hidden, shape.heads * (shape.nope + self.rope))
        self.kv = weight(shape, device, shape.hidden, self.width)
        self.into_latent = weight(shape, device, shape.heads, shape.nope, shape.latent)
        self.out_of_latent = weight(shape, device, shape.heads, shape.latent, shape.nope)
        self.out = weight(shape, device, shape.heads * shape.nope, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = (x @ self.q).view(-1, self.heads, self.nope + self.rope) * (self.nope + self.rope) ** -0.5
        nope, rope = q.split([self.nope, self.rope], -1)
        q = torch.cat([torch.bmm(nope.transpose(0, 1), self.into_latent).transpose(0, 1), rope], -1)
        latent = (x @ self.kv).view(-1, 1, self.width)
        output = q.new_empty(q.shape[0], self.heads, self.latent)
        torch.ops.kvcanary_benchmark.mla_attention(q, latent, output, self.name)
        values = torch.bmm(output.transpose(0, 1), self.out_of_latent).transpose(0, 1)
        return values.flatten(1) @ self.out


class Layer(nn.Module):
    """Attention and a gated MLP, each with a norm before it."""

    def __init__(self, shape: Shape, name: str, device: torch.device | str):
        super().__init__()
        self.attention = (MlaAttention if shape.latent else GqaAttention)(shape, name, device)
        self.up = weight(shape, device, shape.hidden, 2 * shape.mlp)
        self.down = weight(shape, device, shape.mlp, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(normed(x))
        gate, up = (normed(x) @ self.up).chunk(2, -1)
        return x + (F.silu(gate) * up) @ self.down


class Model(nn.Module):
    """Token ids (int64 ``[n]``) to logits ``[requests, vocab]`` of the tokens at ``last`` (int64 ``[requests]``)."""

    def __init__(self, shape: Shape, device: torch.device | str):
        super().__init__()
        self.embedding = weight(shape, device, shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, name, device) for name in shape.layer_names)
        self.head = weight(shape, device, shape.hidden, shape.vocab)

    def forward(self, ids: torch.Tensor, last: torch.Tensor) -> Any:
        x = F.embedding(ids, self.embedding)
        for layer in self.layers:
            x = layer(x)
        return normed(x[last]) @ self.head

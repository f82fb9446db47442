"""A model whose attention is one opaque op, as in serving engines: the graph shows neither pools nor slots.

The op finds the pools by the layer's name and the slots in what the runtime left for it.  The name is a string, or an
object of an opaque type that the graph takes as an input.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

from kvcanary_fx import register_attention_op

HEADS, DIM = 2, 4


class LayerName(OpaqueBase):  # which torch 2.11 asks of value types, too
    """A layer's name that is no string: hoisted, it is an input of the graph, so that layers share their code."""

    def __init__(self, value: str):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerName) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"LayerName({self.value!r})", {"LayerName": LayerName}


register_opaque_type(LayerName, typ="value", hoist=True)
TYPE = f"{LayerName.__module__}.{LayerName.__qualname__}"


@dataclasses.dataclass
class Metadata:
    """What an engine leaves for its attention op before a forward.

    Attributes:
        pools: K and V by the layer's name.
        slots: int64 ``[n]``, where the tokens go.
        reads: int64 ``[m]``, the slots that are attended to.
        redirect: layer name -> slots that a faulty kernel writes instead.
    """

    pools: dict[str, tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=dict)
    slots: torch.Tensor | None = None
    reads: torch.Tensor | None = None
    redirect: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


METADATA = Metadata()


def attend(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, layer: Any) -> None:
    name = layer.value if isinstance(layer, LayerName) else layer
    k_pool, v_pool = METADATA.pools[name]
    slots = METADATA.redirect.get(name, METADATA.slots)
    k_pool[slots], v_pool[slots] = key, value
    k, v = k_pool[METADATA.reads], v_pool[METADATA.reads]
    weights = torch.einsum("qhd,khd->hqk", q, k).softmax(-1)
    output.copy_(torch.einsum("hqk,khd->qhd", weights, v))


def attention(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, layer: Any) -> None:
    attend(q, key, value, output, layer)


_LIBRARY = torch.library.Library("opaque_engine", "FRAGMENT")
for _name, _type in (("attention", "str"), ("attention_hoisted", TYPE)):
    _LIBRARY.define(f"{_name}(Tensor q, Tensor key, Tensor value, Tensor(a!) output, {_type} layer) -> ()")
    _LIBRARY.impl(_name, attention, "CPU")
    _LIBRARY.impl(_name, attention, "CUDA")
    torch.library.register_fake(f"opaque_engine::{_name}", lambda *_: None, lib=_LIBRARY)
    register_attention_op(f"opaque_engine::{_name}", layer="layer", name_of=lambda layer: layer.value)


class Layer(torch.nn.Module):
    def __init__(self, name: str, hoisted: bool):
        super().__init__()
        self.hoisted = hoisted
        self.name = LayerName(name) if hoisted else name
        self.qkv = torch.nn.Linear(HEADS * DIM, 3 * HEADS * DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(-1, 3, HEADS, DIM).unbind(1)
        output = torch.empty_like(q)
        op = torch.ops.opaque_engine.attention_hoisted if self.hoisted else torch.ops.opaque_engine.attention
        op(q.contiguous(), k.contiguous(), v.contiguous(), output, self.name)
        return x + output.flatten(1)


class Model(torch.nn.Module):
    def __init__(self, layers: int, hoisted: bool):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([Layer(f"layers.{i}", hoisted) for i in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

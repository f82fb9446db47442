"""Engine-style attention: one op that is told q, k, v and the name of its layer, and finds everything else itself.

The op does not declare that it writes KV.  The layer's name is a string in the graph, or, as vLLM does it, an object
that the graph takes as an input, so that layers share their code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from attention import Opaque, Place, attend
from batching import Inputs
from kv_store import Group
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

from kvcanary_fx import register_attention_op


class LayerName(OpaqueBase):
    """A layer's name that is no string."""

    def __init__(self, value: str):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerName) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"LayerName({self.value!r})", {"LayerName": LayerName}


class LayerPlace(NamedTuple):
    """What the op finds under a layer's name."""

    place: Place
    window: int | None


#: What the engine left for the forward that runs, by the layer's name.
_PLACES: dict[str, LayerPlace] = {}


@contextlib.contextmanager
def forward_metadata(groups: list[Group], inputs: Inputs) -> Iterator[None]:
    """Leave for the attention ops of one forward what they look up."""
    global _PLACES
    before, _PLACES = _PLACES, {}
    for group, slots, reads in zip(groups, inputs.slots, inputs.reads, strict=False):
        table = reads[inputs.request]
        for name, pool in zip(group.names, group.layers, strict=True):
            _PLACES[name] = LayerPlace(Place(pool, slots, table, inputs.positions), group.window)
    try:
        yield
    finally:
        _PLACES = before


def _attention(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, layer: Any) -> None:
    name = layer.value if isinstance(layer, LayerName) else layer
    if name not in _PLACES:
        raise KeyError(f"attention of layer {name!r}: nothing was left for it; run the model in forward_metadata(...)")
    place, window = _PLACES[name]
    output.copy_(attend(q, key, value, place, window))


def make_attention(name: str, hoisted: bool) -> Opaque:
    """A layer's attention; with ``hoisted`` its name becomes an input of the graph."""
    ops = torch.ops.paged_engine
    return Opaque(ops.attention_hoisted, LayerName(name)) if hoisted else Opaque(ops.attention, name)


register_opaque_type(LayerName, typ="value", hoist=True)
_LIBRARY = torch.library.Library("paged_engine", "FRAGMENT")
for _name, _type in (("attention", "str"), ("attention_hoisted", f"{__name__}.{LayerName.__qualname__}")):
    _LIBRARY.define(f"{_name}(Tensor q, Tensor key, Tensor value, Tensor(a!) output, {_type} layer) -> ()")
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _attention, _device)
    torch.library.register_fake(f"paged_engine::{_name}", lambda *_: None, lib=_LIBRARY)
    register_attention_op(f"paged_engine::{_name}", layer="layer", name_of=lambda layer: layer.value)  # canary

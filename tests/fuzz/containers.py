"""How caches reach a model, and what they are called in its code."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

Tensors = Sequence[torch.Tensor]

#: Attribute names of K, of V, and of a tensor that holds both.
NAMES = (("k_cache", "v_cache", "kv_cache"), ("keys", "values", "kv"), ("key_pool", "value_pool", "pool"))

#: What the argument is called that holds the caches.
ARGUMENT = ("cache", "past_key_values", "buffers")

#: Attributes of a layer, or of the model; containers in an argument of the model.
ATTRIBUTES = ("attribute", "buffer", "module")
ARGUMENTS = ("list", "tuple", "dict", "flat", "columns", "fields", "layered")
CONTAINERS = (*ATTRIBUTES, *ARGUMENTS)


@dataclasses.dataclass
class Fields:
    """All keys, all values."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


@dataclasses.dataclass
class LayerCache:
    keys: torch.Tensor
    values: torch.Tensor


@dataclasses.dataclass
class JointCache:
    """K and V of a layer in one tensor."""

    kv: torch.Tensor


class Layered:
    """A cache in Hugging Face's manner."""

    def __init__(self, layers: Sequence[LayerCache | JointCache]):
        self.layers = layers


class Holder(nn.Module):
    """A module that owns one layer's cache."""

    def __init__(self, tensors: Tensors, called: tuple[str, ...]):
        super().__init__()
        for tensor, name in zip(tensors, called, strict=True):
            self.register_buffer(name, tensor, persistent=False)


def attribute_names(count: int, names: int) -> tuple[str, ...]:
    """What the tensors of a layer are called, if there are ``count``."""
    k, v, both = NAMES[names % len(NAMES)]
    return (k, v) if count == 2 else (both,)


def attach(owner: nn.Module, tensors: Tensors, container: str, called: tuple[str, ...]) -> None:
    """Make tensors attributes of a module."""
    if container == "module":
        owner.cache = Holder(tensors, called)
        return
    for tensor, name in zip(tensors, called, strict=True):
        if container == "buffer":
            owner.register_buffer(name, tensor, persistent=False)
        else:
            setattr(owner, name, tensor)


def wrap(tensors: Sequence[Tensors], container: str) -> Any:
    """The argument that holds a list of tensors for each layer; None where they are attributes."""
    if container in ATTRIBUTES:
        return None
    if container == "list":
        return [list(mine) for mine in tensors]
    if container == "tuple":
        return tuple(tuple(mine) for mine in tensors)
    if container == "dict":
        return {f"layer{n}": list(mine) for n, mine in enumerate(tensors)}
    if container == "flat":
        return [t for mine in tensors for t in mine]
    if container == "columns":
        return [list(column) for column in zip(*tensors, strict=True)]
    if container == "fields":
        return Fields([mine[0] for mine in tensors], [mine[-1] for mine in tensors])
    return Layered([LayerCache(*mine) if len(mine) == 2 else JointCache(*mine) for mine in tensors])


def expression(container: str, names: int, layer: int, place: int, count: int) -> str:
    """The code that finds tensor ``place`` of ``count`` of a layer; attributes: from their owner on."""
    argument, field = ARGUMENT[names % len(ARGUMENT)], ("keys", "values")[place]
    called = attribute_names(count, names)[place]
    return {
        "attribute": called,
        "buffer": called,
        "module": f"cache.{called}",
        "list": f"{argument}[{layer}][{place}]",
        "tuple": f"{argument}[{layer}][{place}]",
        "dict": f"{argument}['layer{layer}'][{place}]",
        "flat": f"{argument}[{layer * count + place}]",
        "columns": f"{argument}[{place}][{layer}]",
        "fields": f"{argument}.{field}[{layer}]",
        "layered": f"{argument}.layers[{layer}].{field if count == 2 else 'kv'}",
    }[container]

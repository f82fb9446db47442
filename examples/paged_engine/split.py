"""A graph cut at attention, as piecewise engines do: the pieces between are compiled one by one.

Attention and the canary's ops, which look the forward's inputs up at run time, stay eager.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from config import EngineConfig
from torch import fx
from torch.fx.passes.split_module import split_module


def piecewise(config: EngineConfig) -> EngineConfig:
    """``config`` with an inner backend that cuts the graph first, if that is wanted."""
    return dataclasses.replace(config, inner=Piecewise(config.inner)) if config.split else config


class Piecewise:
    """A backend: cuts a graph at attention, and compiles what is between with ``inner``.

    Args:
        stays_eager: whether a node belongs to what the graph is cut at; by default attention and the canary's ops.

    Attributes:
        pieces: how many pieces each graph had that were compiled.
    """

    def __init__(self, inner: Any, stays_eager: Callable[[fx.Node], bool] | None = None):
        self.stays_eager = stays_eager or _stays_eager
        self.inner = torch._dynamo.lookup_backend(inner) if isinstance(inner, str) else inner
        self.pieces: list[int] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        parts, eager = _parts(gm, self.stays_eager)
        cut = split_module(gm, None, lambda node: parts[node], keep_original_order=True)
        self.pieces.append(0)
        for name, piece in list(cut.named_children()):
            number = name.removeprefix("submod_")
            if number != name and int(number) not in eager:
                setattr(cut, name, Piece(piece, self.inner))
                self.pieces[-1] += 1
        return cut


class Piece(torch.nn.Module):
    """A compiled piece in the place of its graph.

    Attributes:
        single: the graph gives a value; backends want a tuple, and get one with a single value in it.
    """

    def __init__(self, graph: fx.GraphModule, inner: Callable[..., Any]):
        super().__init__()
        output = graph.graph.output_node()
        self.single = not isinstance(output.args[0], tuple)
        if self.single:
            output.args = ((output.args[0],),)
            graph.recompile()
        self.compiled = inner(graph, _examples(graph))

    def forward(self, *args: Any) -> Any:
        out = self.compiled(*args)
        return out[0] if self.single else out


def _parts(gm: fx.GraphModule, stays_eager: Callable[[fx.Node], bool]) -> tuple[dict[fx.Node, int], set[int]]:
    """The part that each node belongs to, and the parts that stay eager."""
    number, inside, parts, eager = 0, False, {}, set()
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output") and stays_eager(node) != inside:
            number, inside = number + 1, not inside
        if inside:
            eager.add(number)
        parts[node] = number
    return parts, eager


def _stays_eager(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target).split(".")[0] in ("kvcanary", "paged_engine")
    return target is torch.nn.functional.scaled_dot_product_attention


def _examples(piece: fx.GraphModule) -> list[Any]:
    """The fake values that Dynamo left on the piece's inputs."""
    return [node.meta["example_value"] for node in piece.graph.find_nodes(op="placeholder")]

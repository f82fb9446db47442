"""Where a graph shows who is being written: token ids and positions among its inputs."""

from __future__ import annotations

import dataclasses
import re

import torch
from torch import fx

from .accesses import Accesses
from .names import function_name, source_name

_TOKENS = re.compile(r"(input_ids|token_ids|input_tokens|tokens|idx|ids)$")
_POSITIONS = re.compile(r"(position_ids|positions|input_pos|cache_position|pos)$")


@dataclasses.dataclass(frozen=True)
class TokenInputs:
    """The graph's token ids and positions, if it shows them.

    Token ids are int ``[B, T]``, or ``[T]`` in a graph that packs its requests; positions are int ``[B, T]``,
    ``[1, T]``, ``[T]`` or ``[B]``.
    """

    tokens: fx.Node | None
    positions: fx.Node | None
    missing: str | None  # why there are no token ids


def find_token_inputs(gm: fx.GraphModule, found: Accesses) -> TokenInputs:
    """Token ids are the input that an embedding looks up; positions are known by their name."""
    positions = next((n for n in gm.graph.find_nodes(op="placeholder") if _is(n, _POSITIONS, found, (1, 2))), None)
    for node in gm.graph.nodes:
        if function_name(node) == "embedding" and node.op == "call_function" and isinstance(node.args[0], fx.Node):
            looked_up = node.args[0]
            if looked_up.op == "placeholder" and _is(looked_up, _TOKENS, found, (1, 2)):
                return TokenInputs(looked_up, positions, None)
    named = next((n for n in gm.graph.find_nodes(op="placeholder") if _is(n, _TOKENS, found, (1, 2))), None)
    return TokenInputs(named, positions, None if named is not None else "the graph has no input with token ids")


def _is(node: fx.Node, name: re.Pattern[str], found: Accesses, dims: tuple[int, ...]) -> bool:
    value = found.values.get(node)
    if not isinstance(value, torch.Tensor) or value.dim() not in dims:
        return False
    return value.dtype in (torch.int64, torch.int32) and name.search(source_name(node)) is not None

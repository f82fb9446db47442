"""Caches that cannot be guarded: rebuilt each step by ``keys = torch.cat([keys, new])``, or born in the graph.

Such a cache is no input that the graph writes, so there is no pool to guard.  All we can do is say so, by
name.

Before and after (nothing changes)::

    cat: "f32[1, 2, 6, 8]" = torch.cat([l_keys_, k], dim = -2)
    return (out, cat)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from .accesses import FACTORIES, Accesses, storage_key
from .graph_plan import GraphPlan
from .names import function_name, source_name


def find_functional_caches(gm: fx.GraphModule, example_inputs: Sequence[Any], plan: GraphPlan) -> fx.GraphModule:
    """List in ``plan.functional`` the inputs that the graph grows by ``cat`` and returns."""
    output = next(iter(reversed(gm.graph.nodes)))
    returned = {n for n in pytree.tree_leaves(output.args) if isinstance(n, fx.Node)}
    for node in gm.graph.nodes:
        if function_name(node) in ("cat", "concat", "concatenate") and _is_kept(node, returned):
            parts = node.args[0] if node.args else node.kwargs.get("tensors")
            grown = [p for p in parts if _is_cache(p)] if isinstance(parts, list | tuple) else []
            plan.functional += [source_name(p) for p in grown[:1]]
    return gm


def _is_kept(node: fx.Node, returned: set[fx.Node]) -> bool:
    """Whether the graph returns a node or a part of it, as a sliding window's last tokens."""
    parts = [user for user in node.users if user.target is operator.getitem]
    return node in returned or any(part in returned for part in parts)


def caches_born_inside(gm: fx.GraphModule, found: Accesses) -> list[fx.Node]:
    """Nodes that make a tensor which the graph writes like a cache and returns: a lazily initialised one."""
    output = next(iter(reversed(gm.graph.nodes)))
    born = []
    for node in dict.fromkeys(n for n in pytree.tree_leaves(output.args) if isinstance(n, fx.Node)):
        value = found.values.get(node)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 3:
            maker = found.born.get(storage_key(value))
            if maker is not None and function_name(maker) in FACTORIES:
                born.append(maker)
    return born


def _is_cache(node: Any) -> bool:
    """Whether a value is a floating-point input with slots, heads and elements."""
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        return False
    value = node.meta.get("example_value", node.meta.get("val"))
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 3

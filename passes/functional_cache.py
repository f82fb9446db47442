"""Caches that cannot be guarded: rebuilt by ``keys = torch.cat([keys, new])``, replaced, or born in the graph.

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
from .names import function_name, source_name, state_named


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


def replaced_caches(gm: fx.GraphModule, found: Accesses) -> list[fx.Node]:
    """Inputs called a cache or a state that the graph only reads, and returns a new tensor of the same kind for."""
    written = set(found.written_roots())
    caches = [p for p in gm.graph.find_nodes(op="placeholder") if p not in written and _is_cache(p) and _is_called(p)]
    if not caches:
        return []
    output = next(iter(reversed(gm.graph.nodes)))
    returned = [n for n in dict.fromkeys(output.all_input_nodes) if isinstance(_value(n), torch.Tensor)]
    sources = _sources(gm, caches)
    return [cache for cache in caches if any(cache in sources[n] and _replaces(n, cache) for n in returned)]


def _sources(gm: fx.GraphModule, caches: list[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """The caches that each node is computed from."""
    sources: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in gm.graph.nodes:
        own = frozenset([node]) if node in caches else frozenset()
        sources[node] = own.union(*(sources[n] for n in node.all_input_nodes))
    return sources


def _replaces(node: fx.Node, cache: fx.Node) -> bool:
    """Whether a value could take the place of a cache, and is not the cache."""
    new, old = _value(node), _value(cache)
    same = tuple(new.shape) == tuple(old.shape) and new.dtype == old.dtype
    return same and storage_key(new) != storage_key(old)


def _is_called(placeholder: fx.Node) -> bool:
    name = source_name(placeholder)
    return state_named(name) is not None or "cache" in name.lower()


def _is_cache(node: Any) -> bool:
    """Whether a value is a floating-point input with slots, heads and elements."""
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        return False
    value = _value(node)
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 3


def _value(node: fx.Node) -> Any:
    """The fake value of a node."""
    return node.meta.get("example_value", node.meta.get("val"))

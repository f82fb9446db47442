"""Caches that cannot be guarded: rebuilt by ``keys = torch.cat([keys, new])``, replaced, born in the graph, or in a
tensor subclass.

The graph neither writes such a cache nor returns it with some slots written (:mod:`.returned_caches`), so there is no
pool to guard.  All we can do is name it.

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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .accesses import FACTORIES, Accesses, example_value, storage_key
from .attention_reads import AttentionReads
from .dynamo_contract import is_fragment, is_kept_by_someone
from .graph_plan import GraphPlan
from .names import function_name, has_kv_name, source_name, state_named

#: Why an input that comes back as another tensor, computed from it, is not guarded.
REPLACED = "replaced by a new tensor each step"

#: Why a cache in a subclass of torch.Tensor that wraps other tensors is not guarded.
WRAPPED = "a tensor subclass, whose bytes are in tensors inside it"

#: Ops whose result replaces their argument.
_PASSED_ON = ("detach", "clone", "contiguous")


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
    """Whether the graph returns a node, a part of it (such as a sliding window's last tokens), or a copy of it."""
    parts = [u for u in node.users if u.target is operator.getitem or function_name(u) in _PASSED_ON]
    return node in returned or any(_is_kept(part, returned) for part in parts)


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


def replaced_caches(gm: fx.GraphModule, found: Accesses, guarded: Sequence[fx.Node] = ()) -> list[fx.Node]:
    """Inputs that the graph only reads, and returns a new tensor of the same kind for: caches and states by their name,
    or by where they come from.

    Args:
        guarded: inputs that are guarded although they are returned anew.
    """
    known = {*found.written_roots(), *guarded}
    inputs = [p for p in gm.graph.find_nodes(op="placeholder") if p not in known and _may_be_kept(p, found)]
    if not inputs:
        return []
    returned = _returned(gm)
    sources, whole = _sources(gm, inputs), not is_fragment(gm)
    return [
        p
        for p in inputs
        if any(p in sources[n] and _replaces(n, p) and _is_state(p, n, returned[0], whole) for n in returned)
    ]


def wrapped_caches(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[fx.Node]:
    """Inputs called like caches that wrap other tensors: a DTensor, or K and V that a subclass quantizes."""
    given = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
    wrapping = [p for p, t in given if not isinstance(t, torch.nn.Parameter) and _wraps(example_value(p))]
    return [p for p in wrapping if has_kv_name(source_name(p)) or state_named(source_name(p)) is not None]


def _wraps(value: Any) -> bool:
    kind = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 3
    return kind and is_traceable_wrapper_subclass(value)


def passed_on(gm: fx.GraphModule, replaced: Sequence[fx.Node], reads: AttentionReads) -> list[fx.Node]:
    """Those of :func:`replaced_caches` whose tokens the new tensor holds, as ``torch.roll`` leaves them: the next call
    gets that tensor, and not the one that attention reads now."""
    return [p for p in replaced if any(reads.holds(n, p) and _replaces(n, p) for n in _returned(gm))]


def _returned(gm: fx.GraphModule) -> list[fx.Node]:
    """The tensors that a graph returns, each once."""
    return [n for n in gm.graph.output_node().all_input_nodes if isinstance(example_value(n), torch.Tensor)]


def _may_be_kept(placeholder: fx.Node, found: Accesses) -> bool:
    value = example_value(placeholder)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or found.root_of(placeholder) is None:
        return False
    return value.dim() >= (2 if is_kept_by_someone(placeholder) else 3)


def _is_state(placeholder: fx.Node, node: fx.Node, first: fx.Node, whole: bool) -> bool:
    """Whether ``node`` is the new value of ``placeholder``, and not an activation of a layer.

    A name decides where there is one.  Otherwise a state is kept in an attribute or a container, or it is returned
    after the model's result, with another shape.
    """
    if _is_called(placeholder):
        return True
    if is_kept_by_someone(placeholder):
        return node is not first
    shapes = (tuple(map(str, example_value(n).shape)) for n in (placeholder, first))
    return whole and node is not first and len(set(shapes)) == 2


def _sources(gm: fx.GraphModule, caches: list[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """The caches that each node is computed from."""
    sources: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in gm.graph.nodes:
        own = frozenset([node]) if node in caches else frozenset()
        sources[node] = own.union(*(sources[n] for n in node.all_input_nodes))
    return sources


def _replaces(node: fx.Node, cache: fx.Node) -> bool:
    """Whether a value could take the place of a cache, and is not the cache."""
    new, old = example_value(node), example_value(cache)
    same = tuple(new.shape) == tuple(old.shape) and new.dtype == old.dtype
    return same and storage_key(new) != storage_key(old)


def _is_called(placeholder: fx.Node) -> bool:
    name = source_name(placeholder)
    return state_named(name) is not None or "cache" in name.lower() or name.lower().startswith("past")


def _is_cache(node: Any) -> bool:
    """Whether a value is a floating-point input with slots, heads and elements."""
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        return False
    value = example_value(node)
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 3

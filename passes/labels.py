"""Which layer each half belongs to, and whether it is K or V."""

from __future__ import annotations

import re
from collections import Counter

import torch
from torch import fx

from .accesses import Accesses
from .halves import Half
from .names import half_named, module_path, source_name, state_named


def name_halves(halves: list[Half], found: Accesses) -> None:
    """Set ``layer``, ``label`` and ``pool`` of every half of a graph.

    The layer is the module that writes the half.  Outside of modules, or where one module writes the
    caches of several layers in a loop, it is what the pool's name and its K or V leave in common.
    """
    for half in halves:
        half.pool = _pool_name(half)
        nodes = half.nodes_written or [half.first_access.node]
        half.layer = module_path(nodes[0])
    states, halves = [h for h in halves if h.kind == "state"], [h for h in halves if h.kind != "state"]
    _label_states(states)
    sizes = Counter(h.layer for h in halves)
    loose = [h for h in halves if not h.layer or sizes[h.layer] > 2]
    _pair(loose, found)
    for layer in dict.fromkeys(h.layer for h in halves):
        members = [h for h in halves if h.layer == layer and not h.label]
        _label(members)


def _label_states(halves: list[Half]) -> None:
    """Running states by what they are called; numbered where a layer has several of a kind."""
    for half in halves:
        half.layer = half.layer or half.pool
        half.label = state_named(half.pool) or "state"
    kinds = Counter((h.layer, h.label) for h in halves)
    taken: Counter[tuple[str, str]] = Counter()
    for half in halves:
        kind = (half.layer, half.label)
        if kinds[kind] > 1:
            half.label += str(taken[kind])
            taken[kind] += 1


def _pool_name(half: Half) -> str:
    """The pool's name in the user's code, with the constant indices that pick the half."""
    base, steps = half.region.node, [f"[{i}]" for i in half.region.index if isinstance(i, int)]
    while base.op != "placeholder" and base.args and isinstance(base.args[0], fx.Node):
        picked = base.args[1] if base.op == "call_function" and len(base.args) > 1 else None
        if isinstance(picked, int):
            steps.insert(0, f"[{picked}]")
        base = base.args[0]
    return source_name(base) + "".join(steps)


def _pair(halves: list[Half], found: Accesses) -> None:
    """Layers of halves that no module tells apart: K and V that stand next to each other are one."""
    for half in halves:
        half.layer = half.pool
        half.label = half_named(half.pool) or ""
    for first, second in zip(halves[::2], halves[1::2], strict=False):
        stem = _common_stem(first, second, found)
        if stem is not None:
            first.layer = second.layer = stem
            first.label, second.label = "K", "V"


def _common_stem(first: Half, second: Half, found: Accesses) -> str | None:
    """What to call the layer of a K and a V; None if these two are not the halves of one."""
    pair = re.fullmatch(r"(.*)\[0\]", first.pool)
    if pair is not None and second.pool == f"{pair.group(1)}[1]" and found.values[first.root].shape[0] == 2:
        return pair.group(1)
    if pair is not None and second.pool == f"{pair.group(1)}[1]" and first.root is second.root:
        return pair.group(1)
    if (first.label, second.label) != ("K", "V"):
        return None
    a, b = first.pool.rpartition("."), second.pool.rpartition(".")
    if a[0] == b[0] and a[0]:
        return a[0]
    return f"{first.pool}/{second.pool}" if _same_kind(first, second, found) else None


def _same_kind(first: Half, second: Half, found: Accesses) -> bool:
    a, b = found.values[first.root], found.values[second.root]
    return isinstance(a, torch.Tensor) and a.shape[:-1] == b.shape[:-1]


def _label(halves: list[Half]) -> None:
    """K and V by name where the names say it, else by order: a layer writes K first."""
    names = [half_named(h.pool) for h in halves]
    if len(halves) == 1:
        halves[0].label = names[0] or "KV"
    elif None not in names and len(set(names)) == len(names):
        for half, name in zip(halves, names, strict=True):
            half.label = name or ""
    elif len(halves) == 2:
        halves[0].label, halves[1].label = "K", "V"
    else:
        for i, half in enumerate(halves):
            half.label = f"half{i}"

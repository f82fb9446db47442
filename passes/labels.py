"""Which layer each half belongs to, and whether it is K or V."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import torch
from torch import fx

from .accesses import Accesses
from .halves import Half
from .names import half_named, module_path, source_name, state_named
from .states import ancestors


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
    for half in loose:
        half.layer = half.pool
        half.label = half.read_as or half_named(half.pool) or ""
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
    """Layers of halves that no module tells apart: of those that stand next to each other and are called so, of those
    that one attention reads and no other, and of those that stand next to each other.
    """
    left = _paired(list(itertools.pairwise(halves)), halves, lambda a, b: _are_siblings(a, b, found))
    by_attention = [(a, b) for a in left for b in left if a.attention and a.attention == b.attention]
    left = _paired([p for p in by_attention if [h.read_as for h in p] == ["K", "V"]], left, lambda a, b: True)
    _paired(list(zip(left[::2], left[1::2], strict=False)), left, lambda a, b: _are_called_so(a, b, found))


def _paired(pairs: list[tuple[Half, Half]], halves: list[Half], are_pair: Callable[[Half, Half], bool]) -> list[Half]:
    """Name the layers of the ``pairs`` that are K and V; the halves that are left."""
    done: list[Half] = []
    for first, second in pairs:
        if not any(h is first or h is second for h in done) and are_pair(first, second):
            first.layer = second.layer = _common_stem(first, second, halves)
            first.label, second.label = first.label or "K", second.label or "V"
            done += [first, second]
    return [h for h in halves if not any(h is d for d in done)]


def _are_siblings(first: Half, second: Half, found: Accesses) -> bool:
    """Whether two halves are ``kv[0]`` and ``kv[1]`` of a layer."""
    stems = _stem(first, 0), _stem(second, 1)
    if None in stems or stems[0] != stems[1] or first.label == second.label != "":
        return False
    if first.attention and second.attention and first.attention != second.attention:
        return False
    return _same_kind(first, second, found) and not _is_computed_from(second, first)


def _are_called_so(first: Half, second: Half, found: Accesses) -> bool:
    """Whether two halves are ``keys`` and ``values`` of a layer."""
    if (first.label, second.label) != ("K", "V"):
        return False
    return _prefix(first) == _prefix(second) != "" or _same_kind(first, second, found)


def _stem(half: Half, index: int) -> str | None:
    """What a half is an index of."""
    stem = half.pool.removesuffix(f"[{index}]")
    return stem if stem != half.pool else None


def _is_computed_from(half: Half, other: Half) -> bool:
    """Whether what is written to a half is computed from another one, as in the layer above it."""
    touched = {a.node for a in other.accesses}
    written = [r.write.value for r in half.readable if r.write.value is not None]
    return any(touched & set(ancestors(value)) for value in written)


def _common_stem(first: Half, second: Half, halves: list[Half]) -> str:
    """What to call the layer of a K and a V."""
    stems = {_stem(h, i) for h in (first, second) for i in (0, 1)} - {None}
    others = [h.pool for h in halves if h is not first and h is not second]
    for stem in stems:
        if {first.pool, second.pool} == {f"{stem}[0]", f"{stem}[1]"} and not any(
            o.startswith(f"{stem}[") for o in others
        ):
            return str(stem)
    same = _prefix(first) == _prefix(second) != ""
    return _prefix(first) if same else f"{first.pool}/{second.pool}"


def _prefix(half: Half) -> str:
    return half.pool.rpartition(".")[0]


def _ends(stem: str) -> set[str]:
    return {f"{stem}[0]", f"{stem}[1]"}


def _same_kind(first: Half, second: Half, found: Accesses) -> bool:
    a, b = found.values[first.root], found.values[second.root]
    return isinstance(a, torch.Tensor) and a.shape[:-1] == b.shape[:-1]


def _label(halves: list[Half]) -> None:
    """K and V by how they are read, or by name where the names say it, else by order: a layer writes K first."""
    names = [h.read_as or half_named(h.pool) for h in halves]
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

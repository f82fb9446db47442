"""Which layer each half belongs to, and whether it is K or V."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import torch
from torch import fx

from .accesses import Accesses
from .axis_flow import hint
from .halves import Half
from .names import half_named, layer_number, module_path, state_named
from .pool_names import Part, PoolName
from .states import ancestors


def name_halves(halves: list[Half], found: Accesses) -> None:
    """Set ``layer``, ``number`` and ``label`` of every half of a graph.

    The layer is the module that writes the half.  Outside of modules, or where one module writes the
    caches of several layers in a loop, it is what the names of its K and V have in common.
    """
    for half in halves:
        nodes = half.nodes_written or [half.first_access.node]
        half.layer = module_path(nodes[0])
    states, halves = [h for h in halves if h.kind == "state"], [h for h in halves if h.kind != "state"]
    _label_states(states)
    loose: list[Half] = []
    for layer, members in _by_layer(halves).items():
        if not layer or _are_several(members):
            loose += members
    loose.sort(key=lambda h: h.first_access.order)
    for half in loose:
        half.layer = half.pool
    _find_layers(loose, found)
    for members in _by_layer(halves).values():
        _label(members)
    _number([*states, *halves], loose)


def _by_layer(halves: list[Half]) -> dict[str, list[Half]]:
    layers: dict[str, list[Half]] = {}
    for half in halves:
        layers.setdefault(half.layer, []).append(half)
    return layers


def _number(halves: list[Half], loose: list[Half]) -> None:
    """Number the layers by their names, where these tell them apart."""
    for half in halves:
        half.number = layer_number(half.layer)
    if len({h.number for h in loose}) < len({h.layer for h in loose}):
        for half in loose:
            half.number = None


def _are_several(halves: list[Half]) -> bool:
    """Whether what one module writes is the cache of several layers: of several attentions."""
    together = _read_together(halves)
    if together and sum(map(len, together)) == len(halves):
        return len(together) > 1
    return len({id(h.part_of or h) for h in halves}) > 2  # the heads of one tensor are one


def _read_together(halves: list[Half]) -> list[list[Half]]:
    """The halves that an attention reads, those of one attention together."""
    groups: list[tuple[set[fx.Node], list[Half]]] = []
    for half in halves:
        if not half.attention:
            continue
        mine, members = set(half.attention), [half]
        for group in [g for g in groups if g[0] & mine]:
            groups.remove(group)
            mine, members = mine | group[0], group[1] + members
        groups.append((mine, members))
    return [members for _, members in groups]


def _heads_together(halves: list[Half]) -> list[list[Half]]:
    """The heads of each tensor that no attention of the graph reads: behind a break it is another graph's."""
    heads: dict[fx.Node, list[Half]] = {}
    for half in halves:
        if half.part_of is not None and not half.attention:
            heads.setdefault(half.part_of, []).append(half)
    return list(heads.values())


def _label_states(halves: list[Half]) -> None:
    """Label running states by their names; numbered if a layer has several of a kind."""
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


def _find_layers(halves: list[Half], found: Accesses) -> None:
    """Layers of halves that no module tells apart: of those that stand next to each other and are called so, of those
    that one attention reads, or that are heads of one tensor, and of those that stand next to each other.
    """
    left = _paired(list(itertools.pairwise(halves)), halves, halves, lambda a, b: _are_siblings(a, b, found))
    for members in (*_read_together(left), *_heads_together(left)):
        if len(members) > 1:
            left = _settled(members, left, halves)
    pairs = list(zip(left[::2], left[1::2], strict=False))
    _paired(pairs, left, halves, lambda a, b: _are_called_so(a, b, found))


def _paired(
    pairs: list[tuple[Half, Half]], left: list[Half], halves: list[Half], are_pair: Callable[[Half, Half], bool]
) -> list[Half]:
    """Name the layers of the ``pairs`` that are K and V; those of the halves ``left`` that are none."""
    for pair in pairs:
        if all(any(h is one for one in left) for h in pair) and are_pair(*pair):
            left = _settled(list(pair), left, halves)
    return left


def _settled(members: list[Half], left: list[Half], halves: list[Half]) -> list[Half]:
    """Name the layer of some halves; the others that are left."""
    members = sorted(members, key=lambda h: (_known_as(h) == "V", h.name.order))
    layer = _common_name(members, [h for h in halves if not any(h is m for m in members)])
    for half in members:
        half.layer = layer
    return [h for h in left if not any(h is m for m in members)]


def _are_siblings(first: Half, second: Half, found: Accesses) -> bool:
    """Whether two halves are ``kv[0]`` and ``kv[1]`` of a layer."""
    if first.attention and second.attention and first.attention != second.attention:
        return False
    if _are_heads(first, second):
        return False
    labels = _known_as(first), _known_as(second)
    if labels[0] is not None and labels[0] == labels[1]:
        return False
    return (
        _are_ends(first.name, second.name) and _same_kind(first, second, found) and not _is_computed_from(second, first)
    )


def _are_heads(first: Half, second: Half) -> bool:
    """Whether two halves are heads of one tensor."""
    return first.part_of is not None and first.part_of is second.part_of


def _are_ends(first: PoolName, second: PoolName) -> bool:
    """Whether two names are the first and the second half of one thing."""
    if first.input != second.input:
        stem = first.input.removesuffix("[0]")
        return first.parts == second.parts and first.input != stem and second.input == f"{stem}[1]"
    differ = [(a, b) for a, b in zip(first.parts, second.parts, strict=True) if a != b]
    return len(differ) == 1 and all(a is not None and b is not None and _are_halves(a, b) for a, b in differ)


def _are_halves(first: Part, second: Part) -> bool:
    return first[0] == 0 and first[1] == second[0] and second[1] == 2 * first[1]


def _are_called_so(first: Half, second: Half, found: Accesses) -> bool:
    """Whether two halves are ``keys`` and ``values`` of a layer."""
    if (_known_as(first), _known_as(second)) != ("K", "V"):
        return False
    return _prefix(first) == _prefix(second) != "" or _same_kind(first, second, found)


def _is_computed_from(half: Half, other: Half) -> bool:
    """Whether a half's operand is computed from another half, as in the layer above it."""
    touched = {a.node for a in other.accesses}
    written = [r.write.value for r in half.readable if r.write.value is not None]
    return any(touched & set(ancestors(value)) for value in written)


def _common_name(members: list[Half], others: list[Half]) -> str:
    """The layer name of some halves: the common part of their names, unless other halves share it."""
    by_input: dict[str, PoolName] = {}
    for half in members:
        known = by_input.get(half.name.input)
        by_input[half.name.input] = half.name if known is None else known.common(half.name)
    wide = list(by_input.values())
    if len(wide) == 1 and not any(wide[0].holds(h.name) for h in others):
        return str(wide[0])
    if len(wide) == 2 and len({name.parts for name in wide}) == 1:
        for stem in _stems(*(name.input for name in wide)):
            if not any(h.pool.startswith((f"{stem}.", f"{stem}[")) for h in others):
                return stem
    return "/".join(dict.fromkeys(h.pool for h in members) if len(wide) == 1 else map(str, wide))


def _stems(first: str, second: str) -> list[str]:
    """The common beginnings of two expressions."""
    stem = first.removesuffix("[0]")
    stems = [stem] if stem != first and second == f"{stem}[1]" else []
    prefix = first.rpartition(".")[0]
    return stems + [prefix] * (prefix == second.rpartition(".")[0] != "")


def _prefix(half: Half) -> str:
    return half.name.input.rpartition(".")[0]


def _same_kind(first: Half, second: Half, found: Accesses) -> bool:
    a, b = found.values[first.root], found.values[second.root]
    # not by the sizes themselves: their comparison is a guard, which for a size marked as dynamic is an error
    return isinstance(a, torch.Tensor) and [hint(n) for n in a.shape[:-1]] == [hint(n) for n in b.shape[:-1]]


def _label(halves: list[Half]) -> None:
    """K and V by how they are read, or by name where the names say it, else by order: ``kv[0]`` holds K, and a layer
    writes K first.
    """
    labels = [_known_as(h) for h in halves]
    if len(halves) == 2 and not _are_heads(*halves):
        labels = _of_two(halves, labels)
    for half, label in zip(halves, labels, strict=True):
        half.label = label or "KV"


def _known_as(half: Half) -> str | None:
    """K or V as the graph's attention reads it, else by its name."""
    known = half.read_as or half_named(half.pool)
    return None if known == "KV" else known


def _of_two(halves: list[Half], labels: list[str | None]) -> list[str | None]:
    """The labels of a layer's two halves, of which some may be known."""
    if {h.read_as for h in halves} == {"K", "KV"}:  # a latent, and the part of K that V lacks
        return [h.read_as for h in halves]
    if None in labels and set(labels) != {None}:
        known = next(label for label in labels if label is not None)
        return [label or ("V" if known == "K" else "K") for label in labels]
    names = sorted((h.name for h in halves), key=lambda name: name.order)
    by_name = {h.read_as for h in halves} <= {None, "KV"}
    if labels[0] == labels[1] and by_name and (labels[0] is None or _are_ends(*names)):
        return ["K" if h.name == names[0] else "V" for h in halves] if names[0] != names[1] else ["K", "V"]
    return labels

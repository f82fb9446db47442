"""One check in front of a graph's first write and one behind its last, in the place of two in each layer.

A check costs what it disturbs: beside attention, and as one of a hundred launches of a captured decode step, more than
what it looks at.  Before::

    verify_halves([k0, v0], [key0, value0], [slots0], [], state, [0, 1], [0, 1])
    index_copy_(k0, key0)
    ...
    record_halves([k0, v0], [key0, value0], [slots0], [], None, state, [0, 1], [0, 1])
    ...
    verify_halves([k1, v1], [key1, value1], [slots1], [], state, [2, 3], [2, 3])
    ...

After, beside the model where a CUDA graph is captured (:mod:`.halves_beside`)::

    slots = stack([slots0, slots1])
    verify_layers([k0, v0, k1, v1], [slots], [], True, state, [0, 1, 2, 3], [0, 1, 2, 3])
    ...
    join([k0, v0, k1, v1, slots], state)
    kept0 = as_strided(key0, *form), ...
    index_copy_(k0, key0)
    ...
    kept1 = as_strided(key1, *form), ...
    index_copy_(k1, key1)
    ...
    record_layers([k0, v0, k1, v1], [kept0, ...], [slots], [], True, None, state, ...)
    ...
    join([k0, ..., value1, slots], state)

The model waits in front of its first write: what a write replaces is compared before.  ``as_strided`` changes nothing
of what is about to be written, but has Inductor store it, once: the kernel that computes K then writes it to the cache
as well.  An op of ours in that place, as until 2026-11-28, splits that kernel in two.  A part of a larger tensor still
goes through ``join``: where it lies in memory is Inductor's to choose.  What is written is held until it was compared,
so a graph for a prompt keeps a check in each layer.

A layer's slots are computed from what the layer has, such as a count of its own tokens in transformers' static caches.
Stacked, Inductor computes them in one kernel, and the model's own write does so by itself, as without a check.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from ..kernels import side_stream
from .dynamo_contract import fake_values
from .early_values import PURE, written_by
from .graph_plan import GraphPlan
from .held_values import can_hold, stay_written, storages
from .join_side_streams import cuts
from .names import function_name
from .state_inputs import is_canary
from .states import ancestors

_BEGIN = torch.ops.kvcanary.begin.default
_VERIFY = torch.ops.kvcanary.verify_halves.default
_RECORD = torch.ops.kvcanary.record_halves.default
_IDENTIFY = torch.ops.kvcanary.identify.default
_JOIN = torch.ops.kvcanary.join.default


def check_layers_at_once(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    plan: GraphPlan,
    wanted: Callable[[torch.device], bool] = lambda _: True,
    side: bool = True,
) -> fx.GraphModule:
    """Join the checks of all layers, in place; nothing if one of them has to be where it is.

    Args:
        wanted: whether the checks on a device may be moved.
        side: they may run beside the model.
    """
    if plan.joins or len(plan.devices) != 1 or not wanted(plan.devices[0]):
        return gm
    layers = _layers(gm.graph)
    if layers is None or not _are_alike(layers) or not can_hold(v for layer in layers for v in layer.values):
        return gm
    moved = _slots_before(gm.graph, layers)
    if moved is None or not stay_written(gm.graph, {layer.record: layer.record.all_input_nodes for layer in layers}):
        return gm
    _join(gm, layers, moved)
    plan.joins, plan.halves_beside = True, side and side_stream.can_fork(plan.devices[0])
    plan.layers_at_once = len(layers)
    gm.graph.lint()
    gm.recompile()
    return gm


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The checks around the writes of a layer, K and V."""

    verify: fx.Node
    record: fx.Node

    @property
    def caches(self) -> list[fx.Node]:
        return list(self.verify.args[0])  # type: ignore[arg-type]

    @property
    def values(self) -> list[Any]:
        return list(self.record.args[1])  # type: ignore[arg-type]

    @property
    def index(self) -> list[fx.Node]:
        return list(self.record.args[2])  # type: ignore[arg-type]


def _layers(graph: fx.Graph) -> list[_Layer] | None:
    """The layers in order; None if the graph has checks of other kinds, or fewer than two layers."""
    verifies: dict[tuple[int, ...], fx.Node] = {}
    layers = []
    for node in graph.nodes:
        if cuts(node):
            return None
        if node.target is _VERIFY:
            verifies[tuple(node.args[-2])] = node
        elif node.target is _RECORD:
            verify = verifies.pop(tuple(node.args[-2]), None)
            if verify is None or len(node.args[0]) != 2:
                return None
            layers.append(_Layer(verify, node))
        elif is_canary(node) and node.target not in (_BEGIN, _IDENTIFY):
            return None
    return layers if len(layers) > 1 and not verifies else None


def _are_alike(layers: Sequence[_Layer]) -> bool:
    """Whether one op can name the writes of all layers."""
    first = layers[0]
    extent, positions = first.record.args[3], first.record.args[4]
    forms = [_form(node) for node in first.index]
    for layer in layers:
        one, other = layer.verify.args, layer.record.args
        if any(cache.op != "placeholder" for cache in layer.caches):
            return False
        if list(one[2]) != layer.index or one[3] != extent or other[3] != extent or other[4] is not positions:  # type: ignore[arg-type]
            return False
        if None in forms or [_form(node) for node in layer.index] != forms:
            return False
        if not all(isinstance(value, fx.Node) for value in layer.values):
            return False
    return True


def _form(node: fx.Node) -> tuple[Any, ...] | None:
    """The shape and dtype of a tensor; None if a size is not known."""
    (value,) = fake_values([node])
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape), value.dtype, value.device


def _slots_before(graph: fx.Graph, layers: Sequence[_Layer]) -> list[fx.Node] | None:
    """What the slots of all layers are computed with, in order; None if that cannot be done before the first write."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    start = order[_begin(graph)]
    late = {part for layer in layers for node in layer.index for part in ancestors(node) if order[part] > start}
    computed = sorted(late, key=order.__getitem__)
    if any(function_name(node).strip("_") not in PURE or written_by(node) != [] for node in computed):
        return None
    changed: set[int] = set()  # storages that the graph writes behind the start
    waiting = iter(computed)
    node = next(waiting, None)
    for candidate in list(graph.nodes)[start:]:
        if node is None:
            break
        if candidate is node:
            if not changed.isdisjoint(storages(node.all_input_nodes)):
                return None
            node = next(waiting, None)
            continue
        written = written_by(candidate)
        if written is None:
            return None
        changed |= storages(written)
    return computed


def _begin(graph: fx.Graph) -> fx.Node:
    """The first op of ours, which is in front of all of the model's."""
    begin: fx.Node = next(node for node in graph.nodes if node.target is _BEGIN)
    return begin


def _join(gm: fx.GraphModule, layers: Sequence[_Layer], moved: Sequence[fx.Node]) -> None:
    graph, first, last = gm.graph, layers[0], layers[-1]
    extent, positions, state = first.record.args[3:6]
    caches = [cache for layer in layers for cache in layer.caches]
    sites, writes = ([n for layer in layers for n in layer.record.args[at]] for at in (-2, -1))  # type: ignore[union-attr]
    apart = any(layer.index != first.index for layer in layers)
    begin = _begin(graph)
    for node in reversed(moved):
        begin.append(node)
    slots_known = _last_of([begin, *(node for layer in layers for node in layer.index)], graph)
    index = first.index
    if apart:
        with graph.inserting_after(slots_known):
            index = [_stacked(graph, [layer.index[k] for layer in layers]) for k in range(len(index))]
    with graph.inserting_after(_last_of([slots_known, *index], graph)):
        given = (caches, index, extent, apart, state, sites, writes)
        graph.call_function(torch.ops.kvcanary.verify_layers.default, given)
    stored: dict[fx.Node, fx.Node] = {}
    for layer in layers:
        with graph.inserting_before(layer.verify):
            held = _store_once(graph, layer.values, stored)
            _wait_for(graph, [*caches, *index, *held] if layer is first else held, state)
    values = [stored[value] for layer in layers for value in layer.values]
    with graph.inserting_after(last.record):
        recorded = (caches, values, index, extent, apart, positions, state, sites, writes)
        graph.call_function(torch.ops.kvcanary.record_layers.default, recorded)
    for layer in layers:
        graph.erase_node(layer.verify)
        graph.erase_node(layer.record)
    ends = [positions] if isinstance(positions, fx.Node) else []
    with graph.inserting_before(graph.output_node()):
        _wait_for(graph, [*caches, *values, *index, *ends], state)


def _wait_for(graph: fx.Graph, held: Sequence[fx.Node], state: Any) -> None:
    """Insert the op that waits for what reads some tensors beside the model; none for no tensors."""
    if held:
        graph.call_function(_JOIN, (list(dict.fromkeys(held)), state))


def _store_once(graph: fx.Graph, values: Sequence[fx.Node], stored: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """Have Inductor store what a layer is about to write, which the write and the check then read.

    Args:
        stored: gets what the check is given for each value.

    Returns:
        What has to be joined for that.
    """
    held = []
    for value in values:
        if value in stored:
            continue
        stored[value] = value
        if _is_whole(value):
            (fake,) = fake_values([value])
            stored[value] = graph.call_function(torch.as_strided, (value, tuple(fake.shape), fake.stride()))
            stored[value].meta["example_value"] = fake  # the rehearsal of the launches wants its form
        elif value.op != "placeholder":
            held.append(value)
    return held


def _is_whole(value: fx.Node) -> bool:
    """Whether a node computes a tensor that is all of its memory, so that ``as_strided`` names it wherever it lies."""
    (fake,) = fake_values([value])
    size = fake.untyped_storage().nbytes()
    if value.op == "placeholder" or not isinstance(size, int):
        return False
    return bool(fake.storage_offset() == 0 and size == fake.numel() * fake.element_size())


def _stacked(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Node:
    stacked = graph.call_function(torch.stack, (list(nodes),))
    stacked.meta["example_value"] = torch.stack(fake_values(nodes))  # the rehearsal of the launches wants its form
    return stacked


def _last_of(nodes: Iterable[fx.Node], graph: fx.Graph) -> fx.Node:
    """The one that comes last; a placeholder counts as in front of all."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    return max(nodes, key=order.__getitem__)

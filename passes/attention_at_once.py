"""One check before the first attention of a graph and one behind its last, in the place of two around each.

As :mod:`.layers_at_once` does it where the graph shows the writes.  Before::

    verify_at(out0, state, "layers.0")
    attention(q0, k0, v0, out0, "layers.0")
    record_at(out0, k0, v0, state, "layers.0")
    ...
    verify_at(out1, state, "layers.1")
    ...

After, beside the model where it may run there::

    verify_layers_at(out0, state, ["layers.0", "layers.1"])
    attention(q0, k0, v0, out0, "layers.0")
    ...
    join_at(out1, [], [q1, k1, v1], state)  # after a 16th of the layers
    attention(q1, k1, v1, out1, "layers.1")
    ...
    record_layers_at(out1, [k0, k1], [v0, v1], state, ["layers.0", "layers.1"])
    ...
    join([k0, k1, v0, v1, out], state)

What a forward of an engine reads is known before it runs, so nothing waits for the check, unless the forward writes to
what it reads.  K and V are held until the end, so a graph of many tokens, or of any number, keeps its checks in each
layer; so does one whose layers are named by objects, for which an op would have no type of lists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ..kernels import layer_ops, side_stream
from .dynamo_contract import fake_values
from .graph_plan import GraphPlan
from .held_values import can_hold, stay_written
from .join_side_streams import cuts, inputs_of
from .state_inputs import is_canary
from .states import ancestors

_VERIFY, _RECORD = layer_ops.ops_for("", "str")
_BEGIN = torch.ops.kvcanary.begin.default


def check_attention_at_once(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    plan: GraphPlan,
    wanted: Callable[[torch.device], bool] = lambda _: True,
    side: bool = True,
) -> fx.GraphModule:
    """Join the checks around all opaque attention ops, in place; nothing if one of them has to be where it is.

    Args:
        wanted: whether the checks on a device may be moved.
        side: they may run beside the model.
    """
    if plan.joins or plan.layers_at_once or len(plan.devices) != 1 or not wanted(plan.devices[0]):
        return gm
    layers = _layers(gm.graph)
    if layers is None or not _are_alike(layers) or not can_hold(v for layer in layers for v in layer.given):
        return gm
    if not _are_in_order(layers) or _is_named_elsewhere(gm.graph, layers):
        return gm
    if not stay_written(gm.graph, {layer.record: layer.given for layer in layers}):
        return gm
    beside = side and side_stream.can_fork(plan.devices[0])
    _join(gm, layers, beside)
    plan.joins, plan.layers_at_once = beside, len(layers)
    gm.graph.lint()
    gm.recompile()
    return gm


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The checks around one attention op."""

    verify: fx.Node
    record: fx.Node

    @property
    def output(self) -> fx.Node:
        return self.record.args[0]  # type: ignore[return-value]

    @property
    def name(self) -> str:
        return self.record.args[4]  # type: ignore[return-value]

    @property
    def given(self) -> list[Any]:
        """K and V, as far as the op has them."""
        return [operand for operand in self.record.args[1:3] if operand is not None]


def _layers(graph: fx.Graph) -> list[_Layer] | None:
    """The layers in order; None if the graph has checks of other kinds, or fewer than two layers."""
    waiting: dict[Any, fx.Node] = {}
    layers = []
    for node in graph.nodes:
        if cuts(node):
            return None
        if node.target is _VERIFY:
            waiting[node.args[2]] = node
        elif node.target is _RECORD:
            verify = waiting.pop(node.args[4], None)
            if verify is None:
                return None
            layers.append(_Layer(verify, node))
        elif is_canary(node) and node.target is not _BEGIN:
            return None
    return layers if len(layers) > 1 and not waiting else None


def _are_alike(layers: Sequence[_Layer]) -> bool:
    """Whether one op can name K and V of all layers, each layer once."""
    first = [operand is None for operand in layers[0].record.args[1:3]]
    if any([operand is None for operand in layer.record.args[1:3]] != first for layer in layers):
        return False
    return len({layer.name for layer in layers}) == len(layers)


def _are_in_order(layers: Sequence[_Layer]) -> bool:
    """Whether the last attention needs the outputs of all others, and all need the first one's: the ops of all layers
    are tied to these two."""
    outputs = {layer.output for layer in layers}
    before_last = set(ancestors(layers[-1].verify.next))
    if not outputs <= before_last:
        return False
    return all(layers[0].output in set(ancestors(layer.verify.next)) for layer in layers[1:])


def _is_named_elsewhere(graph: fx.Graph, layers: Sequence[_Layer]) -> bool:
    """Whether another op is given a layer: by its name it can write the cache."""
    ours = {node for layer in layers for node in (layer.verify, layer.verify.next, layer.record)}
    names = {layer.name for layer in layers}
    others = (node for node in graph.nodes if node.op.startswith("call") and node not in ours)
    return any(isinstance(leaf, str) and leaf in names for n in others for leaf in tree_leaves((n.args, n.kwargs)))


def _join(gm: fx.GraphModule, layers: Sequence[_Layer], beside: bool) -> None:
    graph, first, last = gm.graph, layers[0], layers[-1]
    state, names = first.record.args[3], [layer.name for layer in layers]
    keys, values = ([layer.record.args[at] for layer in layers if layer.record.args[at] is not None] for at in (1, 2))
    with graph.inserting_before(first.verify):
        graph.call_function(torch.ops.kvcanary.verify_layers_at.default, (first.output, state, names))
    with graph.inserting_after(last.record):
        given = (last.output, keys, values, state, names)
        graph.call_function(torch.ops.kvcanary.record_layers_at.default, given)
    if beside and side_stream.meets_at(len(layers)):
        _wait_in_front_of(graph, layers[side_stream.meets_at(len(layers))], state)
    for layer in layers:
        graph.erase_node(layer.verify)
        graph.erase_node(layer.record)
    if beside:
        made = _made(graph)  # else Inductor moves the wait up to the record
        with graph.inserting_before(graph.output_node()):
            graph.call_function(torch.ops.kvcanary.join.default, (list(dict.fromkeys([*keys, *values, *made])), state))


def _wait_in_front_of(graph: fx.Graph, layer: _Layer, state: Any) -> None:
    """Let the model wait in front of a layer's attention for what began beside it."""
    with graph.inserting_before(layer.verify):
        given: tuple[Any, ...] = (layer.output, [], inputs_of(layer.verify.next, layer.output), state)
        graph.call_function(torch.ops.kvcanary.join_at.default, given)


def _made(graph: fx.Graph) -> list[fx.Node]:
    """The tensors that the graph returns and has computed."""
    returned = [node for node in graph.output_node().all_input_nodes if node.op != "placeholder"]
    values = zip(returned, fake_values(returned), strict=True)
    return [node for node, value in values if isinstance(value, torch.Tensor)]

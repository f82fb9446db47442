"""Where the checks that run beside the model start, and where the model waits for them.

The last op of a graph joins: a CUDA graph cannot end while work that was forked in it is running, and we do not control
the capture: cudagraph trees capture a whole graph, an engine any part.  A graph that will be captured in parts gets no
join, and its checks stay in the model's own stream: an op tagged ``cudagraph_unsafe`` cuts a graph into such parts.

On the side stream, K and V are read when the model is done with them.  The next layer's attention waits for that, and
they are held until then, so that their memory is not reused.

The check of a layer goes after the record of the layer before, so that its bytes are read while the model computes
matrix products.  Forked right before attention, both streams started their work at once: on an H200 a decode of 32
layers took 4.986 ms that way, 4.924 ms this way, and 4.892 ms without checks.

The wait takes attention's output and its inputs as arguments.  Without the output nothing ties it, and the check before
it, to attention.  Without the inputs Inductor moves it up to the check, because the held tensors are freed there, and
the model waits for each check as soon as it is started (seen in its code; such a decode took 5.289 ms).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ..kernels import side_stream
from .dynamo_contract import fake_values
from .graph_plan import GraphPlan
from .state_inputs import state_input


def join_side_streams(gm: fx.GraphModule, example_inputs: Sequence[Any], plan: GraphPlan) -> fx.GraphModule:
    """Make checks start early and join at the end, in graphs of opaque attention on a device with streams, in place."""
    devices = [device for device in plan.devices if side_stream.can_fork(device)]
    if not plan.attention or plan.joins or not devices or any(cuts(node) for node in gm.graph.nodes):
        return gm
    records: dict[Any, fx.Node] = {}  # by its device's state, the latest without a wait
    for node in list(gm.graph.nodes):
        if _is_op(node, "kvcanary::verify_at"):
            _place(gm, node, records.pop(node.args[1], None))
        elif _is_op(node, "kvcanary::record_at"):
            records[node.args[3]] = node
    for device in devices:
        state = state_input(gm, plan, device)
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.call_function(torch.ops.kvcanary.join.default, (_operands(records.get(state)), state))
    plan.joins = True
    gm.recompile()
    return gm


def _place(gm: fx.GraphModule, check: fx.Node, record: fx.Node | None) -> None:
    """Move a check after the record of the layer before, if allowed; the model waits where the check was."""
    if record is None:
        return
    output, state = check.args[:2]
    with gm.graph.inserting_before(check):
        given = (output, _operands(record), inputs_of(check.next, output), state)
        gm.graph.call_function(torch.ops.kvcanary.join_at.default, given)
    if _may_go_ahead(check, record):
        record.append(check)
        check.update_arg(0, record.args[0])


def _operands(record: fx.Node | None) -> list[fx.Node]:
    """The K and V that a record compares."""
    return [a for a in dict.fromkeys(record.args[1:3]) if isinstance(a, fx.Node)] if record is not None else []


def inputs_of(attention: fx.Node, output: Any) -> list[fx.Node]:
    """Attention's inputs: its tensor arguments, except its output."""
    values = zip(attention.all_input_nodes, fake_values(attention.all_input_nodes), strict=True)
    return [node for node, value in values if isinstance(value, torch.Tensor) and node is not output]


def _may_go_ahead(check: fx.Node, record: fx.Node) -> bool:
    """Whether a check sees the same bytes after the record of another layer as at its own place.

    Not if an op between is given the layer: by its name it can write the cache.
    """
    layer = check.args[2]
    if isinstance(layer, fx.Node) and layer.op != "placeholder":
        return False
    between = record.next
    while between is not check:
        if any(leaf is layer or leaf == layer for leaf in tree_leaves((between.args, between.kwargs))):
            return False
        between = between.next
    return True


def _is_op(node: fx.Node, name: str) -> bool:
    """Whether a node calls this op, or one of those made of it for a type of layer names."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name.startswith(name)


def cuts(node: fx.Node) -> bool:
    """Whether the graph is captured in two parts around this op."""
    target = node.target
    ops = [target] if isinstance(target, torch._ops.OpOverload) else []
    if isinstance(target, torch._ops.OpOverloadPacket):
        ops = [getattr(target, overload) for overload in target.overloads()]
    return any(torch.Tag.cudagraph_unsafe in op.tags for op in ops)

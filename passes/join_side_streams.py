"""The last op of a graph waits for the checks that run beside the model; until the next layer they hold K and V.

A CUDA graph cannot end while work that was forked in it is running, and whoever captures is not asked: cudagraph trees
capture all of a graph, an engine what it likes.  A graph that will be captured in parts gets no join, and its checks
stay in the model's own stream: an op tagged ``cudagraph_unsafe`` cuts a graph into such parts.

Beside the model, K and V are read when the model is done with them.  Each check of a layer is given those of the layer
before, and the join those of the last: their memory is not used again before these ops, which wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..kernels import side_stream
from .graph_plan import GraphPlan
from .state_inputs import state_input


def join_side_streams(gm: fx.GraphModule, example_inputs: Sequence[Any], plan: GraphPlan) -> fx.GraphModule:
    """Join at the end of a graph with opaque attention on a device that has streams, in place."""
    devices = [device for device in plan.devices if side_stream.can_fork(device)]
    if not plan.attention or plan.joins or not devices or any(_cuts(node) for node in gm.graph.nodes):
        return gm
    held: list[fx.Node] = []
    for node in list(gm.graph.nodes):
        if _is_op(node, "kvcanary::verify_at"):
            node.update_arg(1, held)
        elif _is_op(node, "kvcanary::record_at"):
            held = list(dict.fromkeys(a for a in node.args[1:3] if isinstance(a, fx.Node)))
    for device in devices:
        state = state_input(gm, plan, device)
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.call_function(torch.ops.kvcanary.join.default, (held, state))
    plan.joins = True
    gm.recompile()
    return gm


def _is_op(node: fx.Node, name: str) -> bool:
    """Whether a node calls this op, or one of those made of it for a type of layer names."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name.startswith(name)


def _cuts(node: fx.Node) -> bool:
    """Whether the graph is captured in two parts around this op."""
    target = node.target
    ops = [target] if isinstance(target, torch._ops.OpOverload) else []
    if isinstance(target, torch._ops.OpOverloadPacket):
        ops = [getattr(target, overload) for overload in target.overloads()]
    return any(torch.Tag.cudagraph_unsafe in op.tags for op in ops)

"""The last op of a graph waits for the checks that run beside the model.

A CUDA graph cannot end while work that was forked in it is running, and whoever captures is not asked: cudagraph trees
capture all of a graph, an engine what it likes.  A graph that will be captured in parts gets no join, and its checks
stay in the model's own stream: an op tagged ``cudagraph_unsafe`` cuts a graph into such parts.
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
    for device in devices:
        state = state_input(gm, plan, device)
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.call_function(torch.ops.kvcanary.join.default, (state,))
    plan.joins = True
    gm.recompile()
    return gm


def _cuts(node: fx.Node) -> bool:
    """Whether the graph is captured in two parts around this op."""
    target = node.target
    ops = [target] if isinstance(target, torch._ops.OpOverload) else []
    if isinstance(target, torch._ops.OpOverloadPacket):
        ops = [getattr(target, overload) for overload in target.overloads()]
    return any(torch.Tag.cudagraph_unsafe in op.tags for op in ops)

"""The ``state`` inputs of a graph, one per device: every canary op mutates one, which keeps the ops and their order."""

from __future__ import annotations

import torch
from torch import fx

from ..kernels import ops as canary_ops
from .dynamo_contract import append_static_input
from .graph_plan import GraphPlan

STATE = "kvcanary_state"


def is_canary(node: fx.Node) -> bool:
    """Whether a node is one of our ops."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == canary_ops.NAMESPACE


def state_input(gm: fx.GraphModule, plan: GraphPlan, device: torch.device) -> fx.Node:
    """The state of a device; if it is new, its ``begin`` becomes the first op of the graph."""
    if device in plan.devices:
        name = _name(plan.devices.index(device))
        known: fx.Node = next(n for n in gm.graph.find_nodes(op="placeholder") if n.name == name)
        return known
    example = torch.zeros(1, dtype=torch.int32, device=device)
    state = append_static_input(gm, _name(len(plan.devices)), example)
    plan.devices.append(device)
    first = next(n for n in gm.graph.nodes if n.op != "placeholder")
    with gm.graph.inserting_before(first):
        gm.graph.call_function(torch.ops.kvcanary.begin.default, (state,))
    return state


def _name(number: int) -> str:
    return f"{STATE}_{number}" if number else STATE

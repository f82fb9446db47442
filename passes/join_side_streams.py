"""Where the checks that run beside the model start, and where the model waits for them.

The last op of a graph joins: a CUDA graph cannot end while work that was forked in it is running, and whoever captures
is not asked: cudagraph trees capture all of a graph, an engine what it likes.  A graph that will be captured in parts
gets no join, and its checks stay in the model's own stream: an op tagged ``cudagraph_unsafe`` cuts a graph into such
parts.

Beside the model, K and V are read when the model is done with them.  A later check is given them, or the join: their
memory is not used again before these ops, which wait.

The check of a layer goes in front of the record of the layer before, where its bytes are read while the model computes
products of matrices.  Forked right before attention, two streams started at once what was due there: on an H200 a
decode of 32 layers took 4.986 ms like that, and 4.932 ms like this, 4.892 ms without checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ..kernels import side_stream
from .graph_plan import GraphPlan
from .state_inputs import state_input


def join_side_streams(gm: fx.GraphModule, example_inputs: Sequence[Any], plan: GraphPlan) -> fx.GraphModule:
    """Let checks start early and join at the end, in graphs of opaque attention on a device with streams, in place."""
    devices = [device for device in plan.devices if side_stream.can_fork(device)]
    if not plan.attention or plan.joins or not devices or any(_cuts(node) for node in gm.graph.nodes):
        return gm
    by_state: dict[Any, _Operands] = {}
    for node in list(gm.graph.nodes):
        if _is_op(node, "kvcanary::verify_at"):
            _place(node, by_state.setdefault(node.args[2], _Operands()))
        elif _is_op(node, "kvcanary::record_at"):
            by_state.setdefault(node.args[3], _Operands()).recorded(node)
    for device in devices:
        state = state_input(gm, plan, device)
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.call_function(torch.ops.kvcanary.join.default, (by_state.get(state, _Operands()).give(), state))
    plan.joins = True
    gm.recompile()
    return gm


class _Operands:
    """The K and V that one device's records read and that nothing has waited for, while going through a graph."""

    def __init__(self) -> None:
        self.record: fx.Node | None = None  # the latest
        self._earlier: list[fx.Node] = []

    def recorded(self, record: fx.Node) -> None:
        """Another layer's, from here on."""
        self._earlier, self.record = self.give(), record

    def give(self, latest: bool = True) -> list[fx.Node]:
        """They go to an op that waits for them, those of the latest record too or not yet."""
        given, self._earlier = self._earlier, []
        if latest and self.record is not None:
            given = given + [a for a in dict.fromkeys(self.record.args[1:3]) if isinstance(a, fx.Node)]
            self.record = None
        return given


def _place(check: fx.Node, operands: _Operands) -> None:
    """Move a check in front of the latest record, if it may go there, and let it wait for what was read before."""
    record = operands.record
    ahead = record is not None and _may_go_ahead(check, record)
    if record is not None and ahead:
        record.prepend(check)
        check.update_arg(0, record.args[0])
    check.update_arg(1, operands.give(latest=not ahead))  # what a record after it reads, nobody has waited for


def _may_go_ahead(check: fx.Node, record: fx.Node) -> bool:
    """Whether a check sees in front of a record of another layer what it sees where it stands.

    Not if an op between is given the layer: by its name it can write the cache.
    """
    layer = check.args[3]
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


def _cuts(node: fx.Node) -> bool:
    """Whether the graph is captured in two parts around this op."""
    target = node.target
    ops = [target] if isinstance(target, torch._ops.OpOverload) else []
    if isinstance(target, torch._ops.OpOverloadPacket):
        ops = [getattr(target, overload) for overload in target.overloads()]
    return any(torch.Tag.cudagraph_unsafe in op.tags for op in ops)

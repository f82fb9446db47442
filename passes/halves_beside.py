"""Let the checks around the writes of layers run beside the model, where a CUDA graph is captured whole.

In a captured decode step a check in the model's own stream costs its latency in every layer: of a 1B-shaped Llama with
one request on an H100, 185 of 1,966 us.  As for opaque attention (:mod:`.join_side_streams`), a layer's check goes
behind the record of the layer before, and the model waits for both in front of its write::

    record_halves([k0, v0], [key0, value0], ...)       # beside the model
    verify_halves([k1, v1], [None, None], ...)         # beside it, while it computes the rest of the layer
    ...
    join([k0, v0, key0, value0, ..., key1, value1], state)
    index_copy_(k1, key1)

The slots that a write replaces are compared before it, so it may not go ahead of the check.  The join takes what was
read since the last one, which may be freed behind it, and what is about to be written, which ties it to its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..kernels import side_stream
from .dynamo_contract import fake_values
from .graph_plan import GraphPlan
from .join_side_streams import cuts
from .state_inputs import is_canary

_VERIFY = torch.ops.kvcanary.verify_halves.default
_RECORD = torch.ops.kvcanary.record_halves.default
_BESIDE = (_VERIFY, _RECORD, torch.ops.kvcanary.identify.default)


def check_halves_beside(gm: fx.GraphModule, example_inputs: Sequence[Any], plan: GraphPlan) -> fx.GraphModule:
    """Place the checks and the waits for them, in place; nothing if the graph has checks of other kinds."""
    nodes = list(gm.graph.nodes)
    ours = [node for node in nodes if is_canary(node)]
    if plan.joins or len(plan.devices) != 1 or not side_stream.can_fork(plan.devices[0]):
        return gm
    if any(node.target not in (*_BESIDE, torch.ops.kvcanary.begin.default) for node in ours):
        return gm
    if not any(node.target is _RECORD for node in ours) or any(cuts(node) for node in nodes):
        return gm
    state = next(node.args[-3] for node in ours if node.target is _RECORD)
    reading: list[fx.Node] = []  # what checks read that the model has not waited for
    record: fx.Node | None = None
    for node in ours:
        if node.target is _VERIFY:
            _place(gm, node, record, reading, state)
            reading, record = [], None
        elif node.target in _BESIDE:
            reading += _read_by(node)
            record = node if node.target is _RECORD else record
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(torch.ops.kvcanary.join.default, (_once(reading), state))
    plan.joins = plan.halves_beside = True
    gm.recompile()
    return gm


def _place(gm: fx.GraphModule, check: Any, record: fx.Node | None, reading: list[fx.Node], state: Any) -> None:
    """Move a check behind the record of the layer before, if that is allowed; the model waits where the check was."""
    values = [value for value in check.args[1] if isinstance(value, fx.Node)]
    with gm.graph.inserting_after(check):
        gm.graph.call_function(torch.ops.kvcanary.join.default, (_once([*reading, *_read_by(check), *values]), state))
    if record is not None and _may_go_ahead(check, record):
        check.update_arg(1, [None] * len(check.args[1]))
        record.append(check)


def _may_go_ahead(check: Any, record: fx.Node) -> bool:
    """Whether a check sees the same bytes behind the record of another layer as at its own place, and its inputs."""
    caches, order = set(check.args[0]), {node: i for i, node in enumerate(check.graph.nodes)}
    others = [node for node in check.all_input_nodes if node not in check.args[1]]
    if any(cache.op != "placeholder" for cache in caches) or any(order[node] > order[record] for node in others):
        return False
    between = record.next
    while between is not check:
        if caches & set(between.all_input_nodes):
            return False
        between = between.next
    return True


def _read_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that a check reads; not its state."""
    values = zip(node.all_input_nodes, fake_values(node.all_input_nodes), strict=True)
    return [given for given, value in values if isinstance(value, torch.Tensor) and given is not node.args[-3]]


def _once(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys(nodes))

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
Which slots these are, a layer may compute by itself, as transformers' static caches do from a count of their tokens:
that goes ahead with the check, past nodes that write to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..kernels import side_stream
from .dynamo_contract import fake_values
from .early_values import PURE, written_by
from .graph_plan import GraphPlan
from .join_side_streams import cuts
from .names import function_name
from .state_inputs import is_canary
from .states import ancestors

_BEGIN = torch.ops.kvcanary.begin.default
_VERIFY = torch.ops.kvcanary.verify_halves.default
_RECORD = torch.ops.kvcanary.record_halves.default
_BESIDE = (_VERIFY, _RECORD, torch.ops.kvcanary.identify.default)


def check_halves_beside(gm: fx.GraphModule, example_inputs: Sequence[Any], plan: GraphPlan) -> fx.GraphModule:
    """Place the checks and the waits for them, in place; nothing if the graph has checks of other kinds."""
    nodes = list(gm.graph.nodes)
    ours = [node for node in nodes if is_canary(node)]
    if plan.joins or len(plan.devices) != 1 or not side_stream.can_fork(plan.devices[0]):
        return gm
    if any(node.target not in (_BEGIN, *_BESIDE) for node in ours):
        return gm
    if not any(node.target is _RECORD for node in ours) or any(cuts(node) for node in nodes):
        return gm
    state = next(node.args[-3] for node in ours if node.target is _RECORD)
    reading: list[fx.Node] = []  # what checks read that the model has not waited for
    start: fx.Node | None = None  # behind which the next check may go
    for node in ours:
        if node.target is _VERIFY:
            _place(gm, node, start, reading, state)
            reading, start = [], None
        elif node.target in _BESIDE:
            reading += _read_by(node)
        if node.target in (_BEGIN, _RECORD):
            start = node
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(torch.ops.kvcanary.join.default, (_once(reading), state))
    plan.joins = plan.halves_beside = True
    gm.recompile()
    return gm


def _place(gm: fx.GraphModule, check: Any, start: fx.Node | None, reading: list[fx.Node], state: Any) -> None:
    """Move a check behind ``start``, the record of the layer before, if it may; the model waits where the check was."""
    values = [value for value in check.args[1] if isinstance(value, fx.Node)]
    with gm.graph.inserting_after(check):
        gm.graph.call_function(torch.ops.kvcanary.join.default, (_once([*reading, *_read_by(check), *values]), state))
    inputs = [node for node in check.all_input_nodes if node not in check.args[1]]
    computed = None if start is None else _computed_behind(start, inputs)
    if start is not None and computed is not None and _same_bytes(check, start, set(computed)):
        check.update_arg(1, [None] * len(check.args[1]))
        for node in (check, *reversed(computed)):
            start.append(node)


def _same_bytes(check: Any, start: fx.Node, moved: set[fx.Node]) -> bool:
    """Whether a check sees the same bytes of its caches behind ``start`` as at its own place."""
    caches = set(check.args[0])
    touched = any(caches & set(node.all_input_nodes) for node in _between(start, check) if node not in moved)
    return all(cache.op == "placeholder" for cache in caches) and not touched


def _computed_behind(start: fx.Node, nodes: Sequence[fx.Node]) -> list[fx.Node] | None:
    """What of the nodes, and of what they are computed from, comes behind ``start``, in order.

    Returns:
        None if it cannot be moved there: it is not pure, or something is written in between.
    """
    order = {node: i for i, node in enumerate(start.graph.nodes)}
    late = {part for node in nodes for part in ancestors(node) if order[part] > order[start]}
    computed = sorted(late, key=order.__getitem__)
    if any(function_name(node).strip("_") not in PURE or _may_write(node) for node in computed):
        return None
    if computed and any(_may_write(node) for node in _between(start, computed[-1])):
        return None
    return computed


def _between(first: fx.Node, end: fx.Node) -> Iterator[fx.Node]:
    node = first.next
    while node is not end:
        yield node
        node = node.next


def _may_write(node: fx.Node) -> bool:
    """Whether a node writes to a tensor of the model, or could: what runs other code may."""
    return written_by(node) != []


def _read_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that a check reads; not its state."""
    values = zip(node.all_input_nodes, fake_values(node.all_input_nodes), strict=True)
    return [given for given, value in values if isinstance(value, torch.Tensor) and given is not node.args[-3]]


def _once(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys(nodes))

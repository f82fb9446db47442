"""Replace KV writes by our own op, which writes in place, where Inductor would copy the whole pool.

Inductor turns some writes into a copy of the pool: ``scatter_``, ``pool[l][half][slot] = k`` on a stacked
pool, and on torch 2.11 writes through a view.  A mutable custom op is left in place.

Before::

    select = pool[1]
    setitem = operator.setitem(select, slot, k)

After::

    select = pool[1]
    index_put_ = torch.ops.kvcanary.index_put_(select, k, [slot], [], 0, 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..kernels import ops as ops  # registers them
from .graph_plan import GraphPlan

RECORD, RECORD_HALVES = torch.ops.kvcanary.record.default, torch.ops.kvcanary.record_halves.default


def rewrite_writes(
    gm: fx.GraphModule, example_inputs: Sequence[Any], plan: GraphPlan, parts_only: bool
) -> fx.GraphModule:
    """Rewrite readable writes of ``gm`` that have an operand, in place.

    Runs after ``insert_canaries``: the record op that follows a write names its slots and operand.
    Custom ops are unchanged: they already write in place.

    Args:
        parts_only: only where a half is a part of its input, K and V or all layers in one tensor, or is written in
            parts, as by a loop over its rows.  Inductor copies the whole input there, and once more for each canary op
            that looks at it in between.
    """
    replaced: dict[fx.Node, None] = {}
    for record, view, value, site, write in _recorded(gm.graph):
        node = plan.written_by.get(write)
        skipped = parts_only and not plan.sites[site].part
        if node is None or value is None or skipped or _is_custom(node):
            continue
        index, extent = record.args[2:4]
        # where the sizes it takes are known; with two halves other nodes may read the first one before its record
        with gm.graph.inserting_before(record if record.target is RECORD else node.next):
            arguments = (view, value, index, extent, site, write)
            gm.graph.call_function(torch.ops.kvcanary.index_put_.default, arguments)
        replaced[node] = None
        plan.rewritten += 1
    for node in replaced:  # one write may fill K and V
        if node.args and isinstance(node.args[0], fx.Node):
            node.replace_all_uses_with(node.args[0])  # an in-place op returns its destination
        gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()
    return gm


def _recorded(graph: fx.Graph) -> list[tuple[fx.Node, Any, Any, int, int]]:
    """Each record with a half, its operand, and the numbers of its site and write."""
    found: list[tuple[fx.Node, Any, Any, int, int]] = []
    for node in graph.nodes:
        if node.target is RECORD:
            found.append((node, *node.args[:2], *node.args[-2:]))
        elif node.target is RECORD_HALVES:
            halves = zip(*node.args[:2], *node.args[-2:], strict=True)
            found += [(node, *half) for half in halves]
    return found


def _is_custom(node: fx.Node) -> bool:
    target = node.target
    packet = isinstance(target, torch._ops.OpOverloadPacket)
    overload = isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "prims")
    return packet or overload or isinstance(target, torch._ops.HigherOrderOperator)

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

from .graph_plan import GraphPlan
from .state_inputs import is_canary


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
    for record in [n for n in gm.graph.nodes if is_canary(n) and n.target is torch.ops.kvcanary.record.default]:
        view, value, index, extent, _, _, site, write = record.args
        node = plan.written_by.get(write)
        skipped = parts_only and not plan.sites[site].part
        if node is None or value is None or skipped or _is_custom(node):
            continue
        with gm.graph.inserting_before(record):  # where the sizes it takes are known
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


def _is_custom(node: fx.Node) -> bool:
    target = node.target
    packet = isinstance(target, torch._ops.OpOverloadPacket)
    overload = isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "prims")
    return packet or overload or isinstance(target, torch._ops.HigherOrderOperator)

"""Values that a check needs before the graph computes them: the slots of a write to a cache that was read before.

Before and after (``early`` computes the nodes in the order they had)::

    verify = torch.ops.kvcanary.verify(values, None, [], [], state, 1, -1)
    cat = torch.cat([values, v])
    arange = torch.arange(2)
    values[arange, position] = v

    arange_1 = torch.arange(2)
    verify = torch.ops.kvcanary.verify(values, None, [arange_1, position], [], state, 1, 3)
    cat = torch.cat([values, v])
    ...
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from .accesses import Accesses
from .axis_flow import argument
from .names import function_name
from .state_inputs import is_canary
from .states import ancestors

#: Ops that slots are computed with: deterministic, and without writes.
PURE = {
    "arange", "unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to", "view", "reshape", "flatten",
    "unflatten", "transpose", "permute", "movedim", "t", "T", "mT", "contiguous", "clone", "to", "long",
    "int", "type_as", "getitem", "getattr", "size", "select", "narrow", "split", "chunk", "unbind", "cat",
    "stack", "repeat", "repeat_interleave", "gather", "index_select", "where", "clamp", "minimum", "maximum",
    "min", "max", "add", "sub", "mul", "neg", "floordiv", "floor_divide", "div", "truediv", "mod",
    "remainder", "cumsum", "sum", "eq", "ne", "lt", "le", "gt", "ge",
}  # fmt: skip


class EarlyValues:
    """Computes values of a graph once more, before the point where they are needed."""

    def __init__(self, graph: fx.Graph, found: Accesses, order: dict[fx.Node, int]):
        """
        Args:
            order: of the nodes before the graph was edited.
        """
        self._graph, self._order = graph, order
        self._written = set(found.written_roots())
        self._found = found

    def possible(self, nodes: Iterable[fx.Node], before: fx.Node) -> bool:
        """Whether all of ``nodes`` can be computed before ``before``."""
        return all(self._is_pure(part) for node in nodes for part in self._late(node, before))

    def of(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """``node``, or its copy at the insertion point if it comes too late."""
        if self._order.get(node, -1) < self._order[before]:
            return node
        copies: dict[fx.Node, fx.Node] = {}
        for part in self._late(node, before):
            copies[part] = self._graph.node_copy(part, lambda n: copies.get(n, n))
        return copies[node]

    def _late(self, node: fx.Node, before: fx.Node) -> list[fx.Node]:
        """What has to be computed once more, in order."""
        late = [n for n in ancestors(node) if self._order.get(n, -1) >= self._order[before]]
        return sorted(late, key=self._order.__getitem__)

    def _is_pure(self, node: fx.Node) -> bool:
        if node.op not in ("call_function", "call_method") or function_name(node).strip("_") not in PURE:
            return False
        sources = [n for n in ancestors(node) if n is node or n.op in ("placeholder", "get_attr")]
        return not any(self._may_change(n) for n in (*sources, *node.all_input_nodes))

    def _may_change(self, node: fx.Node) -> bool:
        """Whether the graph writes to a node's tensor."""
        if self._found.root_of(node) in self._written:
            return True
        return any(writes_in_place(user) and user.all_input_nodes[0] is node for user in node.users)


def writes_in_place(node: fx.Node) -> bool:
    """Whether a node says by its name that it writes to its first argument."""
    name = function_name(node)
    return node.target is operator.setitem or (name.endswith("_") and not name.startswith("__"))


def written_by(node: fx.Node) -> list[fx.Node] | None:
    """The nodes whose tensors a node writes to; None if that is not known."""
    if is_canary(node) or node.op in ("placeholder", "get_attr", "output"):
        return []
    target = node.target
    if isinstance(target, torch._ops.OpOverloadPacket) and len(target.overloads()) == 1:
        target = getattr(target, target.overloads()[0])
    if isinstance(target, torch._ops.OpOverload):
        return _written_by_schema(node, target._schema)
    if isinstance(target, torch._ops.OpOverloadPacket):  # which overload will run is not known
        overloads = [getattr(target, name) for name in target.overloads()]
        return None if any(overload._schema.is_mutable for overload in overloads) else []
    if isinstance(target, torch._ops.HigherOrderOperator):
        return None
    if node.op not in ("call_function", "call_method") or "out" in node.kwargs or node.kwargs.get("inplace"):
        return None
    if writes_in_place(node):
        given = node.args[0] if node.args else None
        return [given] if isinstance(given, fx.Node) else None
    return []


def _written_by_schema(node: fx.Node, schema: Any) -> list[fx.Node] | None:
    """The nodes that an op's schema says it writes to; None if one of them is no node."""
    written: list[Any] = []
    for place, parameter in enumerate(schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            given = argument(node, place, parameter.name)
            written += given if isinstance(given, (list, tuple)) else [given]
    written = [n for n in written if n is not None]
    return written if all(isinstance(n, fx.Node) for n in written) else None

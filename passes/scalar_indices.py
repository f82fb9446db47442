"""Give the 0-d tensors that a write is indexed with an axis: ``cache[:, :, pos] = k[:, :, 0]``.

Python's indexing asks such a tensor for its number, which no fake tensor has: AOTAutograd refuses the graph, and Dynamo
breaks it there.  Indexed with a tensor of one axis the write goes to the same place, and its slots are in the graph.

Before and after::

    k_cache[(:, :, pos)] = k

    reshape = pos.reshape(1)
    unsqueeze = k.unsqueeze(-2)
    k_cache[(:, :, reshape)] = unsqueeze
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .graph_plan import GraphPlan

#: What PyTorch takes as an index; of a 0-d tensor it takes the number, of whatever dtype.
_INDICES = (torch.int32, torch.int64)


def unsqueeze_scalar_indices(gm: fx.GraphModule, example_inputs: Sequence[Any], plan: GraphPlan) -> fx.GraphModule:
    """Rewrite the ``setitem`` calls of ``gm`` whose only index tensors are 0-d integers."""
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=operator.setitem):
        target, index, value = node.args
        parts = index if isinstance(index, tuple) else (index,)
        after = _axes_after(target, parts)
        if after is None:
            continue
        with gm.graph.inserting_before(node):
            device = _tensor(target).device  # type: ignore[union-attr]
            spread = [_spread(p, device) if _tensor(p) is not None else p for p in parts]
            node.args = (target, tuple(spread), _operand(target, value, after))
        changed = True
    if changed:
        gm.graph.lint()
        gm.recompile()
    return gm


def _tensor(x: Any) -> torch.Tensor | None:
    value = x.meta.get("example_value") if isinstance(x, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _is_number(x: Any) -> bool:
    value = x.meta.get("example_value") if isinstance(x, fx.Node) else x
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def _is_bound(x: Any) -> bool:
    return x is None or _is_number(x)


def _axes_after(target: Any, parts: Sequence[Any]) -> int | None:
    """How many axes of what is written follow the one that the 0-d tensors get; None if no write is to be changed.

    Beside other index tensors it is left alone: Python takes the number first, and the order of axes may differ.
    """
    whole = _tensor(target)
    if whole is None or not any(_tensor(p) is not None for p in parts):
        return None
    kinds = [_kind(part) for part in parts]
    if None in kinds:
        return None
    taken = sum(k in ("0-d", "axis", "int") for k in kinds)
    rest = ["axis"] * (whole.dim() - taken)
    at = kinds.index("rest") if "rest" in kinds else len(kinds)
    axes = [k for k in (*kinds[:at], *rest, *kinds[at + 1 :]) if k != "int"]
    places = [i for i, k in enumerate(axes) if k == "0-d"]
    adjacent = places[-1] - places[0] == len(places) - 1
    return len(axes) - len(places) - (places[0] if adjacent else 0)


def _kind(part: Any) -> str | None:
    """What a part of an index is; None if it is something that is left alone."""
    tensor = _tensor(part)
    if tensor is not None:
        return "0-d" if tensor.dim() == 0 and tensor.dtype in (*_INDICES, torch.int8, torch.int16) else None
    if part is None:
        return "new"
    if part is Ellipsis:
        return "rest"
    if isinstance(part, slice):
        return "axis" if all(map(_is_bound, (part.start, part.stop, part.step))) else None
    return "int" if _is_number(part) else None


def _spread(number: fx.Node, device: torch.device) -> fx.Node:
    index, given = _method(number, "reshape", 1), number.meta["example_value"]
    if given.device == device and given.dtype in _INDICES:
        return index
    return _method(index, "to", device, torch.int64)  # our ops want their slots where the cache is


def _operand(target: fx.Node, value: Any, after: int) -> Any:
    """What is written, with an axis of one token before its last ``after`` axes."""
    whole, given = _tensor(target), _tensor(value)
    if whole is None or given is None:
        return value
    if (given.dtype, given.device) != (whole.dtype, whole.device):  # a write at a number casts, one at a tensor refuses
        value = _method(value, "to", whole.device, whole.dtype)
    return _method(value, "unsqueeze", -after - 1) if given.dim() >= after and given.dim() else value


def _method(node: fx.Node, name: str, *args: Any) -> fx.Node:
    made = node.graph.call_method(name, (node, *args))
    with torch.no_grad():
        made.meta["example_value"] = getattr(node.meta["example_value"], name)(*args)
    return made

"""Reading a write's destination: which part of the pool it selects, axis by axis.

A destination like ``pool[layer][:, :, pos]`` has two parts.  The *region* is fixed by the model's
structure (which layer, K or V); the *selection* inside it says which slots this step writes.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from .names import function_name


@dataclasses.dataclass(frozen=True)
class Full:
    """``:``"""


@dataclasses.dataclass(frozen=True)
class Span:
    """``start:stop`` that does not cover the axis; the bounds are ints or nodes.

    ``narrow`` gives a length instead of a stop; it is kept as such, because the sum of two nodes would
    be a new node, and reading a graph must not change it.
    """

    start: Any
    stop: Any = None
    length: Any = None


@dataclasses.dataclass(frozen=True)
class At:
    """One index, an int or a node; the axis disappears from the result."""

    index: Any


@dataclasses.dataclass(frozen=True)
class Indexed:
    """Advanced indexing by an integer tensor."""

    tensor: fx.Node


Part = Full | Span | At | Indexed
Selection = list[Part]


class Unreadable(Exception):
    """The destination cannot be read from the graph; the message says why."""


def static_value(x: Any, values: dict[fx.Node, Any]) -> Any:
    """A node's value in the replay, or ``x`` itself."""
    return values.get(x, x) if isinstance(x, fx.Node) else x


def parse_index(index: Any, shape: tuple[Any, ...], values: dict[fx.Node, Any]) -> Selection:
    """The selection that Python's ``tensor[index]`` makes in a tensor of ``shape``.

    Raises:
        Unreadable: masks, new axes, lists, steps: anything we do not express as a selection.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    consumed = sum(1 for p in parts if p is not Ellipsis)
    if Ellipsis in [p for p in parts if not isinstance(p, fx.Node)]:
        at = next(i for i, p in enumerate(parts) if p is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (len(shape) - consumed)
    parts += [slice(None)] * (len(shape) - len(parts))
    if len(parts) != len(shape):
        raise Unreadable("the index has more parts than the tensor has axes")
    return [_parse_part(part, size, values) for part, size in zip(parts, shape, strict=True)]


def _parse_part(part: Any, size: Any, values: dict[fx.Node, Any]) -> Part:
    if isinstance(part, slice):
        if part.step not in (None, 1):
            raise Unreadable("a slice with a step")
        return parse_span(part.start, part.stop, size, values)
    value = static_value(part, values)
    if isinstance(value, torch.Tensor):
        if value.dtype in (torch.bool, torch.uint8):
            raise Unreadable("a boolean mask as index")
        return Indexed(part)
    if isinstance(value, bool) or part is None:
        raise Unreadable("a new axis in the index")
    if isinstance(value, int | torch.SymInt):
        return At(part)
    raise Unreadable(f"an index of type {type(value).__name__}")


def parse_span(start: Any, stop: Any, size: Any, values: dict[fx.Node, Any]) -> Part:
    """``start:stop`` along an axis of ``size``; :class:`Full` when it covers the axis."""
    low = 0 if start is None else static_value(start, values)
    high = size if stop is None else static_value(stop, values)
    if _same(low, 0) and (_same(high, size) or (isinstance(high, int) and high >= 2**62)):
        return Full()
    return Span(0 if start is None else start, 2**62 if stop is None else stop)


def _parse_narrow(start: Any, length: Any, size: Any, values: dict[fx.Node, Any]) -> Part:
    whole = _same(static_value(start, values), 0) and _same(static_value(length, values), size)
    return Full() if whole else Span(start, length=length)


def _same(a: Any, b: Any) -> bool:
    """Equal as far as the graph shows: symbolic sizes are equal when they are the same expression."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    return False


def selected_by(node: fx.Node, values: dict[fx.Node, Any]) -> tuple[fx.Node, Selection] | None:
    """``(parent, selection)`` when ``node`` is a view of a part of ``parent``; None when it is not.

    Raises:
        Unreadable: it is a part, of a kind we do not express.
    """
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    parent = node.args[0]
    whole = values.get(parent)
    if not isinstance(whole, torch.Tensor):
        return None
    name, args = function_name(node), node.args
    shape = tuple(whole.shape)
    if node.target is operator.getitem:
        return parent, parse_index(args[1], shape, values)
    if name == "select" and len(args) == 3:
        return parent, _on_axis(shape, args[1], At(args[2]))
    if name == "narrow" and len(args) == 4:
        dim = int(args[1]) % len(shape)  # type: ignore[arg-type]
        return parent, _on_axis(shape, dim, _parse_narrow(args[2], args[3], shape[dim], values))
    if name == "slice" and len(args) >= 4 and (len(args) < 5 or args[4] == 1):
        dim = int(args[1]) % len(shape)  # type: ignore[arg-type]
        return parent, _on_axis(shape, dim, parse_span(args[2], args[3], shape[dim], values))
    return None


def _on_axis(shape: tuple[Any, ...], dim: Any, part: Part) -> Selection:
    selection: Selection = [Full()] * len(shape)
    selection[int(dim)] = part
    return selection

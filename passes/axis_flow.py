"""Following the axes of an input through a graph: which axis of a value goes along which axis of the input.

An example, from a cache ``[B, S, H, D]`` to what attention is given::

    keys                            ({0}, {1}, {2}, {3})
    keys.transpose(1, 2)            ({0}, {2}, {1}, {3})
    ...[:, :, None].expand(...)     ({0}, {2}, {}, {1}, {3})
    ...reshape(B, H * 4, S, D)      ({0}, {2}, {1}, {3})

Only ops that move, copy or scale are followed.  After any other op the axes are unknown, and nothing is concluded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .names import function_name

Axis = frozenset[int]
NO_AXIS: Axis = frozenset()


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the axes of a value come from.

    Attributes:
        input: the placeholder.
        axes: for each axis of the value, the axes of the input along which it goes: none, one, or several merged.
        ranges: ``(axis, start, stop)`` of the input where constants chose a part, however that was written.
        moved: axes of the input whose indices are not what they were: split, rolled, concatenated.
        weights: the softmax whose probabilities the value was multiplied by, or None.
    """

    input: fx.Node
    axes: tuple[Axis, ...]
    ranges: frozenset[tuple[int, int, int]] = frozenset()
    moved: Axis = NO_AXIS
    weights: fx.Node | None = None

    @property
    def picked(self) -> dict[int, int]:
        """The index of each axis of which constants chose one."""
        return {axis: start for axis, start, stop in self.ranges if stop == start + 1}

    def along(self, *axes: Axis) -> Source:
        return dataclasses.replace(self, axes=axes)

    def pick(self, axis: int, index: Any) -> Source:
        """One index of an axis of the value; the axis is gone."""
        own, length, one = self._own(axis), self.length(axis), self
        if own is not None and isinstance(index, int) and (index >= 0 or length is not None):
            one = self._chosen(own, index + (length or 0) if index < 0 else index, 1)
        return dataclasses.replace(one, axes=self.axes[:axis] + self.axes[axis + 1 :])

    def narrowed(self, axis: int, start: Any, length: Any) -> Source:
        """``length`` indices of an axis of the value from ``start`` on, which is not negative."""
        own = self._own(axis)
        if own is None:
            return self
        if not isinstance(start, int) or not isinstance(length, int):
            return self.shuffled(axis)  # a later index counts from there on
        return self if (start, length) == (0, self._range(own)[1]) else self._chosen(own, start, length)

    def _chosen(self, own: int, start: int, length: int) -> Source:
        others, first = frozenset(r for r in self.ranges if r[0] != own), self._range(own)[0]
        return dataclasses.replace(self, ranges=others | {(own, first + start, first + start + length)})

    def length(self, axis: int) -> int | None:
        """How many indices of the input's axis an axis of the value has; None if that is not known."""
        own = self._own(axis)
        return None if own is None else self._range(own)[1]

    def _own(self, axis: int) -> int | None:
        """The axis of the input whose indices an axis of the value has, in order."""
        own = next(iter(self.axes[axis]), None)
        return own if len(self.axes[axis]) == 1 and own not in self.moved else None

    def _range(self, own: int) -> tuple[int, int | None]:
        """The first index of the input's axis that is in the value, and how many are."""
        size = self.input.meta["example_value"].shape[own]
        known = ((start, stop - start) for axis, start, stop in self.ranges if axis == own)
        return next(known, (0, size if isinstance(size, int) else None))

    def shuffled(self, *axes: int) -> Source:
        """Some axes of the value in another order: their indices are not the input's."""
        return dataclasses.replace(self, moved=self.moved.union(*(self.axes[a] for a in axes)))

    def may_share(self, other: Source) -> bool:
        """Whether two parts of one input may have elements in common."""
        mine = {axis: (start, stop) for axis, start, stop in self.ranges}
        return self.input is other.input and all(
            start < mine.get(axis, (start, stop))[1] and mine.get(axis, (start, stop))[0] < stop
            for axis, start, stop in other.ranges
        )


def follow(node: fx.Node, operand: fx.Node, source: Source, values: dict[fx.Node, Any]) -> Source | None:
    """The source of a node's value, given the ``source`` of an operand; None if the axes cannot be followed."""
    name = function_name(node)
    if name == "getattr":
        name = str(node.args[1])
    if name.endswith("_") and not name.startswith("_") and node.args[:1] == (operand,):
        return source  # an in-place op returns its destination
    rule = _RULES.get(name)
    if rule is not None:
        found = rule(node, source, values)
    elif name in _ELEMENTWISE:
        found = source.along(*_broadcast(source.axes, dims_of(values.get(node))))
    else:
        return None
    value = values.get(node)
    return found if found is None or not isinstance(value, torch.Tensor) or dims_of(value) == len(found.axes) else None


def index(source: Source, parts: Sequence[Any], values: dict[fx.Node, Any]) -> Source | None:
    """The source of ``value[parts]``."""
    known = [values.get(p, p) if isinstance(p, fx.Node) else p for p in parts]
    given = sum(_consumed(k) for k in known)
    at = next((i for i, k in enumerate(known) if k is Ellipsis), len(known))
    full = [slice(None)] * (len(source.axes) - given)
    known = [*known[:at], *full, *known[at + 1 :]]
    if sum(k is Ellipsis for k in known) or len(source.axes) < given:
        return None
    return _apply(source, known)


def _apply(source: Source, parts: Sequence[Any]) -> Source | None:
    """Index with one part for each axis, new axes apart; the axes of index tensors go along all that they replace."""
    kept: list[Axis] = []
    advanced: list[int] = []  # places among the parts without ints, where index tensors stand
    merged, dims, axis = NO_AXIS, 0, 0
    for part in parts:
        if part is None:
            kept.append(NO_AXIS)
        elif isinstance(part, slice):
            source = _sliced(source, axis, part)
            kept.append(source.axes[axis])
            axis += 1
        elif isinstance(part, torch.Tensor):
            count = _consumed(part)
            merged = merged.union(*source.axes[axis : axis + count])
            source = source.shuffled(*range(axis, axis + count))
            source = source.along(*source.axes[:axis], *source.axes[axis + count :])
            advanced.append(len(kept) + len(advanced))
            dims = max(dims, 1 if part.dtype == torch.bool else part.dim())
        elif isinstance(part, int | torch.SymInt) and not isinstance(part, bool):
            source = source.pick(axis, part)
        else:
            return None
    if not advanced:
        return source.along(*kept)
    adjacent = advanced[-1] - advanced[0] == len(advanced) - 1
    at = advanced[0] if adjacent else 0
    return source.along(*kept[:at], *[merged] * dims, *kept[at:])


def _sliced(source: Source, axis: int, part: slice) -> Source:
    """A slice of an axis of the value."""
    start, stop, length = part.start, part.stop, source.length(axis)
    if part.step not in (None, 1):
        return source.shuffled(axis)
    if all(bound is None or isinstance(bound, int) for bound in (start, stop)):
        if length is not None:
            start, stop, _ = slice(start, stop).indices(length)
            return source.narrowed(axis, start, max(stop - start, 0))
        if start is None and stop is None:
            return source
        if stop is not None and 0 <= (start or 0) <= stop:
            return source.narrowed(axis, start or 0, stop - (start or 0))
    return source.narrowed(axis, None, None)


def _consumed(part: Any) -> int:
    """How many axes a part of an index stands for."""
    if part is None or part is Ellipsis:
        return 0
    return part.dim() if isinstance(part, torch.Tensor) and part.dtype == torch.bool else 1


def _getitem(node: fx.Node, source: Source, values: dict[fx.Node, Any]) -> Source | None:
    parts = node.args[1]
    pieces = node.args[0]
    if isinstance(pieces, fx.Node) and not isinstance(values.get(pieces), torch.Tensor):
        unbound = function_name(pieces) == "unbind"
        dim = _axis(argument(pieces, 1 if unbound else 2, "dim", 0), len(source.axes))
        if dim is None or unbound:
            return None if dim is None else source.pick(dim, parts)
        made = values.get(pieces)  # by chunk or split
        if not isinstance(made, tuple | list) or not isinstance(parts, int):
            return source.shuffled(dim)
        sizes = [piece.shape[dim] for piece in made]
        before = sizes[: parts % len(sizes)]
        return source.narrowed(dim, sum(before) if all(isinstance(n, int) for n in before) else None, sizes[parts])
    return index(source, parts if isinstance(parts, tuple) else [parts], values)


def _select(node: fx.Node, source: Source, values: dict[fx.Node, Any]) -> Source | None:
    dim = _axis(argument(node, 1, "dim"), len(source.axes))
    chosen = argument(node, 2, "index")
    return None if dim is None else source.pick(dim, values.get(chosen, chosen))


def _narrow(node: fx.Node, source: Source, values: dict[fx.Node, Any]) -> Source | None:
    dim, start, length = (argument(node, place, name) for place, name in enumerate(("dim", "start", "length"), 1))
    dim = _axis(dim, len(source.axes))
    if dim is None:
        return None
    if isinstance(start, int) and start < 0:
        start += source.length(dim) or 0
    return source.narrowed(dim, start, length)


def _slice(node: fx.Node, source: Source, values: dict[fx.Node, Any]) -> Source | None:
    dim = _axis(argument(node, 1, "dim", 0), len(source.axes))
    bounds = (argument(node, place, name) for place, name in enumerate(("start", "end", "step"), 2))
    return None if dim is None else _sliced(source, dim, slice(*bounds))


def _rearrange(node: fx.Node, source: Source, values: dict[fx.Node, Any]) -> Source | None:
    """``cat``, ``roll``, ``gather``: the indices along an axis are unknown from here on."""
    place = 2 if function_name(node) in ("roll", "take_along_dim") else 1
    dim = _axis(argument(node, place, "dim"), len(source.axes))
    return source.shuffled(*(range(len(source.axes)) if dim is None else (dim,)))


def _keep(node: fx.Node, source: Source, values: dict[fx.Node, Any]) -> Source | None:
    return source


def _swap(node: fx.Node, source: Source, values: dict[fx.Node, Any]) -> Source | None:
    swapped = function_name(node) in ("getattr", "t", "adjoint")
    a = _axis(-2 if swapped else argument(node, 1, "dim0"), len(source.axes))
    b = _axis(-1 if swapped else argument(node, 2, "dim1"), len(source.axes))
    if a is None or b is None:
        return None
    axes = list(source.axes)
    axes[a], axes[b] = axes[b], axes[a]
    return source.along(*axes)


def _permute(node: fx.Node, source: Source, values: dict[fx.Node, Any]) -> Source | None:
    places = [_axis(d, len(source.axes)) for d in _many(node, 1, "dims")]
    return None if None in places else source.along(*(source.axes[p] for p in places if p is not None))


def _movedim(node: fx.Node, source: Source, values: dict[fx.Node, Any]) -> Source | None:
    given = [argument(node, 1, "source"), argument(node, 2, "destination")]
    froms, tos = ([_axis(d, len(source.axes)) for d in (g if isinstance(g, tuple | list) else [g])] for g in given)
    if None in froms or None in tos or len(froms) != len(tos):
        return None
    rest = iter(a for i, a in enumerate(source.axes) if i not in froms)
    moved = {to: source.axes[start] for start, to in zip(froms, tos, strict=True) if start is not None}
    return source.along(*(moved[i] if i in moved else next(rest) for i in range(len(source.axes))))


def _unsqueeze(node: fx.Node, source: Source, values: dict[fx.Node, Any]) -> Source | None:
    dim = _axis(argument(node, 1, "dim", 0), len(source.axes) + 1)
    return None if dim is None else source.along(*source.axes[:dim], NO_AXIS, *source.axes[dim:])


def _squeeze(node: fx.Node, source: Source, values: dict[fx.Node, Any]) -> Source | None:
    dims = _many(node, 1, "dim")
    whole = values.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    gone = {_axis(d, len(source.axes)) for d in dims} or set(range(len(source.axes)))
    if not isinstance(whole, torch.Tensor):
        return None
    for i in sorted((i for i in gone if i is not None and hint(whole.shape[i]) == 1), reverse=True):
        source = source.pick(i, 0)
    return source


def _reduce(node: fx.Node, source: Source, values: dict[fx.Node, Any]) -> Source | None:
    dims = {_axis(d, len(source.axes)) for d in _many(node, 1, "dim")}
    if not dims or None in dims:
        return None
    left = [NO_AXIS if i in dims else a for i, a in enumerate(source.axes)]
    if not argument(node, 2, "keepdim", False):
        left = [a for i, a in enumerate(left) if i not in dims]
    return source.along(*left)


def _regroup(node: fx.Node, source: Source, values: dict[fx.Node, Any]) -> Source | None:
    """``view``, ``reshape``, ``flatten``: the sizes show which axes are merged or split."""
    whole = node.args[0]
    before, after = values.get(whole) if isinstance(whole, fx.Node) else None, values.get(node)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    old, new = [hint(s) for s in before.shape], [hint(s) for s in after.shape]
    if len(old) != len(source.axes) or None in old or None in new or 0 in old:
        return None
    axes: list[Axis] = []
    i = j = 0
    while i < len(old) or j < len(new):
        ends = _block(old, new, i, j)
        if ends is None:
            return None
        along = NO_AXIS.union(*source.axes[i : ends[0]])
        one = ends[0] - i == 1 and old[i] == 1
        if sum(size != 1 for size in new[j : ends[1]]) > 1:
            source = source.shuffled(*range(i, ends[0]))
        axes += [along if size != 1 or one else NO_AXIS for size in new[j : ends[1]]]
        i, j = ends
    return source.along(*axes)


def _block(old: list[Any], new: list[Any], i: int, j: int) -> tuple[int, int] | None:
    """The ends of the shortest groups of sizes, from ``i`` and ``j`` on, that hold equally many elements."""
    if i == len(old) or j == len(new):
        return len(old), len(new)  # the rest are ones
    a, b = i + 1, j + 1
    while (left := math.prod(old[i:a])) != (right := math.prod(new[j:b])):
        if left < right and a < len(old):
            a += 1
        elif left > right and b < len(new):
            b += 1
        else:
            return None
    return a, b


def _stretch(node: fx.Node, source: Source, values: dict[fx.Node, Any]) -> Source | None:
    return source.along(*_broadcast(source.axes, dims_of(values.get(node))))


def _broadcast(axes: tuple[Axis, ...], dims: int) -> tuple[Axis, ...]:
    return (NO_AXIS,) * (dims - len(axes)) + axes


def _repeat_interleave(node: fx.Node, source: Source, values: dict[fx.Node, Any]) -> Source | None:
    return None if argument(node, 2, "dim") is None else source


def dims_of(value: Any) -> int:
    """The axes of a tensor; 0 for anything else."""
    return value.dim() if isinstance(value, torch.Tensor) else 0


def hint(size: Any) -> int | None:
    """A size as a number, without a guard on it."""
    return size if isinstance(size, int) else size.node.hint


def _axis(dim: Any, dims: int) -> int | None:
    return dim % dims if isinstance(dim, int) and -dims <= dim < dims else None


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _many(node: fx.Node, place: int, name: str) -> list[Any]:
    """Dimensions given one by one, as a tuple, or by name."""
    given = node.args[place:] or (node.kwargs.get(name),)
    flat = [d for g in given for d in (g if isinstance(g, tuple | list) else [g])]
    return [d for d in flat if d is not None and not isinstance(d, bool)]


Rule = Callable[[fx.Node, Source, dict[fx.Node, Any]], Source | None]

_RULES: dict[str, Rule] = {
    "getitem": _getitem,
    "select": _select,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "t", "T", "mT", "mH", "adjoint"), _swap),
    "permute": _permute,
    **dict.fromkeys(("movedim", "moveaxis"), _movedim),
    **dict.fromkeys(("unsqueeze", "stack"), _unsqueeze),
    "squeeze": _squeeze,
    **dict.fromkeys(("sum", "mean"), _reduce),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"), _regroup),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to", "repeat", "tile"), _stretch),
    "repeat_interleave": _repeat_interleave,
    "narrow": _narrow,
    "slice": _slice,
    **dict.fromkeys(
        ("cat", "concat", "concatenate", "roll", "flip", "pad", "index_select", "gather", "take_along_dim"), _rearrange
    ),
    **dict.fromkeys(
        (
            *(
                "chunk",
                "split",
                "tensor_split",
                "unbind",
            ),
            *(
                "index_copy",
                "index_put",
                "scatter",
                "index_fill",
            ),
            *("masked_scatter", "index_add", "_unsafe_index_put", "slice_scatter", "select_scatter", "scatter_add"),
        ),
        _keep,
    ),
}

_ELEMENTWISE = frozenset(
    (
        *("add", "sub", "mul", "div", "iadd", "isub", "imul", "truediv", "itruediv", "multiply", "true_divide", "neg"),
        *("pow", "tanh", "clamp", "nan_to_num", "where", "masked_fill", "dropout"),
        *("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach"),
    )
)


def passes_on(node: fx.Node) -> bool:
    """Whether a node only moves, copies or scales its operands."""
    name = function_name(node)
    return name in _RULES or name in _ELEMENTWISE

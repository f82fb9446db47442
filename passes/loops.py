"""Writes in a loop over sequences or heads, if no attention shows what an axis counts: ``keys[b][:, pos] = k[b]``.

Constant indices of a destination's axis may be sequences, heads, or K and V.  If index ``i`` of the axis is written
from index ``i`` of one tensor, for every ``i``, that axis is the tensor's: K and V would be two tensors.  It counts
sequences if it is the first axis, or if the tokens' axis stands before it; heads otherwise.  Only two indices of an
axis of two may be K and V after all, computed as one tensor: then a name has to say it.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .accesses import Accesses
from .attention_reads import AttentionReads
from .names import function_name, half_named, source_name
from .selection import At, Full, Selection, Span, Unreadable, selected_by
from .writes import KVWrite

REORDERS = ("movedim", "moveaxis", "permute", "transpose", "swapaxes", "swapdims")

#: Why a cache is not guarded if nothing shows what its axis of two counts.
AMBIGUOUS = (
    "it is written at the constants 0 and 1 of an axis of two, and nothing in this graph says whether these are "
    "sequences, heads, or K and V: put the write and the attention into one graph, call it keys, values or kv, "
    "or declare it in a KVPool"
)

_PASSED_ON = ("to", "type", "float", "half", "bfloat16", "clone", "contiguous", "detach", *REORDERS)


@dataclasses.dataclass(frozen=True)
class Loop:
    """Writes of each index of ``operand`` to the same index of one axis.

    Attributes:
        whole: the tensor that has the axis, by its place in the storage.
        of_rows: it counts sequences.
    """

    whole: tuple[Any, ...]
    axis: int
    operand: fx.Node
    nodes: frozenset[fx.Node]
    of_rows: bool


@dataclasses.dataclass(frozen=True)
class _Step:
    """The one index of an axis that a write goes to, and the operand's index that it comes from."""

    whole: fx.Node
    axis: int
    index: int
    fixed: tuple[Any, ...]  # constants in other axes
    of_rows: bool
    write: KVWrite


class Loops:
    """The loops among the writes to one input.

    Attributes:
        ambiguous: one of them may be over K and V.
    """

    def __init__(self, root: fx.Node, writes: Sequence[KVWrite], found: Accesses, reads: AttentionReads):
        self.found, self.loops, self.ambiguous = found, list[Loop](), False
        groups: dict[Any, list[_Step]] = {}
        for write in writes:
            for step in _steps(write, found):
                if not reads.of(reads.source_of(step.whole)):
                    groups.setdefault((place(found.values[step.whole]), step.axis, step.fixed), []).append(step)
        for (whole, axis, _), steps in groups.items():
            operand = _dealt(steps, found)
            if operand is None:
                continue
            if _may_be_kv(steps[0], root, found):
                self.ambiguous |= not is_called_kv(root)
                continue
            nodes = frozenset(s.write.node for s in steps)
            self.loops.append(Loop(whole, axis, operand, nodes, steps[0].of_rows))

    def is_row_axis(self, node: fx.Node, axis: int) -> bool:
        """Whether a loop runs over an axis of a value, and that axis counts sequences."""
        whole = place(self.found.values[node])
        return any(loop.of_rows and loop.axis == axis and loop.whole == whole for loop in self.loops)

    def part_of(self, writes: Sequence[KVWrite]) -> fx.Node | None:
        """The tensor of which some writes store one part: a head."""
        nodes = {w.node for w in writes}
        return next((loop.operand for loop in self.loops if not loop.of_rows and nodes <= loop.nodes), None)


def place(view: torch.Tensor) -> tuple[Any, ...]:
    """Identity of a view inside its storage; symbolic sizes compare by expression."""
    return (str(view.storage_offset()), *map(str, view.shape), *map(str, view.stride()))


def _steps(write: KVWrite, found: Accesses) -> list[_Step]:
    """The constants of a write's destination: in its own index, or else in that of the view that it writes."""
    if write.value is None or write.selection is None or write.opaque is not None or write.flat is not None:
        return []
    ints = {a: p.index for a, p in enumerate(write.selection) if isinstance(p, At) and isinstance(p.index, int)}
    return _in_index(write, write.selection, ints) if ints else _in_view(write, write.selection, found)


def _in_index(write: KVWrite, selection: Selection, ints: dict[int, int]) -> list[_Step]:
    """A step for each of the constants, by the axis, in the index of a write."""
    left = len(selection) - len(ints)
    if not 2 <= left <= 3:
        return []
    moved = {a for a, p in enumerate(selection) if not isinstance(p, Full) and a not in ints}
    steps = []
    for axis, index in ints.items():
        fixed = {a: i for a, i in ints.items() if a != axis}
        of_rows = _is_first(axis, moved, set(fixed), left)
        steps.append(_Step(write.region, axis, index, tuple(fixed.items()), of_rows, write))
    return steps


def _in_view(write: KVWrite, selection: Selection, found: Accesses) -> list[_Step]:
    """The step of a write to a view that is one index of an axis, its other axes in any order; else none."""
    node, axes = write.region, list(range(len(selection)))
    while function_name(node) in REORDERS:
        turned = _turned(node, found)
        if turned is None:
            return []
        node, axes = node.args[0], [turned[a] for a in axes]  # type: ignore[assignment]
    picked = one_picked(node, found)
    if picked is None:
        return []
    whole, axis, index = picked
    left = found.values[whole].dim() - 1
    if not 2 <= left <= 3:
        return []
    gone = found.values[whole].dim() > found.values[node].dim()
    chosen = {a for a, p in zip(axes, selection, strict=True) if not isinstance(p, Full)}
    moved = {a + (gone and a >= axis) for a in chosen}
    return [_Step(whole, axis, index, (), _is_first(axis, moved, set(), left), write)]


def _is_first(axis: int, moved: set[int], fixed: set[int], left: int) -> bool:
    """Whether an axis counts sequences: only tokens may stand before it, and after tokens it must not be the heads'."""
    before = set(range(axis)) - fixed
    return not before or (before <= moved and left == 3)


def _turned(node: fx.Node, found: Accesses) -> list[int] | None:
    """The operand's axis for each axis of a reordering."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    sizes = torch.Size(range(2, 2 + found.values[node].dim()))
    made = getattr(torch.empty(sizes, device="meta"), function_name(node))(*node.args[1:], **node.kwargs)
    return [size - 2 for size in made.shape]


def one_picked(node: fx.Node, found: Accesses) -> tuple[fx.Node, int, int] | None:
    """``(parent, axis, index)`` if a node is one constant index of an axis, kept or not, and nothing else."""
    given = node.args[0] if node.args else None
    if node.target is operator.getitem and isinstance(given, fx.Node) and isinstance(node.args[1], int):
        name, whole = function_name(given), given.args[0] if given.args else None
        if name in ("unbind", "split", "chunk", "tensor_split") and isinstance(whole, fx.Node):
            size = found.values[whole].dim()
            dim = given.kwargs.get("dim", given.args[-1] if len(given.args) > (1 if name == "unbind" else 2) else 0)
            if not isinstance(dim, int):
                return None
            one = name == "unbind" or found.values[node].shape[dim % size] == 1
            return (whole, dim % size, node.args[1]) if one else None
    try:
        picked = selected_by(node, found.values)
    except Unreadable:
        return None
    parts = [] if picked is None else [(a, _constant(p)) for a, p in enumerate(picked[1]) if not isinstance(p, Full)]
    if picked is None or len(parts) != 1 or parts[0][1] is None:
        return None
    return picked[0], parts[0][0], parts[0][1]


def _constant(part: Any) -> int | None:
    """The index, if a part is one constant."""
    if isinstance(part, At):
        return part.index if isinstance(part.index, int) else None
    if not isinstance(part, Span) or not isinstance(part.start, int):
        return None
    length = part.length if part.length is not None else _minus(part.stop, part.start)
    return part.start if isinstance(length, int) and length == 1 else None


def _minus(stop: Any, start: int) -> int | None:
    return stop - start if isinstance(stop, int) else None


def _dealt(steps: Sequence[_Step], found: Accesses) -> fx.Node | None:
    """The tensor whose every index goes to the same index of the destination's axis; None if there is none."""
    operands: dict[Any, fx.Node] = {}
    indices: set[int] = set()
    size: Any = 0
    for step in steps:
        node = step.write.value
        while isinstance(node, fx.Node) and function_name(node) in _PASSED_ON and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        picked = one_picked(node, found) if isinstance(node, fx.Node) else None
        if picked is None or picked[2] != step.index:
            return None
        operands.setdefault((_expression(picked[0]), picked[1]), picked[0])
        indices.add(step.index)
        size = found.values[picked[0]].shape[picked[1]]
    alone = found.values[steps[0].whole].shape[steps[0].axis] == 1
    if len(operands) != 1 or not isinstance(size, int) or indices != set(range(size)) or (size < 2 and not alone):
        return None
    return next(iter(operands.values()))


def _expression(node: fx.Node) -> Any:
    """Identity of a view: a loop makes the same view in each iteration."""
    if function_name(node) not in (*REORDERS, "getitem", "select", "unbind") or node.kwargs:
        return node
    return (function_name(node), *(_expression(a) if isinstance(a, fx.Node) else repr(a) for a in node.args))


def _may_be_kv(step: _Step, root: fx.Node, found: Accesses) -> bool:
    """Whether an axis of two may hold K and V: in a tensor that is not a part of its input, and not called K or V."""
    view, whole = found.values[step.whole], found.values[root]
    if view.shape[step.axis] != 2 or step.fixed or str(view.numel()) != str(whole.numel()):
        return False
    return half_named(source_name(root)) is None


def is_called_kv(root: fx.Node) -> bool:
    """Whether an input's name says that it holds K and V, and no index follows that picks one of them."""
    return re.search(r"(^|_)kv[^\]]*$", source_name(root).split(".")[-1], re.IGNORECASE) is not None

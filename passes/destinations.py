"""Where a write goes: the fixed part of a destination (layer, K or V), and what the step selects in it (slots).

``kv[layer][0, :, pos] = k`` is a write to the region ``kv[layer][0]`` at ``[:, pos]``.  Two things do not follow from
the index alone, and are taken from how attention reads the tensor (:mod:`.attention_reads`): a constant index may be a
sequence's (``keys[row][:, pos] = k[row]`` in a loop over rows) or a token's (``keys.select(2, pos)``, if the graph
was compiled for one position), and K and V may be written at once (``kv[:, slots] = torch.stack([k, v])``: two
regions).
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from .accesses import Accesses
from .attention_reads import AttentionReads
from .axis_flow import Source
from .loops import REORDERS, Loops, is_called_kv
from .names import function_name, half_named, source_name
from .selection import At, Full, Indexed, Part, Selection, Span, Unreadable, selected_by
from .write_ops import slot_axes_by_token
from .writes import KVWrite, without_slots


@dataclasses.dataclass(frozen=True)
class Region:
    """A fixed part of a graph value: ``node`` itself, or ``node[index]`` with constant indices."""

    node: fx.Node
    index: tuple[Any, ...] = ()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.index] if self.index else tensor


@dataclasses.dataclass(frozen=True)
class Destination:
    """One region that a write goes to.

    Attributes:
        selection: what the write selects in it; None when opaque.
        part: the index into the write's operand of what it receives; () for all of it.
        turned: the operand's axes in the region's order, if the write sees them in another order; () if not.
    """

    region: Region
    selection: Selection | None
    part: tuple[Any, ...] = ()
    turned: tuple[int, ...] = ()


def destinations(write: KVWrite, found: Accesses, reads: AttentionReads, loops: Loops) -> list[Destination]:
    """The regions that a write goes to: one, or K and V."""
    view = found.values[write.region]
    if write.half is not None:
        return [Destination(Region(write.region, (write.half,)), [Full()] * (view.dim() - 1))]
    if write.opaque is not None:
        return [Destination(region, None) for region in _opaque_regions(write, found, reads, loops)]
    if write.flat is not None:
        return [Destination(Region(write.region), [Full()] * view.dim())]
    given: Selection = [Full()] * view.dim() if write.selection is None else write.selection
    node, selection, turned = _with_rows(write.region, given, found, reads, loops, _may_turn(write, given, found))
    source, constant = reads.source_of(node), [a for a, p in enumerate(selection) if _is_constant(p)]
    rows = {a for a in constant if reads.is_row_axis(source, a) or loops.is_row_axis(node, a)}
    tokens = {a for a in constant if reads.is_token_axis(source, a)}
    fixed, rest = _fix(selection, rows, tokens)
    halves = _kv_axis(node, selection, write, found, reads)
    if halves is None:
        region = Region(node, fixed if any(f != slice(None) for f in fixed) else ())
        return [Destination(region, rest, turned=turned)]
    apart = None if turned else _parts(write, selection, halves, found)
    if apart is None:
        write.opaque = "it writes K and V at once, in an order of axes that differs from the cache's"
        return [Destination(Region(node, _with(fixed, halves, half)), None) for half in (0, 1)]
    place = halves - sum(isinstance(f, int) for f in fixed[:halves])
    rest = rest[:place] + rest[place + 1 :]
    return [Destination(Region(node, _with(fixed, halves, half)), rest, apart[half]) for half in (0, 1)]


def _with(fixed: tuple[Any, ...], axis: int, half: int) -> tuple[Any, ...]:
    return (*fixed[:axis], half, *fixed[axis + 1 :])


def _is_constant(part: Part) -> bool:
    if isinstance(part, Span):
        return not any(isinstance(x, fx.Node) for x in (part.start, part.stop, part.length))
    return isinstance(part, At) and isinstance(part.index, int)


def _with_rows(
    node: fx.Node, selection: Selection, found: Accesses, reads: AttentionReads, loops: Loops, may_turn: bool = False
) -> tuple[fx.Node, Selection, tuple[int, ...]]:
    """The tensor that replaces ``node``, one whose sequences or tokens (or some of them) are picked one by one; the
    selection in it; and the order of the operand's axes in it, () if that is the write's.

    Args:
        may_turn: follow a sequence's axes in another order, too: ``keys[row].transpose(0, 1)[pos] = k``.
    """
    order = list(range(sum(not isinstance(p, At) for p in selection)))
    while True:
        whole, axes = _before_reordering(node, found)
        straight = axes == sorted(axes)
        if straight:
            node = whole
        elif not may_turn:
            break
        places = [axes.index(a) for a in range(len(axes))]  # of the axes of ``whole`` among those of ``node``
        within = [selection[p] for p in places]
        left = [p for p, part in enumerate(selection) if not isinstance(part, At)]  # the operand lacks the others
        turned = [order[left.index(p)] for p in places if p in left]
        if not straight and _counts_sequences_first(reads.source_of(whole), selection, within, reads):
            node, selection, order = whole, within, turned
            continue
        outer = _in_parent(whole, within, found, reads, loops)
        if outer is None:
            break
        (node, selection), order = outer, turned
    return node, selection, () if order == sorted(order) else tuple(order)


def _in_parent(
    node: fx.Node, selection: Selection, found: Accesses, reads: AttentionReads, loops: Loops
) -> tuple[fx.Node, Selection] | None:
    """The tensor of which ``node`` is some sequences or tokens, and the selection in it; None if it is nothing such."""
    picked = _picked_from(node, found)
    if picked is None:
        return None
    parent, axis, part = picked
    if isinstance(part, Full):
        return parent, selection
    source = reads.source_of(parent)
    if not (reads.is_row_axis(source, axis) or reads.is_token_axis(source, axis) or loops.is_row_axis(parent, axis)):
        return None
    if isinstance(part, At):
        return parent, [*selection[:axis], part, *selection[axis:]]
    if isinstance(selection[axis], Full):
        return parent, [*selection[:axis], part, *selection[axis + 1 :]]
    return None


def _counts_sequences_first(part: Source | None, seen: Selection, own: Selection, reads: AttentionReads) -> bool:
    """Whether the axis of sequences stands before that of tokens in a tensor, as in ``[B, H, S, D]``.

    Attention shows it.  K may be written in a graph whose attention is another's, behind a break: then a write to
    some indices of the view's first axis, behind another axis of the tensor, is taken for one of tokens, as it is where
    the tensor itself is written.  So K and V are divided alike, and judged together.

    Args:
        seen: what a write selects in a view of the tensor.
        own: what it selects in the tensor's own axes.
    """
    if not reads.of(part):
        return len(own) >= 3 and not isinstance(seen[0], Full) and isinstance(own[0], Full)
    slots = reads.slot_axes(part)
    return slots is not None and len(slots.axes) == 2 and not slots.paged


def _may_turn(write: KVWrite, selection: Selection, found: Accesses) -> bool:
    """Whether a write's operand has one axis for each axis of its destination, in that order."""
    if write.value is None:
        return True
    plain = all(isinstance(p, Full | Span) or (isinstance(p, Indexed) and _dims_of(p, found) == 1) for p in selection)
    once = sum(isinstance(p, Indexed) for p in selection) <= 1
    return plain and once and write.grid is None and found.values[write.value].dim() == len(selection)


def _before_reordering(node: fx.Node, found: Accesses) -> tuple[fx.Node, list[int]]:
    """``(whole, axes)``: the tensor of which ``node`` is a view that only reorders axes, and each one's axis in it."""
    axes = list(range(int(found.values[node].dim())))
    while function_name(node) in REORDERS and node.args and isinstance(node.args[0], fx.Node):
        sizes = torch.Size(range(2, 2 + len(axes)))
        turned = getattr(torch.empty(sizes, device="meta"), function_name(node))(*node.args[1:], **node.kwargs)
        own = [size - 2 for size in turned.shape]
        node, axes = node.args[0], [own[a] for a in axes]
    return node, axes


def _picked_from(node: fx.Node, found: Accesses) -> tuple[fx.Node, int, Part] | None:
    """``(parent, axis, part)`` if a node is a constant part of one axis of its parent, or all of it; else None."""
    parent = node.args[0] if node.args else None
    if isinstance(parent, fx.Node) and node.target is operator.getitem and function_name(parent) == "unbind":
        whole = parent.args[0]
        return (whole, _unbound_dim(parent, found), At(node.args[1])) if isinstance(whole, fx.Node) else None
    try:
        picked = selected_by(node, found.values)
    except Unreadable:
        return None
    if picked is None:
        return None
    parts = [(axis, part) for axis, part in enumerate(picked[1]) if not isinstance(part, Full)]
    if not parts:
        return picked[0], 0, Full()
    if len(parts) != 1 or not _is_constant(parts[0][1]):
        return None
    return picked[0], *parts[0]


def _unbound_dim(node: fx.Node, found: Accesses) -> int:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    whole = node.args[0]
    assert isinstance(dim, int)
    assert isinstance(whole, fx.Node)
    return dim % int(found.values[whole].dim())


def _fix(selection: Selection, rows: set[int], tokens: set[int]) -> tuple[tuple[Any, ...], Selection]:
    """``(constant index, the rest)``: constant integers, and constant slices of the last axes, are structure.

    Args:
        rows, tokens: axes whose constant integer is a sequence or a token, and so part of a slot's number.
    """
    shown = rows | tokens
    last_indexed = max((a for a, p in enumerate(selection) if isinstance(p, Indexed)), default=-1)
    moving = [a for a, p in enumerate(selection) if a in shown or _moves(p, a, selection, last_indexed)]
    if not set(moving) - rows:  # only constants: the last integer is the slot
        moving += [a for a, p in enumerate(selection) if isinstance(p, At) and a not in rows][-1:]
    fixed = tuple(slice(None) if a in moving else _constant(p) for a, p in enumerate(selection))
    rest = [p if a in moving else Full() for a, p in enumerate(selection) if a in moving or not isinstance(p, At)]
    return fixed, rest


def _constant(part: Part) -> Any:
    """A part as a constant index."""
    if isinstance(part, At):
        return part.index
    if isinstance(part, Span):
        return slice(part.start, part.stop if part.length is None else part.start + part.length)
    return slice(None)


def _moves(part: Part, axis: int, selection: Selection, last_indexed: int) -> bool:
    """Whether a part selects slots, not a layer or half."""
    if isinstance(part, Indexed):
        return True
    if isinstance(part, Span):
        variable = any(isinstance(x, fx.Node) for x in (part.start, part.stop, part.length))
        return variable or (axis < len(selection) - 1 and (last_indexed < 0 or axis < last_indexed))
    return isinstance(part, At) and isinstance(part.index, fx.Node)


def _kv_axis(node: fx.Node, selection: Selection, write: KVWrite, found: Accesses, reads: AttentionReads) -> int | None:
    """The axis along which one write stores both K and V; None if it writes one of them."""
    view, source = found.values[node], reads.source_of(node)
    for axis, part in enumerate(selection[:-1]):
        if not isinstance(part, Full) or not isinstance(view.shape[axis], int) or view.shape[axis] != 2:
            continue
        shown = reads.is_kv_axis(source, axis)
        if shown or (shown is None and _is_stacked(write, axis, selection, found)):
            return axis
    return None


def _is_stacked(write: KVWrite, axis: int, selection: Selection, found: Accesses) -> bool:
    """Whether the operand is a ``stack`` of two along an axis, and the tensor is not called K or V itself."""
    value = write.value
    if value is None or function_name(value) != "stack" or half_named(_input_name(write, found)) is not None:
        return False
    given = value.args[0] if value.args else value.kwargs.get("tensors")
    dim = value.args[1] if len(value.args) > 1 else value.kwargs.get("dim", 0)
    dims = found.values[value].dim()
    place = _operand_axis(write, selection, axis, found)
    return isinstance(given, list | tuple) and len(given) == 2 and isinstance(dim, int) and dim % dims == place


def _input_name(write: KVWrite, found: Accesses) -> str:
    root = found.root_of(write.region)
    return "" if root is None else source_name(root)


def _parts(
    write: KVWrite, selection: Selection, axis: int, found: Accesses
) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """The operand's parts for K and V; None if these would not have the axes of a write to one half."""
    indexed = [a for a, p in enumerate(selection) if isinstance(p, Indexed)]
    if write.grid is not None:
        return None  # the index has the axis, too
    if indexed and indexed[0] < axis < indexed[-1] and indexed != [0, *indexed[1:]]:
        return None  # without the axis between them, the index tensors' axes would not come first
    if write.value is None:
        return (), ()
    place = _operand_axis(write, selection, axis, found)
    if place < 0:
        return (), ()  # the same for both
    before = (slice(None),) * place
    one = found.values[write.value].shape[place] == 1
    return (*before, 0), (*before, 0 if one else 1)


def _operand_axis(write: KVWrite, selection: Selection, axis: int, found: Accesses) -> int:
    """The axis of a write's operand that matches an axis that the write takes whole; negative if it has none."""
    left = [a for a, p in enumerate(selection) if not isinstance(p, At)]
    indexed = [left.index(a) for a, p in enumerate(selection) if isinstance(p, Indexed)]
    assert write.value is not None
    dims = max((_dims_of(p, found) for p in selection if isinstance(p, Indexed)), default=0)
    place = left.index(axis)
    if indexed and write.grid is None:
        adjacent = indexed[-1] - indexed[0] == len(indexed) - 1
        before = sum(i < place for i in indexed)
        ahead = not adjacent or indexed[0] < place
        place += (dims if ahead else 0) - before
    rank = len(left) - len(indexed) + dims
    return place - (rank - int(found.values[write.value].dim()))


def _dims_of(part: Indexed, found: Accesses) -> int:
    return int(found.values[part.tensor].dim())


def _opaque_regions(write: KVWrite, found: Accesses, reads: AttentionReads, loops: Loops) -> list[Region]:
    """The regions of a write that hides its slots: K and V, if the tensor holds both, [2, ...] or [pages, 2, ...].

    Without a name, an axis of two in front of three others may as well be two sequences.
    """
    node = without_slots(write.region, found.values)
    node, _, _ = _with_rows(node, [Full()] * found.values[node].dim(), found, reads, loops)
    if write.slot_axes:
        return [Region(write.region)]
    view, source = found.values[node], reads.source_of(node)
    root = found.root_of(write.region)
    named = write.masked_axes is None and root is not None and is_called_kv(root)
    for axis, dims in ((0, 4 if named else 5), (1, 5)):
        if view.dim() > 2 and view.shape[axis] == 2:
            shown = reads.is_kv_axis(source, axis)
            if shown is None:
                shown = _is_given_k_and_v(write, view, axis, found)
            guessed = shown is None and view.dim() >= dims and not _is_one_half(write, source, found)
            if shown or guessed:
                return [Region(node, (*(slice(None),) * axis, half)) for half in (0, 1)]
    return [Region(node)]


def _is_given_k_and_v(write: KVWrite, view: torch.Tensor, axis: int, found: Accesses) -> bool | None:
    """True if an op that changes nothing else gets two tensors alike, whose rows are those of ``view`` without an axis:
    K and V; None if not."""
    given = [found.values.get(n) for n in write.node.all_input_nodes if n is not write.region]
    rows = [t for t in given if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dim() >= 2]
    left = torch.Size([*view.shape[:axis], *view.shape[axis + 1 :]])
    alike = len(rows) == 2 and rows[0].shape == rows[1].shape and slot_axes_by_token(left, rows[0].shape) is not None
    return True if alike and half_named(_input_name(write, found)) is None else None


def _is_one_half(write: KVWrite, source: Source | None, found: Accesses) -> bool:
    """Whether what is written is K or V, by its name or as a part: one of two, or some of each row."""
    if half_named(_input_name(write, found)) is not None:
        return True
    if source is None:
        return False
    whole = found.values[source.input].shape
    last = len(whole) - 1
    return any(axis == last or (stop == start + 1 and str(whole[axis]) == "2") for axis, start, stop in source.ranges)

"""Reading a KV write: where it goes, at which slots, with what operand.

Storages show that a node writes a pool (:mod:`.accesses`).  Here its call is parsed, by the names of the common idioms,
for the slots and the operand.  A call that cannot be parsed is not an error: the write is guarded as *opaque*, by
comparing the pool before and after it.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .accesses import Accesses, extent_of
from .dynamo_contract import is_transformed
from .names import function_name
from .selection import (
    At,
    Full,
    Indexed,
    Part,
    Selection,
    Span,
    Unreadable,
    parse_index,
    selected_by,
)
from .write_ops import WriteSpec, read_custom_op


@dataclasses.dataclass
class KVWrite:
    """One write to one region of a pool.

    Attributes:
        node: the node that writes.
        region: the node whose value is the region: the layer's K or V, as a view of the pool.
        selection: what the write selects in the region, one part per axis; None when opaque.
        value: the operand, or None when there is none to compare with (fills, sums, opaque writes).
        flat: instead of a selection, a tensor of slot numbers over all slot axes (a slot_mapping).
        grid: instead of advanced indexing, ``(axis, index)`` of a scatter.
        wraps: negative indices count from the end.
        opaque: why slots and operand are unknown, or None.
        slot_axes: the region's slot axes, where the write itself says them.
        masked_axes: of an opaque write, the region's slot axes as far as the mask shows them that picks the slots.
        half: index on the region's first axis, where one argument holds K and V.
        fill: the write puts a constant, so it says nothing about whether this is a KV cache.
        named: the op that writes says that this is a KV cache.
        made: the tensor that holds the pool after the write, if that is another one than before.
    """

    node: fx.Node
    region: fx.Node
    selection: Selection | None = None
    value: fx.Node | None = None
    flat: fx.Node | None = None
    grid: tuple[int, fx.Node] | None = None
    wraps: bool = True
    opaque: str | None = None
    slot_axes: tuple[int, ...] | None = None
    masked_axes: tuple[int, ...] | None = None
    half: int | None = None
    fill: bool = False
    named: bool = False
    made: fx.Node | None = None


Reader = Callable[[fx.Node, dict[fx.Node, Any]], KVWrite]


def _setitem(node: fx.Node, values: dict[fx.Node, Any]) -> KVWrite:
    target, index, value = node.args[:3]
    assert isinstance(target, fx.Node)
    selection = parse_index(index, tuple(values[target].shape), values)
    return _selected(node, target, selection, value, values)


def _index_copy(node: fx.Node, values: dict[fx.Node, Any]) -> KVWrite:
    target, dim, index, value = bound(node, ("self", "dim", "index", "source"))
    selection: Selection = [Full()] * values[target].dim()
    selection[int(dim)] = Indexed(index)
    write = _selected(node, target, selection, value, values)
    write.wraps = False
    return write


def _index_fill(node: fx.Node, values: dict[fx.Node, Any]) -> KVWrite:
    """Like an ``index_copy_`` of a number."""
    target, dim, index, value = bound(node, ("self", "dim", "index", "value"))
    return _without_operand(node, target, dim, index, values, fill=not isinstance(value, fx.Node))


def _index_add(node: fx.Node, values: dict[fx.Node, Any]) -> KVWrite:
    """The slots are known, the sum is not."""
    target, dim, index = bound(node, ("self", "dim", "index", "source"))[:3]
    return _without_operand(node, target, dim, index, values)


def _without_operand(
    node: fx.Node, target: fx.Node, dim: Any, index: fx.Node, values: dict[fx.Node, Any], fill: bool = False
) -> KVWrite:
    """A write at an index, with nothing to compare what is there with."""
    selection: Selection = [Full()] * values[target].dim()
    selection[int(dim)] = Indexed(index)
    return KVWrite(node, target, selection, fill=fill, wraps=False)


def _index_put(node: fx.Node, values: dict[fx.Node, Any]) -> KVWrite:
    target, indices, value, accumulate = bound(node, ("self", "indices", "values", "accumulate"), accumulate=False)
    parts = tuple(slice(None) if i is None else i for i in indices)
    selection = parse_index(parts, tuple(values[target].shape), values)
    return _selected(node, target, selection, None if accumulate else value, values)


def _scatter(node: fx.Node, values: dict[fx.Node, Any]) -> KVWrite:
    target, dim, index, value = bound(node, ("self", "dim", "index", "src"))
    given, whole = values[index], values[target]
    dim = int(dim) % whole.dim()
    row_axes = [a for a in range(whole.dim()) if a != dim and not (a == 0 and whole.dim() >= 3)]
    for axis in row_axes:
        if (given.stride(axis) != 0 and given.shape[axis] != 1) or given.shape[axis] != whole.shape[axis]:
            raise Unreadable("a scatter whose index varies inside a slot")
    write = KVWrite(node, target, value=_tensor_node(value, values), grid=(dim, index), wraps=False)
    write.selection = [Full()] * whole.dim()
    write.selection[dim] = Indexed(index)
    if 0 not in (dim, *row_axes):
        write.selection[0] = Span(0, given.shape[0]) if given.shape[0] != whole.shape[0] else Full()
    return write


def _copy(node: fx.Node, values: dict[fx.Node, Any]) -> KVWrite:
    target, value = bound(node, ("self", "src"))
    return _from_functionalised(node, target, value, values) or _whole(node, target, value, values)


def _from_functionalised(node: fx.Node, target: fx.Node, value: Any, values: dict[fx.Node, Any]) -> KVWrite | None:
    """``pool.copy_(new)`` where ``new`` is what a functionalised custom op made of the pool."""
    if not isinstance(value, fx.Node) or value.target is not operator.getitem:
        return None
    source = value.args[0]
    spec = read_custom_op(source, values) if isinstance(source, fx.Node) else None
    for part in spec.parts if spec is not None else ():
        if part.pool is target and part.opaque is None:
            return KVWrite(
                node,
                target,
                value=part.value,
                flat=part.slots,
                wraps=False,
                slot_axes=part.slot_axes,
                half=part.half,
                named=part.named,
            )
    return None


def _in_place(node: fx.Node, values: dict[fx.Node, Any]) -> KVWrite:
    """``fill_``, ``zero_``, ``add_`` and similar: the destination is known, the operand is not comparable."""
    target = node.args[0]
    assert isinstance(target, fx.Node)
    write = _whole(node, target, None, values)
    write.fill = function_name(node) in ("fill_", "zero_")
    return write


def _whole(node: fx.Node, target: fx.Node, value: Any, values: dict[fx.Node, Any]) -> KVWrite:
    """A write to all of ``target``, which may itself be a part that was picked out of the region."""
    picked = selected_by(target, values)
    if picked is not None:
        parent, selection = picked
        shown = any(_is_slot_part(part, axis, selection, values) for axis, part in enumerate(selection))
        if shown or _is_one_token(parent, selection, value, values):
            return _selected(node, parent, selection, value, values)
    return KVWrite(node, target, [Full()] * values[target].dim(), _tensor_node(value, values))


def without_slots(node: fx.Node, values: dict[fx.Node, Any]) -> fx.Node:
    """The view of which ``node`` is some slots, where a step picks them; else ``node``.

    An op that hides where it writes may be given a window into the cache, ``cache.narrow(2, position, 1)``, which is at
    another place in each step.
    """
    while True:
        try:
            picked = selected_by(node, values)
        except Unreadable:
            return node
        if picked is None or not any(_is_slot_part(p, axis, picked[1], values) for axis, p in enumerate(picked[1])):
            return node
        node = picked[0]


def _is_slot_part(part: Any, axis: int, selection: Selection, values: dict[fx.Node, Any]) -> bool:
    if isinstance(part, Indexed):
        return True
    if isinstance(part, Span):
        return axis < len(selection) - 1
    return isinstance(part, At) and isinstance(part.index, fx.Node)


def _is_one_token(parent: fx.Node, selection: Selection, value: Any, values: dict[fx.Node, Any]) -> bool:
    """Whether a constant index of an axis is written from another index of a tensor that has the same axes, this one
    shorter: ``keys.select(2, 7).copy_(k.select(2, 0))``.  Of a head or a sequence the indices are the same; the first
    axis may count layers.
    """
    try:
        taken = selected_by(value, values) if isinstance(value, fx.Node) else None
    except Unreadable:
        return False
    if taken is None or len(taken[1]) != len(selection):
        return False
    chosen, whole = [a for a, p in enumerate(selection) if not isinstance(p, Full)], values[parent].shape
    if len(chosen) != 1 or not 0 < chosen[0] < len(selection) - 1:
        return False
    (axis,), source = chosen, values[taken[0]].shape
    to, given = selection[axis], taken[1][axis]
    alike = all(isinstance(p, Full) and str(source[a]) == str(whole[a]) for a, p in enumerate(taken[1]) if a != axis)
    if not alike or not isinstance(to, At) or not isinstance(given, At):
        return False
    sizes = source[axis], whole[axis]
    return to.index != given.index and all(isinstance(n, int) for n in sizes) and bool(sizes[0] < sizes[1])


def _selected(node: fx.Node, target: fx.Node, selection: Selection, value: Any, values: dict[fx.Node, Any]) -> KVWrite:
    operand = _tensor_node(value, values)
    return KVWrite(node, target, selection, operand, fill=operand is None and not isinstance(value, fx.Node))


def _tensor_node(value: Any, values: dict[fx.Node, Any]) -> fx.Node | None:
    """``value`` if it is a tensor with rows to compare; None for numbers and 0-d tensors."""
    if isinstance(value, fx.Node) and isinstance(values.get(value), torch.Tensor) and values[value].dim() > 0:
        return value
    return None


def bound(node: fx.Node, names: tuple[str, ...], **defaults: Any) -> list[Any]:
    """The call's arguments by position or name, in the order of ``names``."""
    given = dict(zip(names, node.args, strict=False))
    given.update({{"input": "self", "src": names[-1]}.get(k, k): v for k, v in node.kwargs.items()})
    missing = [n for n in names if n not in given and n not in defaults]
    if missing:
        raise Unreadable(f"a call of {function_name(node)} without {missing[0]}")
    return [given.get(n, defaults.get(n)) for n in names]


READERS: dict[str, Reader] = {
    "setitem": _setitem,
    "index_copy_": _index_copy,
    "index_fill_": _index_fill,
    "index_add_": _index_add,
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    "_unsafe_index_put_": _index_put,
    "scatter_": _scatter,
    "copy_": _copy,
}

#: In-place ops whose first argument is the destination.
IN_PLACE = ("fill_", "zero_", "add_", "sub_", "mul_", "div_", "masked_fill_", "clamp_", "iadd", "isub", "imul")


def read_write(node: fx.Node, root: fx.Node, found: Accesses) -> list[KVWrite]:
    """The writes that ``node`` makes to the pool behind the placeholder ``root``; at least one."""
    values = found.values
    if any(is_transformed(values.get(a)) for a in node.all_input_nodes if found.root_of(a) is root):
        return _opaque(node, root, found, "it is under torch.vmap or torch.func")
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        writes = _opaque(node, root, found, f"it is inside {_higher_order_name(node)}")
        for write in writes:
            write.slot_axes = _inner_slot_axes(node, write.region, root, found)
        return writes
    spec = read_custom_op(node, values)
    if spec is not None:
        return _custom(node, root, spec, found)
    name = function_name(node)
    reader = READERS.get(name) or (_in_place if name in IN_PLACE else None)
    try:
        if name == "_foreach_copy_":
            return _each(node, root, found)
        given = node.kwargs.get("out")
        if isinstance(given, fx.Node):
            return [dataclasses.replace(_whole(node, given, None, values), fill=False)]
        if reader is not None and (node.target is not operator.setitem or isinstance(node.args[0], fx.Node)):
            return [reader(node, values)]
    except Unreadable as e:
        return _opaque(node, root, found, str(e))
    return _opaque(node, root, found, f"the op {_qualified(node)} does not show where it writes")


def _each(node: fx.Node, root: fx.Node, found: Accesses) -> list[KVWrite]:
    """``torch._foreach_copy_(pools, values)``: a copy each."""
    pairs = zip(*bound(node, ("self", "src")), strict=True)
    return [_whole(node, target, value, found.values) for target, value in pairs if found.root_of(target) is root]


def _custom(node: fx.Node, root: fx.Node, spec: WriteSpec, found: Accesses) -> list[KVWrite]:
    """The writes of a mutable custom op that names its slots and operands."""
    writes = []
    for part in spec.parts:
        if found.root_of(part.pool) is root:
            writes.append(
                KVWrite(
                    node,
                    part.pool,
                    value=part.value,
                    flat=part.slots,
                    wraps=False,
                    slot_axes=part.slot_axes,
                    half=part.half,
                    opaque=part.opaque,
                    named=part.named,
                )
            )
    return writes or _opaque(node, root, found, f"the op {_qualified(node)} does not show where it writes")


def _opaque(node: fx.Node, root: fx.Node, found: Accesses, why: str) -> list[KVWrite]:
    views = _operands_on(node, root, found)
    return [KVWrite(node, view, opaque=why, masked_axes=_masked_axes(node, view, found.values)) for view in views]


def _masked_axes(node: fx.Node, region: fx.Node, values: dict[fx.Node, Any]) -> tuple[int, ...] | None:
    """The slot axes of ``region[:, mask] = new`` and ``region.masked_scatter_(mask, new)``; None for other writes."""
    if node.args[:1] != (region,) or len(node.args) < 2:
        return None
    dims, name, index = values[region].dim(), function_name(node), node.args[1]
    if name == "masked_scatter_" and isinstance(index, fx.Node):
        mask = values[index]
        axes = {a + dims - mask.dim() for a in range(mask.dim()) if not _is_spread(mask, a)}
    elif name in ("setitem", "index_put_"):
        axes, axis = set(), 0
        for part in index if isinstance(index, tuple | list) else (index,):
            if isinstance(part, slice) or (part is None and name == "index_put_"):  # all of an axis
                axis += 1
                continue
            mask = values.get(part) if isinstance(part, fx.Node) else None
            if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
                return None
            axes |= set(range(axis, axis + mask.dim()))
            axis += mask.dim()
    else:
        return None
    return chosen_axes([At(0) if a in axes else Full() for a in range(dims)], dims)


def _is_spread(mask: torch.Tensor, axis: int) -> bool:
    """Whether a mask says the same along an axis."""
    size, stride = mask.shape[axis], mask.stride(axis)
    return (isinstance(size, int) and size == 1) or (isinstance(stride, int) and stride == 0)


def _operands_on(node: fx.Node, root: fx.Node, found: Accesses) -> list[fx.Node]:
    """The operands of ``node`` that are views of ``root``; the placeholder itself if a byte is in several.

    Under torch.vmap they are what it was given: what it makes of that has no address.
    """
    views = [_before_transform(a, found.values) for a in node.all_input_nodes if found.root_of(a) is root]
    regions = [found.values[without_slots(view, found.values)] for view in views]
    return views if views and all(_are_apart(a, b) for a, b in itertools.combinations(regions, 2)) else [root]


def _before_transform(view: fx.Node, values: dict[fx.Node, Any]) -> fx.Node:
    """What a view under torch.vmap or torch.func is one of."""
    while is_transformed(values.get(view)):
        view = view.all_input_nodes[0]
    return view


def _are_apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two views have no byte in common: one comes after the other, or they are adjacent parts of a row."""
    alike = a.shape == b.shape and a.stride() == b.stride()
    return not extent_of(a).overlaps(extent_of(b)) or (alike and a.storage_offset() != b.storage_offset())


def _inner_slot_axes(node: fx.Node, operand: fx.Node, root: fx.Node, found: Accesses) -> tuple[int, ...] | None:
    """The slot axes that a write inside a subgraph shows, if it addresses the operand as it came in."""
    outer = found.values[operand]
    for access in found.of(root):
        reader = None if access.inner is None else READERS.get(function_name(access.inner))
        if access.node is node and access.writes and reader is not None and access.extent.overlaps(extent_of(outer)):
            assert access.inner is not None
            try:
                write = reader(access.inner, found.inner_values)
            except Unreadable:
                continue
            if found.inner_values[write.region].shape == outer.shape:
                return chosen_axes(write.selection or [], outer.dim())
    return None


def chosen_axes(selection: Selection, ndim: int) -> tuple[int, ...] | None:
    """The axes that number slots, from one selection: those selected along, and the batch axis before them.

    The last axis is one of them only if the place in it is computed, and in no other: K as ``[B, H, D, S]``.  A part of
    it that is the same in each call is a part of a head.
    """
    chosen = {a for a, p in enumerate(selection) if not isinstance(p, Full) and a < ndim - 1}
    if not chosen and ndim >= 3 and len(selection) == ndim and _is_computed(selection[-1]):
        chosen = {ndim - 1}
    if not chosen:
        return None
    if 0 not in chosen and ndim >= 3:
        chosen.add(0)
    return tuple(sorted(chosen)[:2])


def _is_computed(part: Part) -> bool:
    """Whether the graph computes which part this is."""
    if isinstance(part, Span):
        return isinstance(part.start, fx.Node)
    return isinstance(part, Indexed) or (isinstance(part, At) and isinstance(part.index, fx.Node))


def _higher_order_name(node: fx.Node) -> str:
    name = getattr(node.target, "_name", str(node.target))
    return "a user's Triton kernel" if name == "triton_kernel_wrapper_mutation" else f"the subgraph of {name}"


def _qualified(node: fx.Node) -> str:
    target = node.target
    return str(target._schema.name) if isinstance(target, torch._ops.OpOverload) else function_name(node)

"""Caches that a graph returns updated instead of writing them: what it returns is the cache of the next call.

Before and after::

    index_copy: "f32[2, 2, 16, 8]" = torch.index_copy(keys, 2, pos, k)
    return (attn, index_copy)

    verify = torch.ops.kvcanary.verify(keys, None, [pos], [], state, 0, 0)
    index_copy: "f32[2, 2, 16, 8]" = torch.index_copy(keys, 2, pos, k)
    record = torch.ops.kvcanary.record(index_copy, k, [pos], [], None, state, 0, 0)
    return (attn, index_copy)

An update that does not show what it changes is compared in full with its argument (``observe`` and ``record_changed``),
like a write that hides its slots.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from .accesses import MASKED_UPDATES, UPDATES, Accesses
from .names import function_name, has_kv_name, source_name, state_named
from .selection import At, Full, Selection, Unreadable, parse_span
from .write_ops import named_arguments, read_custom_op, schema_of, slot_axes_by_token
from .writes import READERS, KVWrite, bound

#: Ops that return their argument, in a new tensor or not.
_PASSING = ("clone", "detach", "contiguous")


@dataclasses.dataclass
class Returned:
    """One input that comes back updated.

    Attributes:
        root: the placeholder.
        output: which of the graph's outputs takes its place.
        writes: what updates it, in order, as writes to the root.
    """

    root: fx.Node
    output: int
    writes: list[KVWrite]


@dataclasses.dataclass(frozen=True)
class _Step:
    """One update on the way from an input to an output: ``node`` puts something into ``cache``."""

    node: fx.Node
    cache: fx.Node
    slot_axes: tuple[int, ...] | None = None
    custom: KVWrite | None = None


def find_returned(gm: fx.GraphModule, found: Accesses) -> list[Returned]:
    """The caches that ``gm`` returns updated, in the order of its outputs."""
    taken = set(found.written_roots())
    outputs = pytree.tree_leaves(gm.graph.output_node().args)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    returned = []
    for place, node in enumerate(outputs):
        way = _way_to_input(node, found) if isinstance(node, fx.Node) else None
        if way is None:
            continue
        root, steps = way
        if root in taken or not steps or not found.of(root) or not _is_cache(root, steps, found):
            continue
        writes = _writes(root, node, steps, found, order)
        if not all(write.fill for write in writes):
            taken.add(root)
            returned.append(Returned(root, place, writes))
    return returned


def _way_to_input(node: fx.Node, found: Accesses) -> tuple[fx.Node, list[_Step]] | None:
    """The input that ``node`` is an updated copy of, and the updates in order; None if it is none."""
    kind, steps = _kind(node, found), list[_Step]()
    while node.op != "placeholder":
        if kind is None or _kind(node, found) != kind:
            return None
        known = {step.node for step in steps}
        steps[:0] = [_Step(w, node) for w in found.writers_of(node) if w not in known]
        if function_name(node) in _PASSING:
            given = _first(node)
        else:
            step = _step(node, kind, found)
            given = None if step is None else step.cache
            steps[:0] = [] if step is None else [step]
        if given is None:
            return None
        node = given
    return (node, steps) if _kind(node, found) == kind and found.root_of(node) is node else None


def _step(node: fx.Node, kind: tuple[Any, ...], found: Accesses) -> _Step | None:
    """The update that ``node`` is the result of, if it is one."""
    name = function_name(node)
    if name in UPDATES:
        given = _first(node)
        return None if given is None else _Step(node, given)
    return _masked(node, kind, found) if name in MASKED_UPDATES else _custom(node, kind, found)


def _first(node: fx.Node) -> fx.Node | None:
    """The tensor that a method or function is called on."""
    given = node.args[0] if node.args else node.kwargs.get("input")
    return given if isinstance(given, fx.Node) else None


def _kind(node: fx.Node, found: Accesses) -> tuple[Any, ...] | None:
    """The properties that two tensors share if one can replace the other."""
    value = found.values.get(node)
    return _kind_of(value) if isinstance(value, torch.Tensor) else None


def _masked(node: fx.Node, kind: tuple[Any, ...], found: Accesses) -> _Step | None:
    """An update under a mask: the cache is what it keeps elsewhere, its slot axes those along which the mask varies."""
    tensors = [n for n in (*node.args, *node.kwargs.values()) if isinstance(n, fx.Node)]
    masks = [n for n in tensors if _is_mask(n, found)]
    kept = [n for n in tensors if n not in masks and _kind(n, found) == kind and _leads_to_cache(n, found)]
    if len(masks) != 1 or not kept:
        return None
    ndim, mask = found.values[node].dim(), found.values[masks[0]]
    # what was expanded does not vary: its stride is 0
    own = [a for a in range(mask.dim()) if mask.shape[a] != 1 and mask.stride(a) != 0]
    varies = {a + ndim - mask.dim() for a in own} - {ndim - 1}
    varies |= {0} if ndim >= 3 else set()
    return _Step(node, kept[0], tuple(sorted(varies)[:2]))


def _is_mask(node: fx.Node, found: Accesses) -> bool:
    value = found.values.get(node)
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _leads_to_cache(node: fx.Node, found: Accesses) -> bool:
    """Whether a tensor is, or is an updated copy of, an input with a cache's name."""
    way = _way_to_input(node, found)
    return way is not None and _is_called(way[0])


def _custom(node: fx.Node, kind: tuple[Any, ...], found: Accesses) -> _Step | None:
    """The update by a custom op of which ``node`` is an output: the pools it takes and returns, in order."""
    call, number = node, 0
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        call, number = node.args[0], node.args[1]  # type: ignore[assignment]
    schema = schema_of(call.target)
    if schema is None or schema.is_mutable or schema.name.split("::")[0] in ("aten", "prims", "kvcanary"):
        return None
    made = found.values.get(call)
    results = list(made) if isinstance(made, list | tuple) else [made]
    same = [i for i, r in enumerate(results) if isinstance(r, torch.Tensor) and _kind_of(r) == kind]
    spec = read_custom_op(call, found.values)
    named = {a: v for a, v in named_arguments(call).items() if isinstance(v, fx.Node) and _kind(v, found) == kind}
    pools = [v for a, v in named.items() if has_kv_name(a) or _leads_to_cache(v, found)]
    if spec is not None:
        pools = [p.pool for p in spec.parts if _kind(p.pool, found) == kind]
    if len(pools) != len(same) or number not in same:
        return None
    pool = pools[same.index(number)]
    for part in spec.parts if spec is not None else ():
        if part.pool is pool and part.opaque is None and part.half is None:
            write = KVWrite(node, pool, value=part.value, flat=part.slots, wraps=False, slot_axes=part.slot_axes)
            return _Step(node, pool, custom=write)
    return _Step(node, pool, _axes_by_operand(pool, call, found))


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (*map(str, tensor.shape), tensor.dtype, tensor.device)


def _axes_by_operand(pool: fx.Node, call: fx.Node, found: Accesses) -> tuple[int, ...] | None:
    """The slot axes of a pool by an operand: ``[B, H, T, D]`` differs from it along one axis, or ``[T, H, D]`` is what
    tokens have."""
    whole = found.values[pool].shape
    for other in call.all_input_nodes:
        value = found.values.get(other)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or other is pool:
            continue
        if value.dim() == len(whole):
            differs = [a for a, (n, m) in enumerate(zip(value.shape, whole, strict=True)) if str(n) != str(m)]
            if len(differs) == 1 and differs[0] < len(whole) - 1:
                return (0, differs[0]) if differs[0] and len(whole) >= 3 else (differs[0],)
        elif value.dim() >= 2 and (axes := slot_axes_by_token(whole, value.shape)) is not None:
            return axes
    return None


def _usual_axes(pool: torch.Tensor) -> tuple[int, ...] | None:
    """Where nothing shows the slot axes: those of ``[B, H, S, D]`` and ``[slots, H, D]``."""
    return {4: (0, 2), 3: (0,), 2: (0,)}.get(pool.dim())


def _is_cache(root: fx.Node, steps: list[_Step], found: Accesses) -> bool:
    """Whether an input that comes back updated is a cache: by its axes and how it is updated, or by its name."""
    if _is_called(root):
        return bool(found.values[root].dim() >= 2)
    shown = not any(function_name(s.node) in MASKED_UPDATES for s in steps)
    return bool(shown and found.values[root].dim() >= 3 and found.values[root].is_floating_point())


def _is_called(root: fx.Node) -> bool:
    name = source_name(root)
    return has_kv_name(name) or state_named(name) is not None


def _writes(
    root: fx.Node, result: fx.Node, steps: list[_Step], found: Accesses, order: dict[fx.Node, int]
) -> list[KVWrite]:
    """The updates as writes to the root; a single opaque one if not all of them can be read."""
    writes, why = [], ""
    for step in steps:
        try:
            write = step.custom or _read(step, found)
        except Unreadable as e:
            why = str(e)
            break
        in_place = step.node in found.writers_of(step.cache)
        writes.append(dataclasses.replace(write, region=root, made=step.cache if in_place else step.node))
    if len(writes) == len(steps):
        return writes
    last = max((result, *(s.node for s in steps)), key=order.__getitem__)
    shown = (s.slot_axes or _axes_by_operand(root, s.node, found) for s in steps)
    axes = next((axes for axes in shown if axes is not None), None) or _usual_axes(found.values[root])
    return [KVWrite(last, root, opaque=why, slot_axes=axes, made=result)]


def _read(step: _Step, found: Accesses) -> KVWrite:
    made_by = step.node.args[0] if step.node.target is operator.getitem else step.node
    name = function_name(made_by) if isinstance(made_by, fx.Node) else step.node.name
    reader = _READERS.get(name)
    if reader is None or "reduce" in step.node.kwargs:
        raise Unreadable(f"the op {name} returns a new tensor, and does not show what it changes in it")
    write = reader(step.node, found.values)
    if write.region is not step.cache:
        raise Unreadable(f"{name} writes to a view of a copy")
    return write


def _slice_scatter(node: fx.Node, values: dict[fx.Node, Any]) -> KVWrite:
    names = ("self", "src", "dim", "start", "end", "step")
    target, value, dim, start, end, step = bound(node, names, dim=0, start=None, end=None, step=1)
    if step != 1:
        raise Unreadable("a slice with a step")
    selection: Selection = [Full()] * values[target].dim()
    selection[dim] = parse_span(start, end, values[target].shape[dim], values)
    return KVWrite(node, target, selection, value)


def _select_scatter(node: fx.Node, values: dict[fx.Node, Any]) -> KVWrite:
    target, value, dim, index = bound(node, ("self", "src", "dim", "index"))
    selection: Selection = [Full()] * values[target].dim()
    selection[dim] = At(index)
    return KVWrite(node, target, selection, value)


_READERS = {
    **READERS,
    **{name: READERS[name + "_"] for name in ("index_copy", "index_put", "_unsafe_index_put", "scatter")},
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
}

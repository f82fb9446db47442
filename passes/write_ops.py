"""Custom ops that write KV: which argument is the pool, which the slots, which the operand.

An op's body is a black box, so its arguments must show it.  Either the op was registered with
:func:`register_kv_write`, or its schema uses the names that serving engines use (``slot_mapping``).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from .names import has_kv_name

#: Argument names that mean "slot number of each token, over the whole pool; -1 for none".
SLOT_NAMES = ("slot_mapping", "slots", "slot", "slot_ids", "out_cache_loc", "cache_loc", "loc")


@dataclasses.dataclass(frozen=True)
class RegisteredOp:
    """How to read one op: names of its arguments, pools and operands paired in order."""

    slots: str
    pools: tuple[str, ...]
    operands: tuple[str, ...]


_REGISTERED: dict[str, RegisteredOp] = {}


def register_kv_write(op: str, *, slots: str, pools: dict[str, str]) -> None:
    """Register how to read a custom op that writes a KV cache.

    Args:
        op: qualified name, ``"mylib::store_kv"``.
        slots: the argument with the slot of each token, integer ``[T]``, over all slots of the pool;
            -1 means that the token is not stored.
        pools: from each mutated pool argument to the argument that is written into it, ``[T, ...]``.
            A pool that holds K and V as its first axis takes a name with an index: ``{"kv[0]": "k"}``.

    Example::

        kvcanary_fx.register_kv_write("mylib::store_kv", slots="where", pools={"k_pool": "k", "v_pool": "v"})
    """
    _REGISTERED[op] = RegisteredOp(slots, tuple(pools), tuple(pools.values()))


@dataclasses.dataclass(frozen=True)
class WritePart:
    """One pool that an op writes."""

    pool: fx.Node
    value: fx.Node | None = None
    slots: fx.Node | None = None
    slot_axes: tuple[int, ...] | None = None
    half: int | None = None  # index on the pool's first axis, when K and V share one argument
    opaque: str | None = None
    named: bool = False  # the op calls the argument a cache, or it was registered


@dataclasses.dataclass(frozen=True)
class WriteSpec:
    parts: tuple[WritePart, ...]


def read_custom_op(node: fx.Node, values: dict[fx.Node, Any]) -> WriteSpec | None:
    """What a custom op's call shows about the pools it writes; None if it is not a custom op or shows nothing."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        schema, arguments = _functionalised(node)
    else:
        schema, arguments = schema_of(node.target), named_arguments(node)
    if schema is None or schema.name.split("::")[0] in ("aten", "prims", "kvcanary"):
        return None
    known = _REGISTERED.get(schema.name) or _by_name(schema, arguments, values)
    if known is None:
        return None
    registered = schema.name in _REGISTERED
    parts = [
        dataclasses.replace(part, named=registered or has_kv_name(pool))
        for pool, operand in zip(known.pools, known.operands, strict=True)
        if (part := _part(pool, operand, known.slots, arguments, values)) is not None
    ]
    return WriteSpec(tuple(parts)) if parts else None


def schema_of(target: Any) -> Any:
    """The schema of an op, of the first overload where none was chosen; None if ``target`` is no op."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def op_name(node: fx.Node) -> str:
    """The qualified name of the op that a node calls; empty if it calls none."""
    schema = schema_of(node.target)
    return "" if schema is None else str(schema.name)


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of the op that a node calls, by the names of its schema, without defaults."""
    schema = schema_of(node.target)
    given = zip(schema.arguments, node.args, strict=False) if schema is not None else ()
    return {**{a.name: value for a, value in given}, **node.kwargs}


def _functionalised(node: fx.Node) -> tuple[Any, dict[str, Any]]:
    """Schema and arguments of the op inside an ``auto_functionalized`` node."""
    if getattr(node.target, "_name", "") != "auto_functionalized" or not node.args:
        return None, {}
    return schema_of(node.args[0]), dict(node.kwargs)


def _by_name(schema: Any, arguments: dict[str, Any], values: dict[fx.Node, Any]) -> RegisteredOp | None:
    """Read an op by its arguments' names: one of SLOT_NAMES, mutated pools, as many operands."""
    slots = next((n for n in SLOT_NAMES if _is_tensor(arguments.get(n), values)), None)
    if slots is None:
        return None
    tokens = values[arguments[slots]].numel()
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    pools = [n for n in arguments if n in written and _is_tensor(arguments[n], values)]
    operands = [
        n
        for n in arguments
        if n not in written
        and _is_tensor(arguments[n], values)
        and values[arguments[n]].is_floating_point()
        and values[arguments[n]].dim() >= 2
        and values[arguments[n]].shape[0] == tokens
    ]
    if len(pools) == len(operands):
        return RegisteredOp(slots, tuple(pools), tuple(operands))
    return None


def _is_tensor(argument: Any, values: dict[fx.Node, Any]) -> bool:
    return isinstance(argument, fx.Node) and isinstance(values.get(argument), torch.Tensor)


def _part(
    pool: str, operand: str, slots: str, arguments: dict[str, Any], values: dict[fx.Node, Any]
) -> WritePart | None:
    name, _, index = pool.partition("[")
    if not _is_tensor(arguments.get(name), values):
        return None
    node, half = arguments[name], int(index.rstrip("]")) if index else None
    value, where = arguments.get(operand), arguments.get(slots)
    if value is None or not _is_tensor(value, values) or not _is_tensor(where, values):
        return WritePart(node, opaque="its call names no slots or no operand")
    shape = values[node].shape if half is None else values[node].shape[1:]
    axes = slot_axes_by_token(shape, values[value].shape)
    if axes is None:
        return WritePart(node, opaque="the operand's rows do not fit the pool's")
    return WritePart(node, value, where, axes, half)


def slot_axes_by_token(pool: torch.Size, operand: torch.Size) -> tuple[int, ...] | None:
    """The axes of the pool that number slots: those not needed to hold one token of the operand.

    They lead, or the pool is ``[pages, heads, page_size, dim]`` and the operand ``[T, heads, dim]``.
    """
    row = math.prod(operand[1:])
    for count in (1, 2):
        if len(pool) > count and math.prod(pool[count:]) == row:
            return tuple(range(count))
    heads_first = len(pool) == 4 and (pool[1], pool[3]) == tuple(operand[1:])
    return (0, 2) if heads_first else None

"""The canary ops around opaque attention, which name a layer instead of taking its tensors.

``kvcanary::verify_at(output!, key, value, state!, layer)``
    checks the bytes of the slots that the forward reads, in every half of the layer.
``kvcanary::record_at(output!, key, value, state!, layer)``
    fingerprints the slots that the forward was planned to write, and compares them with ``key`` and ``value``.

On a GPU both leave their work to a :class:`~.side_stream.SideStream`, if the context has one.  ``verify_at`` then takes
the digests of ``key`` and ``value`` in the model's own stream, and ``record_at`` compares with these.

``output`` is neither read nor written.  Both ops claim to mutate it, because attention does: that is what keeps the
three in order.  A layer's name is a string, or an object of an opaque type that the graph takes as an input; each
opaque type gets ops of its own, because a schema names the type.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import torch

from ..context import ForwardContext, get_forward_context
from ..errors import UnknownLayerError
from .buffers import Check, Site
from .counting import count_op
from .ops import NAMESPACE, kernels_for
from .slot_space import RequestPlan

#: From an opaque layer object to the layer's name, by the attention op it belongs to.
NAME_OF: dict[str, Callable[[Any], str]] = {}

#: Number of the write in the stamps of slots written twice; the writes that a graph shows count from 0.
_WRITE = 65535


@dataclasses.dataclass(frozen=True)
class LayerHalf:
    """One tensor of a layer, as the ops find it by the layer's name.

    Attributes:
        place: 0 for K, 1 for V, and so on.
        number: of the tensor among all of its pool.
        reader: another layer writes the tensor, this one only reads it.
    """

    site: Site
    view: torch.Tensor
    place: int
    number: int
    reader: bool = False


def verify_layer(key: torch.Tensor | None, value: torch.Tensor | None, device: torch.device, layer: str) -> None:
    """The body of ``verify_at``, for engines whose ops around attention are of their own.

    Raises:
        MissingContextError: no forward is running.
        UnknownLayerError: no pool has the layer.
    """
    context = get_forward_context()
    halves, side = _halves(context, layer), context.sides.get(device)
    if side is not None:
        _digest_operands(context, halves, (key, value))
    with side.fork() if side is not None else contextlib.nullcontext():
        for half in halves:
            kernels_for(device).verify(half.site, half.view, None)
        count_op(context.gates[device])


def _digest_operands(
    context: ForwardContext, halves: tuple[LayerHalf, ...], operands: tuple[torch.Tensor | None, torch.Tensor | None]
) -> None:
    """Keep digests of what the layer is given to write, for a record that comes when its memory is used again."""
    given = []
    for half in halves:
        plan = _plan_of(context, half)
        rows = _rows(half, operands, plan) if plan is not None else None
        if plan is not None and plan.real_slots is not None and rows is not None and not half.reader:
            given.append((half, rows, plan))
    if given:
        sites, values = [half.site for half, _, _ in given], [rows for _, rows, _ in given]
        outs, slots = [_digests(half, plan) for half, _, plan in given], given[0][2].real_slots
        kernels_for(values[0].device).digest_operands(sites, values, slots, outs)


def record_layer(key: torch.Tensor | None, value: torch.Tensor | None, device: torch.device, layer: str) -> None:
    """The body of ``record_at``, as :func:`verify_layer` is that of ``verify_at``.

    Raises:
        MissingContextError: no forward is running.
        UnknownLayerError: no pool has the layer.
    """
    context = get_forward_context()
    side = context.sides.get(device)
    with side.fork() if side is not None else contextlib.nullcontext():
        for half in _halves(context, layer):
            plan = _plan_of(context, half)
            if plan is None or plan.real_slots is None or half.reader:
                continue
            rows = _rows(half, (key, value), plan)
            taken = {} if side is None or rows is None else {"value_digests": _digests(half, plan)}
            values = rows if side is None else None
            kernels_for(device).record(half.site, half.view, plan.real_slots, values, _WRITE, **taken)
        count_op(context.gates[device])


def _plan_of(context: ForwardContext, half: LayerHalf) -> RequestPlan | None:
    space = half.site.space
    return context.requests.get(space.space_id) if space is not None else None


def _digests(half: LayerHalf, plan: RequestPlan) -> torch.Tensor:
    """Where the digests of a half's operand stand between the two ops of a layer: int32 ``[n, planes]``."""
    planes = half.site.half.digest.shape[0]
    assert plan.operand_digests is not None  # sessions that have a side stream give every plan this memory
    return plan.operand_digests[:, half.number * planes : (half.number + 1) * planes]


def _halves(context: ForwardContext, layer: str) -> tuple[LayerHalf, ...]:
    """The tensors of a layer; none where no engine has declared pools."""
    if not context.layers:
        return ()
    if layer not in context.layers:
        raise UnknownLayerError(layer, list(context.layers))
    return context.layers[layer]


def _rows(
    half: LayerHalf, operands: tuple[torch.Tensor | None, torch.Tensor | None], plan: RequestPlan
) -> torch.Tensor | None:
    """The operand as the slots' rows, if it has one per planned token and is of the pool's type."""
    layout, n = half.site.layout, plan.slots.shape[0]
    operand = operands[half.place] if half.place < len(operands) else None
    if plan.taken is not None:  # what a slot of several tokens holds is no token's K or V
        return None
    if operand is None or not half.site.checks & Check.OPERAND or operand.dtype != layout.dtype:
        return None
    operand = operand[:n]  # a batch is padded at its end
    if operand.numel() * layout.dtype.itemsize != n * layout.row_bytes:
        return None
    return operand.reshape(n, *layout.row_shape)


@functools.cache
def ops_for(attention: str, kind: str) -> tuple[Any, Any]:
    """``(verify_at, record_at)`` for an attention op whose layer argument has the schema type ``kind``."""
    if kind == "str":
        return torch.ops.kvcanary.verify_at.default, torch.ops.kvcanary.record_at.default
    suffix = "_" + re.sub(r"\W+", "_", f"{attention}_{kind}")
    _define(suffix, kind, lambda layer: NAME_OF[attention](layer))
    ops = torch.ops.kvcanary
    return getattr(ops, f"verify_at{suffix}").default, getattr(ops, f"record_at{suffix}").default


def _define(suffix: str, kind: str, name_of: Callable[[Any], str]) -> None:
    """Register the two ops for one type of layer name."""

    schema = f"(Tensor(a!) output, Tensor? key, Tensor? value, Tensor(b!) state, {kind} layer) -> ()"
    for name, check in (("verify_at", verify_layer), ("record_at", record_layer)):

        def body(
            output: torch.Tensor,
            key: torch.Tensor | None,
            value: torch.Tensor | None,
            state: torch.Tensor,
            layer: Any,
            check: Callable[..., None] = check,
        ) -> None:
            check(key, value, state.device, name_of(layer))

        _LIBRARY.define(f"{name}{suffix}{schema}", tags=(torch.Tag.flexible_layout,))
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(f"{name}{suffix}", body, device)
        torch.library.register_fake(f"{NAMESPACE}::{name}{suffix}", lambda *_: None, lib=_LIBRARY)


_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_define("", "str", str)

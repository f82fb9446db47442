"""The canary ops around opaque attention, which name a layer instead of taking its tensors.

``kvcanary::verify_at(output!, state!, layer)``
    checks the bytes of the slots that the forward reads, in every half of the layer.
``kvcanary::record_at(output!, key, value, state!, layer)``
    fingerprints the slots that the forward was planned to write, and compares them with ``key`` and ``value``.

``kvcanary::join_at(output!, held, inputs, state!)``
    lets attention wait for both, which on a GPU leave their work to a :class:`~.side_stream.SideStream`, if the context
    has one.  ``held`` is what they read, and may go then.  ``inputs`` is what attention takes.

``output`` is neither read nor written.  The ops claim to mutate it, because attention does: that is what keeps them in
order.  A layer's name is a string, or an object of an opaque type that the graph takes as an input; each
opaque type gets ops of its own, because a schema names the type.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import torch

from ..errors import UnknownLayerError
from .checks import Check
from .context import ForwardContext, LayerHalf, get_forward_context
from .counting import count_op
from .ops import NAMESPACE, join_side, kernels_for
from .side_stream import SideStream
from .slots.space import RequestPlan
from .turns import taking_turns

#: From an opaque layer object to the layer's name, by the attention op it belongs to.
NAME_OF: dict[str, Callable[[Any], str]] = {}

#: Number of the write in the stamps of slots written twice; the writes that a graph shows count from 0.
_WRITE = 65535


def verify_layer(device: torch.device, layer: str) -> None:
    """The body of ``verify_at``, for engines whose ops around attention are of their own.

    Raises:
        MissingContextError: no forward is running.
        UnknownLayerError: no pool has the layer.
    """
    context = get_forward_context()
    due = _verified(_halves(context, layer))
    if due:
        with _beside(context.sides.get(device)):
            plan = context.requests.get(due[0].site.space.space_id) if due[0].site.space is not None else None
            in_flight = plan is not None and plan.in_flight
            kernels_for(device).verify_halves([h.site for h in due], [h.view for h in due], 1, in_flight)


def _verified(halves: tuple[LayerHalf, ...]) -> list[LayerHalf]:
    """The halves whose bytes ``verify_at`` compares.  If there are none it launches nothing, and ``record_at`` counts
    for both: on an H200, kernels that only counted were 209 us of a decode step of 4.9 ms, beside it."""
    return [half for half in halves if half.site.checks & Check.CONTENT and half.site.layout.slots]


def record_layer(key: torch.Tensor | None, value: torch.Tensor | None, device: torch.device, layer: str) -> None:
    """The body of ``record_at``, as :func:`verify_layer` is that of ``verify_at``.

    Raises:
        MissingContextError: no forward is running.
        UnknownLayerError: no pool has the layer.
    """
    context = get_forward_context()
    halves = _halves(context, layer)
    ops = 1 if _verified(halves) else 2
    written, plan = _written(context, halves)
    with _beside(context.sides.get(device)):
        if plan is None or plan.real_slots is None:
            count_op(context.gates[device], ops)
            return
        values = [_rows(half, (key, value), plan) for half in written]
        sites, views = [half.site for half in written], [half.view for half in written]
        kernels_for(device).record_halves(sites, views, plan.real_slots, values, _WRITE, ops)


def _beside(side: SideStream | None) -> contextlib.AbstractContextManager[None]:
    return side.fork() if side is not None else contextlib.nullcontext()


def _written(context: ForwardContext, halves: tuple[LayerHalf, ...]) -> tuple[list[LayerHalf], RequestPlan | None]:
    """The halves of a layer that the forward writes, and its plan of their pool; no plan if no engine told one."""
    written = [half for half in halves if not half.reader]
    space = written[0].site.space if written else None  # the halves of a layer are of one pool
    return written, context.requests.get(space.space_id) if space is not None else None


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

    def verify_at(output: torch.Tensor, state: torch.Tensor, layer: Any) -> None:
        verify_layer(state.device, name_of(layer))

    def record_at(
        output: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, state: torch.Tensor, layer: Any
    ) -> None:
        record_layer(key, value, state.device, name_of(layer))

    given = {"verify_at": "", "record_at": "Tensor? key, Tensor? value, "}
    for body in (verify_at, record_at):
        schema = f"(Tensor(a!) output, {given[body.__name__]}Tensor(b!) state, {kind} layer) -> ()"
        _register(f"{body.__name__}{suffix}", schema, body)


def _join_at(output: torch.Tensor, held: list[torch.Tensor], inputs: list[torch.Tensor], state: torch.Tensor) -> None:
    join_side(state.device)


def _register(name: str, schema: str, body: Callable[..., None]) -> None:
    _LIBRARY.define(name + schema, tags=(torch.Tag.flexible_layout,))
    _LIBRARY.impl(name, taking_turns(body), "CPU")
    _LIBRARY.impl(name, body, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *_: None, lib=_LIBRARY)


_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_define("", "str", str)
_register("join_at", "(Tensor(a!) output, Tensor[] held, Tensor[] inputs, Tensor(b!) state) -> ()", _join_at)

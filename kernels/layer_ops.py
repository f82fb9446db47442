"""The canary ops around opaque attention, which name a layer instead of taking its tensors.

``kvcanary::verify_at(output!, state!, layer)``
    checks the bytes of the slots that the forward reads, in every half of the layer.
``kvcanary::record_at(output!, key, value, state!, layer)``
    fingerprints the slots that the forward planned to write, and compares them with ``key`` and ``value``.

``kvcanary::join_at(output!, held, inputs, state!)``
    makes attention wait for both, which on a GPU run on a :class:`~.side_stream.SideStream`, if the context has one.
    ``held`` is what they read; it may be freed afterwards.  ``inputs`` are attention's arguments.

``kvcanary::verify_layers_at(output!, state!, layers)``
``kvcanary::record_layers_at(output!, keys, values, state!, layers)``
    in the place of both, the checks of all layers of a graph: ``output`` is the first layer's, and the last one's.

``output`` is neither read nor written.  The ops are declared to mutate it, as attention does: that keeps them in order.
A layer's name is a string, or an object of an opaque type that the graph takes as an input; each
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
from .content.layer import LayerRecord
from .context import ForwardContext, get_forward_context
from .counting import count_op
from .host_time import timed
from .ops import NAMESPACE, join_side
from .turns import taking_turns

#: From an opaque layer object to the layer's name, by the attention op it belongs to.
NAME_OF: dict[str, Callable[[Any], str]] = {}


def verify_layer(device: torch.device, layer: str) -> None:
    """The body of ``verify_at``, for engines with their own ops around attention.

    Raises:
        MissingContextError: no forward is running.
        UnknownLayerError: no pool has the layer.
    """
    verify_in(get_forward_context(), device, layer)


def record_layer(key: torch.Tensor | None, value: torch.Tensor | None, device: torch.device, layer: str) -> None:
    """The body of ``record_at``, as :func:`verify_layer` is that of ``verify_at``.

    Raises:
        MissingContextError: no forward is running.
        UnknownLayerError: no pool has the layer.
    """
    record_in(get_forward_context(), key, value, device, layer)


def verify_in(context: ForwardContext, device: torch.device, layer: str) -> None:
    """:func:`verify_layer` for a caller that has the context."""
    record, side = _record_of(context, layer), context.sides.get(device)
    if side is not None and not context.joins:
        side.release()
    if record is None or context.compared or not record.verifies:
        return
    plan = context.requests.get(record.space.space_id)
    if side is not None:
        side.start()
    record.verify(plan is not None and plan.in_flight, side.stream if side is not None else None)


def record_in(
    context: ForwardContext,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    device: torch.device,
    layer: str,
) -> None:
    """:func:`record_layer` for a caller that has the context."""
    record = _record_of(context, layer)
    plan = context.requests.get(record.space.space_id) if record is not None and record.writes else None
    if record is None or plan is None or plan.real_slots is None:
        _count(context, record, device)
        return
    if context.held is not None:
        context.held.take(record, plan, key, value)
        return
    side = context.sides.get(device)
    if side is not None:
        side.start()
        if not context.joins:
            side.hold(key, value)
    record.record(plan, key, value, side.stream if side is not None else None)


def _verify_layers_at(output: torch.Tensor, state: torch.Tensor, layers: list[str]) -> None:
    context = get_forward_context()
    if context.together is not None:  # else no engine has declared pools
        context.together.verify(context.requests, context.sides.get(state.device))


def _record_layers_at(
    output: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], state: torch.Tensor, layers: list[str]
) -> None:
    context = get_forward_context()
    if context.together is None:
        count_op(context.gates[state.device], 2 * len(layers))
    else:
        context.together.record(context.requests, keys, values, context.sides.get(state.device))


def _count(context: ForwardContext, record: LayerRecord | None, device: torch.device) -> None:
    """The forward has no plan: only count that the ops ran."""
    side = context.sides.get(device)
    with side.fork() if side is not None else contextlib.nullcontext():
        count_op(context.gates[device], record.ops if record is not None else 2)


def _record_of(context: ForwardContext, layer: str) -> LayerRecord | None:
    """What the checks of a layer need; None where no engine has declared pools."""
    record = context.layers.get(layer)
    if record is None and context.layers:
        raise UnknownLayerError(layer, list(context.layers))
    return record


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
    _LIBRARY.impl(name, timed(body), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *_: None, lib=_LIBRARY)


_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_define("", "str", str)
_register("join_at", "(Tensor(a!) output, Tensor[] held, Tensor[] inputs, Tensor(b!) state) -> ()", _join_at)
_register("verify_layers_at", "(Tensor(a!) output, Tensor(b!) state, str[] layers) -> ()", _verify_layers_at)
_register(
    "record_layers_at",
    "(Tensor(a!) output, Tensor[] keys, Tensor[] values, Tensor(b!) state, str[] layers) -> ()",
    _record_layers_at,
)

"""Opaque attention: one op that writes KV and reads it, and finds the tensors by the name of its layer.

All that the graph shows is ``attention(q, k, v, output!, layer_name)``, as in vLLM and SGLang.  The op visibly mutates
only its output, so our ops thread the output: ``verify_at(output!, state!, layer)`` before it
and ``record_at(output!, k, v, state!, layer)`` after it.  Reading q instead left them out of order in 11 of 12 tries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..kernels import layer_ops
from .dynamo_contract import fake_values, opaque_type_name
from .graph_plan import AttentionPlan, GraphPlan
from .state_inputs import is_canary, state_input
from .write_ops import named_arguments, op_name


@dataclasses.dataclass(frozen=True)
class AttentionOp:
    """How to read one op: the names of its arguments."""

    output: str
    layer: str
    key: str | None
    value: str | None


_REGISTERED: dict[str, AttentionOp] = {}


def register_attention_op(
    op: str,
    *,
    output: str = "output",
    layer: str = "layer_name",
    key: str | None = "key",
    value: str | None = "value",
    name_of: Callable[[Any], str] = str,
) -> None:
    """Tell the pass about an op that writes and reads the KV cache of a layer that it looks up by name.

    Args:
        op: qualified name, ``"vllm::unified_attention_with_output"``.
        output: the argument that the op mutates.
        layer: the argument with the layer's name: a string, or an opaque object that is an input of the graph.
        key, value: the arguments with what is written, ``[tokens, ...]`` in the order of the step's tokens; None
            where the op has none, and then the operand check is off.
        name_of: from an opaque layer object to the layer's name, one of ``KVPool.layer_names``.
    """
    _REGISTERED[op] = AttentionOp(output, layer, key, value)
    layer_ops.NAME_OF[op] = name_of


def guard_attention_ops(gm: fx.GraphModule, example_inputs: Sequence[Any], plan: GraphPlan) -> fx.GraphModule:
    """Put a check before and a fingerprint after every opaque attention op, in place."""
    found = [n for n in gm.graph.nodes if op_name(n) in _REGISTERED]
    if not found or any(is_canary(n) and "_at" in n.target._schema.name for n in gm.graph.nodes):
        return gm
    places = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    for node in found:
        _guard(gm, node, plan, lambda layer: example_inputs[places[layer]])
    plan.ops = sum(is_canary(n) for n in gm.graph.nodes)
    gm.graph.lint()
    gm.recompile()
    return gm


def _guard(gm: fx.GraphModule, node: fx.Node, plan: GraphPlan, example_of: Callable[[fx.Node], Any]) -> None:
    name, given = op_name(node), named_arguments(node)
    known = _REGISTERED[name]
    output: Any = given[known.output]
    layer: Any = given[known.layer]
    kind = "str" if isinstance(layer, str) else opaque_type_name(example_of(layer))
    state = state_input(gm, plan, _device_of(output))
    verify, record = layer_ops.ops_for(name, kind)
    key = given.get(known.key) if known.key else None
    value = given.get(known.value) if known.value else None
    with gm.graph.inserting_before(node):
        gm.graph.call_function(verify, (output, state, layer))
    with gm.graph.inserting_after(node):
        gm.graph.call_function(record, (output, key, value, state, layer))
    plan.attention.append(AttentionPlan(name, layer if isinstance(layer, str) else None, key is not None))


def _device_of(output: Any) -> torch.device:
    (value,) = fake_values([output])
    device: torch.device = value.device
    return device

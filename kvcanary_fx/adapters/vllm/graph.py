"""Inserts our ops into the graphs that vLLM compiles.

::

    dep = vllm.unified_kv_cache_update(key, value, layer)
    kvcanary_vllm.verify(output, layer)                                              # new
    vllm.unified_attention_with_output(query, key, value, output, layer, ..., dep)
    kvcanary_vllm.record(output, key, value, layer)                                  # new

Where vLLM splits its graphs at attention, as by default on a GPU, one op has all three in it, and both ops there are
called without the dispatcher (:mod:`.direct`)::

    dep = kvcanary_vllm.unified_kv_cache_update(key, value, layer)
    kvcanary_vllm.unified_attention_with_output(query, key, value, output, layer, ..., dep)

There no pass of vLLM looks for attention ops; where it does not split, its fusions do.

This happens when Dynamo hands over the whole graph, before vLLM splits it at attention: every compilation mode gets its
backend from one place, and a later pass sees no attention op in the default, piecewise mode.  Our ops join the
splitting ops, so that they take the piece of their attention op and the pieces between stay as alike as they were:
vLLM compiles equal pieces once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from vllm.config import CompilationConfig, VllmConfig

from ...passes.dynamo_contract import clone_graph_module
from ...passes.write_ops import named_arguments, op_name
from . import ops
from .patching import wrap

log = logging.getLogger("kvcanary")


def hook() -> None:
    """Guard the graphs of every model that vLLM compiles from now on."""

    def init_backend(
        original: Callable[..., Any], config: CompilationConfig, vllm_config: VllmConfig, *args: Any, **kwargs: Any
    ) -> Any:
        inner = original(config, vllm_config, *args, **kwargs)
        if inner == "inductor":
            return GuardedInductor(config)
        return guarded(torch._dynamo.lookup_backend(inner) if isinstance(inner, str) else inner, config)

    wrap(CompilationConfig, "init_backend", init_backend)


def guarded(inner: Callable[..., Any], config: CompilationConfig) -> Callable[..., Any]:
    """A backend that inserts our ops into a graph and passes it on."""

    def compile_guarded(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        return inner(insert_guards(gm, config), example_inputs, **kwargs)

    return compile_guarded


class GuardedInductor(torch._TorchCompileInductorWrapper):
    """The object that torch.compile makes from the backend's name "inductor", guarded.

    It is a subclass, because ahead-of-time compilation checks the type, and it takes the options that vLLM passes
    only with the name.
    """

    def __init__(self, config: CompilationConfig):
        super().__init__("default", dict(config.inductor_compile_config), False)
        self._compilation_config = config

    def __call__(self, model_: fx.GraphModule, inputs_: Sequence[Any], **kwargs: Any) -> Any:
        return super().__call__(insert_guards(model_, self._compilation_config), inputs_, **kwargs)


def insert_guards(gm: fx.GraphModule, config: CompilationConfig) -> fx.GraphModule:
    """A copy of ``gm`` with our ops around every attention op; ``gm`` itself if it has none."""
    found = [n for n in gm.graph.nodes if op_name(n) in ops.ATTENTION]
    if not found or any(op_name(n) in ops.OPS for n in gm.graph.nodes):
        return gm
    split_at_ours(config)
    clone = clone_graph_module(gm)
    if ops.splits_at_attention(config):
        for node in clone.graph.nodes:
            _replace(node, config.splitting_ops or ())
    else:
        for node in [n for n in clone.graph.nodes if op_name(n) in ops.ATTENTION]:
            _guard(clone, node)
    clone.graph.lint()
    clone.recompile()
    log.info("kvcanary.vllm guarded %d attention ops of a compiled graph", len(found))
    return clone


def split_at_ours(config: CompilationConfig) -> None:
    """Keep our ops in the pieces of the attention ops if graphs are split at those."""
    splits = config.splitting_ops
    if splits and any(op in splits for op in ops.ATTENTION):
        splits.extend(op for op in ops.OPS if op not in splits)


def _replace(node: fx.Node, splits: Sequence[str]) -> None:
    """Let the op that has the checks in it run in the place of attention, and ours in that of the write before it."""
    name = op_name(node)
    ours = ops.WITH_CHECKS.get(name) or (ops.UPDATES.get(name) if name in splits else None)
    if ours is not None:
        op = getattr(getattr(torch.ops, ops.NAMESPACE), ours.split("::")[1])
        node.target = op.default if isinstance(node.target, torch._ops.OpOverload) else op


def _guard(gm: fx.GraphModule, node: fx.Node) -> None:
    """Put the ops of the checks around attention."""
    key, value = ops.ATTENTION[op_name(node)]
    given = named_arguments(node)
    output, layer = given["output"], given["layer_name"]
    ours = getattr(torch.ops, ops.NAMESPACE)
    with gm.graph.inserting_before(node):
        _call(gm, ours.verify.default, (output, layer), node)
    with gm.graph.inserting_after(node):
        _call(gm, ours.record.default, (output, given[key], given[value], layer), node)


def _call(gm: fx.GraphModule, op: Any, arguments: tuple[Any, ...], like: fx.Node) -> None:
    node = gm.graph.call_function(op, arguments)
    node.meta = {k: v for k, v in like.meta.items() if k in ("stack_trace", "nn_module_stack", "source_fn_stack")}
    node.meta["example_value"] = None

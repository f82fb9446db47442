"""Our ops around vLLM's attention, and the same checks for calls outside a graph.

``kvcanary_vllm::verify(output!, layer_name)``
    before attention: marks its layer as guarded.  The bytes that the forward reads were compared before the model,
    in all layers at once.
``kvcanary_vllm::record(output!, key, value, layer_name)``
    after it: takes fingerprints of the written slots, and compares them with ``key`` and ``value``.

Both claim to mutate ``output``, as attention does: that keeps the three in order and alive.  Unlike the ops of other
backends they take no state: vLLM's graphs are called with the inputs that Dynamo found, also from a warm cache.

``kvcanary_vllm::unified_attention_with_output(...)``, and the like for each attention op of vLLM
    attention with both around it, in its place where vLLM splits its graphs there: a step that runs layer by layer
    from Python calls one op, as without the canary.

``kvcanary_vllm::unified_kv_cache_update(...)``, and the like for MLA
    vLLM's write of K and V, in its place before such an op: both are called directly, see :mod:`.direct`.

A model may have attention of its own, which writes K and V without any of these ops: its layers are recorded from the
cache when the model has run, and not compared with what was to be written.

If attention runs outside such a graph (eager mode, a model that is not compiled, a step that skips the
compiled graph), the implementation of vLLM's own op makes the two calls.  Both find what they need in the context that
:class:`~kvcanary_fx.engine.layers.LayerChecks` publishes, and do nothing without one: in a warm-up, or an
unguarded draft.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from vllm import forward_context
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig
from vllm.model_executor.layers.attention import attention, mla_attention
from vllm.platforms import current_platform
from vllm.utils import torch_utils
from vllm.utils.torch_utils import LayerNameType

from ...kernels.context import ForwardContext, current_context
from ...kernels.deferred import Deferred
from ...kernels.layer_ops import record_in, verify_in
from ...kernels.ops import join_side
from .breakable import break_capture, next_piece_overwrites
from .direct import call_directly, told_before

NAMESPACE = "kvcanary_vllm"
CHECKS = (f"{NAMESPACE}::verify", f"{NAMESPACE}::record")

#: vLLM's attention ops, each with the names of its written arguments: key and value, or the latent and the rotary part.
ATTENTION = {
    "vllm::unified_attention_with_output": ("key", "value"),
    "vllm::unified_mla_attention_with_output": ("kv_c_normed", "k_pe"),
}

#: For each of them, the op that has its checks within.
WITH_CHECKS = {op: op.replace("vllm::", f"{NAMESPACE}::") for op in ATTENTION}

#: The module of each of vLLM's ops that write K and V before attention, with its implementation.
_UPDATES_OF = {
    "vllm::unified_kv_cache_update": attention,
    "vllm::unified_mla_kv_cache_update": mla_attention,
}

#: For each of those, ours, which does the same.
UPDATES = {op: op.replace("vllm::", f"{NAMESPACE}::") for op in _UPDATES_OF}

OPS = (*CHECKS, *WITH_CHECKS.values(), *UPDATES.values())


@dataclasses.dataclass
class Guarded:
    """The layers of one forward that were guarded, by ops of a graph or outside one.

    Attributes:
        rows: int64 ``[n]``, the rows of keys and values of the planned tokens; None: the first ones, in order.
        defers: what layers wrote need not be taken in before the model has run, if it is held until then.
        deferred: where they note it, from the first of them on.
        own: layers whose attention may be none of vLLM's ops.
    """

    rows: torch.Tensor | None = None
    in_graph: set[str] = dataclasses.field(default_factory=set)
    outside: set[str] = dataclasses.field(default_factory=set)
    defers: bool = False
    deferred: Deferred | None = None
    own: Sequence[str] = ()


_GUARDED: contextvars.ContextVar[Guarded | None] = contextvars.ContextVar("kvcanary_vllm_guarded", default=None)


@contextlib.contextmanager
def one_forward(rows: torch.Tensor | None = None, defers: bool = False, own: Sequence[str] = ()) -> Iterator[Guarded]:
    """Around the model: no layer has been guarded yet.

    Args:
        rows, defers, own: as of :class:`Guarded`; with ``defers``, its layers are all known once what is held was
            recorded.
    """
    guarded, token = begin_forward(rows, defers, own)
    try:
        yield guarded
        record_own(guarded)
    finally:
        end_forward(token)


def begin_forward(
    rows: torch.Tensor | None = None, defers: bool = False, own: Sequence[str] = ()
) -> tuple[Guarded, contextvars.Token[Guarded | None]]:
    """:func:`one_forward` where a generator is too slow; the second is for :func:`end_forward`.  In between, when the
    model has run, :func:`record_own` is due."""
    guarded = Guarded(rows, defers=defers, own=own)
    return guarded, _GUARDED.set(guarded)


def record_own(guarded: Guarded) -> None:
    """The model has run: record the layers whose attention was none of vLLM's ops, from the cache."""
    context = current_context() if guarded.own else None
    if context is None:
        return
    if guarded.deferred is not None:
        guarded.deferred.take_in()
    for layer in guarded.own:
        if layer in context.layers and layer not in guarded.in_graph and layer not in guarded.outside:
            record_in(context, None, None, context.layers[layer].gate.device, layer)
            guarded.outside.add(layer)


def end_forward(token: contextvars.Token[Guarded | None]) -> None:
    """The model has run, or raised."""
    _GUARDED.reset(token)


def telling_writes(tell: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Around a model: ``tell`` is called before each of its layers writes K and V, where a graph of ours does."""
    ours = getattr(torch.ops, NAMESPACE)
    return told_before([getattr(ours, op.split("::")[1]) for op in UPDATES.values()], tell)


def runs_from_python(config: VllmConfig) -> bool:
    """Whether the layers of the running forward run from Python, no piece of it is a CUDA graph, and nothing overwrites
    what attention was given."""
    if not forward_context.is_forward_context_available():
        return False
    mode = forward_context.get_forward_context().cudagraph_runtime_mode
    return mode == CUDAGraphMode.NONE and layers_are_apart(config)


def layers_are_apart(config: VllmConfig) -> bool:
    """Whether attention runs between what is compiled, and not inside it, where Inductor overwrites its operands."""
    compiled = config.compilation_config
    return compiled.mode == CompilationMode.NONE or splits_at_attention(compiled)


def splits_at_attention(config: CompilationConfig) -> bool:
    """Whether vLLM splits the graphs that it compiles at attention, which then runs as it is, in a piece of its own."""
    split = any(op in (config.splitting_ops or ()) for op in ATTENTION)
    return config.mode == CompilationMode.VLLM_COMPILE and split and not config.use_inductor_graph_partition


def verify(output: torch.Tensor, layer_name: LayerNameType) -> None:
    """The op before attention."""
    context, layer = current_context(), name_of(layer_name)
    if context is None or layer not in context.layers:
        return
    known = _GUARDED.get()
    if known is not None:
        known.in_graph.add(layer)
    _verify(context, output, layer)


def _verify(context: ForwardContext, output: torch.Tensor, layer: str) -> None:
    if context.sides or not context.compared:
        verify_in(context, output.device, layer)


def record(
    output: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, layer_name: LayerNameType
) -> None:
    """The op after attention."""
    context, layer = current_context(), name_of(layer_name)
    if context is not None and layer in context.layers:  # other groups of a model may not be guarded
        known = _GUARDED.get()
        if known is not None and known.rows is not None:
            key, value = (None if t is None else t[known.rows] for t in (key, value))
        record_in(context, key, value, output.device, layer)


def name_of(layer_name: LayerNameType) -> str:
    """As vLLM's own function says it, whose ``isinstance`` of an opaque type took half of such an op."""
    return layer_name if type(layer_name) is str else layer_name.value


def _nothing(*_: Any) -> None:
    """The ops' fake implementation."""


def register() -> None:
    """Define the ops, and let vLLM's own ops make the same calls outside our graphs.

    A cached artifact needs the ops when it is loaded, so this runs when the plugin is loaded.
    """
    if hasattr(getattr(torch.ops, NAMESPACE), "verify"):
        return
    for name, body in (("verify", verify), ("record", record)):
        torch_utils.direct_register_custom_op(
            name,
            body,
            mutates_args=["output"],
            fake_impl=_nothing,
            target_lib=_LIBRARY,
            tags=(torch.Tag.flexible_layout,),
        )
    for op, module in _UPDATES_OF.items():
        name = op.split("::")[1]
        body, fake = getattr(module, name), getattr(module, f"{name}_fake")
        torch_utils.direct_register_custom_op(name, body, fake_impl=fake, target_lib=_LIBRARY)
        call_directly(NAMESPACE, name, body)
    for name, original in _ATTENTION_BODIES.items():
        checked = _guarded(original, in_graph=True)
        torch_utils.direct_register_custom_op(
            name,
            checked,
            mutates_args=_written(getattr(torch.ops.vllm, name).default),
            fake_impl=_nothing,
            target_lib=_LIBRARY,
        )
        call_directly(NAMESPACE, name, checked)
        outside = break_capture(_guarded(original, in_graph=False))
        _OVERRIDES.impl(name, outside, current_platform.dispatch_key, allow_override=True)


def _written(op: torch._ops.OpOverload) -> list[str]:
    """The arguments that an op writes to."""
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _guarded(original: Callable[..., None], in_graph: bool) -> Callable[..., None]:
    """The implementation of one of vLLM's attention ops, with the checks that no other op makes.

    Args:
        in_graph: of the op that a graph of ours calls in its place.
    """

    @functools.wraps(original)  # the schema is that of its signature
    def guarded(
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output: torch.Tensor,
        layer_name: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        known = _GUARDED.get()
        if in_graph and known is not None and known.deferred is not None:
            original(query, key, value, output, layer_name, *args, **kwargs)
            deferred = known.deferred
            deferred.written.append((layer_name, key, value))
            if len(deferred.written) == deferred.room:
                deferred.take_in()
            return
        context, layer = current_context(), name_of(layer_name)
        if context is None or layer not in context.layers or _is_checked_elsewhere(known, layer, in_graph):
            original(query, key, value, output, layer_name, *args, **kwargs)
            return
        _verify(context, output, layer)
        original(query, key, value, output, layer_name, *args, **kwargs)
        if in_graph and known is not None and known.defers and _may_be_deferred(context):
            known.deferred = Deferred(context, name_of, known.in_graph, first=(layer_name, key, value))
            return
        record(output, key, value, layer)
        if not in_graph and next_piece_overwrites():
            join_side(output.device)
        if known is not None:  # not before: guarded is what was recorded
            (known.in_graph if in_graph else known.outside).add(layer)

    return guarded


def _may_be_deferred(context: ForwardContext) -> bool:
    """Whether the ops of the other layers need nothing but to be noted."""
    return context.held is not None and context.compared and not context.sides


def _is_checked_elsewhere(known: Guarded | None, layer: str, in_graph: bool) -> bool:
    """Whether ops of a graph around this one make the checks, or nobody asks for them."""
    return not in_graph and (known is None or layer in known.in_graph)


_ATTENTION_BODIES = {
    "unified_attention_with_output": attention.unified_attention_with_output,
    "unified_mla_attention_with_output": mla_attention.unified_mla_attention_with_output,
}
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_OVERRIDES = torch.library.Library("vllm", "IMPL")

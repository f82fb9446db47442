"""From vLLM's KV cache groups to pools: one for each group of layers that share block ids."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from ...pool_layout import KVPool
from . import layouts

log = logging.getLogger("kvcanary")


@dataclasses.dataclass(frozen=True)
class Group:
    """A KV cache group under guard.

    Attributes:
        number: of the group, in vLLM's order.
        page_size: tokens of a block of the block manager.
        kernel_page_size: tokens of a block of the attention kernel, which may be a part of the manager's.
        window: tokens that its attention sees; None for all.
        layers: K and V (latent and rotary part) of each layer, ``[pages, page_size, ...]``, by the layer's name.
        mla: halves are the latent and the rotary part.
    """

    number: int
    page_size: int
    kernel_page_size: int
    window: int | None
    layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    mla: bool

    @property
    def name(self) -> str:
        return f"group{self.number}"

    def pool(self, table: torch.Tensor, allocations: bool) -> KVPool:
        """The pool of this group, whose request table is ``table``."""
        return KVPool(
            list(self.layers.values()),
            table,
            name=self.name,
            layer_names=list(self.layers),
            half_names=("latent", "rope") if self.mla else ("K", "V"),
            paged=True,
            table_page_size=self.page_size,
            slots_from=f"slots_{self.number}",
            reserved=tuple(range(self.page_size)),  # block 0 is vLLM's null block
            window=self.window,
            allocations=allocations,
        )


def guarded_groups(runner: Any) -> list[Group]:
    """The groups of a model runner that can be guarded; the others are told, with the reason."""
    found = []
    drafts = draft_layers(runner)
    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        made, why = _group(runner, number, group, drafts)
        if made is None:
            log.warning("kvcanary.unguarded KV cache group %d (%s, ...): %s", number, group.layer_names[0], why)
        else:
            found.append(made)
    return found


def draft_layers(runner: Any) -> frozenset[str]:
    """The layers of a draft model, whose forwards are not bracketed: their KV is not guarded."""
    drafter = getattr(runner, "drafter", None)
    names: set[str] = set()
    for field in ("_draft_attn_layer_names", "attn_layer_names"):
        names.update(getattr(drafter, field, None) or ())
    return frozenset(names)


def _group(runner: Any, number: int, group: Any, drafts: frozenset[str]) -> tuple[Group | None, str]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    window = _window(spec)
    if isinstance(window, str):
        return None, window
    layers, mla = {}, False
    for name in group.layer_names:
        layer = runner.compilation_config.static_forward_context[name]
        if name in drafts or getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            continue
        halves = _halves(layer, runner._kernel_block_sizes[number])
        if isinstance(halves, str):
            return None, f"layer {name}: {halves}"
        layers[name], mla = halves, isinstance(layer, MLAAttention)
    if not layers:
        return None, "a draft model's layers are not guarded"
    return Group(number, spec.block_size, runner._kernel_block_sizes[number], window, layers, mla), ""


def _window(spec: Any) -> int | str | None:
    """Tokens that the group's blocks are kept for, None for all; or why it cannot be guarded, as text."""
    refused = (ChunkedLocalAttentionSpec, CrossAttentionSpec, EncoderOnlyAttentionSpec)
    if not isinstance(spec, AttentionSpec) or isinstance(spec, refused):
        return f"{type(spec).__name__} is not supported by this adapter"
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window)
    if isinstance(spec, FullAttentionSpec):
        return None
    return f"{type(spec).__name__} is not supported by this adapter"


def _halves(layer: Any, page_size: int) -> tuple[torch.Tensor, torch.Tensor] | str:
    """The two halves of a layer as views ``[pages, page_size, ...]``; why not, as text."""
    cache = layer.kv_cache
    if not isinstance(cache, torch.Tensor) or not cache.numel():
        return "it has no KV cache of its own"
    if isinstance(layer, MLAAttention):
        shapes: tuple[tuple[int, ...], tuple[int, ...]] = (layer.kv_lora_rank,), (layer.qk_rope_head_dim,)
        write = _mla_write(layer)
    elif isinstance(layer, Attention):
        shapes = (layer.num_kv_heads, layer.head_size), (layer.num_kv_heads, layer.head_size_v)
        write = _write(layer)
    else:
        return f"{type(layer).__name__} is not supported by this adapter"
    found = layouts.find(cache, page_size, shapes, write)
    if found is None:
        return (
            f"its backend {layer.attn_backend.get_name()} does not keep the {cache.dtype} bytes of a slot as one "
            "strided row (AMX tiles and quantised caches do not): use another dtype or attention backend"
        )
    return found[0].view(cache, page_size), found[1].view(cache, page_size)


def _write(layer: Any) -> layouts.Write:
    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, key, value, cache, slots)

    return write


def _mla_write(layer: Any) -> layouts.Write:
    def write(latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        layer.impl.do_kv_cache_update(latent, rope.unsqueeze(1), cache, slots, layer.kv_cache_dtype, layer._k_scale)

    return write

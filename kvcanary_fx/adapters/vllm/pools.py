"""Pools from vLLM's KV cache groups: one for each group of layers that share block ids."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol

import torch
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from ...engine.kv_pool import KVPool
from . import layouts

log = logging.getLogger("kvcanary")

#: The field of a batch with the batch of cross-attention.
ENCODER = "encoder"

#: Methods of speculative decoding whose drafts are guarded.
GUARDED_DRAFTS = ("draft_model", "eagle", "eagle3")


class Pooled(Protocol):
    """A guarded KV cache group, of attention or of something else."""

    @property
    def number(self) -> int: ...
    def pool(self, table: torch.Tensor, allocations: bool) -> KVPool: ...


@dataclasses.dataclass(frozen=True)
class Group:
    """A guarded KV cache group.

    Attributes:
        number: of the group, in vLLM's order.
        page_size: tokens of a block of the block manager.
        kernel_page_size: tokens of a block of the attention kernel, which may be smaller than the manager's.
        window: tokens that its attention sees, None for all.
        layers: K and V (latent and rotary part) of each layer, ``[pages, page_size, ...]``, by the layer's name.
        mla: halves are the latent and the rotary part.
        chunk: tokens of a chunk, where a token's attention sees its own chunk alone; None: there are no chunks.
        draft: the layers are a draft's, whose own session checks its forwards.
        drafted: those of the layers that are a draft's, in a session of the target and its draft.
        chunked: those whose attention sees chunks, for which vLLM makes tables of its own.  The group's blocks are kept
            (``chunk`` is None) where it has other layers, too.
        cross: its layers keep K and V of an encoder's output, written in a request's first forward alone.
        own: those whose class has attention of its own, which may be none of vLLM's ops.
    """

    number: int
    page_size: int
    kernel_page_size: int
    window: int | None
    layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    mla: bool
    chunk: int | None = None
    draft: bool = False
    drafted: frozenset[str] = frozenset()
    chunked: frozenset[str] = frozenset()
    cross: bool = False
    own: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return group_name(self.number, self.draft)

    @property
    def layer_with_table(self) -> str | None:
        """One whose attention kernel gets the runner's block table; None: there is none."""
        return next((name for name in self.layers if name not in self.chunked), None)

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
            chunk=self.chunk,
            written_once=self.cross,
            batch=ENCODER if self.cross else None,
            allocations=allocations,
        )


def group_name(number: int, draft: bool) -> str:
    """The name of a KV cache group's pool, in reports and metrics."""
    return f"{'draft' if draft else 'group'}{number}"


def note_unguarded(number: int, draft: bool, layer: str, why: str, unguarded: dict[str, str] | None) -> None:
    """Log that a KV cache group is not guarded, and keep the reason.

    Args:
        layer: one of its layers.
        unguarded: gets the reason, by the group's name.
    """
    log.warning("kvcanary.unguarded KV cache group %d (%s, ...): %s", number, layer, why)
    if unguarded is not None:
        unguarded[group_name(number, draft)] = why


def guarded_groups(
    runner: Any, unguarded: dict[str, str] | None = None, elsewhere: Set[str] = frozenset()
) -> list[Group]:
    """The groups of the target model that can be guarded by the first runner; the others are logged, with the reason.

    Args:
        unguarded: gets the reasons of the others, by name.
        elsewhere: layers that are not asked for.
    """
    drafts = draft_layers(runner)
    known = runner.compilation_config.static_forward_context
    return _groups(runner, frozenset(known) - drafts - elsewhere, False, unguarded, cross=True)


def groups_with_drafts(
    runner: Any, why: str | None, unguarded: dict[str, str], elsewhere: Set[str] = frozenset()
) -> list[Group]:
    """The groups of the target model that the second runner can guard, each with a draft's layers that are in it.

    Args:
        why: the draft's layers cannot be guarded, as text.
        unguarded: gets the reasons of what is not guarded, by name.
        elsewhere: layers that are not asked for.
    """
    drafts = draft_layers(runner)
    known = frozenset(runner.compilation_config.static_forward_context) - elsewhere
    if drafts and why is not None:
        log.warning("kvcanary.unguarded draft layers (%s, ...): %s", min(drafts), why)
        unguarded["draft"] = why
    guardable = () if why is not None else _groups(runner, drafts, True, unguarded)
    drafted = frozenset(name for group in guardable for name in group.layers)
    found = _groups(runner, (known - drafts) | drafted, False, unguarded)
    return [dataclasses.replace(group, drafted=drafted & frozenset(group.layers)) for group in found]


def draft_groups(runner: Any, unguarded: dict[str, str] | None = None) -> list[Group]:
    """The groups of a draft's layers that can be guarded; the others are logged, with the reason.

    Args:
        unguarded: gets the reasons of the others, by name.
    """
    drafts = draft_layers(runner)
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    why = _unguarded(drafter) if drafts else None
    if why is not None:
        log.warning("kvcanary.unguarded draft layers (%s, ...): %s", min(drafts), why)
        if unguarded is not None:
            unguarded["draft"] = why
        return []
    return _groups(runner, drafts, True, unguarded)


def draft_layers(runner: Any) -> frozenset[str]:
    """The layers of a draft, which are in KV cache groups of the target model or in their own."""
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)  # of the first, the second runner
    names: set[str] = set()
    for field in ("_draft_attn_layer_names", "attn_layer_names", "draft_attn_layer_names"):
        names.update(getattr(drafter, field, None) or ())
    return frozenset(names)


def _unguarded(drafter: Any) -> str | None:
    """Why the forwards of a proposer cannot be bracketed; None if they can.

    MTP, DFlash and parallel drafting lay out their tokens differently, or leave layers out.
    """
    from vllm.v1.spec_decode.draft_model import DraftModelProposer  # the second runner never imports them
    from vllm.v1.spec_decode.eagle import EagleProposer

    if type(drafter) not in (EagleProposer, DraftModelProposer) or drafter.method not in GUARDED_DRAFTS:
        return f"drafts of {getattr(drafter, 'method', type(drafter).__name__)} are not supported by this adapter"
    if drafter.parallel_drafting or drafter.constant_draft_positions:
        return "drafts that do not go on by one position a forward are not supported by this adapter"
    return None


def _groups(
    runner: Any, wanted: Set[str], draft: bool, unguarded: dict[str, str] | None, cross: bool = False
) -> list[Group]:
    """
    Args:
        cross: the runner's forwards have a batch of the encoder's, see :mod:`.encoder`.
    """
    found = []
    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        names = [name for name in group.layer_names if name in wanted]
        if not names:
            continue
        left: dict[str, str] = {}
        made, why = _group(runner, number, group.kv_cache_spec, names, cross, left)
        if made is None:
            note_unguarded(number, draft, names[0], why, unguarded)
            continue
        found.append(dataclasses.replace(made, draft=draft))
        if left:
            _note_left(found[-1], left, unguarded)
    return found


def _note_left(group: Group, left: Mapping[str, str], unguarded: dict[str, str] | None) -> None:
    """Log that some layers of a group are not guarded, and keep the reason.

    Args:
        left: why each is not, by name.
        unguarded: as of :func:`note_unguarded`.
    """
    layer, why = next(iter(left.items()))
    log.warning("kvcanary.unguarded %d layers of KV cache group %d (%s, ...): %s", len(left), group.number, layer, why)
    if unguarded is not None:
        unguarded[f"{group.name}, {len(left)} of its layers"] = why


def _group(
    runner: Any, number: int, spec: Any, names: Sequence[str], cross: bool, left: dict[str, str]
) -> tuple[Group | None, str]:
    """A group; or None, and why it cannot be guarded.

    Args:
        cross: as of :func:`_groups`.
        left: gets why some of its layers cannot be guarded, by name, where others can.
    """
    spec = spec_of_a_layer(spec)
    reach = _reach(spec, cross)
    if isinstance(reach, str):
        return None, reach
    window, chunk = reach
    layers, kernel_page, found = {}, kernel_page_sizes(runner)[number], layouts.Known()
    known = runner.compilation_config.static_forward_context
    for name in names:
        layer = known[name]
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            continue
        halves = _halves(layer, kernel_page, found)
        if isinstance(halves, str):
            left[name] = halves
        else:
            layers[name] = halves
    if not layers:
        why = next((f"layer {name}: {why}" for name, why in left.items()), "its layers have no KV cache of their own")
        return None, why
    own = frozenset(name for name in layers if _has_attention_of_its_own(known[name]))
    if own:
        log.info(
            "kvcanary.vllm %d layers of KV cache group %d (%s, ...) have attention of their own (%s): what they wrote "
            "is recorded from the cache, and not compared with K and V",
            *(len(own), number, min(own), type(known[min(own)]).__name__),
        )
    mla = any(_is_mla(known[name]) for name in layers)
    chunked = frozenset(name for name in layers if isinstance(known[name], ChunkedLocalAttention))
    encoded = isinstance(spec, CrossAttentionSpec)
    kinds: dict[str, Any] = dict(chunked=chunked, cross=encoded, own=own)
    return Group(number, spec.block_size, kernel_page, window, layers, mla, chunk, **kinds), ""


def _is_mla(layer: Any) -> bool:
    """Whether a layer stores a latent and a rotary part, as vLLM's own MLA layers do, and knows how to store them."""
    return isinstance(layer, MLAAttention) or all(
        hasattr(layer, name) for name in ("kv_lora_rank", "qk_rope_head_dim", "kv_cache_dtype", "_k_scale", "impl")
    )


def _has_attention_of_its_own(layer: Any) -> bool:
    """Whether a layer's class has a forward of its own, which may be none of vLLM's attention ops.

    Those beside :class:`Attention` come to its forward.
    """
    package = Attention.__module__.rpartition(".")[0]
    return not type(layer).forward.__module__.startswith(f"{package}.")


def own_layers(groups: Sequence[Group], drafted: bool = False) -> tuple[str, ...]:
    """The layers with attention of their own.

    Args:
        drafted: those of a draft in the target's groups, and not the target's.
    """
    return tuple(name for group in groups for name in group.own if (name in group.drafted) == drafted)


def kernel_page_sizes(runner: Any) -> list[int]:
    """Tokens of a block of the attention kernels, for each KV cache group."""
    sizes = getattr(runner, "kernel_block_sizes", None)  # of the second runner
    return list(runner._kernel_block_sizes if sizes is None else sizes)


def spec_of_a_layer(spec: Any) -> Any:
    """The spec of one of the layers of a group, which are alike where we look."""
    return next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def longest_encoded(runner: Any, spec: Any, otherwise: int) -> int:
    """Positions that a request has at most in a group of cross-attention: Whisper hears 1,500 and says 448 tokens.

    Args:
        otherwise: in groups of another kind.
    """
    if not isinstance(spec_of_a_layer(spec), CrossAttentionSpec):
        return otherwise
    return int(runner.vllm_config.scheduler_config.max_num_encoder_input_tokens)


def _reach(spec: Any, cross: bool) -> tuple[int | None, int | None] | str:
    """The window and the chunk of a group's attention, whose blocks are kept; or why it cannot be guarded, as text."""
    if not isinstance(spec, AttentionSpec) or isinstance(spec, EncoderOnlyAttentionSpec):
        return f"{type(spec).__name__} is not supported by this adapter"
    if getattr(spec, "tokens_per_state", 1) != 1:
        return f"{type(spec).__name__} with {spec.tokens_per_state} tokens to a slot is not supported by this adapter"
    if isinstance(spec, CrossAttentionSpec):
        return (None, None) if cross else "cross-attention is guarded with Model Runner V1 only"
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return None, int(spec.attention_chunk_size)
    # of their subclasses one has blocks of its own before the request's, one gives up blocks between its first and its
    # last tokens, and one computes tokens again that are stored: none is what it is derived from
    if type(spec) is SlidingWindowSpec:
        return int(spec.sliding_window), None
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return None, None
    return f"{type(spec).__name__} is not supported by this adapter"


#: Types of a KV cache that has a number for each element, and those with scales for each token and head.
_PLAIN = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")
_WITH_SCALES = "_per_token_head"


def _halves(layer: Any, page_size: int, known: layouts.Known) -> tuple[torch.Tensor, torch.Tensor] | str:
    """The two halves of a layer as views ``[pages, page_size, ...]``; or why it cannot be guarded, as text.

    Args:
        known: what other layers of its group have.
    """
    cache = layer.kv_cache
    if not isinstance(cache, torch.Tensor) or not cache.numel():
        return "it has no KV cache of its own"
    if _is_mla(layer):
        shapes: tuple[tuple[int, ...], tuple[int, ...]] = (layer.kv_lora_rank,), (layer.qk_rope_head_dim,)
        write = _mla_write(layer)
    elif isinstance(layer, Attention):
        shapes = (layer.num_kv_heads, layer.head_size), (layer.num_kv_heads, layer.head_size_v)
        write = _write(layer)
    else:
        return f"{type(layer).__name__} is not supported by this adapter"
    kind = str(layer.kv_cache_dtype)
    with_scales = kind.endswith(_WITH_SCALES)
    if not with_scales and kind not in _PLAIN:
        return f"a KV cache of {kind} is not supported by this adapter: use another --kv-cache-dtype"
    found = (layouts.find_with_scales if with_scales else known.find)(cache, page_size, shapes, write)
    if found is None:
        return (
            f"its backend {layer.attn_backend.get_name()} does not keep the {cache.dtype} bytes of a slot as one "
            "strided row (AMX tiles and quantised caches do not): use another dtype or attention backend"
        )
    if with_scales:
        cache = cache.view(torch.uint8)  # a scale is no number of the others' type, which may say NaN of it
    return found[0].view(cache, page_size), found[1].view(cache, page_size)


def _write(layer: Any) -> layouts.Write:
    backend = copy.copy(layer.impl)  # which may keep something of the first cache that it sees, as where its scales are

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        backend.do_kv_cache_update(layer, key, value, cache, slots)

    return write


def _mla_write(layer: Any) -> layouts.Write:
    backend = copy.copy(layer.impl)

    def write(latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        backend.do_kv_cache_update(latent, rope.unsqueeze(1), cache, slots, layer.kv_cache_dtype, layer._k_scale)

    return write

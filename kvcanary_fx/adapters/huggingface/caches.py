"""Which cache ``generate`` of a protected model runs over: static if possible, and with room for another turn."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Container
from typing import Any

import torch

from ...runtime.session import CanarySession

#: What a forward calls the argument that is its cache: from transformers 5.24 on; before; Mamba's models before.
_ARGUMENTS = ("cache", "past_key_values", "cache_params")

#: Models that work with a compiled static cache (seen in their tests), though transformers does not mark them so.
_FIT = ("FalconH1ForCausalLM", "MambaForCausalLM", "Zamba2ForCausalLM")


def cache_argument(names: Container[str]) -> str | None:
    """Which of these names, of a forward's arguments, is that of its cache; None if none is."""
    for name in _ARGUMENTS:
        if name in names:
            return name
    return None


def cache_name(model: Any) -> str:
    """What the forward of a model of transformers calls its cache.

    Raises:
        TypeError: it takes no cache.
    """
    name = cache_argument(inspect.signature(model.forward).parameters)
    if name is None:
        raise TypeError(f"{type(model).__name__}.forward takes no cache: none of its arguments is {_ARGUMENTS}")
    return name


def setting(model: Any, options: dict[str, Any], name: str) -> Any:
    """The value of ``name`` in ``generate(**options)``: its argument, its configuration's, or the model's."""
    if options.get(name) is not None:
        return options[name]
    given = getattr(options.get("generation_config"), name, None)
    return given if given is not None else getattr(model.generation_config, name, None)


def why_not_static(model: Any, options: dict[str, Any]) -> str | None:
    """Why a call of ``generate`` cannot have a static cache; None if it can."""
    if options.get("assistant_model") is not None or any(
        setting(model, options, name)
        for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "is_assistant")
    ):
        return (
            "generate with drafted tokens (assistant_model, prompt_lookup_num_tokens, assistant_early_exit) needs a "
            "cache that can be cropped. That of these calls is rebuilt in each step, so they run unguarded. To guard "
            "them: cache_implementation='static' with transformers 5.24 or later and a model without sliding windows, "
            "or no drafts"
        )
    return _why_no_static_cache_fits(model)


def _why_no_static_cache_fits(model: Any) -> str | None:
    """Why no call of a model has a static cache unless it asks for one."""
    name = type(model).__name__
    takes_a_cache = getattr(model, "_supports_default_dynamic_cache", None)
    if callable(takes_a_cache) and not takes_a_cache():  # MiniMax, RWKV, xLSTM, Reformer, XLNet
        return (
            f"{name} makes its cache itself, and transformers gives it no other, whatever cache_implementation says. "
            "What it rebuilds in each step is not guarded, and no setting changes that"
        )
    config = getattr(model, "config", None)
    if getattr(config, "alibi", False):
        # seen of Falcon, whose bias is as long as the attention mask: RuntimeError over transformers' own static cache
        return (
            f"{name} with config.alibi works only over a DynamicCache, which is rebuilt in each step: its bias is as "
            "long as the attention mask, and a static cache is longer. Its calls run unguarded"
        )
    if _chooses_tokens(config):
        return (
            f"{name} has the same tokens only over a DynamicCache, which is rebuilt in each step: its indexer's scores "
            "can be equal, and which of the equal ones it takes depends on the cache's length. Its calls run "
            "unguarded; cache_implementation='static' guards them"
        )
    if name in _FIT or getattr(model, "_can_compile_fullgraph", True):
        return None
    return (
        f"{name} has the same tokens only over a DynamicCache, which is rebuilt in each step: transformers does not "
        "support a static one for it. Its calls run unguarded; cache_implementation='static' guards them, if the model "
        "runs over one: look whether the tokens are the same"
    )


def _chooses_tokens(config: Any) -> bool:
    """Whether attention sees the best tokens by an indexer's scores (DeepSeek-V3.2, GLM-MoE-DSA, HY-V4 and others).

    Seen in tiny models with two heads of the indexer: other tokens over a static cache than over a dynamic one; with 16
    heads the same.  By the sources the scores are sums behind a ReLU, so some can be exactly 0, and which of these
    ``topk`` takes depends on the cache's length.
    """
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return getattr(text, "index_topk", None) is not None


def has_tensors(layer: Any) -> bool:
    """Whether a layer of a cache has been written, so that its tensors exist."""
    states = [
        *getattr(layer, "is_conv_states_initialized", {}).values(),
        *getattr(layer, "is_recurrent_states_initialized", {}).values(),
    ]
    return getattr(layer, "is_initialized", True) and (not states or any(states))


def sizes_of(tokens: torch.Tensor | None, cache: Any) -> tuple[Any, ...]:
    """By which sizes forwards of one model are compiled anew: those of its tokens, and of its cache."""
    layers = getattr(cache, "layers", None)
    length = getattr(layers[-1], "max_cache_len", None) if layers else None
    return None if tokens is None else tokens.shape, length


class ReorderedInPlace:
    """Caches whose beams are reordered in their own tensors while one ``generate`` runs.

    transformers makes new tensors in each step of a beam search, of which nothing is known: all that they hold would be
    taken as it is, each time.  In place a row must hold what another one held before.
    """

    def __init__(self, session: CanarySession) -> None:
        self._session, self._caches = session, list[Any]()

    def add(self, cache: Any) -> None:
        """From here on, until :meth:`end`; nothing where that is so, or there is none."""
        if cache is not None and not any(known is cache for known in self._caches) and hasattr(cache, "reorder_cache"):
            self._caches.append(cache)
            cache.reorder_cache = functools.partial(self._reorder, cache)

    def end(self) -> None:
        """The caches are as they were."""
        for cache in self._caches:
            del cache.reorder_cache
            for _, _, tensor in _tensors(cache):
                self._session.registry.exchange_rows(tensor, only=False)
        self._caches.clear()

    def _reorder(self, cache: Any, beams: torch.Tensor) -> None:
        self._session.look()  # what is found later would be compared with rows that moved on
        for _, _, tensor in _tensors(cache):
            self._session.registry.exchange_rows(tensor, only=True)
        _reorder(cache, beams)


def _tensors(cache: Any) -> list[tuple[dict[Any, Any], Any, torch.Tensor]]:
    """The tensors of a cache, each with the table that has it, and its name there."""
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    layers = [vars(layer) for part in (cache, *parts) for layer in getattr(part, "layers", ())]
    tables = [*layers, *(states for layer in layers for states in layer.values() if isinstance(states, dict))]
    return [(table, name, t) for table in tables for name, t in table.items() if isinstance(t, torch.Tensor)]


def _reorder(cache: Any, beams: torch.Tensor) -> None:
    before = _tensors(cache)
    type(cache).reorder_cache(cache, beams)
    for table, name, tensor in before:
        new = table[name]
        if new is not tensor and (new.shape, new.dtype, new.device) == (tensor.shape, tensor.dtype, tensor.device):
            table[name] = tensor.copy_(new)


def needed_length(model: Any, options: dict[str, Any], tokens: torch.Tensor | None) -> int:
    """How many tokens a cache must hold for a call of ``generate``; 0 if unknown.

    Args:
        tokens: int64 ``[batch, n]``, all tokens so far.
    """
    new = setting(model, options, "max_new_tokens")
    if new is not None:
        return tokens.shape[1] + int(new) if tokens is not None else 0
    return int(setting(model, options, "max_length") or 0)


def make_room(cache: Any, model: Any, length: int) -> bool:
    """Grow a static cache, filled by an earlier turn, to ``length`` tokens; its contents are kept.

    A static cache of ``generate`` has the exact size of its call; the dynamic one that it replaces would grow.

    Returns:
        Whether tensors were replaced by larger ones.
    """
    from transformers.cache_utils import StaticCache, StaticLayer

    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
    if not any(isinstance(layer, StaticLayer) for layer in layers):
        return False
    sizes = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=length).layers
    grown = False
    for layer, size in zip(layers, sizes, strict=False):
        if isinstance(layer, StaticLayer) and layer.max_cache_len < getattr(size, "max_cache_len", 0):
            _grow(layer, size.max_cache_len)
            grown = True
    return grown


def _grow(layer: Any, length: int) -> None:
    """Larger tensors with the same contents, for one layer of a cache."""
    for name, axis in (("keys", 2), ("values", 2), ("indexer_keys", 1)):
        tensor = getattr(layer, name, None)
        if isinstance(tensor, torch.Tensor):
            shape = list(tensor.shape)
            shape[axis] = length
            larger = tensor.new_zeros(shape)
            larger.narrow(axis, 0, tensor.shape[axis]).copy_(tensor)
            torch._dynamo.mark_static_address(larger)
            setattr(layer, name, larger)
    layer.max_cache_len = length

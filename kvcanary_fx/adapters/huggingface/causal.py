"""Prefills whose causal mask is left to attention, as transformers leaves it in eager.

Attention that gets ``is_causal`` and no mask has faster kernels.  So transformers makes no mask for the prefill of an
empty cache, which it does not compile; where Dynamo traces it, it makes one.  A guarded prefill is compiled: with 8
prompts of 4,096 tokens, attention took 145 ms instead of 21 (1B-shaped Llama, H200, transformers 5.17).

While such a prefill runs, the model's configuration names an attention that is registered here as transformers' own are
(``AttentionInterface``, ``AttentionMaskInterface``).  It computes what ``sdpa`` does, and its mask is none.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

_NAME = "kvcanary_causal"


class CausalPrefills:
    """The prefills of one model that need no mask; none once a second thread calls the model."""

    def __init__(self, model: Any):
        self._config = model.config if _may_have_another_name(model) else None
        self._thread: int | None = None
        self._running = threading.Lock()

    def need_no_mask(self, cache: Any, tokens: torch.Tensor | None, mask: torch.Tensor | None) -> bool:
        """Whether a forward is the prefill of an empty cache, without padding.

        Args:
            tokens: int64 ``[batch, n]``, or their embeddings ``[batch, n, hidden]``.
            mask: the forward's ``attention_mask``; transformers passes None where every token sees all before it.
        """
        thread = threading.get_ident()
        if thread != self._thread:
            self._called_by(thread)
        if self._config is None or mask is not None or tokens is None or tokens.shape[1] < 2:
            return False
        if type(cache).__name__ != "StaticCache" or self._config._attn_implementation != "sdpa":
            return False
        return int(cache.get_seq_length()) == 0

    def _called_by(self, thread: int) -> None:
        with self._running:  # another thread's prefill has changed the configuration
            if self._thread is not None:
                self._config = None
            self._thread = thread

    @contextlib.contextmanager
    def without_mask(self) -> Iterator[None]:
        """The model's forwards within are such prefills."""
        config = self._config
        assert config is not None
        _register()
        with self._running:
            config._attn_implementation = _NAME
            try:
                yield
            finally:
                config._attn_implementation = "sdpa"


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(_NAME, _mask)


def _mask(
    *,
    kv_length: int,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    attention_mask: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor | None:
    """The mask of a layer: none where Dynamo traces and all tokens before are seen, else transformers' own."""
    from transformers.masking_utils import sdpa_mask

    sees_all = attention_mask is None and (local_size is None or kv_length < local_size)
    if torch.compiler.is_dynamo_compiling() and allow_is_causal_skip and sees_all:
        return None
    mask: torch.Tensor | None = sdpa_mask(
        kv_length=kv_length,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        attention_mask=attention_mask,
        **others,
    )
    return mask


def _may_have_another_name(model: Any) -> bool:
    """Whether nothing in a model asks what its attention is called, except to look it up."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "sub_configs", None):
        return False
    sources = {sys.modules.get(type(module).__module__) for module in model.modules()}
    return all(source is None or _only_looks_it_up(source) for source in sources)


@functools.cache
def _only_looks_it_up(source: Any) -> bool:
    if source.__name__.startswith("torch."):
        return True
    try:
        text = inspect.getsource(source)
    except (OSError, TypeError):
        return False
    text = re.sub(r"get_interface\(\s*self\.config\._attn_implementation", "", text)
    return "_attn_implementation" not in text and "AttentionInterface()" not in text

"""Attention of a model's own, as DeepSeek V3.2 and Kimi have it in vLLM: it writes K and V by itself, calls none of
vLLM's attention ops, and keeps something beside K and V in the same KV cache group."""

from __future__ import annotations

from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

#: How often such attention ran from Python.
CALLS: list[str] = []


class SideCache(torch.nn.Module, AttentionLayerBase):
    """What an indexer keeps of each token, in a way that no adapter knows: here nothing."""

    def __init__(self, attention: Attention, prefix: str):
        super().__init__()
        self.kv_cache, self._like = torch.tensor([]), [attention]
        self.num_heads = attention.num_heads  # the backend asks each layer of a group
        get_current_vllm_config().compilation_config.static_forward_context[prefix] = self

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self._like[0].get_kv_cache_spec(vllm_config)

    def get_attn_backend(self) -> Any:
        return self._like[0].get_attn_backend()


class OwnAttention(Attention):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.side = SideCache(self, f"{self.layer_name}.side")

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        output = torch.empty_like(query)
        self._attend(
            query.view(-1, self.num_heads, self.head_size),
            key.view(-1, self.num_kv_heads, self.head_size),
            value.view(-1, self.num_kv_heads, self.head_size),
            output.view(-1, self.num_heads, self.head_size),
        )
        return output

    @eager_break_during_capture
    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> None:
        metadata, _, cache, slots = get_attention_context(self.layer_name)
        CALLS.append(self.layer_name)
        if slots is not None and metadata is not None:
            self.impl.do_kv_cache_update(self, key, value, cache, slots)
        self.impl.forward(self, query, key, value, cache, metadata, output=output)


def install() -> None:
    """From now on Llama's layers have such attention."""
    from vllm.model_executor.models import llama

    llama.Attention = OwnAttention

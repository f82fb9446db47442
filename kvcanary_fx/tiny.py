"""Tiny Hugging Face models with random weights, built from configs: for the demo, the examples and the tests."""

from __future__ import annotations

from typing import Any

import torch

from .errors import MissingExtraError

_COMMON: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)

#: Architecture -> (model class, config class, arguments of the config).
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", dict(_COMMON, head_dim=8)),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", dict(_COMMON, head_dim=8)),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        dict(_COMMON, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        dict(_COMMON, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        dict(
            _COMMON,
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            moe_intermediate_size=32,
        ),
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        dict(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=256),
    ),
}


def build(architecture: str, layers: int | None = None, seed: int = 0, device: str = "cpu") -> Any:
    """A tiny random model in eval mode, float32.

    Args:
        architecture: a key of :data:`ARCHITECTURES`.
        layers: number of layers, for architectures whose layers are all alike.
        device: where the model goes; weights are drawn on the CPU, so they are the same everywhere.

    Raises:
        MissingExtraError: transformers is not installed.
        KeyError: no such architecture.
    """
    try:
        import transformers
    except ImportError as e:
        raise MissingExtraError("transformers", "demo", "a tiny Hugging Face model") from e
    model_class, config_class, arguments = ARCHITECTURES[architecture]
    if layers is not None:
        arguments = dict(arguments, num_hidden_layers=layers)
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**arguments)
    model = getattr(transformers, model_class)(config).eval()
    if device != "cpu" and hasattr(config, "num_experts_per_tok"):
        # the default sends the experts' offsets to the host, which no CUDA graph can do
        model.set_experts_implementation("batched_mm")
    return model.to(device)

"""Tiny Hugging Face models with random weights, built from configs: for the demo, the examples and the tests."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import MissingExtraError

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


_MAMBA: dict[str, Any] = dict(
    mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=8, mamba_chunk_size=8, mamba_expand=2
)
_SHARED_KV: dict[str, Any] = dict(
    _COMMON,
    num_hidden_layers=4,
    head_dim=8,
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention"] * 2,
    num_kv_shared_layers=2,
    vocab_size_per_layer_input=128,
    hidden_size_per_layer_input=8,
)
_DECODER: dict[str, Any] = dict(
    vocab_size=128,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    eos_token_id=None,
)

#: The same for models whose cache has more than the keys and values of every layer.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3n": (
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        dict(
            _SHARED_KV,
            intermediate_size=[48] * 4,
            laurel_rank=4,
            altup_num_inputs=2,
            activation_sparsity_pattern=[0.0] * 4,
        ),
    ),
    "gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig", dict(_SHARED_KV, global_head_dim=8)),
    "deepseek_v32": (
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        dict(ARCHITECTURES["deepseek_v3"][2], index_n_heads=2, index_head_dim=16, index_topk=8),
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        dict(vocab_size=128, hidden_size=32, num_hidden_layers=2, state_size=8, conv_kernel=4),
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        dict(
            vocab_size=128,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
            num_heads=8,
            head_dim=8,
            n_groups=2,
            conv_kernel=4,
            chunk_size=8,
        ),
    ),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        dict(
            _COMMON,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=4,
            num_experts_per_tok=2,
            mamba_d_state=8,
            mamba_d_conv=4,
            mamba_dt_rank=8,
        ),
    ),
    "bamba": ("BambaForCausalLM", "BambaConfig", dict({**_COMMON, **_MAMBA}, attn_layer_indices=[1])),
    "falcon_h1": ("FalconH1ForCausalLM", "FalconH1Config", dict({**_COMMON, **_MAMBA}, head_dim=8, mamba_d_ssm=64)),
    "zamba2": (
        "Zamba2ForCausalLM",
        "Zamba2Config",
        dict(
            _COMMON,
            mamba_d_state=8,
            mamba_headdim=8,
            n_mamba_heads=8,
            mamba_ngroups=2,
            chunk_size=8,
            layers_block_type=["mamba", "hybrid"],
            num_mem_blocks=1,
        ),
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        dict(
            _COMMON,
            head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            layer_types=["linear_attention", "full_attention"],
        ),
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        dict(_COMMON, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        dict(
            vocab_size=128,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            eos_token_id=None,
        ),
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        dict(_DECODER, max_position_embeddings=64, decoder_start_token_id=2, forced_eos_token_id=None),
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        dict(
            _DECODER,
            num_mel_bins=8,
            max_source_positions=8,
            max_target_positions=64,
            decoder_start_token_id=1,
            bos_token_id=1,
            pad_token_id=0,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
    ),
}


def build(architecture: str, layers: int | None = None, seed: int = 0, device: str = "cpu") -> Any:
    """A tiny random model in eval mode, float32.

    Args:
        architecture: a key of :data:`ARCHITECTURES` or :data:`OTHERS`.
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
    model_class, config_class, arguments = {**ARCHITECTURES, **OTHERS}[architecture]
    if layers is not None:
        arguments = dict(arguments, num_hidden_layers=layers)
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**arguments)
    model = getattr(transformers, model_class)(config).eval()
    if device != "cpu" and hasattr(config, "num_experts_per_tok"):
        # the default copies the experts' offsets to the host, which a CUDA graph cannot do
        model.set_experts_implementation("batched_mm")
    return model.to(device)


def prompt(model: Any, batch: int, length: int) -> torch.Tensor:
    """A random first argument of ``model.generate``, on the model's device.

    Returns:
        int64 token ids ``[batch, length]``; for Whisper float32 features ``[batch, mel bins, frames]``, of a length
        that the model sets.
    """
    config = model.config
    if model.main_input_name == "input_features":
        return torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions).to(model.device)
    return torch.randint(3, config.vocab_size, (batch, length)).to(model.device)


def static_cache(model: Any, length: int, encoder_length: int = 0) -> Any:
    """A cache for ``length`` tokens that is written in place; a pair of them for encoder-decoders.

    Args:
        encoder_length: positions that cross-attention reads.
    """
    from transformers import EncoderDecoderCache, StaticCache

    config = model.config.get_text_config(decoder=True)
    cache = StaticCache(config=config, max_cache_len=length)
    if not model.config.is_encoder_decoder:
        return cache
    return EncoderDecoderCache(cache, StaticCache(config=config, max_cache_len=encoder_length))


def cache_tensors(cache: Any) -> list[tuple[int, str, torch.Tensor]]:
    """``(layer, half, tensor)`` of all tensors that a Hugging Face cache holds so far.

    ``half`` is K, V, indexer, conv or state, numbered where a layer has several; for cross-attention it starts
    with ``cross``.
    """
    if hasattr(cache, "cross_attention_cache"):
        crossed = cache_tensors(cache.cross_attention_cache)
        return cache_tensors(cache.self_attention_cache) + [(n, f"cross {half}", t) for n, half, t in crossed]
    names = dict(keys="K", values="V", indexer_keys="indexer", conv_states="conv", recurrent_states="state")
    held = []
    for number, layer in enumerate(cache.layers):
        for attribute, half in names.items():
            value = getattr(layer, attribute, None)
            parts = list(value.values()) if isinstance(value, dict) else [value]
            for i, part in enumerate(parts):
                if isinstance(part, torch.Tensor) and part.dim() > 1:
                    held.append((number, half if len(parts) == 1 else f"{half}{i}", part))
    return held

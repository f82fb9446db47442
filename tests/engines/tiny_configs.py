"""Configurations of tiny models, as Hugging Face writes them, for engines that are given no weights."""

from __future__ import annotations

from typing import Any

VOCABULARY = 256

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    hidden_act="silu",
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)
_MLA: dict[str, Any] = dict(
    q_lora_rank=64,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    moe_intermediate_size=128,
    routed_scaling_factor=1.0,
    num_key_value_heads=4,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    moe_layer_freq=1,
)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": dict(_COMMON, model_type="llama", architectures=["LlamaForCausalLM"]),
    "qwen3": dict(_COMMON, model_type="qwen3", architectures=["Qwen3ForCausalLM"]),
    "gemma3": dict(
        _COMMON,
        model_type="gemma3_text",
        architectures=["Gemma3ForCausalLM"],
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=32,
        hidden_activation="gelu_pytorch_tanh",
    ),
    "mixtral": dict(
        _COMMON,
        model_type="mixtral",
        architectures=["MixtralForCausalLM"],
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "deepseek_v3": {
        k: v
        for k, v in dict(_COMMON, **_MLA, model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"]).items()
        if k != "head_dim"
    },
}

#: Models with tests of their own: whose layers are not alike, or not all guarded.
OTHERS: dict[str, dict[str, Any]] = {
    "llama4": dict(
        _COMMON,
        model_type="llama4_text",
        architectures=["Llama4ForCausalLM"],
        num_hidden_layers=4,
        attention_chunk_size=64,
        no_rope_layer_interval=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        intermediate_size_mlp=256,
        use_qk_norm=True,
        attn_temperature_tuning=False,
    ),
    "hybrid": dict(
        _COMMON,
        model_type="lfm2",
        architectures=["Lfm2ForCausalLM"],
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=8,
        head_dim=64,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        num_hidden_layers=4,
        conv_L_cache=3,
        conv_dim=512,
        conv_dim_out=512,
        block_dim=512,
        block_ff_dim=1024,
        block_multiple_of=64,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        norm_eps=1e-5,
    ),
}

"""Families of models that differ in their attention, tiny, as Hugging Face writes their configurations."""

from __future__ import annotations

from typing import Any

import tiny_configs

#: What they have in common: sizes that attention on a GPU takes, too.
_COMMON: dict[str, Any] = tiny_configs.CONFIGS["llama"] | dict(
    hidden_size=512, intermediate_size=512, num_attention_heads=8, head_dim=64
)
_ENDS = dict(vocab_size=tiny_configs.VOCABULARY, bos_token_id=1, eos_token_id=2)
_WINDOW: dict[str, Any] = dict(sliding_window=64, layer_types=["sliding_attention", "full_attention"])
_LATENT: dict[str, Any] = {k: v for k, v in _COMMON.items() if k != "head_dim"} | dict(num_key_value_heads=8)


def _family(architecture: str, kind: str, base: dict[str, Any] = _COMMON, **changed: Any) -> dict[str, Any]:
    return base | dict(architectures=[architecture], model_type=kind) | changed


#: By name; each says what is particular about its attention.
FAMILIES: dict[str, dict[str, Any]] = {
    # capped scores, windows in every other layer
    "gemma2": _family(
        "Gemma2ForCausalLM",
        "gemma2",
        **_WINDOW,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=32,
        hidden_activation="gelu_pytorch_tanh",
    ),
    # its last layers read the K and V of layers before
    "gemma3n": _family(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        num_hidden_layers=4,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=tiny_configs.VOCABULARY,
        hidden_size_per_layer_input=32,
        altup_num_inputs=2,
        altup_active_idx=0,
        altup_coef_clip=120.0,
        altup_correct_scale=True,
        laurel_rank=16,
        activation_sparsity_pattern=[0.0] * 4,
        intermediate_size=[512] * 4,
        rope_local_base_freq=10000.0,
        final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh",
    ),
    # sinks, windows in every other layer, experts
    "gpt_oss": _family(
        "GptOssForCausalLM",
        "gpt_oss",
        **_WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=7.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 256,
            "truncate": False,
        },
    ),
    # windows in all layers
    "mistral": _family("MistralForCausalLM", "mistral", sliding_window=64),
    "starcoder2": _family("Starcoder2ForCausalLM", "starcoder2", sliding_window=64, norm_epsilon=1e-5, use_bias=True),
    # windows in every other layer; positions in some layers alone
    "cohere2": _family("Cohere2ForCausalLM", "cohere2", **_WINDOW, layer_norm_eps=1e-5, logit_scale=1.0),
    "exaone4": _family("Exaone4ForCausalLM", "exaone4", **_WINDOW, sliding_window_pattern=2),
    # learned positions; those of OPT begin at 2
    "gpt2": dict(
        _ENDS,
        architectures=["GPT2LMHeadModel"],
        model_type="gpt2",
        n_embd=512,
        n_layer=2,
        n_head=8,
        n_positions=512,
        n_inner=512,
    ),
    "opt": dict(
        _ENDS,
        architectures=["OPTForCausalLM"],
        model_type="opt",
        hidden_size=512,
        num_hidden_layers=2,
        ffn_dim=512,
        num_attention_heads=8,
        max_position_embeddings=512,
        word_embed_proj_dim=512,
        pad_token_id=0,
    ),
    # biases by distance in the place of positions
    "bloom": dict(_ENDS, architectures=["BloomForCausalLM"], model_type="bloom", hidden_size=512, n_layer=2, n_head=8),
    # attention and the layer's MLP beside each other, K and V of few heads
    "falcon": dict(
        _ENDS,
        architectures=["FalconForCausalLM"],
        model_type="falcon",
        hidden_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_kv_heads=2,
        new_decoder_architecture=True,
        alibi=False,
        max_position_embeddings=512,
    ),
    # Q, K and V of one product; norms of Q and K; experts beside a shared one
    "phi3": _family("Phi3ForCausalLM", "phi3", pad_token_id=0, original_max_position_embeddings=512),
    "olmo2": _family("Olmo2ForCausalLM", "olmo2"),
    "qwen2_moe": _family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[],
    ),
    # latents: kept as such, and as K and V of each head
    "deepseek_v2": _family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {k: v for k, v in tiny_configs.CONFIGS["deepseek_v3"].items() if k not in ("scoring_func", "topk_method")},
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=8,
        first_k_dense_replace=2,
        topk_method="greedy",
        scoring_func="softmax",
    ),
    "minicpm3": _family(
        "MiniCPM3ForCausalLM",
        "minicpm3",
        _LATENT,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=64,
        scale_emb=1,
        scale_depth=1.4,
        dim_model_base=128,
    ),
}

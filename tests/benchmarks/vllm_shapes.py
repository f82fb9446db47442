"""Shapes of models for vLLM's benchmarks: a config.json without weights or tokenizer."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

_LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=128256,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    hidden_act="silu",
    torch_dtype="bfloat16",
    bos_token_id=1,
    eos_token_id=2,
)
SHAPES: dict[str, dict[str, Any]] = {
    "1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64, tie_word_embeddings=True),
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128),
    # 30B with 3B active; wants a GPU for each engine
    "moe": dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        num_hidden_layers=48,
        head_dim=128,
        num_key_value_heads=4,
        vocab_size=151936,
    ),
    # LFM2-1.2B: ten short convolutions, six layers of attention
    "lfm2": dict(
        architectures=["Lfm2ForCausalLM"],
        model_type="lfm2",
        hidden_size=2048,
        intermediate_size=12288,
        num_hidden_layers=16,
        layer_types=["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
        conv_L_cache=3,
        conv_bias=False,
        conv_dim=2048,
        conv_dim_out=2048,
        block_dim=2048,
        block_ff_dim=12288,
        block_multiple_of=256,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=True,
        norm_eps=1e-5,
        vocab_size=65536,
        tie_word_embeddings=True,
    ),
    # granite-4.0-h-micro: 36 layers of Mamba 2, four of attention
    "granite-h": dict(
        architectures=["GraniteMoeHybridForCausalLM"],
        model_type="granitemoehybrid",
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=40,
        layer_types=["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
        mamba_n_heads=64,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_d_conv=4,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=256,
        mamba_conv_bias=True,
        mamba_proj_bias=False,
        attention_bias=False,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=8192,
        position_embedding_type="nope",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.015625,
        logits_scaling=8.0,
        vocab_size=100352,
        tie_word_embeddings=True,
    ),
    # for a try on a CPU
    "tiny": dict(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
    ),
}


def vocabulary(shape: str) -> int:
    """How many tokens a shape knows."""
    found: int = (_LLAMA | SHAPES[shape])["vocab_size"]
    return found


def write_config(shape: str) -> str:
    """Write a shape's config.json; the folder it is in, which vLLM takes as a model."""
    directory = Path(tempfile.gettempdir()) / f"kvcanary-vllm-{shape}"
    directory.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as out:
        out.write(json.dumps(_LLAMA | SHAPES[shape]))
    os.replace(out.name, directory / "config.json")  # engines that start at once read a whole one
    return str(directory)

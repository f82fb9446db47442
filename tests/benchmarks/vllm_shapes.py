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

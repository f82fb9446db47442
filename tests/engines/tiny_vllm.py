"""Tiny random models for vLLM, from local configurations: no hub, no weights, no tokenizer."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import tiny_whisper
import torch
from tiny_configs import CONFIGS, OTHERS

#: float32: with bfloat16 a CPU that has AMX keeps KV in tiles, unless it is guarded: other tokens.
DTYPE = "float32"

#: What a machine without a GPU, a network or a model hub needs.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
}


def write_config(name: str, directory: pathlib.Path) -> str:
    """Put a model's configuration into ``directory/name``; its path."""
    path = directory / name
    path.mkdir(parents=True, exist_ok=True)
    if name in tiny_whisper.SECONDS:
        tiny_whisper.write(path, tiny_whisper.SECONDS[name])
        return os.fspath(path)
    (path / "config.json").write_text(json.dumps((CONFIGS | OTHERS)[name]))
    return os.fspath(path)


def engine_arguments(name: str, directory: pathlib.Path, **changed: Any) -> dict[str, Any]:
    """Arguments for ``vllm.LLM``: small blocks and few of them, so that prompts share and lack some."""
    given: dict[str, Any] = dict(
        model=write_config(name, directory),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=DTYPE,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=32,
        num_gpu_blocks_override=64,
        seed=0,
        enforce_eager=True,
    )
    if name in tiny_whisper.SECONDS:
        given.update(tiny_whisper.ARGUMENTS)
    elif "kv_lora_rank" in (CONFIGS | OTHERS)[name] and not torch.cuda.is_available():
        # of itself vLLM takes the one for AMX where a CPU has that, which knows no float32
        given["attention_config"] = {"backend": "CPU_MLA"}
    return given | changed


def client_name(request: str) -> str:
    """What a server's client called a request (``X-Request-Id``), of vLLM's id: ``cmpl-NAME-0-b938fdf1``."""
    return request.removeprefix("cmpl-").rpartition("-")[0].removesuffix("-0")

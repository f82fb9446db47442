"""Scenes with LoRA adapters: prefixes of equal tokens whose KV differs."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import tiny_configs
import torch
from vllm_rig import Rig, prompt

_RANK = 4


def adapter(number: int, directory: pathlib.Path) -> Any:
    """A random adapter of every attention projection, as PEFT writes it; vLLM's request for it."""
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    config, random = tiny_configs.CONFIGS["llama"], torch.Generator().manual_seed(number)
    kv = config["num_key_value_heads"] * config["head_dim"]
    widths = {"q_proj": config["hidden_size"], "k_proj": kv, "v_proj": kv, "o_proj": config["hidden_size"]}
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(_RANK, config["hidden_size"], generator=random)
            weights[f"{prefix}.lora_B.weight"] = torch.randn(width, _RANK, generator=random)
    path = directory / f"adapter{number}"
    path.mkdir(exist_ok=True)
    save_file(weights, path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": _RANK, "lora_alpha": 8, "target_modules": list(widths)}
    (path / "adapter_config.json").write_text(json.dumps(about | {"bias": "none", "base_model_name_or_path": ""}))
    return LoRARequest(path.name, number, os.fspath(path))


def _rig(directory: pathlib.Path, model: str) -> Rig:
    return Rig(model, directory, enable_lora=True, max_loras=2, max_lora_rank=8)


def lora(directory: pathlib.Path, model: str) -> dict[str, Any]:
    """One prompt with two adapters and with none, at once and again: the second round hits the prefix cache."""
    rig = _rig(directory, model)
    adapters = [None, adapter(1, directory), adapter(2, directory)]
    for again in range(2):
        for number, given in enumerate(adapters):
            rig.add(f"{number} {again}", prompt(5, 96), lora_request=given)
        rig.run()
    found: dict[str, Any] = {"tokens": rig.tokens}
    if "KVCANARY_MODE" in os.environ:
        found["violations"] = [v.line() for v in rig.session.violations()]
        found["recorded"] = rig.session.stats().recorded
    return found


def lora_mixed_up(directory: pathlib.Path, model: str) -> dict[str, Any]:
    """vLLM's prefix cache forgets the adapters: one's prompt takes up what the other's left."""
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils._gen_lora_extra_hash_keys = lambda request: []
    rig = _rig(directory, model)
    for number in (1, 2):
        rig.add(f"R{number}", prompt(5, 96), lora_request=adapter(number, directory))
        rig.run()
    return {"told": sorted(rig.told())}


SCENES = {"lora": lora, "lora mixed up": lora_mixed_up}

"""The scene ``models`` of :mod:`vllm_v2_run`: kinds of models and caches, each with an engine of its own.

KVCANARY_MODE=log KVCANARY_BUDGET=none MODEL=mla python tests/engines/vllm_v2_run.py DIRECTORY models

``own`` has attention that is none of vLLM's ops, see :mod:`vllm_own_attention`.
Of ``hybrid`` (short convolutions), ``ssm`` (Mamba 2) and ``gdn`` (gated delta nets) each state is flipped, too; under a
budget until it is told.
``PREFIX=0`` runs without a prefix cache: a request has one block of states; else ``mamba_cache_mode`` is ``align``.
"""

from __future__ import annotations

import os
import zlib
from typing import Any

import tiny_configs
import tiny_families
import vllm_v2_flips
import vllm_v2_state_flips
from vllm_rig import Rig, mixed_load

_SIZES: dict[str, Any] = dict(
    hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8, head_dim=64
)

#: Configurations, by the name that ``MODEL`` gives.
MODELS: dict[str, dict[str, Any]] = {
    "llama": tiny_configs.CONFIGS["llama"] | _SIZES | dict(num_hidden_layers=4),
    "moe": tiny_configs.CONFIGS["mixtral"] | _SIZES,
    "mla": {  # dense: the experts are another thing
        k: v
        for k, v in (tiny_configs.CONFIGS["deepseek_v3"] | _SIZES | dict(first_k_dense_replace=2)).items()
        if k != "head_dim"
    }
    | dict(num_key_value_heads=8),
    "window": tiny_configs.CONFIGS["gemma3"] | _SIZES,
    "chunks": tiny_configs.OTHERS["llama4"] | _SIZES | dict(num_hidden_layers=4),
    "fp8": tiny_configs.CONFIGS["llama"] | _SIZES,
    "own": tiny_configs.CONFIGS["llama"] | _SIZES,  # for eager mode, or VLLM_USE_BREAKABLE_CUDAGRAPH=1
    "hybrid": tiny_configs.OTHERS["hybrid"],
    "ssm": tiny_configs.OTHERS["granite"],
    "gdn": tiny_configs.OTHERS["qwen3_next"],
    **tiny_families.FAMILIES,
}

# its draft, the layer behind the last, is dense, too
MODELS["mtp"] = MODELS["mla"] | dict(first_k_dense_replace=3, num_nextn_predict_layers=1)

#: What their engines get besides.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "fp8": dict(kv_cache_dtype="fp8"),
    "hybrid": dict(block_size=None),  # vLLM's own, so that pages of both kinds have the same bytes
    "ssm": dict(block_size=None),
    "gdn": dict(block_size=None),
    "gemma3n": dict(kv_sharing_fast_prefill=True),
}


def arguments(model: str) -> dict[str, Any]:
    """What a model's engine gets besides."""
    return ARGUMENTS.get(model, {}) | ({"enable_prefix_caching": False} if os.environ.get("PREFIX") == "0" else {})


def chosen() -> str:
    """The model that the environment asks for."""
    return os.environ.get("MODEL", "llama")


def models(rig: Rig) -> dict[str, Any]:
    """Prefix hits, prompts in chunks and an abort; what is guarded, and a flip in each half that is."""
    mixed_load(rig)
    found: dict[str, Any] = dict(ok=True, model=chosen(), tokens=zlib.crc32(str(sorted(rig.tokens.items())).encode()))
    found["sample"] = next(iter(rig.tokens.values()))[:8]
    found["groups"] = [
        f"{type(group.kv_cache_spec).__name__} {group.kv_cache_spec.block_size} x {len(group.layer_names)}"
        for group in rig.runner.kv_cache_config.kv_cache_groups
    ]
    if rig.guard is None:
        return found
    told = [str(v.line()) for session in rig.guard.sessions for v in session.violations()]
    halves = {group.name: 2 * len(group.layers) for group in rig.guard.groups}
    states = getattr(rig.guard, "states", None)
    if states is not None:
        stats = states.session.stats()
        found["states"] = dict(recorded=stats.recorded, checked=stats.checked, groups=[g.name for g in states.groups])
        found["states"]["turns"] = states.turns.describe(states.size) if hasattr(states, "turns") else "all"
        found["state flips"] = vllm_v2_state_flips.state_flips(rig)
    sampled = states is not None and rig.session.pace is not None  # then KV is not compared each time it is read
    flips = {} if sampled else vllm_v2_flips.flips(rig)
    ok = not told and not rig.session.uncovered
    ok = ok and all(row["ok"] for row in [*flips.values(), *found.get("state flips", {}).values()])
    return found | dict(ok=ok, violations=told[:4], uncovered=rig.session.uncovered[:4], halves=halves, flips=flips)


SCENES = {"models": models}

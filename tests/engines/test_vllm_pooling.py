"""Models that sample nothing: damage must not reach an embedding."""

from __future__ import annotations

import json
import pathlib

import pytest
import tiny_vllm
import torch
from tokenizers import Tokenizer
from tokenizers import models as models_of_tokenizers
from vllm_rig import prompt

TEXT = prompt(1, 100)

#: On a GPU, with Model Runner V2 and its graphs.
ON_A_GPU = dict(
    dtype="bfloat16", block_size=16, enforce_eager=False, kv_cache_memory_bytes=1 << 28, gpu_memory_utilization=0.3
)


@pytest.fixture(scope="module")
def embedder(models, vllm_environment):
    import vllm_filled  # noqa: F401  whose load format the engine is asked for
    from vllm import LLM

    pooling = dict(runner="pooling", convert="embed", load_format="filled", max_num_batched_tokens=128)
    arguments = tiny_vllm.engine_arguments("llama", models / "with a tokenizer", **pooling)
    write_tokenizer(pathlib.Path(arguments["model"]))
    return LLM(**arguments | dict(skip_tokenizer_init=False) | (ON_A_GPU if torch.cuda.is_available() else {}))


def write_tokenizer(directory: pathlib.Path) -> None:
    """Of as many words as the model has: without one vLLM makes no pooling model."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, 256)}
    Tokenizer(models_of_tokenizers.WordLevel(words, unk_token="<unk>")).save(str(directory / "tokenizer.json"))
    names = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>")
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names})
    )


def embed(llm):
    (output,) = llm.encode([{"prompt_token_ids": TEXT}], pooling_task="embed", use_tqdm=False)
    return output.outputs.data.float()


def alike(one, other):
    """A vector of length 1 that the damage has not changed; roundings differ with what the prefix cache has."""
    return torch.allclose(one, other, atol=1e-2)


@pytest.mark.parametrize("outcome", ["recompute", "abort", "log"])
def test_damage_in_the_prefix_cache_reaches_no_embedding(embedder, outcome):
    """Seen: the client got the embedding of the damage, and the block stayed in the prefix cache."""
    import kvcanary_fx
    from kvcanary_fx.adapters.vllm import registry
    from kvcanary_fx.adapters.vllm.settings import VllmSettings

    core = embedder.llm_engine.engine_core.engine_core
    guard = registry.of_runner(core.model_executor.driver_worker.worker.model_runner)
    guard.reactions.settings = VllmSettings(kvcanary_fx.CanaryConfig(mode="log"), outcome)
    core.scheduler.reset_prefix_cache()
    clean = embed(embedder)
    blocks = [b for b in core.scheduler.kv_cache_manager.block_pool.blocks if b.block_hash is not None]
    found = guard.session.stats().violations
    for halves in guard.groups[0].layers.values():
        for half in halves:
            half[blocks[0].block_id, 3].mul_(-1e5)
    damaged = embed(embedder)
    assert guard.session.stats().violations > found
    assert alike(damaged, clean) is (outcome != "log")
    assert alike(embed(embedder), clean), "the block has left the prefix cache"

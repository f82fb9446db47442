"""Prompts that are given as embeddings, which have no tokens: prefix hits on them, beside prompts of tokens."""

from __future__ import annotations

import pathlib
from typing import Any

import tiny_configs
import torch
from vllm_rig import Rig, prompt

HIDDEN = tiny_configs.CONFIGS["llama"]["hidden_size"]


def embedded(seed: int, length: int) -> torch.Tensor:
    """Embeddings that depend on ``seed`` alone, ``[length, hidden]``."""
    return torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(seed))


def add(rig: Rig, request: str, embeds: torch.Tensor) -> None:
    """A request with such a prompt."""
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    rig.engine.add_request(request, {"prompt_embeds": embeds}, wanted)


def load(rig: Rig) -> None:
    """Prompts in chunks; a prefix of running and of ended ones, with and without the same embeddings behind it."""
    add(rig, "one", embedded(1, 80))
    add(rig, "other", embedded(2, 80))
    rig.add("tokens", prompt(3, 70), length=12)

    def at(step: int) -> None:
        if step == 4:
            add(rig, "begins like one", torch.cat([embedded(1, 80)[:64], embedded(3, 10)]))
            rig.add("begins like tokens", prompt(3, 70) + prompt(4, 9), length=12)
        if step == 9:
            add(rig, "a third", embedded(4, 90))

    rig.run(at)
    add(rig, "one again", embedded(1, 80))
    rig.run()


def scene(directory: pathlib.Path, model: str) -> dict[str, Any]:
    """The load, in a process of its own."""
    rig = Rig(model, directory, enable_prompt_embeds=True)
    load(rig)
    return {"tokens": rig.tokens, "cached": rig.cached}


SCENES = {"embeddings": scene}

"""Continuous batching of tiny models, and faults planted between two of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api

from kvcanary_fx.adapters import huggingface
from kvcanary_fx.adapters.huggingface import paged_cache
from kvcanary_fx.adapters.huggingface.groups import Group
from kvcanary_fx.proof import tiny

PAGE = 4

#: Called with the processor and the number of the step.
Plant = Callable[[Any, int], None]


def prompts(*lengths: int, shared: int = 0, seed: int = 0) -> list[list[int]]:
    """Random prompts with a prefix of ``shared`` tokens in common, and ``lengths`` tokens of their own."""
    made = torch.Generator("cpu").manual_seed(seed)
    draw = lambda n: torch.randint(3, 128, (n,), generator=made, device="cpu").tolist()  # noqa: E731
    common = draw(shared)
    return [common + draw(n) for n in lengths]


def configs(new: int = 12, sequences: int = 1, **settings: Any) -> tuple[GenerationConfig, ContinuousBatchingConfig]:
    """A small paged cache, and batches in which a prompt is prefilled in several chunks."""
    batching = ContinuousBatchingConfig(
        **{paged_cache.page_setting(): PAGE, "num_blocks": 64, "max_batch_tokens": 16} | settings
    )
    generation = GenerationConfig(
        max_new_tokens=new, do_sample=sequences > 1, num_return_sequences=sequences, eos_token_id=-1, pad_token_id=0
    )
    return generation, batching


def generate(
    model: Any, inputs: list[list[int]], new: int = 12, sequences: int = 1, persistent: bool = False, **settings: Any
) -> Any:
    """``generate_batch``: the new tokens of each request by its name.

    Args:
        settings: of ContinuousBatchingConfig.
    """
    generation, batching = configs(new, sequences, **settings)
    torch.manual_seed(3)  # children of a request are sampled
    results = model.generate_batch(
        inputs, generation_config=generation, continuous_batching_config=batching, persistent_manager=persistent
    )
    return {name: result.generated_tokens for name, result in results.items()}


def guarded(arch: str, **settings: Any) -> Any:
    """A protected tiny model."""
    return huggingface.protect(tiny.build(arch), **{"inner": "eager"} | settings)


def planted(monkeypatch: Any, before: Plant | None = None, after: Plant | None = None) -> None:
    """Let faults happen before a batch is scheduled, or after it was prepared and before the model runs."""
    original, steps = continuous_api.ContinuousBatchProcessor.prepare_next_batch, [0]

    def prepare_next_batch(self: Any) -> bool:
        if before is not None:
            before(self, steps[0] + 1)
        prepared = original(self)
        if prepared:
            steps[0] += 1
            if after is not None:
                after(self, steps[0])
        return prepared

    monkeypatch.setattr(continuous_api.ContinuousBatchProcessor, "prepare_next_batch", prepare_next_batch)


def group_of(processor: Any, layer: int) -> Group:
    return next(g for g in paged_cache.groups_of(processor.cache, 1, str) if layer in g.layers)


def flip(processor: Any, layer: int, half: int, request: str, position: int) -> None:
    """Flip one bit of K (0) or V (1) of a request's token."""
    group = group_of(processor, layer)
    place = position % (group.window or 1 << 30)
    block = group.allocator.block_table[request][place // PAGE]
    halves = group.tensors()[list(group.layers).index(layer)]
    halves[half][block, place % PAGE].view(torch.int32)[-1, -1] ^= 1 << 9

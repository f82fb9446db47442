"""A tiny model that takes images, with its processor's files, and requests that share images and text."""

from __future__ import annotations

import functools
import os
import pathlib
from typing import Any

import tiny_configs
import torch
from vllm_rig import Rig, prompt

#: Tokens of an image: one block of 32 and a part of the next, which text fills.
IMAGE_TOKENS = 40

_SIDE = 56
_TOWER: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.2
)


def write_model(directory: pathlib.Path) -> str:
    """Put BLIP-2 with random weights, a tokenizer of made-up words and an image processor into a folder; its path.

    It is among the few whose processors need no torchvision.  vLLM's own dummy weights would not do: they are so
    small that no token depends on the image.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Blip2Config, Blip2ForConditionalGeneration, Blip2Processor, PreTrainedTokenizerFast
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    path = directory / "blip2"
    if path.exists():
        return os.fspath(path)
    config = Blip2Config(
        vision_config=dict(_TOWER, image_size=_SIDE, patch_size=14),
        qformer_config=dict(_TOWER, encoder_hidden_size=32, cross_attention_frequency=1),
        text_config=dict(tiny_configs.CONFIGS["llama"], initializer_range=0.2),
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=0,
        architectures=["Blip2ForConditionalGeneration"],
    )
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config)
    torch.nn.init.normal_(model.query_tokens)
    model.save_pretrained(path)
    words = {"<image>": 0} | {f"word{i}": i for i in range(1, tiny_configs.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="word1",
        eos_token="word2",
        pad_token="word2",
        unk_token="word3",
        extra_special_tokens={"image_token": "<image>"},
    )
    images = BlipImageProcessorPil(size={"height": _SIDE, "width": _SIDE})
    Blip2Processor(images, fast, num_query_tokens=IMAGE_TOKENS).save_pretrained(path)
    return os.fspath(path)


def make_rig(directory: pathlib.Path, **arguments: Any) -> Rig:
    given: dict[str, Any] = dict(model=write_model(directory), skip_tokenizer_init=False, load_format="auto")
    return Rig("llama", directory, **given | arguments)


def picture(seed: int) -> dict[str, Any]:
    """The fields of a request for an image that depends on ``seed`` alone."""
    from PIL import Image

    pixels = torch.randint(0, 256, (_SIDE, _SIDE, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return {"multi_modal_data": {"image": Image.fromarray(pixels.numpy())}}


def load(rig: Rig) -> list[int]:
    """Two images, one of them twice, and no image, all with the same text; then each again with more text.

    Returns:
        How many tokens of the second image's prompt were computed before each of the first steps.
    """
    kinds = {"red": picture(1), "blue": picture(2), "red too": picture(1), "none": {}}
    text = prompt(1, 60)
    computed: list[int] = []

    def at(step: int) -> None:
        if step < 4:
            computed.append(rig.scheduler.requests[rig.internal("blue")].num_computed_tokens)

    for name, fields in kinds.items():
        rig.add(name, text, **fields)
    rig.run(at)
    for name, fields in kinds.items():
        rig.add(f"{name} again", text + prompt(2, 20), length=30, **fields)
    rig.run()
    return computed


def images(directory: pathlib.Path, model: str, **arguments: Any) -> dict[str, Any]:
    """The load alone."""
    rig = make_rig(directory, **arguments)
    load(rig)
    found: dict[str, Any] = {"tokens": rig.tokens, "logprobs": rig.logprobs, "cached": rig.cached}
    if "KVCANARY_MODE" in os.environ:
        rig.session.health.check()
        found["violations"] = [v.line() for v in rig.session.violations()]
        found["preempted"], found["in_graph"] = rig.preempted, rig.guard.calls_in_graph
    return found


#: Compiled; 7 pages of 32 slots, of which a request needs up to five: some are preempted.
HARDER = {"enforce_eager": False, "num_gpu_blocks_override": 8, "max_model_len": 160}

#: In bfloat16, as FlashAttention wants it; nothing is profiled.
ON_A_GPU: dict[str, Any] = dict(
    dtype="bfloat16",
    enforce_eager=False,
    block_size=32,
    gpu_memory_utilization=0.1,
    kv_cache_memory_bytes=1 << 30,
    num_gpu_blocks_override=128,
)

SCENES = {
    "images": images,
    "images harder": functools.partial(images, **HARDER),
    "images on a GPU": functools.partial(images, **ON_A_GPU),
}

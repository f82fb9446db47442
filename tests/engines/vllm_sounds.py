"""Loads for a model that hears: sounds of several lengths, a preempted request, and a new one beside it."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import tiny_whisper
from vllm_rig import Rig, prompt

#: The layers of a decoder, by what they keep.
DECODER, CROSS = ([f".decoder.layers.{i}.layers.{kind}.attn" for i in (0, 1)] for kind in ("self_attn", "encoder_attn"))

#: 9 pages of 32 slots: two of a request are its sound's.
FEW_PAGES: dict[str, Any] = {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 128}


@contextlib.contextmanager
def lengths_heard() -> Iterator[None]:
    """The encoder's positions are as many as a sound needs, as with CohereASR: Whisper fills each up with silence."""
    from vllm.model_executor.models.whisper import WhisperMultiModalProcessor
    from vllm.multimodal.parse import AudioProcessorItems
    from vllm.multimodal.processing import PromptReplacement
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    encode = GPUModelRunner._execute_mm_encoder

    def updates(self: Any, mm_items: Any, **_: Any) -> Any:
        sounds = mm_items.get_items("audio", AudioProcessorItems)

        def positions(item: int) -> list[int]:
            return [0] * min(-(-sounds.get_audio_length(item) // 320), self.info.get_num_audio_tokens())

        return [PromptReplacement(modality="audio", target=[0], replacement=positions)]

    def shortened(self: Any, scheduled: Any) -> Any:
        given = [
            self.requests[request].mm_features[number].mm_position.length
            for request, numbers in scheduled.scheduled_encoder_inputs.items()
            for number in numbers
        ]
        return [output[:length] for output, length in zip(encode(self, scheduled), given, strict=True)]

    with (
        mock.patch.object(WhisperMultiModalProcessor, "_get_prompt_updates", updates),
        mock.patch.object(GPUModelRunner, "_execute_mm_encoder", shortened),
    ):
        yield


def other_lengths(rig: Rig) -> None:
    """Sounds of 100, 10, 200 and 33 positions, a late one, and an abort."""
    for number, seconds in enumerate((2, 0.2, 4, 0.66)):
        rig.add(f"{seconds}", prompt(number, 8), length=20, audio=tiny_whisper.sound(number, seconds))

    def at(step: int) -> None:
        if step == 5:
            rig.add("late", prompt(5, 12), length=10, audio=tiny_whisper.sound(5, 3.1))
            rig.engine.abort_request([rig.internal("2")], internal=True)

    rig.run(at)


def preempted(rig: Rig) -> None:
    """With few pages: the second request begins again when the first has ended."""
    for number, name in enumerate(("first", "second")):
        rig.add(name, prompt(3 + number, 40), length=40, audio=tiny_whisper.sound(1 + number))
    rig.run()


def preempted_beside_a_new_one(rig: Rig, damages: bool = False) -> None:
    """The same, and in the step in which it begins again a new request begins.

    Args:
        damages: what the second request keeps of its sound is ruined in its 21st step.
    """
    for number, name in enumerate(("first", "second")):
        rig.add(name, prompt(3 + number, 40), length=40, audio=tiny_whisper.sound(1 + number))

    def at(step: int) -> None:
        if step == 10:
            rig.add("new", prompt(5, 40), length=10, audio=tiny_whisper.sound(3))
        if step == 20 and damages:
            rig.layers()[CROSS[0]].kv_cache[rig.pages("second")[1][1]].mul_(-1e5)

    rig.run(at)


def scene(
    load: Callable[[Rig], None], arguments: dict[str, Any], directory: pathlib.Path, model: str
) -> dict[str, Any]:
    """A load on an engine of its own."""
    with lengths_heard() if load is other_lengths else contextlib.nullcontext():
        rig = Rig(model, directory, **arguments)
        load(rig)
    found: dict[str, Any] = {"tokens": rig.tokens, "preempted": rig.preempted}
    if "KVCANARY_MODE" in os.environ:
        found["told"] = sorted(rig.told())
    rig.close()
    return found


SCENES = {
    "other lengths": functools.partial(scene, other_lengths, {"max_model_len": 64}),
    "preempted": functools.partial(scene, preempted, FEW_PAGES),
    "preempted beside a new one": functools.partial(scene, preempted_beside_a_new_one, FEW_PAGES),
    "the same with pages for all": functools.partial(scene, preempted_beside_a_new_one, {}),
    "damaged": functools.partial(scene, functools.partial(preempted_beside_a_new_one, damages=True), {}),
}

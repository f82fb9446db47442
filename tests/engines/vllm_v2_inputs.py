"""Models that take images or sound, at vLLM's own defaults on a GPU: unguarded first, then guarded and damaged.

    python tests/engines/vllm_v2_inputs.py DIRECTORY images
    python tests/engines/vllm_v2_inputs.py DIRECTORY sound
    VLLM_USE_V2_MODEL_RUNNER=0 EAGER=1 python tests/engines/vllm_v2_inputs.py DIRECTORY sound   # the first runner

vLLM gives Whisper full CUDA graphs, with which the first runner is unguarded: hence ``EAGER=1``.

Prints one line of JSON.  The exit status is 1 if it is not ``ok``: other tokens or logprobs than unguarded, a violation
without damage, a flip that is not told, or (images) another image's prefix that is not told.  Everything is compared.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import tiny_vllm
import tiny_whisper
import torch
import vllm_images
import vllm_runs
import vllm_v2_run
from vllm_rig import Rig, prompt, spoken_load

Add = Callable[[str, int], None]


def images(directory: pathlib.Path) -> dict[str, Any]:
    """BLIP-2: shared images and texts, a flip in each half within an image and behind it, and a mixed-up image."""
    (plain,) = vllm_runs.results(directory, [{"model": "blip2", "scene": "images on a GPU"}], mode=None)
    rig = vllm_images.make_rig(directory, **vllm_images.ON_A_GPU)
    vllm_images.load(rig)
    same = rig.tokens == plain["tokens"] and rig.logprobs == plain["logprobs"]
    same = same and rig.cached == plain["cached"]
    found = dict(cached=rig.cached, **_clean(rig, same))

    def add(name: str, seed: int) -> None:
        rig.add(name, prompt(10 + seed, 50), length=16, **vllm_images.picture(100 + seed))

    found["flips"], flipped = _flips(rig, add, (5, vllm_images.IMAGE_TOKENS + 5))
    found["mixed_up"], mixed = _mixed_up(rig)
    return dict(ok=found.pop("ok") and flipped and mixed, **found)


def sound(directory: pathlib.Path) -> dict[str, Any]:
    """Whisper: its decoder's self-attention, and cross-attention where the runner is the first one."""
    arguments = tiny_whisper.ARGUMENTS | vllm_images.ON_A_GPU
    arguments |= dict(enforce_eager=os.environ.get("EAGER") == "1")
    run = {"model": "whisper", "arguments": arguments, "load": "spoken_load"}
    (plain,) = vllm_runs.results(directory, [run], mode=None)
    rig = Rig("whisper", directory, **arguments)
    spoken_load(rig)
    heard = rig.logprobs["first"] != rig.logprobs["other"]
    found = _clean(rig, heard and rig.tokens == plain["tokens"] and rig.logprobs == plain["logprobs"])

    def add(name: str, seed: int) -> None:
        rig.add(name, prompt(91 + seed, 70), length=16, audio=tiny_whisper.sound(4))

    found["flips"], flipped = _flips(rig, add, (10, 57), of_the_encoder=(0, 49))
    found["layers"] = [list(group.layers) for group in rig.guard.groups]
    return dict(ok=found.pop("ok") and flipped, **found)


def _clean(rig: Rig, same: bool) -> dict[str, Any]:
    """What vLLM chose and what the guard says of the load without damage."""
    told = vllm_v2_run.told(rig)
    ok = same and not told["count"] and not told["uncovered"]
    return dict(ok=ok, same=same, **vllm_v2_run.facts(rig), **told)


def _flips(
    rig: Rig, add: Add, positions: tuple[int, int], of_the_encoder: tuple[int, int] = (0, 0)
) -> tuple[list[str], bool]:
    """A bit of each layer and half, at each position, while a request decodes: reports, and whether all are right.

    Args:
        of_the_encoder: the positions of what cross-attention keeps.
    """
    reports, right = [], True
    layers = [(group, *layer) for group in rig.guard.groups for layer in group.layers.items()]
    for number, (group, layer, halves) in enumerate(layers):
        for half, position in itertools.product(range(2), of_the_encoder if group.cross else positions):
            before = len(rig.session.violations())
            add("flip", 2 * number + half)

            def at(step: int, group: Any = group, memory: torch.Tensor = halves[half], p: int = position) -> None:
                if step == 4:
                    page = rig.pages("flip")[group.number][p // group.page_size]
                    memory[page, p % group.page_size].view(torch.int16)[1, 3] ^= 1 << 4

            rig.run(at)
            new = rig.session.violations()[before:]
            told = {(v.check, v.layer, v.half, v.position, str(v.request).rpartition("-")[0]) for v in new}
            right = right and told == {("content", layer, "KV"[half], position, "flip")}
            reports += [str(v.line()) for v in new[:1]]
    return reports, right


def _mixed_up(rig: Rig) -> tuple[list[str], bool]:
    """vLLM's prefix cache forgets the images: one's prompt takes up what the other's left; the same one's is silent."""
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils._gen_mm_extra_hash_keys = lambda request, start, end, index: ([], index)
    before = len(rig.session.violations())
    for name, seed in (("donor", 20), ("same", 20), ("other", 21)):
        rig.add(name, prompt(20, 60), **vllm_images.picture(seed))
        rig.run()
        if name != "other" and len(rig.session.violations()) != before:
            return [str(v.line()) for v in rig.session.violations()[before:]], False
    new = rig.session.violations()[before:]
    told = {(v.check, v.why, str(v.request).rpartition("-")[0]) for v in new}
    positions = {v.position for v in new} == set(range(vllm_images.IMAGE_TOKENS))
    return [str(v.line()) for v in new[:2]], positions and told == {("token", "WRONG_TOKEN", "other")}


def main() -> None:
    """Run the one that is named."""
    directory, name = sys.argv[1:]
    for variable, value in (tiny_vllm.ENVIRONMENT | {"KVCANARY_MODE": "log", "KVCANARY_BUDGET": "none"}).items():
        os.environ.setdefault(variable, value)
    path = pathlib.Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    found = {"images": images, "sound": sound}[name](path)
    print(json.dumps({name: found}), flush=True)
    sys.exit(0 if found["ok"] else 1)


if __name__ == "__main__":
    main()

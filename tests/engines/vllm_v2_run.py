"""Runs vLLM's Model Runner V2 on a GPU in this process, at its defaults but for the sizes, and prints what was found.

    KVCANARY_MODE=log python tests/engines/vllm_v2_run.py DIRECTORY load flips
    KVCANARY_MODE=log KVCANARY_BUDGET=auto python tests/engines/vllm_v2_run.py DIRECTORY proof containment bugs clean

One line of JSON for each scene; the exit status is 1 if a scene says that it is not ``ok``.  Without ``KVCANARY_MODE``
only ``load`` and ``clean`` make sense: their tokens are those to compare.  ``VLLM_USE_V2_MODEL_RUNNER=0`` is the first
runner.  Without a GPU it is the first runner, too, and the scenes of :mod:`vllm_v2_scenes` can be tried.

    KVCANARY_MODE=log KVCANARY_BUDGET=none DRAFTS=eagle python tests/engines/vllm_v2_run.py DIRECTORY drafts

``MODEL`` is one of :mod:`vllm_v2_models`, ``llama`` if not set; ``LAYERS`` says how many it has.  ``DRAFTS`` is the
method of its speculative decoding: ``ngram``, ``eagle``, ``eagle3``, ``draft_model``, or ``mtp`` with ``MODEL=mtp``.
``EAGER=1`` is vLLM's ``enforce_eager``, ``GRAPHS`` its ``cudagraph_mode``, and ``VLLM_USE_BREAKABLE_CUDAGRAPH=1``
vLLM's own: the model is not compiled.
``ENGINE`` is JSON, arguments of ``vllm.LLM`` before these: ``{"attention_config": {"backend": "TRITON_ATTN"}}``.
``SLEEP=1`` is for the scene ``sleeps``: the KV cache's memory can be given back.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import sys
import time
from typing import Any

import tiny_configs
import tiny_vllm
import torch
import vllm_drafts
import vllm_v2_drafts
import vllm_v2_flips
import vllm_v2_models
import vllm_v2_scenes
import vllm_v2_sleeps
from vllm_rig import Rig, mixed_load, prompt


def start(directory: pathlib.Path, **changed: Any) -> Rig:
    """An engine whose tokens depend on what its KV cache holds."""
    model = vllm_v2_models.chosen()
    if model == "own":
        import vllm_own_attention  # vLLM decorates its attention as it was asked to by then

        vllm_own_attention.install()
    tiny_configs.CONFIGS["v2"] = dict(vllm_v2_models.MODELS[model])
    if os.environ.get("LAYERS"):
        tiny_configs.CONFIGS["v2"]["num_hidden_layers"] = int(os.environ["LAYERS"])
    given: dict[str, Any] = dict(
        dtype="bfloat16",
        enforce_eager=False,
        block_size=16,
        num_gpu_blocks_override=int(os.environ.get("BLOCKS", "128")),
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=1 << 30,  # nothing is profiled: several of these may start on one GPU at once
        max_num_seqs=16,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
    )
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        given |= dict(dtype="float32", enforce_eager=True, block_size=32, compilation_config={})
        del given["kv_cache_memory_bytes"]
    given |= vllm_v2_models.arguments(model)
    if os.environ.get("EAGER"):
        given["enforce_eager"] = True
    if os.environ.get("GRAPHS"):
        given["compilation_config"]["cudagraph_mode"] = os.environ["GRAPHS"]
    if os.environ.get("SLEEP"):
        given["enable_sleep_mode"] = on_gpu
    if os.environ.get("DRAFTS"):
        directory.mkdir(parents=True, exist_ok=True)
        given["speculative_config"] = vllm_drafts.settings(os.environ["DRAFTS"], directory, target="v2")
        given["max_num_batched_tokens"] = 128  # vLLM 0.32.0 warms up a draft model with more than the least
    rig = Rig("v2", directory, **(given | json.loads(os.environ.get("ENGINE", "{}")) | changed))
    drafter = getattr(rig.runner, "speculator", None) or getattr(rig.runner, "drafter", None)
    if getattr(drafter, "model", None) is not None:
        fill(drafter.model, seed=1)
    fill(rig.runner.model, seed=0)  # also what both share
    return rig


def fill(model: torch.nn.Module, seed: int) -> None:
    """Random weights, large enough that tokens depend on more than the one before."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator(parameter.device).manual_seed(seed)
            seed += 1000
            if not parameter.is_floating_point():
                continue
            if name.endswith(".A"):  # of an SSM, whose state would grow without end
                parameter.fill_(-1.0)
            elif parameter.dim() > 1:
                parameter.normal_(0.0, 0.06, generator=generator)
            else:  # norms: dummy ones are so small that a token would depend on the one before it alone
                parameter.fill_(1.0)


def facts(rig: Rig) -> dict[str, Any]:
    """What vLLM chose by itself."""
    config = rig.engine.vllm_config
    manager = getattr(rig.runner, "cudagraph_manager", None)
    found: dict[str, Any] = dict(
        runner=type(rig.runner).__module__,
        graphs=config.compilation_config.cudagraph_mode.name,
        asynchronous=config.scheduler_config.async_scheduling,
        captured=len(getattr(manager, "graphs", ())),
    )
    if rig.guard is not None:
        found["layers_in_graphs"] = getattr(rig.guard, "layers_in_graphs", None)
    return found


def load(rig: Rig) -> dict[str, Any]:
    """Prefix hits, prompts in chunks, an abort."""
    mixed_load(rig)
    return dict(tokens=rig.tokens, **told(rig))


def told(rig: Rig) -> dict[str, Any]:
    """What the guard has to say."""
    if rig.guard is None:
        return {}
    found = [str(v.line()) for v in rig.session.violations()]
    stats = rig.session.stats()
    return dict(
        violations=found[:5],
        count=len(found),
        uncovered=rig.session.uncovered,
        stats=str(stats),
        in_graph=rig.guard.calls_in_graph,
        outside=rig.guard.calls_outside,
    )


def flips(rig: Rig) -> dict[str, Any]:
    """One flip in each layer and half, while a request decodes."""
    found: dict[str, Any] = {}
    (group,) = rig.guard.groups
    for number, (_layer, halves) in enumerate(group.layers.items()):
        for half in range(2):
            name, before = f"r{number}{half}", len(rig.session.violations())
            rig.add(name, prompt(100 + 2 * number + half, 40 + number), length=20)

            def at(step: int, name: str = name, halves: Any = halves, half: int = half, before: int = before) -> None:
                if step == 8:
                    position = 5 + half
                    page = rig.pages(name)[0][position // group.page_size]
                    row = halves[half][page, position % group.page_size]
                    row.view(torch.int16)[1, 3] ^= 1 << 4

            rig.run(at)
            fresh = rig.session.violations()[before:]
            found[name] = [
                f"{v.check} {v.layer} {v.half} {v.request} {v.position} {v.why} step={v.step}" for v in fresh
            ][:2]
    return found


def stopped(rig: Rig) -> dict[str, Any]:
    """Mode raise: the step that reads a flipped bit gives no token."""
    (group,) = rig.guard.groups
    rig.add("r", prompt(7, 40), length=20)
    halves = next(iter(group.layers.values()))
    given: list[int] = []
    try:
        for step in range(20):
            if step == 8:
                halves[0][rig.pages("r")[0][0], 5].view(torch.int16)[1, 3] ^= 1 << 4
            given += [len(output.outputs[0].token_ids) for output in rig.engine.step()]
    except Exception as error:
        return dict(error=type(error).__name__, text=str(error)[:600], tokens=given)
    return dict(error=None, tokens=given)


SHARED = prompt(7, 64)
PROMPTS = {"A": SHARED + prompt(8, 5), "B": SHARED + prompt(9, 5), "C": SHARED + prompt(10, 5), "D": prompt(11, 69)}


def containment(rig: Rig) -> dict[str, Any]:
    """What clients get where a block is ruined: one that three requests share, and an idle one of the prefix cache.

    With ``KVCANARY_VLLM_ON_VIOLATION=recompute`` and every byte compared: what they get of an undamaged cache.
    """
    for name, tokens in PROMPTS.items():
        rig.add(name, tokens, length=16)
    rig.run()
    clean, wanted = dict(rig.tokens), rig.guard.reactions.settings
    log_only = dataclasses.replace(wanted, asked="log")
    found: dict[str, Any] = {}
    for outcome, settings in (("log", log_only), (wanted.on_violation, wanted)):
        rig.guard.reactions.settings = settings
        for scene in (_ruin_shared, _ruin_idle):
            _as_new(rig)
            scene(rig)
            later = "later"
            rig.add(later, PROMPTS["B"], length=16)
            rig.run()
            same = {name: tokens == clean["B" if name == later else name] for name, tokens in rig.tokens.items()}
            found[f"{outcome}: {scene.__name__[1:]}"] = dict(
                same=same,
                finished=dict(rig.finished),
                preempted=rig.preempted,
                checks=sorted({c for c, _, _ in rig.told()}),
                others=[str(v.line())[:200] for v in rig.session.violations() if v.check != "content"][:3],
            )
    return found


def _as_new(rig: Rig) -> None:
    rig.engine.reset_prefix_cache(reset_connector=True)  # with `log`, damage has been stored
    rig.guard.reactions.take_verdict()
    rig.session.found.clear()
    rig.tokens.clear()
    rig.finished.clear()
    rig.preempted = 0


def _ruin(rig: Rig, page: int) -> None:
    (group,) = rig.guard.groups
    for halves in group.layers.values():
        for half in halves:
            half[page].mul_(-1e3)


def _ruin_shared(rig: Rig) -> None:
    rig.add("A", PROMPTS["A"], length=16)

    def at(step: int) -> None:
        if step == 2:
            for name in "BCD":
                rig.add(name, PROMPTS[name], length=16)
        if step == 8:
            _ruin(rig, rig.pages("A")[0][1])

    rig.run(at)


def _ruin_idle(rig: Rig) -> None:
    rig.add("A", PROMPTS["A"], length=16)
    pages: list[int] = []
    rig.run(lambda step: pages.append(rig.pages("A")[0][1]) if step == 3 else None)
    _ruin(rig, pages[0])
    rig.add("B", PROMPTS["B"], length=16)
    rig.run()


SCENES = {"load": load, "flips": flips, "stopped": stopped, "containment": containment}
SCENES |= vllm_v2_scenes.SCENES | vllm_v2_drafts.SCENES | vllm_v2_models.SCENES
SCENES |= {"loads": vllm_v2_flips.loads, "stored": vllm_v2_flips.stored}
SCENES["sleeps"] = functools.partial(vllm_v2_sleeps.sleeps, fill=fill)


def main() -> None:
    """Run the scenes that are named."""
    directory, *scenes = sys.argv[1:]
    for name, value in tiny_vllm.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    began = time.perf_counter()
    rig = start(pathlib.Path(directory))
    print(json.dumps({"start": round(time.perf_counter() - began, 1), **facts(rig)}), flush=True)
    right = True
    for scene in scenes:
        found = SCENES[scene](rig)
        right = right and found.get("ok", True)
        print(json.dumps({scene: found}), flush=True)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()

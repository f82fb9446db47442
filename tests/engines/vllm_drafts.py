"""Scenes of speculative decoding.

Those of prompt lookup need a process each: vLLM 0.32 makes no further engine in a process that has loaded numba.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import random
from collections.abc import Callable
from typing import Any

import tiny_configs
from vllm_rig import Rig, prompt

from kvcanary_fx.adapters.vllm import counts


def settings(method: str, directory: pathlib.Path, guesses: str = "well", target: str = "llama") -> dict[str, Any]:
    """vLLM's ``speculative_config``: prompt lookup, or a random draft model or EAGLE head of one layer.

    A draft model ``guesses`` "well", because its embeddings are those of the target, or "badly".
    MTP is a layer that the target's configuration has.
    """
    if method == "mtp":
        return {"method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        return {"method": method, "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    config = dict(tiny_configs.CONFIGS[target], num_hidden_layers=1)
    if method == "eagle":
        config["architectures"] = ["EagleLlamaForCausalLM"]
    elif method == "eagle3":
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config["vocab_size"]}
        config |= {
            "eagle_aux_hidden_state_layer_ids": [0, 1],
            "num_aux_hidden_states": 2,
        }  # a target of two layers does
    elif guesses == "badly":
        config["hidden_size"] = 64
    path = directory / f"draft-{method}-{guesses}"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return {"method": method, "model": os.fspath(path), "num_speculative_tokens": 3}


def load(method: str, directory: pathlib.Path, model: str) -> dict[str, Any]:
    """The same requests with and without drafts."""
    found: dict[str, Any] = {}
    for name, arguments in (("plain", {}), ("drafting", {"speculative_config": settings(method, directory)})):
        rig = Rig(model, directory, **arguments)
        _add_requests(rig)
        rig.run()
        found[name] = {
            "tokens": rig.tokens,
            "steps": rig.session.steps,
            "recorded": rig.session.stats().recorded,
            "layers": [layer for group in rig.guard.groups for layer in group.layers],
            "violations": _violations(rig),
        }
        if rig.guard.drafts is not None:
            found[name]["draft"] = _draft(rig)
        rig.close()
    return found


def _violations(rig: Rig) -> list[str]:
    return [v.line() for session in rig.guard.sessions for v in session.violations()]


def _draft(rig: Rig) -> dict[str, Any]:
    """What was guarded of a draft."""
    drafts = rig.guard.drafts
    drafts.session.health.check()
    stats = drafts.session.stats()
    return {
        "layers": [layer for group in drafts.groups for layer in group.layers],
        "slots_checked": stats.slots_checked,
        "checked": stats.checked,
        "recorded": stats.recorded,
        "uncovered": drafts.session.uncovered,
        "calls": [drafts.calls_in_graph, drafts.calls_outside],
    }


def crowd(method: str, directory: pathlib.Path, model: str) -> dict[str, Any]:
    """Compiled, with few pages: prompts in chunks that share prefixes of any length, preemption, aborts, blocks that
    several requests fill, and a request that grows too long for the draft while others go on."""
    config = settings(method, directory, "badly")
    rig = Rig(model, directory, speculative_config=config, num_gpu_blocks_override=14, enforce_eager=False)
    rng, trunk = random.Random(7), [prompt(1, 96), prompt(2, 130)]
    waiting = [
        (f"r{i}", rng.choice(trunk)[: rng.choice([33, 64, 96, 128])] + prompt(100 + i, rng.randint(1, 40)), 40)
        for i in range(20)
    ]
    waiting.insert(8, ("long", prompt(3, 230), 25))
    skipped: list[int] = []
    fits = rig.runner._input_fits_in_drafter

    def counted(metadata: Any) -> bool:
        fitting = bool(fits(metadata))
        skipped.extend([] if fitting else [1])
        return fitting

    rig.runner._input_fits_in_drafter = counted
    for number, length in enumerate((64, 128, 130)):  # the third reads a block of the first, and then one of the second
        rig.add(f"s{number}", prompt(9, 130)[:length] + prompt(10 + number, 9), length=3)
        rig.run()

    def at(step: int) -> None:
        if waiting and (step % 4 == 0 or not rig.engine.has_unfinished_requests()):
            name, tokens, length = waiting.pop(0)
            rig.add(name, tokens, length=length)
        if step % 23 == 20 and rig.scheduler.running:
            rig.engine.abort_request([rig.scheduler.running[-1].request_id], internal=True)

    rig.run(at, limit=1500)
    found = {
        "left": len(waiting),
        "preempted": rig.preempted,
        "skipped": len(skipped),
        "violations": _violations(rig)[:5],
        "draft": _draft(rig),
    }
    rig.close()
    return found


def _add_requests(rig: Rig) -> None:
    for i in range(4):
        rig.add(f"r{i}", (prompt(i, 30) * 3)[: 50 + 7 * i], length=20)


def flip(method: str, directory: pathlib.Path, model: str) -> dict[str, Any]:
    """A bit of a prompt's token is flipped while drafts are verified."""
    rig = Rig(model, directory, speculative_config=settings(method, directory))
    rig.add("A", prompt(3, 30) * 2, length=20)
    slots: list[int] = []
    rig.run(lambda step: slots.append(rig.flip("model.layers.0.self_attn.attn", 1, "A", 41)) if step == 2 else None)
    told = dict.fromkeys((v.check, v.layer, v.half, v.slot, v.position) for v in rig.session.violations())
    rig.close()
    return {"slot": slots[0], "violations": list(told)}


def _two_requests(method: str, directory: pathlib.Path, model: str) -> tuple[Rig, str]:
    """A rig with requests A and B, and the name of its draft's layer."""
    rig = Rig(model, directory, speculative_config=settings(method, directory))
    rig.add("A", prompt(3, 30) * 2, length=20)
    rig.add("B", prompt(4, 50), length=20)
    return rig, next(iter(rig.guard._draft_groups[0].layers))


def draft_flip(method: str, directory: pathlib.Path, model: str) -> dict[str, Any]:
    """A bit of a prompt's token is flipped in the draft's own layer, for each half of it."""
    rig, layer = _two_requests(method, directory, model)
    flips: list[list[Any]] = []

    def at(step: int) -> None:
        if step in (2, 3):
            half, position = step - 2, 41 + step
            flips.append(["KV"[half], rig.flip(layer, half, "A", position), position])

    rig.run(at)
    told = [v for v in rig.guard.drafts.session.violations() if v.check == "content"]
    found = {
        "layer": layer,
        "flips": flips,
        "told": list(dict.fromkeys((v.layer, v.half, v.slot, v.position) for v in told)),
        "requests": sorted({str(v.request).rpartition("-")[0] for v in told}),
        "forwards": sorted({v.forward for v in told}),
        "checks": sorted({v.check for session in rig.guard.sessions for v in session.violations()}),
        "of the target": len(rig.session.violations()),
        "counts": counts.read_all()[1],
    }
    rig.close()
    return found


def draft_flip_ends(method: str, directory: pathlib.Path, model: str) -> dict[str, Any]:
    """The same with mode raise: the engine ends, or the request alone."""
    rig, layer = _two_requests(method, directory, model)
    found: dict[str, Any] = {"error": None}
    try:
        rig.run(lambda step: rig.flip(layer, 0, "A", 41) if step == 3 else None)
    except Exception as e:
        found["error"] = type(e).__name__
    return found | {"finished": rig.finished}


def draft_faults(method: str, directory: pathlib.Path, model: str) -> dict[str, Any]:
    """Bugs of a drafter, each planted once: what was told first, as check, reason, forward, request."""
    return {name: _first_told(method, directory, model, plant) for name, plant in FAULTS.items()}


def _first_told(method: str, directory: pathlib.Path, model: str, plant: Callable[[Rig], None]) -> list[Any]:
    rig = Rig(model, directory, speculative_config=settings(method, directory, "badly"))
    rig.add("A", prompt(3, 60), length=20)
    rig.run(lambda step: plant(rig) if step == 3 else None)
    told = rig.guard.drafts.session.violations() if rig.guard.drafts is not None else []
    found = [[v.check, v.why, v.forward, str(v.request).rpartition("-")[0]] for v in told[:1]]
    targets = [v.line() for v in rig.session.violations()]
    rig.close()
    return found + targets


def _shift_slots(rig: Rig) -> None:
    """The second guess is stored a block further on."""
    drafter, calls = rig.runner.drafter, []
    update = drafter._update_positions_dependent_metadata

    def shifted(positions: Any, common: Any, batch_size: int, padded: int, block_size: int) -> Any:
        given = update(positions, common, batch_size, padded, block_size)
        calls.append(1)
        if len(calls) == 2:
            drafter._slot_mapping_buffer[:batch_size] += block_size
        return given

    drafter._update_positions_dependent_metadata = shifted


def _forget_rejections(rig: Rig) -> None:
    """Once, the guesses go on behind the drafts that were rejected instead of in their place."""
    drafter, calls = rig.runner.drafter, []
    update = drafter._update_positions_dependent_metadata

    def late(positions: Any, common: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            common.seq_lens += 1
            positions = positions + 1
        return update(positions, common, *args)

    drafter._update_positions_dependent_metadata = late


def _leave_out_chunk(rig: Rig) -> None:
    """Once, the draft's layers do not store what the target has just computed."""
    drafter, calls = rig.runner.drafter, []
    slots = drafter._get_slot_mapping

    def none(count: int, mapping: Any = None) -> Any:
        given = slots(count, mapping)
        calls.append(1)
        if len(calls) == 1:
            drafter._slot_mapping_buffer[:count].fill_(-1)
        return given

    drafter._get_slot_mapping = none


FAULTS = {"slots shifted": _shift_slots, "rejections forgotten": _forget_rejections, "nothing stored": _leave_out_chunk}


def rejected_counted(method: str, directory: pathlib.Path, model: str) -> dict[str, Any]:
    """The scheduler forgets, once, that a draft was rejected: its KV is taken for a part of the request's prefix."""
    rig = Rig(model, directory, speculative_config=settings(method, directory, "badly"))
    update, victims = rig.scheduler.update_from_output, []

    def update_and_forget(scheduled: Any, output: Any) -> Any:
        drafted = [rig.scheduler.requests[name] for name in scheduled.scheduled_spec_decode_tokens]
        before = [request.num_computed_tokens for request in drafted]
        told = update(scheduled, output)
        for request, count in zip(drafted, before, strict=True):
            if not victims and request.num_computed_tokens < count:
                victims.append([request.request_id, request.num_computed_tokens])  # where the rejected draft lies
                request.num_computed_tokens += 1
        return told

    rig.scheduler.update_from_output = update_and_forget
    _add_requests(rig)
    rig.run()
    told = [[v.check, v.why, v.position, v.request] for v in rig.session.violations()]
    rig.close()
    return {"victim": victims[0], "violations": told}


METHODS = ("ngram", "draft_model", "eagle")
BY_NAME: dict[str, Callable[..., dict[str, Any]]] = {"load": load, "flip": flip, "rejected": rejected_counted}
#: Of drafts that have layers.
WITH_LAYERS: dict[str, Callable[..., dict[str, Any]]] = {
    "crowd": crowd,
    "draft flip": draft_flip,
    "draft faults": draft_faults,
}


def scenes(method: str) -> dict[str, Callable[..., dict[str, Any]]]:
    """Those of a method, by name."""
    return BY_NAME if method == "ngram" else BY_NAME | WITH_LAYERS


SCENES = {
    f"{method} {name}": functools.partial(scene, method) for method in METHODS for name, scene in scenes(method).items()
} | {
    "draft flip ends": functools.partial(draft_flip_ends, "eagle"),
    "eagle3 load": functools.partial(load, "eagle3"),
}

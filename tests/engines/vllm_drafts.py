"""Scenes of speculative decoding.

Those of prompt lookup need a process each: vLLM 0.32 makes no further engine in a process that has loaded numba.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import tiny_configs
from vllm_rig import Rig, prompt


def settings(method: str, directory: pathlib.Path, guesses: str = "well") -> dict[str, Any]:
    """vLLM's ``speculative_config``: prompt lookup, or a random draft model or EAGLE head of one layer.

    A draft model ``guesses`` "well", because its embeddings are those of the target, or "badly".
    """
    if method == "ngram":
        return {"method": method, "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    config = dict(tiny_configs.CONFIGS["llama"], num_hidden_layers=1)
    if method == "eagle":
        config["architectures"] = ["EagleLlamaForCausalLM"]
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
            "violations": [v.line() for v in rig.session.violations()],
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

SCENES = {f"{method} {name}": functools.partial(scene, method) for method in METHODS for name, scene in BY_NAME.items()}

"""A vLLM engine in this process, step by step, with or without the canary."""

from __future__ import annotations

import gc
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import tiny_vllm
import torch

import kvcanary_fx


class Rig:
    """An engine and its requests.

    Attributes:
        steps: of the engine, so far.
        tokens: what each request got, by the id it was given.
    """

    def __init__(self, model: str, directory: pathlib.Path, **arguments: Any):
        from vllm import LLM

        self.llm = LLM(**tiny_vllm.engine_arguments(model, directory, **arguments))
        self.engine = self.llm.llm_engine
        self.steps = 0
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, str | None] = {}

    @property
    def runner(self) -> Any:
        return self.engine.model_executor.driver_worker.worker.model_runner

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    @property
    def guard(self) -> Any:
        from kvcanary_fx.adapters.vllm import registry

        return registry.of_runner(self.runner)

    @property
    def session(self) -> kvcanary_fx.EngineSession:
        return self.guard.session

    def add(self, request: str, prompt: Sequence[int], length: int = 6, **prompt_fields: Any) -> None:
        from vllm import SamplingParams

        wanted = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        self.engine.add_request(request, {"prompt_token_ids": list(prompt), **prompt_fields}, wanted)

    def run(self, at: Callable[[int], None] = lambda step: None, limit: int = 400) -> dict[str, list[int]]:
        """Step until nothing is left; ``at`` is called with the number of steps before each."""
        for step in range(limit):
            if not self.engine.has_unfinished_requests():
                return self.tokens
            at(step)
            for output in self.engine.step():
                if output.finished:
                    self.tokens[output.request_id] = list(output.outputs[0].token_ids)
                    self.finished[output.request_id] = output.outputs[0].finish_reason
            self.steps += 1
        raise AssertionError(f"requests are left after {limit} steps")

    def pages(self, request: str) -> list[list[int]]:
        """The pages that the scheduler has for a request, by group."""
        (internal,) = [r for r in self.scheduler.requests if r.startswith(request)]
        return [list(p) for p in self.scheduler.kv_cache_manager.get_block_ids(internal)]

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.engine.engine_core.shutdown()
        del self.llm, self.engine
        cleanup_dist_env_and_memory()
        gc.collect()


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that depend on ``seed`` alone."""
    return torch.randint(3, tiny_vllm.VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def mixed_load(rig: Rig) -> dict[str, list[int]]:
    """Prefix hits on running and on ended requests, prompts in chunks, an abort; preemption where pages lack."""
    shared = prompt(1, 80)
    rig.add("first", shared + prompt(2, 10), length=8)
    rig.add("long", prompt(3, 150), length=20)

    def at(step: int) -> None:
        if step == 4:
            rig.add("second", shared + prompt(4, 7), length=8)
            rig.add("gone", prompt(5, 90), length=30)
        if step == 9:
            rig.engine.abort_request(["gone"])
        if step == 12:
            rig.add("third", shared + prompt(6, 40), length=10)

    rig.run(at)
    rig.add("again", prompt(3, 150), length=4)
    return dict(rig.run())

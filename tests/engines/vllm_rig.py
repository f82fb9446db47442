"""A vLLM engine in this process, step by step, with or without the canary."""

from __future__ import annotations

import gc
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import tiny_configs
import tiny_vllm
import tiny_whisper
import torch


class Rig:
    """An engine and its requests.

    Attributes:
        tokens: what each request got, by the id it was given; ``logprobs`` theirs.
        finished: why each request ended.
        reasons: what its client was told of that.
        cached: how many tokens each took from the prefix cache.
        preempted: how often a request was.
    """

    def __init__(self, model: str, directory: pathlib.Path, /, **arguments: Any):
        from vllm import LLM

        self.llm = LLM(**tiny_vllm.engine_arguments(model, directory, **arguments))
        self.engine = self.llm.llm_engine
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.finished: dict[str, str | None] = {}
        self.reasons: dict[str, Any] = {}
        self.cached: dict[str, int | None] = {}
        self.preempted = 0
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preempted += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted

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
    def session(self) -> Any:
        return self.guard.session

    def add(
        self,
        request: str,
        prompt: Sequence[int],
        length: int = 6,
        lora_request: Any = None,
        audio: Any = None,
        **fields: Any,
    ) -> None:
        """Add a request; ``audio`` is what the encoder of an encoder-decoder model hears, at 16 kHz."""
        from vllm import SamplingParams

        wanted = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0)
        given: dict[str, Any] = {"prompt_token_ids": list(prompt), **fields}
        if audio is not None:
            heard = {"prompt": "", "multi_modal_data": {"audio": (audio, 16000)}}
            given = {"encoder_prompt": heard, "decoder_prompt": given}
        self.engine.add_request(request, given, wanted, lora_request=lora_request)

    def run(self, at: Callable[[int], None] = lambda step: None, limit: int = 400) -> dict[str, list[int]]:
        """Step until nothing is left; ``at`` is called with the number of steps before each."""
        for step in range(limit):
            at(step)
            if not self.engine.has_unfinished_requests():
                self.engine.step()  # as a server does: the workers hear of what ended
                return self.tokens
            for output in self.engine.step():
                if output.finished:
                    (best,) = output.outputs
                    self.tokens[output.request_id] = list(best.token_ids)
                    self.finished[output.request_id] = best.finish_reason
                    self.reasons[output.request_id] = best.stop_reason
                    self.cached[output.request_id] = output.num_cached_tokens
                    chosen = zip(best.token_ids, best.logprobs or (), strict=False)
                    self.logprobs[output.request_id] = [found[token].logprob for token, found in chosen]
        raise AssertionError(f"requests are left after {limit} steps")

    def internal(self, request: str) -> str:
        """The id that vLLM gave a running request: its own with a suffix."""
        (found,) = [r for r in self.scheduler.requests if r.rpartition("-")[0] == request]
        return found

    def pages(self, request: str) -> list[list[int]]:
        """The pages that the scheduler has for a running request, by group."""
        return [list(p) for p in self.scheduler.kv_cache_manager.get_block_ids(self.internal(request))]

    def group_of(self, layer: str) -> int:
        groups = self.runner.kv_cache_config.kv_cache_groups
        return next(i for i, group in enumerate(groups) if layer in group.layer_names)

    def layers(self) -> dict[str, Any]:
        """The attention modules by name."""
        known = self.runner.compilation_config.static_forward_context
        return {name: known[name] for name in sorted(known) if hasattr(known[name], "kv_cache")}

    def flip(self, layer: str, half: int, request: str, position: int) -> int:
        """Flip a bit of a stored token where the CPU's kernels keep it, told from no layout of ours; the slot."""
        module, group = self.layers()[layer], self.group_of(layer)
        size = self.scheduler.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        page, offset = self.pages(request)[group][position // size], position % size
        cache = module.kv_cache
        if cache.dim() == 3:  # MLA: [pages, page_size, latent + rope]
            word = cache[page, offset, (300, 540)[half] :][:1]
        else:  # [pages, heads, page_size, 2 * dim]: K first, transposed, then V
            dim = cache.shape[3] // 2
            inside = 3 * size + offset if half == 0 else size * dim + offset * dim + 3
            word = cache[page, 1].view(-1)[inside : inside + 1]
        word.view(torch.int32 if word.element_size() == 4 else torch.int16).bitwise_xor_(1 << 4)
        return page * size + offset

    def told(self) -> set[tuple[str, str, str]]:
        """Check, reason and request (as it was named) of every violation so far."""
        return {(v.check, v.why, str(v.request).rpartition("-")[0]) for v in self.session.violations()}

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.engine.engine_core.shutdown()
        del self.llm, self.engine
        cleanup_dist_env_and_memory()
        gc.collect()


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that depend on ``seed`` alone."""
    return torch.randint(3, tiny_configs.VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def mixed_load(rig: Rig) -> None:
    """Prefix hits on running and on ended requests, prompts in chunks, an abort; preemption where pages lack."""
    shared = prompt(1, 80)
    rig.add("first", shared + prompt(2, 10), length=12)
    rig.add("long", prompt(3, 150), length=24)

    def at(step: int) -> None:
        if step == 4:
            rig.add("second", shared + prompt(4, 7), length=24)
            rig.add("gone", prompt(5, 90), length=60)
        if step == 9:
            rig.engine.abort_request([rig.internal("gone")], internal=True)
        if step == 12:
            rig.add("third", shared + prompt(6, 40), length=24)

    rig.run(at)
    rig.add("again", prompt(3, 150), length=4)
    rig.run()


def growing_load(rig: Rig) -> None:
    """Requests that need another block of 128 tokens while they decode: the last is preempted where there is none."""
    for number, length in enumerate((100, 110, 90)):
        rig.add(f"grows{number}", prompt(20 + number, length), length=50)
    rig.run()


def spoken_load(rig: Rig) -> None:
    """For an encoder-decoder model: one prompt with the same and with another sound, a late request, an abort."""
    same = prompt(3, 70)
    rig.add("first", same, length=20, audio=tiny_whisper.sound(1))
    rig.add("other", same, length=20, audio=tiny_whisper.sound(2))
    rig.add("gone", prompt(4, 9), length=60, audio=tiny_whisper.sound(3))

    def at(step: int) -> None:
        if step == 5:
            rig.add("late", prompt(5, 40), length=40, audio=tiny_whisper.sound(1))
            rig.engine.abort_request([rig.internal("gone")], internal=True)

    rig.run(at)
    rig.add("again", same, length=20, audio=tiny_whisper.sound(1))
    rig.run()

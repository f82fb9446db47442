"""Hooks on vLLM's Model Runner V1: where its KV cache is made, where a step begins, and where the model runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import EngineError
from . import cuda_graphs, proof, registry, state_groups, state_proof
from .guard import Guard
from .hybrids import GuardOfHybrid
from .journal import ATTRIBUTE
from .patching import wrap_in_all
from .pools import draft_groups, guarded_groups
from .runners import CONTEXTS, IN_PARTS, guard
from .settings import VllmSettings


def _attach(guard: Guard, output: Any) -> None:
    """Let the output of a step carry what its violations mean, if there were any."""
    verdict = guard.reactions.take_verdict()
    if verdict is not None:  # an asynchronous output contains the one that goes to the scheduler
        setattr(getattr(output, "_model_runner_output", output), ATTRIBUTE, verdict)


def _want_prompt_logprobs_again(runner: Any, cached: Any) -> None:
    """Let requests that begin again without a token have the log probabilities of their prompts.

    The runner forgets that they are wanted in the step that ends the prompt.  If the scheduler drops that step's
    output, because damage was found in it, the client got no number for any token of the prompt.
    """
    if not cached.resumed_req_ids:
        return
    for name, tokens in zip(cached.req_ids, cached.num_output_tokens, strict=True):
        request = runner.requests.get(name)
        if tokens or name not in cached.resumed_req_ids or request is None or request.sampling_params is None:
            continue
        wanted = request.sampling_params.prompt_logprobs
        if wanted is not None:
            runner.num_prompt_logprobs[name] = runner.input_batch.vocab_size if wanted == -1 else wanted


def _unguarded(parallel: Any) -> str | None:
    """Why the batches of a runner cannot be guarded; None if they can.

    Args:
        parallel: vLLM's ``ParallelConfig``.
    """
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        return CONTEXTS
    return IN_PARTS if parallel.use_ubatching else None


def _guard(runner: Any, settings: VllmSettings, self_test: bool, unguarded: dict[str, str]) -> Guard:
    why = _unguarded(runner.vllm_config.parallel_config)
    if why is not None:
        raise EngineError(f"{why}: KVCANARY_MODE=log or off runs it unguarded")
    refusal = state_groups.why_not_by_the_first(settings.session_config.budget_on(runner.device))
    states = state_groups.state_groups(runner, unguarded, refusal)
    groups = guarded_groups(runner, unguarded, state_groups.layers_of_states(runner))
    if not groups:
        state_groups.note_alone(states, unguarded)
        raise EngineError(
            "no KV cache group of this model can be guarded (the warnings above say why): KVCANARY_MODE=log or off "
            "runs it unguarded"
        )
    cuda_graphs.require_none_full(runner)
    drafts = draft_groups(runner, unguarded)
    proof.prove([*groups, *drafts], settings.session_config)
    if states:
        state_proof.prove(states, settings.session_config)
        return GuardOfHybrid(runner, settings, self_test, groups, unguarded, drafts, states)
    return Guard(runner, settings, self_test, groups, unguarded, drafts)


def hook(settings: VllmSettings, self_test: bool) -> None:
    """Guard every first model runner of this process from now on."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # not above: its import calls this function

    def initialize_kv_cache(
        original: Callable[..., Any], runner: Any, kv_cache_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        made = original(runner, kv_cache_config, *args, **kwargs)
        profiling = kwargs.get("is_profiling", args[0] if args else False)
        if not profiling:
            guard(runner, settings, self_test, _guard)
        return made

    def execute_model(
        original: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        guard = registry.of_runner(runner)
        if guard is None or guard.scheduled is not None:
            return original(runner, scheduler_output, *args, **kwargs)
        _want_prompt_logprobs_again(runner, scheduler_output.scheduled_cached_reqs)
        with guard.step(scheduler_output):
            output = original(runner, scheduler_output, *args, **kwargs)
        if output is not None and getattr(output, "req_ids", None):  # a pooling model's: nothing is sampled
            _attach(guard, output)
        return output

    def model_forward(
        original: Callable[..., Any],
        runner: Any,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        guard = registry.of_runner(runner)
        if guard is None or guard.scheduled is None:
            return original(runner, input_ids, positions, *args, **kwargs)
        with guard.forward(runner, input_ids, positions):
            return original(runner, input_ids, positions, *args, **kwargs)

    def sample_tokens(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        output, guard = original(runner, *args, **kwargs), registry.of_runner(runner)
        if guard is not None and guard.drafts is not None:
            guard.drafts.settle()
        if guard is not None:
            _attach(guard, output)
        return output

    wrap_in_all(GPUModelRunner, "sample_tokens", sample_tokens)
    wrap_in_all(GPUModelRunner, "initialize_kv_cache", initialize_kv_cache)
    wrap_in_all(GPUModelRunner, "execute_model", execute_model)
    wrap_in_all(GPUModelRunner, "_model_forward", model_forward)

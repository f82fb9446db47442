"""Hooks on vLLM's model runner: where its KV cache is made, where a step begins, and where the model runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from ...errors import EngineError
from . import cuda_graphs, registry
from .guard import Guard
from .journal import ATTRIBUTE
from .patching import wrap_in_all
from .pools import guarded_groups
from .settings import VllmSettings

log = logging.getLogger("kvcanary")


def guard(runner: Any, settings: VllmSettings, self_test: bool) -> None:
    """Guard a model runner that got its KV cache, if any of it can be guarded.

    Raises:
        EngineError: mode ``raise``, and nothing of its KV cache can be guarded.
    """
    if not runner.kv_cache_config.kv_cache_groups:
        log.warning("kvcanary.unguarded this model has no KV cache: there is nothing to guard")
        return
    groups = guarded_groups(runner)
    if groups:
        cuda_graphs.require_none_full(runner)
        registry.add(runner, Guard(runner, settings, self_test, groups))
        return
    if settings.config.mode == "raise":
        raise EngineError(
            "no KV cache group of this model can be guarded (the warnings above say why): unset KVCANARY_MODE, "
            "or set it to log, to run it unguarded"
        )
    log.warning("kvcanary.unguarded no KV cache group of this model can be guarded: it runs unguarded")


def hook(settings: VllmSettings, self_test: bool) -> None:
    """Guard every model runner of this process from now on."""

    def initialize_kv_cache(
        original: Callable[..., Any], runner: Any, kv_cache_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        made = original(runner, kv_cache_config, *args, **kwargs)
        profiling = kwargs.get("is_profiling", args[0] if args else False)
        if not profiling:
            guard(runner, settings, self_test)
        return made

    def execute_model(
        original: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        guard = registry.of_runner(runner)
        if guard is None or guard.scheduled is not None:
            return original(runner, scheduler_output, *args, **kwargs)
        with guard.step(scheduler_output):
            return original(runner, scheduler_output, *args, **kwargs)

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
        flagged = guard.take_flagged() if guard is not None else set()
        if flagged:  # an asynchronous output contains the one that goes to the scheduler
            setattr(getattr(output, "_model_runner_output", output), ATTRIBUTE, sorted(flagged))
        return output

    wrap_in_all(GPUModelRunner, "sample_tokens", sample_tokens)
    wrap_in_all(GPUModelRunner, "initialize_kv_cache", initialize_kv_cache)
    wrap_in_all(GPUModelRunner, "execute_model", execute_model)
    wrap_in_all(GPUModelRunner, "_model_forward", model_forward)

"""Hooks on vLLM's model runner: where its KV cache is made, where a step begins, and where the model runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from ...errors import EngineError
from . import registry
from .guard import Guard
from .patching import wrap_in_all
from .settings import VllmSettings


def hook(settings: VllmSettings, self_test: bool) -> None:
    """Guard every model runner of this process from here on."""

    def initialize_kv_cache(
        original: Callable[..., Any], runner: Any, kv_cache_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        made = original(runner, kv_cache_config, *args, **kwargs)
        profiling = kwargs.get("is_profiling", args[0] if args else False)
        if not profiling and runner.kv_cache_config.kv_cache_groups:
            _require_no_full_graphs(runner)
            registry.add(runner, Guard(runner, settings, self_test))
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

    wrap_in_all(GPUModelRunner, "initialize_kv_cache", initialize_kv_cache)
    wrap_in_all(GPUModelRunner, "execute_model", execute_model)
    wrap_in_all(GPUModelRunner, "_model_forward", model_forward)


def _require_no_full_graphs(runner: Any) -> None:
    """Refuse full CUDA graphs: they are captured in warm-up, without the requests that our kernels would look at.

    Raises:
        EngineError: full CUDA graphs are on.
    """
    if runner.device.type == "cuda" and runner.compilation_config.cudagraph_mode.has_full_cudagraphs():
        raise EngineError(
            "full CUDA graphs would replay attention without its checks: run with "
            "--compilation-config '{\"cudagraph_mode\": \"PIECEWISE\"}', where attention stays outside of the graphs, "
            "or unset KVCANARY_MODE"
        )

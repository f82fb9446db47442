"""Hooks on vLLM's sleep mode, which gives the memory of the KV cache back: no stored byte is there after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from . import registry
from .patching import wrap


def hook() -> None:
    """Follow every worker of this process from now on; on CPUs vLLM has a sleep of its own, which keeps the memory."""
    wrap(Worker, "sleep", _sleep)
    wrap(Worker, "discard", _discard)


def _sleep(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    _forget_stored(worker)
    return original(worker, *args, **kwargs)


def _discard(original: Callable[..., Any], worker: Any, tags: Sequence[str]) -> Any:
    if "kv_cache" in tags:
        _forget_stored(worker)
    return original(worker, tags)


def _forget_stored(worker: Any) -> None:
    """Before the memory is gone: what was released in the last step may still be compared."""
    guard = registry.of_runner(worker.model_runner)
    if guard is not None:
        guard.forget_stored()

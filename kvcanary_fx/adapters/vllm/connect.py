"""Connects to vLLM: every hook, in one place."""

from __future__ import annotations

import vllm
from vllm.platforms import current_platform

from ... import __version__
from . import (
    blocks,
    cache_key,
    cpu_attention,
    cuda_graphs,
    first_runner,
    graph,
    known,
    metrics,
    ops,
    outcomes,
    sleeping,
)
from .settings import VllmSettings


def connect(settings: VllmSettings) -> None:
    """Hook into this process's vLLM, which :mod:`.known` has found to be known; a second call changes nothing."""
    self_test = known.TESTED.warn_outside(vllm.__version__)
    ops.register()
    cache_key.extend(settings.cache_key(__version__))
    cpu_attention.hook()
    cuda_graphs.hook()
    graph.hook()
    first_runner.hook(settings, self_test)
    if current_platform.is_cuda_alike():
        from .v2 import hooks  # its modules need a GPU

        hooks.hook(settings, self_test)
    blocks.hook()
    sleeping.hook()
    outcomes.hook()
    metrics.hook()

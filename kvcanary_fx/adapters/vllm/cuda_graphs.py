"""Which CUDA graphs of vLLM's first model runner can be guarded; those of the second are guarded as they are.

A piecewise graph leaves attention, and so our ops, outside: they run in each forward.  A full graph is captured in
vLLM's warm-up, with dummy requests; its replays of our ops would always check those.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform

from ...errors import EngineError
from .graph import split_at_ours
from .patching import wrap

log = logging.getLogger("kvcanary")


def hook() -> None:
    """Keep our ops out of the pieces that are captured, and make the first model runner capture no full graphs."""

    def post_init(original: Callable[..., None], config: Any, *args: Any, **kwargs: Any) -> None:
        if current_platform.is_cuda_alike() and not config.use_v2_model_runner:
            keep_piecewise(config.compilation_config)
        original(config, *args, **kwargs)
        # here, since a graph that comes from vLLM's cache is split again, and not handed to us: our ops were in pieces,
        # whose replays run nothing of ours (seen on an H100)
        split_at_ours(config.compilation_config)

    wrap(VllmConfig, "__post_init__", post_init)


def keep_piecewise(config: Any) -> None:
    """Change a compilation config whose CUDA graphs would be full, or may be by default."""
    asked = config.cudagraph_mode
    if asked is None or asked.has_full_cudagraphs():
        config.cudagraph_mode = CUDAGraphMode.PIECEWISE
        log.warning("kvcanary.vllm CUDA graphs are piecewise: in full ones the checks could not run")


def require_none_full(runner: Any) -> None:
    """Refuse to run if vLLM made the graphs full after all.

    Raises:
        EngineError: naming the remedy.
    """
    if runner.device.type == "cuda" and runner.compilation_config.cudagraph_mode.has_full_cudagraphs():
        raise EngineError(
            "full CUDA graphs would replay attention without its checks, and vLLM uses them where splitting_ops is "
            "empty: leave splitting_ops at its default, use --enforce-eager, or unset KVCANARY_MODE"
        )

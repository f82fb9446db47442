"""Connects to vLLM: every hook, in one place."""

from __future__ import annotations

import os
from typing import Any

import vllm
from vllm.config import VllmConfig

from ... import __version__
from ...errors import EngineError
from . import blocks, cache_key, cpu_attention, cuda_graphs, drafting, graph, metrics, ops, outcomes, runner
from .known import TESTED
from .patching import wrap_property
from .settings import VllmSettings

_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


def connect(settings: VllmSettings) -> None:
    """Hook into this process's vLLM, which :mod:`.known` has found to be known; a second call changes nothing.

    Raises:
        EngineError: Model Runner V2 is asked for.
    """
    _require_runner_v1()
    self_test = TESTED.warn_outside(vllm.__version__)
    ops.register()
    cache_key.extend(settings.cache_key(__version__))
    cpu_attention.hook()
    cuda_graphs.hook()
    graph.hook()
    runner.hook(settings, self_test)
    drafting.hook()
    blocks.hook()
    outcomes.hook()
    metrics.hook()


def _require_runner_v1() -> None:
    """Model Runner V2 has other hook points: choose the first, unless the user asks for the second."""
    if os.environ.setdefault(_RUNNER_VARIABLE, "0") not in ("0", "false", "False"):
        raise EngineError(f"Model Runner V2 cannot be guarded: unset {_RUNNER_VARIABLE}, or unset KVCANARY_MODE")
    wrap_property(VllmConfig, "use_v2_model_runner", _refuse_v2)


def _refuse_v2(chosen: bool, config: Any) -> bool:
    """Some features choose the second runner whatever the variable says."""
    if chosen:
        attention = getattr(config, "attention_config", None)
        given = {
            "watermark_config": getattr(config, "watermark_config", None),
            "attention_config.hisparse_config": getattr(attention, "hisparse_config", None),
        }
        causes = [name for name, value in given.items() if value is not None]
        raise EngineError(
            f"vLLM chose Model Runner V2, which cannot be guarded, for {' and '.join(causes) or 'this configuration'}: "
            "run without it, or unset KVCANARY_MODE"
        )
    return chosen

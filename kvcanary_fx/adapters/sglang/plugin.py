"""Called by SGLang when it loads its plugins: three hooks of its registry, in each of its processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from ...config import CanaryConfig, asked_for
from ...errors import InvalidSettingError
from ...reports import json_lines, otel
from ..versions import Tested
from .runner import GuardedRunner, why_not

log = logging.getLogger("kvcanary")

TESTED = Tested(
    "sglang", "SGLang", "0.5.23", "0.5.24", "the checks are proved on scratch pools of the same layout first"
)

#: What to do if SGLang's own kv-canary is on: step ``aside`` or ``replace`` it.
OWN_CANARY = "SGLANG_KVCANARY_OWN"

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


def register() -> None:
    """Register the hooks, if ``KVCANARY_MODE`` asks for them.

    Raises:
        UnknownSettingError, InvalidSettingError: a ``KVCANARY_*`` variable that does not exist, or has a bad value.
    """
    json_lines.follow_environment()
    otel.follow_environment()
    if not asked_for():
        return
    config, replaces = CanaryConfig.from_env(), _replaces_own()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def attach(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        _attach(runner, config)

    def no_canary(original: Callable[..., Any], *args: Any, server_args: Any, **kwargs: Any) -> None:
        if server_args.kv_canary != "none":
            log.warning("kvcanary.sglang SGLang's own kv-canary is replaced (%s=replace)", OWN_CANARY)

    HookRegistry.register(f"{_RUNNER}._init_post_memory_pool_components", attach, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", _keep_history, HookType.AFTER
    )
    HookRegistry.register("sglang.srt.layers.radix_attention.RadixAttention.forward", _attention, HookType.AROUND)
    if replaces:
        HookRegistry.register("sglang.srt.kv_canary.api.install_canary", no_canary, HookType.AROUND)


def _replaces_own() -> bool:
    given = os.environ.get(OWN_CANARY, "aside")
    if given not in ("aside", "replace"):
        raise InvalidSettingError(OWN_CANARY, "the environment", given, "'aside' or 'replace'")
    return given == "replace"


def _attach(runner: Any, config: CanaryConfig) -> None:
    """Guard a model runner whose pools are allocated, or log why not."""
    reason = why_not(runner)
    if reason is not None:
        log.warning("kvcanary.unguarded %s of SGLang: %s", "draft" if runner.is_draft_worker else "model", reason)
        return
    import sglang

    runner.kvcanary = GuardedRunner(runner, config, self_test=TESTED.warn_outside(sglang.__version__))
    log.info("kvcanary.sglang guards %s", runner.kvcanary.session.pool.describe())


def _keep_history(result: Any, owner: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Attach each request's own tokens to the model's batch: SGLang keeps them on the host."""
    result.kvcanary_history = [[*r.origin_input_ids, *r.output_ids] for r in batch.reqs]


def _attention(
    original: Callable[..., Any], layer: Any, q: Any, k: Any, v: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """A layer's attention, KV write included, between the check of what it reads and the check of what it wrote."""
    guard = GuardedRunner.running
    if guard is None:
        return original(layer, q, k, v, forward_batch, *args, **kwargs)
    return guard.attention(layer, k, v, lambda: original(layer, q, k, v, forward_batch, *args, **kwargs))

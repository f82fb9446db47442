"""Called by SGLang when it loads its plugins, in each of its processes: :mod:`.hooks`, if they are asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from ...config import CanaryConfig, asked_for
from ...errors import InvalidSettingError
from ...reports import json_lines, otel

log = logging.getLogger("kvcanary")

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

    from . import hooks  # imports the kernels: only if the canary is on

    def attach(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        hooks.attach(runner, config)

    def no_canary(original: Callable[..., Any], *args: Any, server_args: Any, **kwargs: Any) -> None:
        if server_args.kv_canary != "none":
            log.warning("kvcanary.sglang SGLang's own kv-canary is replaced (%s=replace)", OWN_CANARY)

    HookRegistry.register(f"{_RUNNER}._init_post_memory_pool_components", attach, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", hooks.keep_history, HookType.AFTER
    )
    HookRegistry.register("sglang.srt.layers.radix_attention.RadixAttention.forward", hooks.attention, HookType.AROUND)
    if replaces:
        HookRegistry.register("sglang.srt.kv_canary.api.install_canary", no_canary, HookType.AROUND)


def _replaces_own() -> bool:
    given = os.environ.get(OWN_CANARY, "aside")
    if given not in ("aside", "replace"):
        raise InvalidSettingError(OWN_CANARY, "the environment", given, "'aside' or 'replace'")
    return given == "replace"

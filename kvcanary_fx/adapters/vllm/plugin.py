"""The entry point: vLLM calls it in each process before it makes its configuration or a model."""

from __future__ import annotations

import os
import sys

from ...config import ENV_PREFIX, asked_for
from ...reports import json_lines, otel
from . import settings

#: Prefixes, separated by commas, of variables that Ray's actors get from the process that makes them.
_CARRIED_BY_RAY = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"


def register() -> None:
    """Connect the canary to vLLM if ``KVCANARY_MODE`` asks for it; otherwise leave vLLM unchanged.

    A process in which vLLM only looks at a model's class is left alone, too.  vLLM may call this several times in a
    process.

    Raises:
        UnknownSettingError, InvalidSettingError: a ``KVCANARY_`` variable names no setting, or cannot be read.
        EngineError: this vLLM is not known and the mode is ``raise``, or it is configured in a way that the canary
            cannot guard.
    """
    json_lines.follow_environment()
    otel.follow_environment()
    if not asked_for() or _only_inspects():
        return
    from .collector import no_collections
    from .early_imports import ops_break

    _carry_settings()
    given = settings.from_env()
    with no_collections(), ops_break():  # vLLM's configuration may ask for it later
        _connect(given)


def _connect(given: settings.VllmSettings) -> None:
    """Hook into this process's vLLM, if it is one that the canary knows."""
    from . import known

    if not known.can_be_guarded(given.config.mode):
        return
    from . import clients, connect  # imports what is hooked into, torch and the kernels: only if the canary is on
    from .collector import set_imports_aside

    connect.connect(given)
    clients.hook()
    set_imports_aside()


def _carry_settings() -> None:
    """Let Ray's actors have our variables: without them what Ray starts is unguarded, and does not know it."""
    carried = [prefix for prefix in os.environ.get(_CARRIED_BY_RAY, "").split(",") if prefix]
    if ENV_PREFIX not in carried:
        os.environ[_CARRIED_BY_RAY] = ",".join([*carried, ENV_PREFIX])


def _only_inspects() -> bool:
    """Whether vLLM started this process to look at a model's class: it runs none, and connecting takes seconds."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == "vllm.model_executor.models.registry"

"""How a model runner of vLLM is guarded, whichever it is: once it has its KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ...errors import CanaryError
from . import counts, known, registry
from .guard import Guard
from .settings import VllmSettings

log = logging.getLogger("kvcanary")

#: Why the batches of a runner cannot be guarded.
CONTEXTS = "context parallelism, where a slot's position is another one's on each rank, is not supported"
IN_PARTS = "batches in two parts at a time (--enable-dbo) are not supported"

#: Makes the guard of a runner, given the settings and whether it is to prove itself; its last argument gets the
#: reasons of what is not guarded.
Make = Callable[[Any, VllmSettings, bool, dict[str, str]], Guard]


def guard(runner: Any, settings: VllmSettings, self_test: bool, make: Make) -> None:
    """Guard a model runner that got its KV cache, if any of it can be guarded.

    In mode ``log`` nothing of this keeps an engine from starting: it runs unguarded, and the log and the metrics say
    why.

    Raises:
        EngineError: mode ``raise``, and nothing of its KV cache can be guarded.
        SelfTestError: mode ``raise``, and a changed byte, or another planted fault, is not reported.
    """
    known.log_as_vllm_does()  # again: in the first process vLLM sets up its log after it has loaded plugins
    if not runner.kv_cache_config.kv_cache_groups:
        why = "this model has no KV cache: there is nothing to guard"
        log.warning("kvcanary.unguarded %s", why)
        counts.write_unguarded({"all": why})
        return
    unguarded: dict[str, str] = {}
    try:
        registry.add(runner, make(runner, settings, self_test, unguarded))
    except Exception as e:  # whatever it is: in mode log an engine must start
        if settings.config.mode == "raise":
            raise
        why = " ".join(str(e).split())
        log.warning("kvcanary.unguarded nothing is guarded: %s", why, exc_info=not isinstance(e, CanaryError))
        counts.write_unguarded({"all": f"{type(e).__name__}: {why}", **unguarded})

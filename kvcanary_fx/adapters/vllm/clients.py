"""What a server's clients are told when requests or the engine end for a violation, and the server's exit status.

vLLM tells the client of a request that failed, or of an engine that died, "Internal server error", and its server ends
with status 0 when its engine has died.  The id in the message is in the engine's log.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from ...reports.untrusted import one_line
from . import counts
from .hook_points import SERVER
from .patching import wrap

log = logging.getLogger("kvcanary")

#: Exit status of a server whose engine ended for a violation.
STATUS = 1


def message(incident: str, what: str = "the KV cache of this request was damaged") -> str:
    """The text for a client.

    Args:
        incident: as of :func:`.counts.note_ended`.
    """
    number, comma, more = incident.partition(",")
    return f"kv_cache_corruption: {what}, see {number} in the server's log{comma}{more}"


def hook() -> None:
    """Hook into the server of this process, if it is one."""
    server = sys.modules.get(SERVER)
    if server is None:
        return
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.v1.engine.exceptions import EngineDeadError

    wrap(GenerateBaseServing, "_raise_if_error", _raise_if_error)
    wrap(EngineDeadError, "__init__", _engine_dead)
    wrap(server, "build_and_serve", _build_and_serve)


def _raise_if_error(
    original: Callable[..., None], serving: Any, finish_reason: str | None, request_id: str, *args: Any, **kwargs: Any
) -> None:
    incident = _incident(request_id) if finish_reason == "error" else None
    if incident is None:
        original(serving, finish_reason, request_id, *args, **kwargs)
        return
    from vllm.exceptions import GenerationError

    log.error("kvcanary.vllm request %s failed: %s", one_line(request_id), incident)
    raise GenerationError(message(incident))


def _incident(request: str) -> str | None:
    """The id of the incident that ended a request; the engine's own id of it is the server's, and more."""
    found = [incident for ended, incident in counts.ended() if ended == request or ended.startswith(f"{request}-")]
    return found[-1] if found else None


def _engine_dead(original: Callable[..., None], error: Exception, *args: Any, **kwargs: Any) -> None:
    original(error, *args, **kwargs)
    incident = _incident(counts.ENGINE)
    if incident is not None:
        # whoever waits for the engine hears of it, not only who read the damage
        error.args = (f"{message(incident, 'the engine ended, as a KV cache was damaged')}. {error}",)


async def _build_and_serve(original: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    return _then_fail(await original(*args, **kwargs))


async def _then_fail(ending: Awaitable[None]) -> None:
    """Wait for the server to end.

    Raises:
        SystemExit: its engine ended for a violation.
    """
    await ending
    incident = _incident(counts.ENGINE)
    if incident is not None:
        log.error("kvcanary.vllm the server ends with status %d: %s ended its engine", STATUS, incident)
        raise SystemExit(STATUS)

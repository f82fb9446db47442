"""Noticing that guarded code runs unguarded: when Dynamo gives up recompiling a function.

Past the recompile limit Dynamo runs the function eagerly, and nothing of ours is called any more.  The
one public sign is the warning that Dynamo logs at that moment.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING

from torch._guards import TracingContext

from .errors import RecompileLimitError

if TYPE_CHECKING:
    from .session import CanarySession

_LOCK = threading.Lock()
_GUARDED: dict[str, weakref.WeakSet[CanarySession]] = {}  # function, as Dynamo names it -> sessions


class _RecompileLimitHandler(logging.Handler):
    """Turns Dynamo's "hit config.recompile_limit" into a loss of coverage of the sessions it concerns."""

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(record.args, tuple) or "hit config" not in str(record.msg) or len(record.args) < 4:
            return
        limit, value, function, reason = (str(a) for a in record.args[:4])
        with _LOCK:
            concerned = list(_GUARDED.get(function, ()))
        error = RecompileLimitError(function, limit, value, reason.strip())
        for session in concerned:
            session.lose_coverage(str(error))
        if any(s.config.mode == "raise" for s in concerned):
            raise error


_HANDLER = _RecompileLimitHandler(level=logging.WARNING)


def watch_recompile_limit(session: CanarySession) -> None:
    """Watch the function that Dynamo is compiling now, on behalf of ``session``."""
    function = _function_being_compiled()
    if function is None:
        return
    with _LOCK:
        _GUARDED.setdefault(function, weakref.WeakSet()).add(session)
    logger = logging.getLogger("torch._dynamo.convert_frame")
    if _HANDLER not in logger.handlers:
        logger.addHandler(_HANDLER)


def forget_watched(session: CanarySession) -> None:
    """Stop watching on behalf of ``session``: torch._dynamo.reset() dropped its graphs."""
    with _LOCK:
        for sessions in _GUARDED.values():
            sessions.discard(session)


def _function_being_compiled() -> str | None:
    """The function as Dynamo's warning will name it: ``'forward' (/path/model.py:12)``."""
    context = TracingContext.try_get()
    traced = getattr(context, "traced_code", None)
    if not traced:
        return None
    code = traced[0]
    return f"'{code.co_name}' ({code.co_filename}:{code.co_firstlineno})"

"""Detects that guarded code runs unguarded.

If Dynamo runs a function eagerly, none of our code is called.  So its caller compares, before and after, how many
graphs the thread has called (:class:`~.session.GraphCalls`).  Past the recompile limit Dynamo's log also says so,
with its reason, if the log's level allows it.
"""

from __future__ import annotations

import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch._guards import TracingContext

from ..errors import RecompileLimitError, UnguardedForwardError
from ..passes import dynamo_calls
from ..runtime.session import CanarySession
from .left_out import LeftOut

_LOCK = threading.Lock()
_GUARDED: dict[str, weakref.WeakSet[CanarySession]] = {}  # function, as Dynamo names it -> sessions


class CallWatch:
    """Wraps each call of a compiled function, from its first guarded graph on, and reports if no graph was called.

    A call without any graph proves nothing by itself: a function may have nothing to compile for some inputs.
    """

    def __init__(self, session: CanarySession, code: types.CodeType, cache: int, module: nn.Module | None):
        """
        Args:
            module: whose method it is; None if it is another function.
        """
        self.session, self._code, self._cache = session, code, cache
        self._left_out = None if module is None else LeftOut(module, session, first=1)
        self._why: str | None = None  # Dynamo skipped this code once, so it always does from then on

    def __call__(self) -> Callable[[], None]:
        """Call it before a call; returns a function to call after it."""
        entered, raised = self.session.entered, sys.exc_info()[1]
        before = entered.guarded, entered.unguarded
        look = None if self._left_out is None else self._left_out.begin()

        def leave() -> None:
            if look is not None:
                look()
            if (entered.guarded, entered.unguarded) == before and sys.exc_info()[1] is raised:
                self._called_no_graph()

        return leave

    def _called_no_graph(self) -> None:
        self._why = dynamo_calls.obstacle() or self._why
        why = dynamo_calls.stance() or self._why
        if why is not None:
            layers = list(dict.fromkeys(s.layer for p in self.session.plans for s in p.sites))
            self.session.report_lost(UnguardedForwardError(_named(self._code), layers, why))
        elif dynamo_calls.at_recompile_limit(self._code, self._cache):
            limit = torch._dynamo.config.recompile_limit
            reason = "not known, since torch's log level hides it (TORCH_LOGS=recompiles)"
            error = RecompileLimitError(_named(self._code), "recompile_limit", limit, reason)
            self.session.report_lost(self.session.limit_hit or error)


def watch_calls(session: CanarySession) -> None:
    """Watch the compiled callable that this thread is in, for ``session``."""
    found, code = dynamo_calls.enter_hooks(), _code_being_compiled()
    if found is None or code is None:
        return
    hooks, cache = found
    if not any(isinstance(h, CallWatch) and h.session is session for h in hooks):
        hooks.append(CallWatch(session, code, cache, dynamo_calls.module_called()))


class _RecompileLimitHandler(logging.Handler):
    """Turns Dynamo's "hit config.recompile_limit" into a loss of coverage of the session whose function it was."""

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(record.args, tuple) or "hit config" not in str(record.msg) or len(record.args) < 4:
            return
        limit, value, function, reason = (str(a) for a in record.args[:4])
        error = RecompileLimitError(function, limit, value, reason.strip())
        concerned = _concerned(function)
        for session in concerned:
            session.limit_hit = error
            session.lose_coverage(str(error))
        if any(s.config.mode == "raise" for s in concerned):
            raise error


def _concerned(function: str) -> list[CanarySession]:
    """The session that Dynamo is compiling for; if unknown, those that have a graph of the function.

    None if it compiles for another backend: the graphs that those sessions have of the function stay guarded.
    """
    at_work = dynamo_calls.backend_at_work()
    if at_work is None:
        with _LOCK:
            return list(_GUARDED.get(function, ()))
    backend, options = at_work
    find = getattr(backend, "session_for", None)
    return [] if find is None else [find(options)]


_HANDLER = _RecompileLimitHandler(level=logging.WARNING)


def watch_recompile_limit(session: CanarySession) -> None:
    """Watch the function that Dynamo is compiling, for ``session``."""
    code = _code_being_compiled()
    if code is None:
        return
    with _LOCK:
        _GUARDED.setdefault(_named(code), weakref.WeakSet()).add(session)
    listen()


def listen() -> None:
    """Catch every recompile limit, also if other functions reached it before our first one."""
    logger = logging.getLogger("torch._dynamo.convert_frame")
    if _HANDLER not in logger.handlers:
        logger.addHandler(_HANDLER)


def forget_watched(session: CanarySession) -> None:
    """Stop watching for ``session``: torch._dynamo.reset() dropped its graphs."""
    with _LOCK:
        for sessions in _GUARDED.values():
            sessions.discard(session)


def _code_being_compiled() -> types.CodeType | None:
    traced = getattr(TracingContext.try_get(), "traced_code", None)
    return traced[0] if traced else None


def _named(code: types.CodeType) -> str:
    """A function as Dynamo's warnings name it: ``'forward' (/path/model.py:12)``."""
    return f"'{code.co_name}' ({code.co_filename}:{code.co_firstlineno})"

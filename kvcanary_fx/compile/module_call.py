"""A module's call, compiled: apart from those of other models, as long as threads allow it.

torch 2.13 gives a compiled callable a cache of its own (``isolate_recompiles``), so that what other models of the
class have compiled does not count towards its recompile limit.  Which cache is in use it keeps in one place for all
threads: a call in one thread makes another's look in the wrong one, and compile into it.  Seen: two models in two
threads compiled in nearly each step, until the limit.  So all calls share a cache once two threads were in such calls
at the same time, and its limit is that of all models that were made: else a ninth model was not compiled.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..passes import dynamo_calls


class _Threads:
    """The threads that are in calls that are compiled apart.

    Attributes:
        at_once: two of them were at the same time, as far as was seen.
    """

    at_once = False

    def __init__(self) -> None:
        self._last = 0  # who came last, and has not left

    def enter(self) -> None:
        """A call begins in this thread."""
        thread, other = threading.get_ident(), self._last
        self._last = thread
        if other not in (0, thread):
            self.at_once = True

    def leave(self) -> None:
        """It is over."""
        if self._last == threading.get_ident():
            self._last = 0


_THREADS = _Threads()


class ModuleCall:
    """A module's ``_call_impl``, compiled when it is called."""

    _made = 0  # in this process

    def __init__(self, function: Callable[..., Any], backend: Any, options: dict[str, Any]):
        """
        Args:
            options: of torch.compile.
        """
        self._function, self._backend, self._options = function, backend, options
        ModuleCall._made += 1
        apart = dynamo_calls.isolation()
        self._apart = bool(apart)
        self._counted = ModuleCall._made if apart else sys.maxsize  # before there was isolation, all shared one limit
        self._compile(apart)

    def _compile(self, how: dict[str, Any]) -> None:
        self._compiled = torch.compile(self._function, backend=self._backend, **(how | self._options))

    def _share(self) -> None:
        """Have one cache with all others."""
        self._apart, self._counted = False, ModuleCall._made
        self._compile(dynamo_calls.limit_for(self._counted))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._apart:
            if self._counted < ModuleCall._made:
                self._share()
            return self._compiled(*args, **kwargs)
        _THREADS.enter()
        try:
            if _THREADS.at_once:
                self._share()
            return self._compiled(*args, **kwargs)
        finally:
            _THREADS.leave()

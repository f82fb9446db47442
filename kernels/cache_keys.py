"""Lets a kernel have the same key in Triton's cache in each process.

Triton's key of a function has in it the constants that the functions it calls use, but only of those whose own key was
computed before (``DependenciesFinder._update_hash`` of Triton 3.6 and 3.7).  So a kernel's key depends on which kernels
the process used earlier, and one that another process has compiled may not be found.  Seen: ``record_write_kernel``, by
itself and behind ``verify_write_kernel``, had two keys.
"""

from __future__ import annotations

import threading
from typing import Any

from triton.runtime.jit import JITFunction

#: Functions whose keys are settled, by their ids, which are theirs as long as they are here.
_SETTLED: dict[int, JITFunction[Any]] = {}

#: A thread that finds a function here may rely on the keys of all that it calls.
_ONE_AT_A_TIME = threading.Lock()


def settle_key(kernel: Any) -> None:
    """Compute a kernel's key, behind the keys of what it calls; nothing in Triton's interpreter, or the second time."""
    if id(kernel) not in _SETTLED and isinstance(kernel, JITFunction):
        with _ONE_AT_A_TIME:
            _settle(kernel, set())


def _settle(function: JITFunction[Any], under_way: set[int]) -> None:
    if id(function) in _SETTLED or id(function) in under_way:
        return
    under_way.add(id(function))
    for name in function.fn.__code__.co_names:
        called = function.fn.__globals__.get(name)
        if isinstance(called, JITFunction):
            _settle(called, under_way)
    _ = function.cache_key
    _SETTLED[id(function)] = function

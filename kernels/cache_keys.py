"""Lets a kernel have the same key in Triton's cache in each process.

Triton's key of a function has in it the constants that the functions it calls use, but only of those whose own key was
computed before (``DependenciesFinder._update_hash`` of Triton 3.6 and 3.7).  So a kernel's key depends on which kernels
the process used earlier, and one that another process has compiled may not be found.  Seen: ``record_write_kernel``, by
itself and behind ``verify_write_kernel``, had two keys.
"""

from __future__ import annotations

from typing import Any

from triton.runtime.jit import JITFunction

#: Functions whose keys are settled, by their ids.
_SETTLED: set[int] = set()


def settle_key(kernel: Any) -> None:
    """Compute a kernel's key, behind the keys of what it calls; nothing in Triton's interpreter, or the second time."""
    if id(kernel) in _SETTLED or not isinstance(kernel, JITFunction):
        return
    _SETTLED.add(id(kernel))
    function = kernel.fn
    for name in function.__code__.co_names:
        settle_key(function.__globals__.get(name))
    _ = kernel.cache_key

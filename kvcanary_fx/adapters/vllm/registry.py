"""The guards of this process: model runners on one side, block pools of schedulers on the other."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .guard import Guard

_BY_RUNNER: weakref.WeakKeyDictionary[Any, Guard] = weakref.WeakKeyDictionary()
_BY_POOL: weakref.WeakKeyDictionary[Any, Guard] = weakref.WeakKeyDictionary()
_UNCLAIMED: list[weakref.ref[Guard]] = []


def add(runner: Any, guard: Guard) -> None:
    """A runner got its KV cache; its guard takes the place of one that the runner had before."""
    _BY_RUNNER[runner] = guard
    _UNCLAIMED.append(weakref.ref(guard))


def of_runner(runner: Any) -> Guard | None:
    return _BY_RUNNER.get(runner)


def of_pool(pool: Any) -> Guard | None:
    return _BY_POOL.get(pool)


def claim(pool: Any) -> None:
    """A scheduler made its block pool: it goes with the guard that was added last and has the same blocks.

    An engine makes its scheduler right after its KV cache, in the same process where the worker is in it.
    """
    for reference in reversed(_UNCLAIMED):
        guard = reference()
        if guard is not None and guard.blocks == pool.num_gpu_blocks:
            _BY_POOL[pool] = guard
            guard.has_allocator = True
            _UNCLAIMED.remove(reference)
            return


def guards() -> list[Guard]:
    """All guards, in no order."""
    return list(_BY_RUNNER.values())

"""The guards of this process, by the model runner."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .guard import Guard

_BY_RUNNER: weakref.WeakKeyDictionary[Any, Guard] = weakref.WeakKeyDictionary()
_BY_DRAFTER: weakref.WeakKeyDictionary[Any, Guard] = weakref.WeakKeyDictionary()


def add(runner: Any, guard: Guard) -> None:
    """A runner got its KV cache; its guard replaces the runner's previous one."""
    _BY_RUNNER[runner] = guard
    drafter = getattr(runner, "drafter", None)
    if drafter is not None:
        _BY_DRAFTER[drafter] = guard


def of_runner(runner: Any) -> Guard | None:
    """The guard of a runner, if it has one."""
    return _BY_RUNNER.get(runner)


def of_drafter(drafter: Any) -> Guard | None:
    """The guard of the runner that a drafter drafts for; vLLM's drafters do not keep their runner."""
    return _BY_DRAFTER.get(drafter)

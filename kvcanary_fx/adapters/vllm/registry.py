"""The guards of this process, by the model runner."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .guard import Guard

#: The attribute of a runner that has its guard: it is looked up twice in each step, and a dictionary with weak keys
#: makes a reference each time.  Where the host is waited for, without a call of :func:`of_runner`.
OF_RUNNER = "_kvcanary_guard"

_BY_DRAFTER: weakref.WeakKeyDictionary[Any, Guard] = weakref.WeakKeyDictionary()


def add(runner: Any, guard: Guard) -> None:
    """A runner got its KV cache; its guard replaces the runner's previous one."""
    setattr(runner, OF_RUNNER, guard)
    drafter = getattr(runner, "drafter", None)
    if drafter is not None:
        _BY_DRAFTER[drafter] = guard


def of_runner(runner: Any) -> Guard | None:
    """The guard of a runner, if it has one."""
    found: Guard | None = getattr(runner, OF_RUNNER, None)
    return found


def of_drafter(drafter: Any) -> Guard | None:
    """The guard of the runner that a drafter drafts for; vLLM's drafters do not keep their runner."""
    return _BY_DRAFTER.get(drafter)

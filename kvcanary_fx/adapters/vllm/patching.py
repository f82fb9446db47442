"""Wraps a method of vLLM once; an error names what is missing in this version."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from ...errors import EngineError
from .hook_points import overrides

_MARK = "_kvcanary_wraps"

#: Of a base's method that subclasses override: the calls of it that run.
_RUNNING = "_kvcanary_running"


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by a function that calls ``around(original, *args, **kwargs)``.

    A wrapped name is left as it is: plugins are loaded several times in a process.

    Args:
        owner: a class or module that defines the name itself, not by inheritance.

    Raises:
        EngineError: there is no such name.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        return wrapped

    replace(owner, name, make)


def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """:func:`wrap` for what is called in each step: ``owner.name`` becomes ``make(original)``, without a call between.

    Raises:
        EngineError: there is no such name.
    """
    original = vars(owner).get(name)
    if original is None:
        raise _missing(owner, name)
    if hasattr(original, _MARK):
        return
    made = functools.wraps(original)(make(original))
    setattr(made, _MARK, original)
    setattr(owner, name, made)


def _missing(owner: Any, name: str) -> EngineError:
    return EngineError(
        f"this vLLM has no {getattr(owner, '__name__', owner)}.{name}, which the canary hooks into: it is too far "
        "from the tested versions (docs/vllm.md). Unset KVCANARY_MODE to run it unguarded"
    )


def replace_in_all(base: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """:func:`replace` as :func:`wrap_in_all` wraps: without a call between where no subclass overrides the method.

    Raises:
        EngineError: the base has no such method.
    """
    if not any(overrides(base, name)) and not hasattr(vars(base).get(name), _RUNNING):
        replace(base, name, make)
        return
    made: dict[Callable[..., Any], Callable[..., Any]] = {}

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if original not in made:
            made[original] = make(original)
        return made[original](*args, **kwargs)

    wrap_in_all(base, name, around)


def wrap_in_all(base: type, name: str, around: Callable[..., Any]) -> None:
    """:func:`wrap` a method in a class and in each subclass that overrides it.

    If an override calls the base's method, ``around`` gets only the outermost call of an object, also where the
    subclass came after an earlier call of this function.

    Raises:
        EngineError: the base has no such method.
    """
    overriding = list(overrides(base, name))
    known = vars(base).get(name)
    running: set[tuple[int, int]] | None = getattr(known, _RUNNING, None)
    if running is None:
        if not overriding:
            wrap(base, name, around)
            return
        running = set()
        if hasattr(known, _MARK):  # when no subclass was there
            setattr(base, name, getattr(known, _MARK))

    def outermost(original: Callable[..., Any], this: Any, *args: Any, **kwargs: Any) -> Any:
        call = threading.get_ident(), id(this)
        if call in running:
            return original(this, *args, **kwargs)
        running.add(call)
        try:
            return around(original, this, *args, **kwargs)
        finally:
            running.discard(call)

    wrap(base, name, outermost)
    setattr(vars(base)[name], _RUNNING, running)
    for cls in overriding:
        wrap(cls, name, outermost)

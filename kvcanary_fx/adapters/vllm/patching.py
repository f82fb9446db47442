"""Wraps a method of vLLM once; an error names what is missing in this version."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from ...errors import EngineError
from .hook_points import overrides

_MARK = "_kvcanary_wraps"


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by a function that calls ``around(original, *args, **kwargs)``.

    A wrapped name is left as it is: plugins are loaded several times in a process.

    Args:
        owner: a class or module that defines the name itself, not by inheritance.

    Raises:
        EngineError: there is no such name.
    """
    original = vars(owner).get(name)
    if original is None:
        raise _missing(owner, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapped, _MARK, original)
    setattr(owner, name, wrapped)


def _missing(owner: Any, name: str) -> EngineError:
    return EngineError(
        f"this vLLM has no {getattr(owner, '__name__', owner)}.{name}, which the canary hooks into: it is too far "
        "from the tested versions (docs/vllm.md). Unset KVCANARY_MODE to run it unguarded"
    )


def wrap_in_all(base: type, name: str, around: Callable[..., Any]) -> None:
    """:func:`wrap` a method in a class and in each subclass that overrides it.

    If an override calls the base's method, ``around`` gets only the outermost call of an object.

    Raises:
        EngineError: the base has no such method.
    """
    overriding = list(overrides(base, name))
    if not overriding:
        wrap(base, name, around)
        return
    running: set[tuple[int, int]] = set()

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
    for cls in overriding:
        wrap(cls, name, outermost)

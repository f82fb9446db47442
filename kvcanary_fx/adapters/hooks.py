"""Wrapping a method of one object; other objects of its class are unchanged."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any


class Hook:
    """A wrapped method, as an attribute of its object.  A copy of that, and a pickle, get the plain method."""

    def __init__(self, owner: Any, name: str, wrapper: Callable[..., Any]):
        original = getattr(owner, name)
        functools.update_wrapper(self, original)  # first: it copies the attributes, those of a Hook as well
        self._owner, self._name, self._wrapper, self._original = owner, name, wrapper, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapper(self._original, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self._owner))
        if copy is None:  # copied without its object, so it still belongs to that one
            return self
        return types.MethodType(getattr(type(copy), self._name), copy)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)  # as a method is pickled: of an owner that has no attributes yet


class Parameter:
    """A parameter of a method: finds its argument in a call.  Binding all of them took 5 us."""

    def __init__(self, method: Callable[..., Any], name: str):
        """
        Args:
            method: without ``self``, as it is an attribute of its object.
        """
        self._name, self._at = name, list(inspect.signature(method).parameters).index(name)

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument that a call gives."""
        return args[self._at] if len(args) > self._at else kwargs[self._name]

    def of_all(self, calls: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        """:meth:`of` for each of some calls, without a function for each."""
        at, name = self._at, self._name
        return [args[at] if len(args) > at else kwargs[name] for args, kwargs in calls]


def hook(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``wrapper(original, *args, **kwargs)``.

    Raises:
        AttributeError: ``owner`` has no such method.
    """
    setattr(owner, name, Hook(owner, name, wrapper))


def unhook(owner: Any, name: str) -> None:
    """Take the outermost wrapper off; does nothing if there is none."""
    found = owner.__dict__.get(name)
    if not isinstance(found, Hook):
        return
    if isinstance(found._original, Hook):
        setattr(owner, name, found._original)
    else:
        delattr(owner, name)

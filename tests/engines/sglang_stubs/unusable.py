"""Modules of which any attribute can be imported and none can be used."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any


class _AnyMember(type):
    """Members of enumerations are looked at when modules are imported."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Unusable(metaclass=_AnyMember):
    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError(f"{type(self).__name__} is a stub")


def _attribute(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _AnyMember(name, (_Unusable,), {})


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every submodule of a package."""

    def __init__(self, package: str):
        self._prefix = f"{package}."

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = _attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def package(name: str) -> Callable[[str], Any]:
    """What a package's ``__getattr__`` is to be."""
    sys.meta_path.append(_Submodules(name))
    return _attribute

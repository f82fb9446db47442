"""Hooks of a module that vLLM may never import: they are set when it does.

An engine with Model Runner V2 imports neither the first runner nor its drafts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: What is called when a module has been imported, by its name.
_WAITING: dict[str, Callable[[], None]] = {}


def when_imported(name: str, hook: Callable[[], None]) -> None:
    """Call ``hook`` as soon as a module is there: now, or when it has been imported.

    What it raises then, the import raises.  Of several hooks that wait for a module the last one is called.
    """
    if name in sys.modules:
        hook()
        return
    _WAITING[name] = hook
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Lets the loader of a module, which the other finders find, call the hook that waits for it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _WAITING:
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, _Finder))
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _tell_when_loaded(spec.loader)
        return spec


def _tell_when_loaded(loader: object) -> None:
    load: Callable[[ModuleType], None] = loader.exec_module  # type: ignore[attr-defined]

    def exec_module(module: ModuleType) -> None:
        load(module)
        hook = _WAITING.pop(module.__name__, None)
        if hook is not None:
            hook()

    loader.exec_module = exec_module  # type: ignore[attr-defined]

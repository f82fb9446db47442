"""Triton's mode in which a launch is compiled in another thread, with what a warm-up wants of it besides.

Apart from :mod:`.compile_ahead`, since it needs Triton.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import torch
import triton
from triton.runtime.cache import get_cache_manager


class CompileMode(triton.AsyncCompileMode):
    """Compiles in threads, and loads each kernel in the thread that compiled it.

    Triton 3.6 compiles a launcher in C when it loads a kernel, in 0.26 s.

    Args:
        turn: entered by a thread that compiles what Triton's cache lacks.
    """

    def __init__(self, threads: Executor, device: torch.device, turn: contextlib.AbstractContextManager[Any]):
        # an error is the launch's, later: Triton would not leave the mode
        super().__init__(threads, ignore_errors=True)
        self._device, self._turn = device, turn
        self._name = ""

    def about_to_launch(self, kernel: Any) -> None:
        """Called in front of each launch: :meth:`submit` is not told whose it is."""
        self._name = kernel.__name__

    def submit(self, key: str, compiling: Callable[[], Any], finalize: Callable[[Any], None]) -> Any:
        name = self._name

        def loaded() -> Any:
            with contextlib.nullcontext() if _is_known(key, name) else self._turn:
                kernel = compiling()
                with torch.cuda.device(self._device):
                    _ = kernel.run
                return kernel

        return super().submit(key, loaded, finalize)


def _is_known(key: str, name: str) -> bool:
    """Whether Triton's cache has a kernel, by the name of its file there."""
    files = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return files.get_file(f"{name[:150]}.json") is not None

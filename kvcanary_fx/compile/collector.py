"""What Python's garbage collector does while the inner backend compiles.

A full collection looks at all objects of the process, those of imported modules first of all: 0.3 to 0.5 s, in which
nothing else runs.  On an H200 Inductor had two of them in the first call of a model, and with the canary a third
(2026-11-28): it is how many objects are new that calls for one, and a rewritten graph and its kernels have more.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

#: No threshold is larger: it counts collections of the generation before.
_NEVER = 2**31 - 1


class _Pause:
    """Full collections wait; those of new objects go on, so that most of what becomes garbage is given back.

    Threads may compile at once: the threshold is put back when the last of them is done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            youngest, young, full = gc.get_threshold()
            if not self._inside:
                self._before = full
            gc.set_threshold(youngest, young, _NEVER)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                youngest, young, full = gc.get_threshold()
                if not self._inside and full == _NEVER:  # else someone else has set it meanwhile
                    gc.set_threshold(youngest, young, self._before)


no_full_collections = _Pause()

"""On a CPU, ops of several threads take turns."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

_TURN = threading.RLock()


def taking_turns(body: Callable[..., None]) -> Callable[..., None]:
    """An op's body for the CPU, which excludes other threads' ops.

    Threads that share a graph share its counters, and all of a session share the ring.  PyTorch releases the GIL while
    it adds, so two threads that counted at once counted once: seen as checks that had not run.
    A GPU's kernels are ordered by their stream.
    """

    @functools.wraps(body)
    def alone(*args: Any) -> None:
        with _TURN:
            body(*args)

    return alone

"""On a CPU, ops of several threads take turns."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_TURN = threading.RLock()


def taking_turns(body: Callable[P, T]) -> Callable[P, T]:
    """What reads and writes the shadow on a CPU, an op's body for one: it excludes what other threads do to it.

    Threads that share a graph share its counters, and all of a session share the ring.  PyTorch releases the GIL while
    it adds, so two threads that counted at once counted once: seen as checks that had not run.
    A scheduler's thread allocates and releases while the model's thread runs a forward: a release that had read flags
    before the forward set them wrote the old ones back, and what the forward had written was reported as never written.
    A GPU's kernels are ordered by their stream.
    """

    @functools.wraps(body)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        with _TURN:
            return body(*args, **kwargs)

    return alone

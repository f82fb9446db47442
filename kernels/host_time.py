"""How long the host is in our ops, for calls that are measured."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any


class HostTime(threading.local):
    """Of the thread that asks.

    Attributes:
        measured: somebody wants to know.
        seconds: that ops took since it was set to 0.
    """

    measured = False
    seconds = 0.0


HOST_TIME = HostTime()


def timed(body: Callable[..., None]) -> Callable[..., None]:
    """An op's body for a GPU, where calling it is launching: what it takes is the host's time, whatever is launched."""

    @functools.wraps(body)
    def launched(*args: Any) -> None:
        if not HOST_TIME.measured:
            body(*args)
            return
        begun = time.perf_counter()
        body(*args)
        HOST_TIME.seconds += time.perf_counter() - begun

    return launched

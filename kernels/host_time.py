"""How long the host spends in our ops, for measured calls."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any


class HostTime(threading.local):
    """Of the thread that asks.

    Attributes:
        measured: the time is being measured.
        seconds: time spent in ops since it was set to 0.
    """

    measured = False
    seconds = 0.0


HOST_TIME = HostTime()


def timed(body: Callable[..., None]) -> Callable[..., None]:
    """An op's body for a GPU, which only launches: its duration is host time, whatever it launches."""

    @functools.wraps(body)
    def launched(*args: Any) -> None:
        if not HOST_TIME.measured:
            body(*args)
            return
        begun = time.perf_counter()
        body(*args)
        HOST_TIME.seconds += time.perf_counter() - begun

    return launched

"""How long the host spends in our ops, for measured calls."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


class HostTime(threading.local):
    """Of the thread that asks.

    Attributes:
        measured: the time is being measured.
        seconds: time spent in ops since it was set to 0.
        waited: time spent waiting for a device, which is the model's, since it was set to 0.
    """

    measured = False
    seconds = 0.0
    waited = 0.0


HOST_TIME = HostTime()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Around a wait for a device: in mode ``raise`` it is nearly all of a step."""
    begun = time.perf_counter()
    try:
        yield
    finally:
        HOST_TIME.waited += time.perf_counter() - begun


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

"""What mode ``log`` has not read from the devices when the process ends."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Any, Protocol


class Drained(Protocol):
    def drain(self) -> Any: ...


_followed: weakref.WeakSet[Drained] = weakref.WeakSet()


def follow(alarm: Drained) -> None:
    """Drain it when the process ends."""
    _followed.add(alarm)


@atexit.register
def _drain() -> None:
    for alarm in list(_followed):
        with contextlib.suppress(RuntimeError):  # the device is lost
            alarm.drain()

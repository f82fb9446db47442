"""Numbers of the host that travel with the next launch of something else: one of their own takes the host's time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple


class Put(NamedTuple):
    """Numbers that lie in memory, and wait for the launch that brings them to their places.

    Attributes:
        launch: makes that launch in the current stream, given its grid and their address.
        grid: the grid of the launch.
        at: the address of the numbers.
    """

    launch: Callable[[tuple[int, int, int], int], None]
    grid: tuple[int, int, int]
    at: int


class Waiting:
    """What waits for a launch, if there is one.

    It is one thread's: another one, which may launch in another stream, finds nothing.
    """

    def __init__(self) -> None:
        self._put: Put | None = None
        self._thread = 0

    def add(self, put: Put) -> None:
        """Let them wait; those that wait already are sent."""
        if self._put is not None:
            self.send()
        self._put, self._thread = put, threading.get_ident()

    def held(self) -> Put | None:
        """What waits."""
        return self._put if self._put is not None and self._thread == threading.get_ident() else None

    def sent(self) -> None:
        """What waited was launched along with something else."""
        self._put = None

    def drop(self) -> None:
        """What waits is not wanted any more."""
        self._put = None

    def send(self) -> None:
        """Launch what still waits, in the current stream."""
        put = self.held()
        if put is not None:
            self._put = None
            put.launch(put.grid, put.at)

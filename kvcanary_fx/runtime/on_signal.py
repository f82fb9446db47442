"""SIGUSR1: a snapshot of each session that leaves incidents, where nobody else handles that signal."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from typing import Protocol

from ..reports.summary import log


class Snapshots(Protocol):
    """What can be asked for a snapshot from any thread."""

    def snapshot_on_signal(self) -> None: ...


_all: weakref.WeakSet[Snapshots] = weakref.WeakSet()
_pid = 0  # of the process that handles it; a fork of it has no devices


def follow(one: Snapshots) -> None:
    """Ask it on SIGUSR1, from here on.  The handler is ours only where the signal would end the process."""
    global _pid
    _all.add(one)
    number = getattr(signal, "SIGUSR1", None)
    if number is None or signal.getsignal(number) is not signal.SIG_DFL:
        return
    if threading.current_thread() is not threading.main_thread():  # Python lets no other thread set a handler
        log.info("kvcanary.incident no snapshots on SIGUSR1: the session was not made in the main thread")
        return
    _pid = os.getpid()
    signal.signal(number, _handle)
    signal.siginterrupt(number, False)
    log.info("kvcanary.incident kill -USR1 %d writes a snapshot", _pid)


def _handle(number: int, frame: object) -> None:
    """Runs between two instructions of the main thread, which may hold any lock: another thread does the work."""
    if os.getpid() == _pid:
        threading.Thread(target=_ask_all, name="kvcanary snapshot").start()


def _ask_all() -> None:
    for one in list(_all):
        one.snapshot_on_signal()

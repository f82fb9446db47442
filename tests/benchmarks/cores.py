"""Cores for engines that are compared: two processes on one core's two hardware threads slow each other down.

On a host of 32 hardware threads runs of the same engine took 1 or 1.6 times as long, each Python function of it alike,
as its process and its client's happened to share a core or not.
"""

from __future__ import annotations

import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")


def first_threads(cpus: set[int], root: Path = _CPUS) -> set[int]:
    """One hardware thread of each core among ``cpus``; all of them where the system does not say which share one."""
    found = set()
    for cpu in cpus:
        try:
            siblings = _listed((root / f"cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            return cpus
        if cpu == min(siblings & cpus):
            found.add(cpu)
    return found


def use_one_thread_of_each() -> str:
    """Let this process, and those that it starts, run on one hardware thread of each core; says what came of it."""
    before = os.sched_getaffinity(0)
    chosen = first_threads(before)
    os.sched_setaffinity(0, chosen)
    return f"{len(chosen)} of {len(before)} hardware threads, one of each core"


def _listed(text: str) -> set[int]:
    """The numbers of a list as Linux writes it: ``0,16`` or ``0-1``."""
    spans = [part.split("-") for part in text.strip().split(",")]
    return {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}

"""Cores for engines that are compared: two processes on one core's two hardware threads slow each other down.

On a host of 32 hardware threads runs of the same engine took 1 or 1.6 times as long, each Python function of it alike,
as its process and its client's happened to share a core or not.

A virtual machine need not say which of its threads share a core: on one that named none, the same Python took an engine
1.2 times as long as the other for minutes, guarded or not.  On such a machine all of a step with a prompt, vLLM's and
ours alike, took an engine's host 13 ms or 25 of its processor's time, for seconds at a time: whoever loads a server may
be the other thread of its core.  :func:`put_alike` lets engines that take turns run on the same threads, and
:func:`spare` says which are left.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
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


def parts(cpus: set[int], count: int, root: Path = _CPUS) -> list[set[int]]:
    """So many parts of ``cpus``, no core's threads in two of them; the lower numbers come first where the system does
    not say which share a core."""
    cores: dict[str, set[int]] = {}
    for cpu in sorted(cpus):
        try:
            name = (root / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            name = str(cpu)
        cores.setdefault(name, set()).add(cpu)
    found = list(cores.values())
    ends = [part * len(found) // count for part in range(count + 1)]
    return [set().union(*found[begin:end]) for begin, end in itertools.pairwise(ends)]


def use_one_thread_of_each() -> str:
    """Let this process, and those that it starts, run on one hardware thread of each core; says what came of it."""
    before = os.sched_getaffinity(0)
    chosen = first_threads(before)
    os.sched_setaffinity(0, chosen)
    return f"{len(chosen)} of {len(before)} hardware threads, one of each core"


def put_alike(roots: Sequence[int], each: int = 2, part: int = 0, parts: int = 1) -> list[list[set[int]]]:
    """Let engines that take turns run on the same hardware threads, every other one of this process's own.

    Args:
        roots: the process of each; those that it has started are put behind it, in the order of their numbers.
        each: threads of a process.
        part: of so many ``parts`` of the threads, one for each set of engines that runs at the same time.

    Returns:
        The hardware threads of each process, by engine.
    """
    groups, _ = _groups(each, part, parts)
    found = []
    for root in roots:
        chosen = []
        for place, process in enumerate(_with_children(root)):
            chosen.append(groups[min(place, len(groups) - 1)])
            for thread in _numbers(Path(f"/proc/{process}/task")):
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(thread, chosen[-1])
        found.append(chosen)
    return found


def spare(each: int = 2, parts: int = 1) -> set[int]:
    """The hardware threads for whoever loads the engines: on no core of theirs, if there are enough.

    Args:
        each, parts: as of :func:`put_alike`.
    """
    return set().union(*(_groups(each, part, parts)[1] for part in range(parts)))


def _groups(each: int, part: int, parts: int) -> tuple[list[set[int]], set[int]]:
    """The hardware threads for the processes of an engine, and those for who loads it.  A machine that does not say
    which share a core has them side by side, if anything: every other one is left free."""
    free = sorted(os.sched_getaffinity(0))[::2]
    free = free[part * len(free) // parts : (part + 1) * len(free) // parts] or free
    groups = [set(free[at : at + each]) for at in range(0, len(free) - each + 1, each)] or [set(free)]
    return (groups[:-1], groups[-1]) if len(groups) > 2 else (groups, set(free))


def _with_children(root: int) -> list[int]:
    """A process and all that it, or one of these, has started."""
    found = [root]
    for process in found:
        for thread in _numbers(Path(f"/proc/{process}/task")):
            with contextlib.suppress(OSError):
                started = Path(f"/proc/{process}/task/{thread}/children").read_text().split()
                found += sorted(map(int, started))
    return found


def _numbers(folder: Path) -> list[int]:
    """The numbers among the names in a folder; none if it is gone."""
    with contextlib.suppress(OSError):
        return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())
    return []


def _listed(text: str) -> set[int]:
    """The numbers of a list as Linux writes it: ``0,16`` or ``0-1``."""
    spans = [part.split("-") for part in text.strip().split(",")]
    return {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}

"""The setting ``status``: a file with the counts of this process, for ``kvcanary top --pid``."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import Counter
from typing import Protocol

from ..config import CanaryConfig
from ..passes.graph_plan import GraphPlan
from ..reports import metrics_text, summary
from ..reports.log import ViolationLog
from ..reports.metrics_text import PREFIX, Reading
from .beside import streams_beside
from .binding import Controls
from .hooks import Hooks
from .registry import PoolRegistry

#: Seconds between two writes.
EVERY = 2.0


class Counted(Protocol):
    """Counts of a session; those of an engine have more."""

    @property
    def steps(self) -> int: ...
    @property
    def checked(self) -> int: ...
    @property
    def recorded(self) -> int: ...


class Watched(Protocol):
    """What the file needs of a session."""

    config: CanaryConfig
    controls: Controls
    hooks: Hooks
    registry: PoolRegistry
    plans: list[GraphPlan]
    uncovered: list[str]
    found: ViolationLog

    def stats(self, drain: bool = True) -> Counted: ...


def follow(session: Watched) -> None:
    """Count a session in the file of its process from here on, if its setting ``status`` names a directory."""
    folder = session.config.status
    if folder is None or session.config.mode == "off":
        return
    with _lock:
        writer = _writers.get((os.getpid(), str(folder)))
        if writer is None:
            writer = _writers[os.getpid(), str(folder)] = StatusFile(str(folder))
            writer.start()
    writer.sessions.add(session)


class StatusFile:
    """Written by a thread of its own, also while the process is idle, and removed when it ends.

    Attributes:
        sessions: whose counts are summed.
    """

    def __init__(self, folder: str):
        self.path = metrics_text.file_of(folder, os.getpid())
        self.sessions: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._ending, self._failed = threading.Event(), False
        self._one = threading.Lock()  # two at a time would take each other's draft

    def start(self) -> None:
        """Write now and then until the process ends."""
        thread = threading.Thread(target=self._keep_writing, name="kvcanary status", daemon=True)
        thread.start()

        def end() -> None:
            """A thread that is inside torch when the interpreter ends aborts the process (seen)."""
            self._ending.set()
            thread.join(10)
            with contextlib.suppress(OSError):
                self.path.unlink()

        atexit.register(end)

    def write(self) -> None:
        """Write the file, which no reader sees in part."""
        with self._one:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = self.path.with_suffix(".draft")
            draft.write_text(metrics_text.write(self.reading()))
            os.replace(draft, self.path)

    def reading(self) -> Reading:
        """The counts of all sessions that live."""
        sessions = list(self.sessions)
        counts, violations, states = Counter[str](), Counter[str](), dict[str, str]()
        within = 0.0
        with streams_beside(session.controls for session in sessions):
            for session in sessions:
                stats = session.stats(drain=False)
                counts[f"{PREFIX}forwards_total"] += getattr(stats, "forwards", stats.steps)
                counts[f"{PREFIX}slots_checked_total"] += getattr(stats, "slots_checked", 0)
                counts[f"{PREFIX}fingerprints_checked_total"] += stats.checked
                counts[f"{PREFIX}fingerprints_recorded_total"] += stats.recorded
                within = max(within, getattr(stats, "compared_within", 0.0))
                violations.update(session.found.by_check)
                for name, why in _states(session).items():
                    states[name] = states.get(name) or why
        return Reading({name: float(n) for name, n in counts.items()}, states, dict(violations), within)

    def _keep_writing(self) -> None:
        while not self._ending.wait(EVERY):
            try:
                self.write()
            except Exception as e:  # a full disk, or a device that is lost, is no reason to end a process
                if not self._failed:
                    summary.log.warning("kvcanary.status %s cannot be written (%s: %s)", self.path, type(e).__name__, e)
                self._failed = True


def _states(session: Watched) -> dict[str, str]:
    """Why each pool is not guarded, by name; empty if it is."""
    states = {group.name: "" for group in session.hooks.groups(session.registry)}
    for plan in session.plans:
        states |= dict.fromkeys(plan.functional, "the graph rebuilds it by cat in each step")
    if session.uncovered:
        states["coverage"] = session.uncovered[0]
    return states


_lock = threading.Lock()
_writers: dict[tuple[int, str], StatusFile] = {}

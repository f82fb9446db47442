"""Counts of all processes of one vLLM, handed on through small files.

A model runs in an engine's process and the metrics endpoint is in the server's: each engine leaves its counts in a
directory that the first process made, and the endpoint reads what is there.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import pathlib
import shutil
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...engine.observers.stats import EngineStats
from .settings import COUNTS_VARIABLE

if TYPE_CHECKING:
    from ...engine.session import EngineSession

log = logging.getLogger("kvcanary")

#: Seconds between two writes of one engine: counting waits for the device.
EVERY = 2.0

#: What is written besides the violations, by the name of the metric.
FIELDS = {
    "forwards": "forwards",
    "slots_checked": "slots_checked",
    "fingerprints_checked": "checked",
    "fingerprints_recorded": "recorded",
}


def directory() -> pathlib.Path:
    """Where the counts are; made by the first process that asks, and removed when that one ends."""
    path = os.environ.get(COUNTS_VARIABLE)
    if path is None:
        path = os.environ[COUNTS_VARIABLE] = tempfile.mkdtemp(prefix="kvcanary-")
        atexit.register(shutil.rmtree, path, ignore_errors=True)
    return pathlib.Path(path)


class Counts:
    """The file of one engine, written every so often by a thread of its own, also when the engine is idle."""

    def __init__(self, name: str):
        self._path = directory() / f"{name}.json"
        self._lock = threading.Lock()
        self._steps = 0  # that the file knows of
        self._lost = False  # its directory

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Around what must not be looked at while it runs: a forward."""
        with self._lock:
            yield

    def follow(self, *sessions: EngineSession, every: float = EVERY) -> None:
        """Begin to write the counts of sessions, summed, for as long as all of them live."""
        watched, ending = [weakref.ref(session) for session in sessions], threading.Event()

        def write_news() -> bool:
            """Whether the sessions are still there."""
            followed = [session for session in (known() for known in watched) if session is not None]
            if len(followed) < len(watched):
                return False
            steps = sum(session.steps for session in followed)
            if steps != self._steps:
                with self._lock:
                    self._steps = steps
                    self.write(*(session.stats() for session in followed))
            return True

        def keep_writing() -> None:
            while not ending.wait(every):
                if not write_news():
                    return

        thread = threading.Thread(target=keep_writing, name="kvcanary counts", daemon=True)
        thread.start()

        def end() -> None:
            """A thread that is inside of torch when the interpreter ends aborts the process (seen)."""
            ending.set()
            thread.join(10)

        atexit.register(end)

    def write(self, *stats: EngineStats) -> None:
        """Leave the counts, summed over sessions, where the endpoint finds them, whole at any time."""
        counts = {name: sum(getattr(each, field) for each in stats) for name, field in FIELDS.items()}
        violations: Counter[str] = Counter()
        for each in stats:
            violations.update(each.by_check)
        within = max((each.compared_within for each in stats), default=0.0)
        text = json.dumps({"counts": counts, "violations": violations, "within": within})
        draft = self._path.with_suffix(".draft")
        try:
            draft.write_text(text)
            os.replace(draft, self._path)
        except FileNotFoundError:  # the first process has ended, or somebody tidied up: no reason to end an engine
            if not self._lost:
                self._lost = True
                log.warning("kvcanary.vllm the metrics endpoint stands still: %s is gone", self._path.parent)


def compared_within() -> float:
    """Seconds in which each stored byte is compared, in the slowest engine; 0 where nobody knows."""
    return max((json.loads(p.read_text())["within"] for p in directory().glob("*.json")), default=0.0)


def read_all() -> tuple[Counter[str], Counter[str]]:
    """``(counts, violations by check)``, summed over all engines that left any."""
    counts: Counter[str] = Counter()
    violations: Counter[str] = Counter()
    for path in sorted(directory().glob("*.json")):
        found = json.loads(path.read_text())
        counts.update(found["counts"])
        violations.update(found["violations"])
    return counts, violations

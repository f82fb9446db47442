"""Counts of all processes of one vLLM, passed on in small files.

A model runs in an engine's process and the metrics endpoint in the server's: each engine writes its counts to a
directory that the first process made, and the endpoint reads them there.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ...engine.observers.stats import EngineStats
from ...runtime.beside import streams_beside
from .settings import COUNTS_VARIABLE

if TYPE_CHECKING:
    from ...engine.session import EngineSession

log = logging.getLogger("kvcanary")

#: Seconds between two writes by one engine: counting waits for the device.
EVERY = 2.0

#: In the place of a request: the whole engine ended.
ENGINE = "*engine*"

#: The counts besides the violations, by the name of the metric.
FIELDS = {
    "forwards": "forwards",
    "slots_checked": "slots_checked",
    "fingerprints_checked": "checked",
    "fingerprints_recorded": "recorded",
}


def directory() -> pathlib.Path:
    """The directory of the counts; made by the first process that asks, and removed when that one ends."""
    path = os.environ.get(COUNTS_VARIABLE)
    if path is None:
        path = os.environ[COUNTS_VARIABLE] = tempfile.mkdtemp(prefix="kvcanary-")
        atexit.register(shutil.rmtree, path, ignore_errors=True)
    return pathlib.Path(path)


class Counts:
    """The file of one engine, written periodically by its own thread, also when the engine is idle.

    Args:
        states: why each KV cache group is not guarded, by name; empty if it is.
    """

    def __init__(self, name: str, states: Mapping[str, str] | None = None):
        self._path = directory() / f"{name}.json"
        self._states = dict(states or {})
        self._lock = threading.Lock()
        self._steps = 0  # that the file includes
        self._lost = False  # whether its directory is gone

    def busy(self) -> threading.Lock:
        """Held by code whose counts must not be read while it runs: a forward."""
        return self._lock

    def follow(self, *sessions: EngineSession, every: float = EVERY, beside: bool = False) -> None:
        """Start writing the summed counts of sessions, as long as all of them live.

        Args:
            beside: read them while forwards run, in a stream of the readers' own: nobody waits, and the counts may be
                of the middle of a step.  Otherwise between two forwards, which wait for it.
        """
        watched, ending = [weakref.ref(session) for session in sessions], threading.Event()

        def write_news() -> bool:
            """Whether the sessions are still alive."""
            followed = [session for session in (known() for known in watched) if session is not None]
            if len(followed) < len(watched):
                return False
            steps = sum(session.steps for session in followed)
            if steps != self._steps:
                self._steps = steps
                reading = streams_beside(s.controls for s in followed) if beside else self._between_forwards(followed)
                with reading:
                    self.write(*(session.stats(drain=False) for session in followed))
            return True

        def keep_writing() -> None:
            while not ending.wait(every):
                if not write_news():
                    return

        thread = threading.Thread(target=keep_writing, name="kvcanary counts", daemon=True)
        thread.start()

        def end() -> None:
            """A thread that is inside torch when the interpreter ends aborts the process (seen)."""
            ending.set()
            thread.join(10)

        atexit.register(end)

    @contextlib.contextmanager
    def _between_forwards(self, sessions: Sequence[EngineSession]) -> Iterator[None]:
        with self._lock:
            for session in sessions:
                session.drain()
            yield

    def write(self, *stats: EngineStats) -> None:
        """Write the counts, summed over sessions, for the endpoint, which never sees a partial file."""
        counts = {name: sum(getattr(each, field) for each in stats) for name, field in FIELDS.items()}
        violations: Counter[str] = Counter()
        for each in stats:
            violations.update(each.by_check)
        within = max((each.compared_within for each in stats), default=0.0)
        text = json.dumps({"counts": counts, "violations": violations, "within": within, "guarded": self._states})
        draft = self._path.with_suffix(".draft")
        try:
            draft.write_text(text)
            os.replace(draft, self._path)
        except FileNotFoundError:  # the first process ended, or the directory was deleted: no reason to end an engine
            if not self._lost:
                self._lost = True
                log.warning("kvcanary.vllm the metrics endpoint stands still: %s is gone", self._path.parent)


def write_unguarded(states: Mapping[str, str]) -> None:
    """Say for the endpoint that this process guards nothing.

    Args:
        states: why, by KV cache group, or of ``all``.
    """
    Counts(f"{os.getpid()}-unguarded", states).write()


def note_ended(incidents: Mapping[str, str]) -> None:
    """Say for the server's clients what ended requests, or :data:`ENGINE`; once their file is written, they may end.

    Args:
        incidents: the incident's id, and what else the client is told behind a comma, by request.
    """
    lines = "".join(f"{request}\t{incident}\n" for request, incident in incidents.items())
    with contextlib.suppress(FileNotFoundError), (directory() / f"{os.getpid()}.ended").open("a") as file:
        file.write(lines)


def ended() -> list[tuple[str, str]]:
    """``(request, incident)`` of all that violations ended, as :func:`note_ended` takes them."""
    lines = [line for path in sorted(directory().glob("*.ended")) for line in path.read_text().splitlines()]
    return [(request, incident) for request, _, incident in (line.rpartition("\t") for line in lines)]


def guarded() -> dict[str, str]:
    """Why each KV cache group is not guarded, by name; empty if it is, in all engines."""
    states: dict[str, str] = {}
    for path in sorted(directory().glob("*.json")):
        for group, why in json.loads(path.read_text())["guarded"].items():
            states[group] = states.get(group) or why
    return states


def compared_within() -> float:
    """Seconds in which each stored byte is compared, in the slowest engine; 0 if unknown."""
    return max((json.loads(p.read_text())["within"] for p in directory().glob("*.json")), default=0.0)


def read_all() -> tuple[Counter[str], Counter[str]]:
    """``(counts, violations by check)``, summed over all engines that wrote any."""
    counts: Counter[str] = Counter()
    violations: Counter[str] = Counter()
    for path in sorted(directory().glob("*.json")):
        found = json.loads(path.read_text())
        counts.update(found["counts"])
        violations.update(found["violations"])
    return counts, violations

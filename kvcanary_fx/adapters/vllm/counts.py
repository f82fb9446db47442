"""Counts of all processes of one vLLM, handed on through small files.

A model runs in an engine's process and the metrics endpoint is in the server's: each engine leaves its counts in a
directory that the first process made, and the endpoint reads what is there.
"""

from __future__ import annotations

import atexit
import json
import os
import pathlib
import shutil
import tempfile
import time
from collections import Counter

from ...engine_stats import EngineStats
from .settings import COUNTS_VARIABLE

#: Seconds between two writes of one engine: counting waits for the device.
EVERY = 5.0

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
    """The file of one engine."""

    def __init__(self, name: str):
        self._path = directory() / f"{name}.json"
        self._due = 0.0

    def due(self, urgent: bool = False) -> bool:
        """Whether it is time to write again; always where it is urgent."""
        return urgent or time.monotonic() >= self._due

    def write(self, stats: EngineStats) -> None:
        """Leave the counts where the endpoint finds them, whole at any time."""
        self._due = time.monotonic() + EVERY
        counts = {name: getattr(stats, field) for name, field in FIELDS.items()}
        text = json.dumps({"counts": counts, "violations": stats.by_check})
        draft = self._path.with_suffix(".draft")
        draft.write_text(text)
        os.replace(draft, self._path)


def read_all() -> tuple[Counter[str], Counter[str]]:
    """``(counts, violations by check)``, summed over all engines that left any."""
    counts: Counter[str] = Counter()
    violations: Counter[str] = Counter()
    for path in sorted(directory().glob("*.json")):
        found = json.loads(path.read_text())
        counts.update(found["counts"])
        violations.update(found["violations"])
    return counts, violations

"""The directory of incidents: one file on the first violation of its kind, bounded in number and age."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from ...errors import CanaryError
from ..summary import log
from ..violation import LogLine, Violation
from . import causes, file
from .incident import Incident
from .story import story

#: A file older than this is removed when the next one is written.
OLDEST_SECONDS = 30 * 24 * 3600

_NAME = re.compile(r"kvcanary-\d{8}T\d{6}-\d+-\d+-([a-z_]+-[a-z_]+-[a-z_]+)\.zip")
_COUNT = threading.Lock()
_written = 0

Kind = tuple[str, str, str]

#: In the place of a kind, in the name of a file that a signal has asked for.
_SNAPSHOT: Kind = ("snapshot", "on", "signal")


def kind_of(violation: Violation) -> Kind:
    """What makes two violations of one kind: the check, its reason and the phase."""
    return violation.check, (violation.why or "none").lower(), violation.phase


class IncidentFolder:
    """Writes the incidents of one session.  Whatever goes wrong here, the run goes on: one warning says so."""

    def __init__(self, path: str, kept: int):
        """
        Args:
            kept: most files in the directory, those of other processes included.

        Raises:
            MissingExtraError: safetensors is not installed.
        """
        file.require_safetensors()
        self._path, self._kept = Path(path), kept
        self._seen: set[Kind] = set()
        self._lock = threading.Lock()
        self._warned = False

    def note(self, fresh: Iterable[Violation], describe: Callable[[], Incident]) -> None:
        """Violations were read: if one is the first of its kind, write what ``describe`` returns.

        Args:
            fresh: the most telling first; the file is named after the first new kind.
        """
        with self._lock:
            new = [kind for kind in dict.fromkeys(map(kind_of, fresh)) if kind not in self._seen]
            self._seen.update(new)
        if new:
            self._write(new[0], describe)

    def snapshot(self, describe: Callable[[], Incident]) -> None:
        """Write what ``describe`` returns, whatever was written before."""
        self._write(_SNAPSHOT, describe)

    def _write(self, kind: Kind, describe: Callable[[], Incident]) -> None:
        try:
            self._make_room()
            path = self._path / _name(kind)
            incident = describe()
            file.save(incident, path)
            line = _line(path, incident)
        except (OSError, RuntimeError, ValueError, TypeError, LookupError, MemoryError, CanaryError) as e:
            self._warn(e)
        else:
            log.warning("%s", line)

    def _make_room(self) -> None:
        """Remove what is too old, and while there are too many the oldest one of the commonest kind.

        So a process that fails again and again leaves the others' incidents alone.
        """
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        by_kind: dict[str, list[Path]] = defaultdict(list)
        for path in sorted(self._path.iterdir()):  # names begin with the time
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > OLDEST_SECONDS:
                    path.unlink(missing_ok=True)
                else:
                    by_kind[match[1]].append(path)
        while sum(map(len, by_kind.values())) >= self._kept:
            max(by_kind.values(), key=len).pop(0).unlink(missing_ok=True)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "kvcanary.incident could not be written to %s (%s: %s). The run goes on; further failures are not told",
                self._path,
                type(error).__name__,
                error,
            )


def _line(path: Path, incident: Incident) -> LogLine:
    """Where the file is, and the likeliest cause; the fields of the line have the others and the story, too."""
    text = f"{path} (kvcanary inspect FILE shows it)"
    fields: dict[str, object] = {"file": str(path)}
    names = causes.likely(incident)
    if names:
        text += f". {causes.told(incident)}"
        fields |= {"cause": names[0], "others": ", ".join(names[1:]) or None, "story": story(incident)[0]}
    return LogLine(f"kvcanary.incident {text}", {"message": text, **fields})


def _name(kind: Kind) -> str:
    global _written
    with _COUNT:
        _written += 1
        number = _written
    return f"kvcanary-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{number}-{'-'.join(kind)}.zip"

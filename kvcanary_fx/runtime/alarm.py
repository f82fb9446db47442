"""What becomes of the rows that the devices report: records, log lines, a callback, and the file of an incident."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import deque
from collections.abc import Sequence

from ..errors import IncidentError
from ..reports import json_lines, otel, summary
from ..reports.incidents import file, log_tail
from ..reports.incidents.folder import IncidentFolder
from ..reports.log import ViolationLog
from ..reports.violation import Violation
from . import at_exit, on_signal
from .beside import streams_beside
from .binding import Controls
from .incidents import Told, Watched, describe
from .rows import decode_blackbox, decode_row, take_judged, take_rows

#: Records of a drain that get the history of their slot: as many as an exception shows.
HISTORIES = 3


class Alarm:
    """Reads the rings of one session.

    Attributes:
        found: the violations so far.
        adopted_slots: slots that were written legally outside of the graphs, as far as rows showed it.
    """

    def __init__(self, session: Watched, controls: Controls, lock: contextlib.AbstractContextManager[object]):
        """
        Args:
            lock: held while rows are taken and counted.

        Raises:
            MissingExtraError: incidents are asked for, and safetensors is not installed.
        """
        json_lines.follow_environment()
        otel.follow_environment()
        self._session, self._controls, self._lock = session, controls, lock
        self.found = ViolationLog()
        self.adopted_slots = 0
        self._last: deque[Told] = deque(maxlen=file.MOST_RECORDS)
        config = session.config
        asked = config.incidents is not None and config.mode != "off"
        self._folder = IncidentFolder(str(config.incidents), config.incidents_kept) if asked else None
        if asked:
            log_tail.keep()
            on_signal.follow(self)

    def clear(self) -> None:
        """Forget the violations so far, as at the end of a warm-up."""
        self.found.clear()
        self._last.clear()

    def drop(self) -> None:
        """Take the rows of a warm-up, which do not count."""
        for control in self._controls.by_device.values():
            take_rows(control)

    def drain(self) -> list[Violation]:
        """Read the rings of all devices; returns the new violations, each logged in mode ``log`` and told to the
        callback.  Waits for the devices."""
        session, told, total = self._session, list[Told](), 0
        with self._lock:
            for control in self._controls.by_device.values():
                verdict, failed = take_judged(control, session.registry)
                self.adopted_slots += verdict.adopted_slots
                decoded = [session.hooks.decode(row) or decode_row(row, session.registry) for row in verdict.violations]
                self._add_histories(verdict.violations, decoded)
                self.found.add(decoded, failed)
                told += zip(verdict.violations, decoded, strict=True)
                total += failed
            fresh = [violation for _, violation in told]
            lines = list(self.found.lines(fresh)) if session.config.mode == "log" else []
        try:
            summary.emit(fresh, lines, session.config)
        finally:
            if told:
                self._note(told, total)
        return fresh

    def drain_at_exit(self) -> None:
        """:meth:`drain` when the process ends: nobody may call before that."""
        at_exit.follow(self)

    def _add_histories(self, rows: Sequence[Sequence[int]], decoded: list[Violation]) -> None:
        """Let the first few records to be shown say what their slots went through."""
        first = summary.by_importance(decoded)[:HISTORIES]
        for i in [i for i, violation in enumerate(decoded) if any(violation is v for v in first)]:
            history = self._session.hooks.history(rows[i])
            if history is not None:
                decoded[i] = dataclasses.replace(decoded[i], history=history)

    def read_blackbox(self) -> None:
        """Read what a device left in host memory before it was lost."""
        left = [decode_blackbox(control, self._session.registry) for control in self._controls.by_device.values()]
        told: list[Told] = [one for one in left if one is not None]
        self.found.add([violation for _, violation in told], len(told))
        if told:
            self._note(told, len(told))

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """See :meth:`.CanarySession.snapshot`."""
        file.require_safetensors()
        incident = describe(self._session, list(self._last), self.found.total, "snapshot")
        try:
            file.save(incident, path)
        except OSError as e:
            raise IncidentError(
                path, f"the snapshot cannot be written ({e.strerror or e})", "Give a path in a writable directory"
            ) from e

    def snapshot_on_signal(self) -> None:
        """Write a file to the directory of incidents; called by a thread of its own, and reads no ring."""
        if self._folder is not None:
            told = list(self._last)
            with streams_beside([self._controls]):
                self._folder.snapshot(lambda: describe(self._session, told, self.found.total, "snapshot"))

    def _note(self, told: list[Told], total: int) -> None:
        self._last.extend(told)
        if self._folder is not None:
            fresh = summary.by_importance([violation for _, violation in told])
            self._folder.note(fresh, lambda: describe(self._session, told, total, "violation"))

"""``KVCANARY_LOG=json``: each line of the logger ``kvcanary`` as one JSON object, for collectors of logs."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from ..config import log, log_format
from .violation import LogLine


class JsonLines(logging.Formatter):
    """One JSON object a record: time, level, event, message, pid, and the fields of a violation or an incident."""

    def format(self, record: logging.LogRecord) -> str:
        event, fields = event_of(record)
        told: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc).isoformat(
                timespec="milliseconds"
            ),
            "level": record.levelname,
            "event": event,
            "message": fields["message"],
            "pid": record.process,
            **fields,
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)  # in ASCII, so that nothing in an id can end the line


def event_of(record: logging.LogRecord) -> tuple[str, Mapping[str, Any]]:
    """What a record of the logger ``kvcanary`` is about: the name of the event, and its fields with ``message``."""
    line = record.args[0] if isinstance(record.args, tuple) and len(record.args) == 1 else None
    first, _, rest = record.getMessage().partition(" ")
    ours = first.startswith("kvcanary.")
    fields = line.fields if isinstance(line, LogLine) else {"message": rest if ours else record.getMessage()}
    return first if ours else record.name, fields


class _Stderr(logging.Handler):
    """Writes to what ``sys.stderr`` is at the time, as logging does where nobody has set it up; a line is one write."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if sys.stderr is not None:  # as in a process without a console
                sys.stderr.write(self.format(record) + "\n")
                sys.stderr.flush()
        except Exception:
            self.handleError(record)


def follow_environment() -> bool:
    """Whether ``KVCANARY_LOG`` asks for JSON; if so, write it to stderr from here on.

    The lines no longer reach the handlers of other loggers, which would write them again, as text.  Handlers that were
    added to the logger ``kvcanary`` itself stay.  Lines are written from INFO on, unless the logger has a level.

    Raises:
        InvalidSettingError: its value is neither ``json`` nor ``text``.
    """
    if log_format() != "json":
        return False
    if not any(isinstance(handler, _Stderr) for handler in log.handlers):
        log.addHandler(handler := _Stderr())
        handler.setFormatter(JsonLines())
        log.propagate = False
        log.setLevel(log.level or logging.INFO)
    return True

"""The last lines of the logger ``kvcanary``, kept for incidents."""

from __future__ import annotations

import logging
import time
from collections import deque

from ..summary import log

#: Lines kept, and characters of one.
LINES, WIDTH = 200, 2_000

_lines: deque[str] = deque(maxlen=LINES)


def keep() -> None:
    """Keep lines from here on.

    A filter, not a handler: with a handler of its own the logger would no longer write to stderr in a process that
    has set up no logging.
    """
    log.addFilter(_note)  # once, however often it is called


def lines() -> tuple[str, ...]:
    """The lines so far."""
    return tuple(_lines)


def _note(record: logging.LogRecord) -> bool:
    when = time.strftime("%H:%M:%S", time.localtime(record.created))
    _lines.append(f"{when} {record.levelname} {record.getMessage()}"[:WIDTH])
    return True

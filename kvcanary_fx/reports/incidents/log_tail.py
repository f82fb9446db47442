"""The last lines of the logger ``kvcanary``, kept for incidents."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from ..summary import log

#: Lines kept, and characters of one.
LINES, WIDTH = 200, 2_000


class _Tail(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: deque[str] = deque(maxlen=LINES)

    def emit(self, record: logging.LogRecord) -> None:
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        self.lines.append(f"{when} {record.levelname} {record.getMessage()}"[:WIDTH])


_tail: _Tail | None = None
_LOCK = threading.Lock()


def keep() -> None:
    """Keep lines from here on."""
    global _tail
    with _LOCK:
        if _tail is None:
            _tail = _Tail()
            log.addHandler(_tail)


def lines() -> tuple[str, ...]:
    """The lines so far."""
    return () if _tail is None else tuple(_tail.lines)

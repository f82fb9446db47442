"""``KVCANARY_OTEL=1``: each line of the logger ``kvcanary`` as an OpenTelemetry event, too.

An event is a log record with a name, as OpenTelemetry sends events now: it goes to the logger provider that the process
has set up, with the span that is current, if one is.  A violation is an event on that span as well, since not every
place where traces go takes log records.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from ..config import log, otel_events
from ..errors import MissingExtraError
from .json_lines import event_of

_VIOLATION = "kvcanary.violation"

#: The version from which on a logger takes the fields of an event.
_NEEDED = "opentelemetry-api>=1.39"

#: What the API gives in place of a logger provider, as long as nobody has set one up.
_NO_PROVIDERS = ("ProxyLoggerProvider", "NoOpLoggerProvider")


class OtelEvents:
    """A filter of a logger that lets every record pass and sends it as an event.

    A filter, not a handler: with a handler of its own the logger would no longer write to stderr in a process that has
    set up no logging.
    """

    def __init__(self) -> None:
        """
        Raises:
            MissingExtraError: the OpenTelemetry API is not installed, or its log records cannot be events yet.
        """
        try:
            from opentelemetry import _logs, trace
        except ImportError as e:
            raise MissingExtraError(_NEEDED, "otel", "KVCANARY_OTEL=1") from e
        if "event_name" not in inspect.signature(_logs.Logger.emit).parameters:
            raise MissingExtraError(_NEEDED, "otel", "KVCANARY_OTEL=1")
        self._logs, self._logger, self._span = _logs, _logs.get_logger("kvcanary"), trace.get_current_span
        self._warned = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Send a record.  What goes wrong is logged once; it never stops the caller."""
        try:
            lost = not self._send(record) and record.levelno >= logging.WARNING
            why = "no logger provider is set up in this process (opentelemetry-instrument sets one up)"
        except Exception as e:
            lost, why = True, f"{type(e).__name__}: {e}"
        if lost and not self._warned:
            self._warned = True
            log.warning("kvcanary.otel an event could not be sent, and others may not: %s", why)
        return True

    def _send(self, record: logging.LogRecord) -> bool:
        """Whether somebody takes it."""
        event, fields = event_of(record)
        when, message = int(record.created * 1e9), str(fields["message"])
        attributes = _attributes(fields)
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            attributes |= {"exception.type": type(error).__name__, "exception.message": str(error)}
        self._logger.emit(
            timestamp=when,
            severity_number=self._severity(record.levelno),
            severity_text=record.levelname,
            body=message,
            attributes=attributes,
            event_name=event,
        )
        span = self._span()
        recording = span.is_recording()
        if recording and event == _VIOLATION:
            span.add_event(event, {**attributes, "kvcanary.message": message}, timestamp=when)
        return recording or type(self._logs.get_logger_provider()).__name__ not in _NO_PROVIDERS

    def _severity(self, level: int) -> Any:
        numbers = self._logs.SeverityNumber
        if level >= logging.WARNING:
            return numbers.ERROR if level >= logging.ERROR else numbers.WARN
        return numbers.INFO if level >= logging.INFO else numbers.DEBUG


def _attributes(fields: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """The known fields under names of our own; of what is not a plain value, its text."""
    known = {f"kvcanary.{name}": v for name, v in fields.items() if v is not None and name != "message"}
    return {name: v if isinstance(v, str | bool | int | float) else str(v) for name, v in known.items()}


def follow_environment() -> bool:
    """Whether ``KVCANARY_OTEL`` asks for events; if so, send them from here on.

    Raises:
        InvalidSettingError: its value is neither true nor false.
        MissingExtraError: the OpenTelemetry API is not installed.
    """
    if not otel_events():
        return False
    if not any(isinstance(one, OtelEvents) for one in log.filters):
        log.addFilter(OtelEvents())
    return True

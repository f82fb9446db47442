"""``KVCANARY_OTEL=1``: what a logger provider and the current span of the process get."""

from __future__ import annotations

import dataclasses
import logging
import sys

import pytest
from test_violation_log import WRONG

from kvcanary_fx import CanaryConfig, CanarySession, InvalidSettingError
from kvcanary_fx.errors import MissingExtraError
from kvcanary_fx.reports import otel, summary
from kvcanary_fx.reports.log import ViolationLog
from kvcanary_fx.reports.violation import LogLine

log = logging.getLogger("kvcanary")
HISTORY = "allocated in step 1 to request b"
REUSED = dataclasses.replace(WRONG, history=HISTORY, stored=-1)


@pytest.fixture
def logger():
    before = list(log.filters)
    yield log
    log.filters[:] = before


@pytest.fixture
def sdk():
    return pytest.importorskip("opentelemetry.sdk._logs")


@pytest.fixture
def sent(sdk, logger, monkeypatch):
    """The records that an exporter gets, once a session was made."""
    from opentelemetry import _logs
    from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor

    got: list[object] = []

    class Exporter:
        def export(self, batch):
            got.extend(one.log_record for one in batch)

        def shutdown(self):
            pass

    provider = sdk.LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(Exporter()))
    monkeypatch.setattr(_logs, "get_logger", provider.get_logger)
    monkeypatch.setattr(_logs, "get_logger_provider", lambda: provider)
    monkeypatch.setenv("KVCANARY_OTEL", "1")
    CanarySession(CanaryConfig(mode="log"))
    return got


def told(violation) -> None:
    summary.emit([], list(ViolationLog().lines([violation])), CanaryConfig(mode="log"))


def test_a_violation_is_an_event_with_the_fields_of_the_line(sent):
    told(REUSED)
    (record,) = sent
    assert (record.event_name, record.severity_text) == ("kvcanary.violation", "WARNING")
    assert str(record.body).startswith("[owner] ")
    fields = dict(record.attributes)
    expected = {"check": "owner", "slot": 4, "step": 1, "request": "a", "why": "read_after_free", "history": HISTORY}
    assert {name: fields[f"kvcanary.{name}"] for name in expected} == expected
    assert fields["kvcanary.stored"] == "0x" + "f" * 16  # more than a collector's number holds
    assert "kvcanary.token" not in fields  # unknown


def test_other_lines_are_events_too_each_once_for_any_number_of_sessions(sent):
    session = CanarySession(CanaryConfig(mode="log"))
    session.lose_coverage("why")
    log.warning("%s", LogLine("kvcanary.incident x.zip", {"message": "x.zip", "cause": "early free", "others": None}))
    assert [(r.event_name, r.body, dict(r.attributes)) for r in sent] == [
        ("kvcanary.coverage", "why", {}),
        ("kvcanary.incident", "x.zip", {"kvcanary.cause": "early free"}),
    ]


def test_a_violation_is_an_event_on_the_span_that_is_recorded(sent):
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    with trace.TracerProvider(shutdown_on_exit=False).get_tracer("test").start_as_current_span("generate") as span:
        told(REUSED)
        log.warning("kvcanary.coverage why")
    (event,) = span.events
    assert event.name == "kvcanary.violation"
    assert (event.attributes["kvcanary.slot"], event.attributes["kvcanary.request"]) == (4, "a")
    assert [record.span_id for record in sent] == [span.get_span_context().span_id] * 2


def test_without_a_provider_one_line_says_that_events_are_lost(logger, monkeypatch, caplog):
    pytest.importorskip("opentelemetry._logs")
    monkeypatch.setenv("KVCANARY_OTEL", "1")
    CanarySession(CanaryConfig(mode="log"))
    for _ in range(2):
        told(REUSED)
    (lost,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("kvcanary.otel ")]
    assert "no logger provider is set up in this process" in lost


def test_a_provider_that_fails_is_one_line_and_the_run_goes_on(sent, monkeypatch, caplog):
    (ours,) = [one for one in log.filters if isinstance(one, otel.OtelEvents)]
    monkeypatch.setattr(ours._logger, "emit", lambda **_: 1 / 0)
    for _ in range(2):
        told(REUSED)
    (lost,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("kvcanary.otel ")]
    assert "ZeroDivisionError" in lost


def test_without_the_package_the_setting_is_refused_with_what_to_install(logger, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setenv("KVCANARY_OTEL", "1")
    with pytest.raises(MissingExtraError, match=r"pip install 'kvcanary-fx\[otel\]'"):
        CanarySession(CanaryConfig(mode="log"))


@pytest.mark.parametrize("value", ["0", "", None])
def test_nothing_is_sent_unless_it_is_asked_for(value, logger, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delenv("KVCANARY_OTEL", raising=False)
    if value is not None:
        monkeypatch.setenv("KVCANARY_OTEL", value)
    before = list(logger.filters)
    CanarySession(CanaryConfig())
    assert logger.filters == before
    monkeypatch.setenv("KVCANARY_OTEL", "maybe")
    with pytest.raises(InvalidSettingError, match=r"'KVCANARY_OTEL' in the environment is 'maybe'.*1 or 0"):
        CanaryConfig.from_env()

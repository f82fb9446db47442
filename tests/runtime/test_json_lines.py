"""``KVCANARY_LOG=json``: what a collector of logs reads from stderr."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest
from test_incidents import struck
from test_violation_log import WRONG

from kvcanary_fx import CanaryConfig, CanarySession, InvalidSettingError
from kvcanary_fx.adapters.vllm import known, plugin
from kvcanary_fx.reports import json_lines, summary
from kvcanary_fx.reports.log import ViolationLog

log = logging.getLogger("kvcanary")


@pytest.fixture
def logger():
    before = (list(log.handlers), log.propagate, log.level)
    yield log
    log.handlers[:], log.propagate = before[:2]
    log.setLevel(before[2])


@pytest.fixture
def asked(logger, monkeypatch):
    monkeypatch.setenv("KVCANARY_LOG", "json")
    return CanarySession(CanaryConfig(mode="log"))


def told(capsys) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_violation_is_an_object_with_the_fields_of_the_record(asked, capsys):
    wrong = dataclasses.replace(WRONG, request='evil\n{"event": "forged"}', stored=-1)
    found = ViolationLog()
    summary.emit([wrong], list(found.lines([wrong])), asked.config)
    (line,) = told(capsys)
    expected = dict(event="kvcanary.violation", level="WARNING", check="owner", layer="*", slot=4, position=3, step=1)
    assert {key: line[key] for key in expected} == expected
    assert (line["request"], line["token"], line["pool"]) == (wrong.request, None, "kv")
    assert line["stored"] == "0x" + "f" * 16  # more than a float holds
    assert str(line["time"]).endswith("+00:00")
    assert str(line["message"]).startswith("[owner] ")
    assert "\n" not in str(line["message"])


def test_what_repeats_is_an_object_with_its_count(asked, capsys):
    found = ViolationLog()
    for _ in range(10):
        summary.emit([], list(found.lines([WRONG])), asked.config)
    assert [line.get("times") for line in told(capsys)] == [None, 10]


def test_an_object_has_what_the_slot_went_through_or_null(asked, capsys):
    history = "allocated in step 1 to request b"
    for violation in (WRONG, dataclasses.replace(WRONG, slot=5, history=history)):
        summary.emit([], list(ViolationLog().lines([violation])), asked.config)
    assert [line["history"] for line in told(capsys)] == [None, history]


def test_the_line_about_a_file_has_the_likeliest_cause_and_the_story(asked, capsys, tmp_path):
    struck(tmp_path)
    (line,) = [line for line in told(capsys) if "file" in line]
    assert line["event"] == "kvcanary.incident"
    assert [line["file"]] == [str(path) for path in tmp_path.iterdir()]
    assert line["cause"] == "wrong slot"
    assert "early free" in line["others"]
    assert line["story"].startswith("Step 2, forward 0: ")
    assert f"{line['file']} (kvcanary inspect FILE shows it). Likeliest cause: wrong slot (" in line["message"]


def test_every_other_line_is_an_object_with_its_event(asked, capsys):
    asked.lose_coverage('a "reason",\nin two lines')
    log.info("kvcanary.stats steps=%d", 3)
    log.debug("too fine")
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        log.warning("of no event", exc_info=True)
    lines = told(capsys)
    assert [(line["event"], line["message"], line["level"]) for line in lines] == [
        ("kvcanary.coverage", 'a "reason",\nin two lines', "WARNING"),
        ("kvcanary.stats", "steps=3", "INFO"),
        ("kvcanary", "of no event", "WARNING"),
    ]
    assert str(lines[2]["exception"]).endswith("RuntimeError: boom")


def test_each_line_is_written_once_also_where_the_host_has_set_up_logging(asked, capsys):
    CanarySession(CanaryConfig())
    root = logging.StreamHandler()
    logging.getLogger().addHandler(root)
    try:
        asked.lose_coverage("why")
    finally:
        logging.getLogger().removeHandler(root)
    assert [line["event"] for line in told(capsys)] == ["kvcanary.coverage"]


def test_a_handler_of_the_users_own_stays(asked, capsys, logger):
    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(self.format(record))

    kept: list[str] = []
    logger.addHandler(handler := Kept())
    handler.setFormatter(json_lines.JsonLines())
    asked.lose_coverage("why")
    assert [json.loads(line) for line in kept] == told(capsys)


@pytest.mark.parametrize("form", ["text", "", None])
def test_text_is_the_default_and_leaves_the_logger_alone(form, logger, monkeypatch):
    monkeypatch.delenv("KVCANARY_LOG", raising=False)
    if form is not None:
        monkeypatch.setenv("KVCANARY_LOG", form)
    before = (list(logger.handlers), logger.propagate, logger.level)
    CanarySession(CanaryConfig())
    assert (logger.handlers, logger.propagate, logger.level) == before


def test_another_form_is_refused_with_those_that_there_are(logger, monkeypatch):
    monkeypatch.setenv("KVCANARY_LOG", "jsno")
    for ask in (CanaryConfig.from_env, plugin.register, lambda: CanarySession(CanaryConfig())):
        with pytest.raises(InvalidSettingError, match=r"'KVCANARY_LOG' in the environment is 'jsno'.*'text' or 'json'"):
            ask()


def test_lines_of_an_engine_that_is_not_asked_for_are_objects_too(logger, monkeypatch, capsys):
    monkeypatch.setenv("KVCANARY_LOG", "json")
    monkeypatch.setenv("KVCANARY_CHECKS", "content")
    monkeypatch.delenv("KVCANARY_MODE", raising=False)
    plugin.register()
    assert [line["event"] for line in told(capsys)] == ["kvcanary.off"]


def test_vllms_handlers_do_not_put_their_words_before_an_object(logger, monkeypatch, capsys):
    monkeypatch.setenv("KVCANARY_LOG", "json")
    theirs = logging.StreamHandler()
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [theirs])
    known.log_as_vllm_does()
    log.info("kvcanary.vllm guarded: all")
    assert theirs not in logger.handlers
    assert [line["message"] for line in told(capsys)] == ["guarded: all"]

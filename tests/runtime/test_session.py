"""What a session reports, and how: errors, log lines, records, the callback, counts, the summary."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from toys import Rig

import kvcanary_fx
from kvcanary_fx import CanaryConfig, KVCacheViolation
from kvcanary_fx.errors import CoverageError
from kvcanary_fx.kernels.buffers import Gate
from kvcanary_fx.runtime import at_exit, readback
from kvcanary_fx.runtime.readback import Readback

LINE = re.compile(
    r"kvcanary\.violation check=content phase=pre layer=layers\.1 half=V row=0 position=2 slot=2 step=3 token=\d+ "
    r"request=- stored=0x[0-9a-f]+ found=0x[0-9a-f]+ detail=0 why=- also=- forward=- pool=caches\[1\]\[1\]$"
)


def struck(**settings) -> Rig:
    """A rig with one flipped bit, before the step that finds it."""
    rig = Rig.build(**settings)
    rig.step(4)
    rig.step()
    rig.flip(1, 1, row=0, position=2)
    return rig


def test_error_tells_what_where_why_and_what_to_do():
    with pytest.raises(KVCacheViolation) as caught:
        struck().step()
    text = str(caught.value)
    assert re.search(
        r"\[content\] the bytes of a slot changed since they were written \(digest 0x\w+, now 0x\w+\)", text
    )
    assert "where: layer layers.1, half V, row 0, position 2, token" in text
    assert "slot 2 of caches[1][1], step 3" in text
    assert "usually: " in text
    assert "try: " in text
    assert "session.forget" in text


def test_log_mode_writes_one_line_and_does_not_raise(caplog):
    rig = struck(mode="log")
    with caplog.at_level(logging.WARNING, "kvcanary"):
        rig.step()
        rig.session.drain()
    ours = [r for r in caplog.records if r.name == "kvcanary"]
    assert [r.levelno for r in ours] == [logging.WARNING]
    assert LINE.match(ours[0].getMessage()), ours[0].getMessage()


def test_records_have_every_field():
    rig = struck(mode="log")
    rig.step()
    (v,) = rig.session.violations()
    assert (v.check, v.phase, v.layer, v.half, v.pool) == ("content", "pre", "layers.1", "V", "caches[1][1]")
    assert (v.row, v.index, v.slot, v.position, v.step) == (0, 2, 2, 2, 3)
    assert v.stored != v.found
    assert 0 <= v.token < 50
    assert LINE.match(v.line())


@pytest.mark.parametrize("mode", ["raise", "log"])
def test_callback_gets_each_violation(mode):
    seen = []
    rig = struck(mode=mode, on_violation=seen.append)
    try:
        rig.step()
    except KVCacheViolation:
        assert mode == "raise"
    rig.session.drain()
    assert [v.check for v in seen] == ["content"]


def test_many_violations_are_counted_and_the_first_ones_explained():
    rig = Rig.build(ring_capacity=5)
    rig.step(10)
    for position in range(10):
        rig.flip(0, 0, position=position)
    with pytest.raises(KVCacheViolation) as caught:
        rig.step()
    assert caught.value.total == 10
    assert len(caught.value.violations) == 5
    assert "... and 7 more" in str(caught.value)
    assert rig.session.stats().violations == 10
    rig.flip(0, 1)
    with pytest.raises(KVCacheViolation) as again:
        rig.step()
    assert again.value.total == 1  # the ring was emptied


def test_a_burst_in_log_mode_is_cut_with_the_rest_counted(caplog):
    rig = Rig.build(slots=64, mode="log")
    rig.step(60)
    for position in range(60):
        rig.flip(0, 0, position=position)
        rig.flip(1, 1, position=position)
    with caplog.at_level(logging.WARNING, "kvcanary"):
        rig.step()
        rig.session.drain()
    messages = [r.getMessage() for r in caplog.records]
    assert sum("kvcanary.violation " in m for m in messages) == 100
    assert "kvcanary.violations and 20 more in this drain" in messages


def test_stats_count_what_was_done():
    rig = Rig.build(2, batch=2)
    rig.step(4)
    rig.step()
    stats = rig.session.stats()
    assert stats.steps == 2
    assert stats.recorded == (4 + 1) * 2 * 2 * 2
    assert stats.checked == 4 * 2 * 2 * 2
    assert (stats.adopted, stats.violations) == (0, 0)


def test_summary_names_what_is_guarded_and_what_is_off():
    rig = Rig.build(checks=("content", "bounds"))
    rig.step(4)
    text = rig.session.summary()
    assert "4 halves guarded" in text
    assert re.search(r"guarded  layers\.1\.V +caches\[1\]\[1\], slots on axes \[0, 2\], index_copy_", text)
    assert "off      operand: switched off by the setting 'checks'" in text
    assert "mode raise, checks content, bounds" in text


def test_summary_of_a_model_without_a_cache_says_so():
    backend = kvcanary_fx.CanaryBackend(CanaryConfig(inner="eager"))
    assert "nothing is guarded" in backend.session.summary()


def test_check_raises_what_was_found_since_the_last_look():
    rig = struck(mode="log")
    rig.step()
    with pytest.raises(KVCacheViolation):
        rig.session.check()
    rig.session.check()


def test_shared_session_of_models_with_the_same_settings():
    first = kvcanary_fx.session(CanaryConfig(mode="log"))
    assert kvcanary_fx.session(CanaryConfig(mode="log", inner="eager")) is first
    assert kvcanary_fx.session() is first
    assert kvcanary_fx.session(CanaryConfig(mode="raise")) is not first
    assert kvcanary_fx.sessions() == [first, kvcanary_fx.session(CanaryConfig(mode="raise"))]


def test_shadows_of_dropped_caches_are_released():
    rig = Rig.build()
    for _ in range(5):
        from toys import new_caches

        rig.caches, rig.length = new_caches(), 0
        rig.step(3)
    assert len(rig.session.registry.halves()) == 4


def test_log_mode_goes_on_while_a_read_back_is_on_its_way_and_loses_no_call(monkeypatch):
    """As on a GPU, where the words arrive when the device gets there."""
    monkeypatch.setattr(readback, "BETWEEN", 0.0)
    rig = Rig.build(mode="log")
    rig.step(6)
    rig.step()
    rig.session._readbacks.of(rig.session.bindings[-1]).at_once = False
    started, there = [], False
    start = Readback.start
    monkeypatch.setattr(Readback, "start", lambda self, **given: (start(self, **given), started.append(self)))
    monkeypatch.setattr(Readback, "arrived", lambda self: there)
    rig.step()
    rig.flip(1, 1, row=0, position=2)
    for _ in range(3):
        rig.step()
    assert len(started) == 1
    assert rig.session.known_violations() == []
    there = True
    rig.step()  # the first is there, and has nothing; this one counts the calls before it
    rig.step()
    assert len(started) == 3
    assert [v.check for v in rig.session.known_violations()] == ["content"]
    assert rig.session.uncovered == []


def test_log_mode_reads_back_now_and_then_and_not_in_every_call(monkeypatch):
    """A read-back takes longer than all else that the host does in a step of a decode."""
    rig = Rig.build(mode="log")
    rig.step(6)
    rig.step()
    rig.session._readbacks.of(rig.session.bindings[-1]).at_once = False
    monkeypatch.setattr(readback, "BETWEEN", 3600.0)
    started, start = [], Readback.start
    monkeypatch.setattr(Readback, "start", lambda self, **given: (start(self, **given), started.append(self)))
    rig.step()
    rig.flip(1, 1, row=0, position=2)
    for _ in range(3):
        rig.step()
    assert started == []
    assert rig.session.known_violations() == []
    rig.session.look()
    assert [v.check for v in rig.session.known_violations()] == ["content"]
    rig.session._readbacks.of(rig.session.bindings[-1])._started = -3600.0
    for _ in range(3):
        rig.step()
    assert len(started) == 2


def test_log_mode_reports_a_violation_two_calls_later_where_a_device_says_so(monkeypatch):
    """A GPU writes to the host's memory when a check failed."""
    monkeypatch.setattr(readback, "BETWEEN", 3600.0)
    rig = Rig.build(mode="log")
    rig.session.controls(torch.device("cpu")).bell = torch.zeros(2, dtype=torch.int64)
    rig.step(6)
    rig.step()
    rig.session._readbacks.of(rig.session.bindings[-1]).at_once = False
    started, start = [], Readback.start
    monkeypatch.setattr(Readback, "start", lambda self, **given: (start(self, **given), started.append(self)))
    rig.step()
    assert started == []
    rig.flip(1, 1, row=0, position=2)
    rig.step()
    assert len(started) == 1
    rig.step()
    assert [v.check for v in rig.session.known_violations()] == ["content"]
    rig.step()
    rig.step()
    assert len(started) == 2, "once it has been read, nothing is due"


def test_raise_mode_copies_nothing_in_most_calls_where_a_device_says_that_a_check_failed(monkeypatch):
    monkeypatch.setattr(readback, "BETWEEN", 3600.0)
    rig = Rig.build()
    rig.session.controls(torch.device("cpu")).bell = torch.zeros(2, dtype=torch.int64)
    rig.step(6)
    rig.step()
    copies, start = [], readback.Words.start
    monkeypatch.setattr(readback.Words, "start", lambda self: (start(self), copies.append(self)))
    rig.step()
    rig.step()
    assert copies == []
    rig.flip(1, 1, row=0, position=2)
    with pytest.raises(KVCacheViolation):
        rig.step()
    rig.session._readbacks.of(rig.session.bindings[-1])._started = -3600.0
    rig.step()
    rig.step()
    assert len(copies) == 1, "whether all checks ran is looked at now and then"


def test_log_mode_reports_the_last_calls_when_the_process_ends(monkeypatch):
    """Nobody calls the model again."""
    monkeypatch.setattr(Readback, "is_due", lambda self: False)
    rig = Rig.build(mode="log")
    rig.step(6)
    rig.step()
    rig.session._readbacks.of(rig.session.bindings[-1]).at_once = False
    rig.flip(1, 1, row=0, position=2)
    rig.step()
    assert rig.session.known_violations() == []
    at_exit._drain()
    assert [v.check for v in rig.session.known_violations()] == ["content"]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Words arrive when somebody waits for them."""
    monkeypatch.setattr(Readback, "__init__", _far(Readback.__init__))
    monkeypatch.setattr(Readback, "arrived", lambda self: False)


def _far(init):
    def far(self, *args):
        init(self, *args)
        self.at_once = False

    return far


@pytest.mark.usefixtures("as_on_a_gpu")
def test_in_raise_mode_a_deferred_report_comes_before_the_next_forward_runs():
    rig = Rig.build()
    rig.step(4)
    rig.step()
    rig.flip(1, 1, row=0, position=2)
    calls = rig.session.calls
    with rig.session.deferring():
        rig.step()
        with pytest.raises(KVCacheViolation):
            rig.step()
        assert rig.session.calls == calls + 1
    with pytest.raises(KVCacheViolation):
        rig.flip(1, 0, row=0, position=2)
        rig.step()  # outside, at once


@pytest.mark.usefixtures("as_on_a_gpu")
def test_in_raise_mode_checks_that_did_not_run_are_told_at_the_end_of_deferring(monkeypatch):
    """Calls only look whether a device has said that a check failed."""
    monkeypatch.setattr(readback, "BETWEEN", 3600.0)
    rig = Rig.build()
    rig.session.controls(torch.device("cpu")).bell = torch.zeros(2, dtype=torch.int64)
    rig.step(4)
    rig.step()
    (gate,) = rig.session.bindings[-1].gates.values()
    with pytest.raises(CoverageError), rig.session.deferring():
        rig.step()
        gate[Gate.OPS] -= 1
        rig.step()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_in_raise_mode_the_last_deferred_report_comes_at_the_end():
    rig = Rig.build()
    rig.step(4)
    rig.step()
    rig.flip(1, 1, row=0, position=2)
    with pytest.raises(KVCacheViolation), rig.session.deferring():
        rig.step()

"""The file of an incident: written on the first violation of its kind, whole, bounded, and readable by its owner."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import stat
import sys
import zipfile

import pytest
import torch
from toy import Toy
from toys import Rig

from kvcanary_fx import IncidentError, KVCacheViolation, Violation
from kvcanary_fx.__main__ import main
from kvcanary_fx.errors import MissingExtraError
from kvcanary_fx.proof import perturb
from kvcanary_fx.reports.incidents import file, folder, log_tail
from kvcanary_fx.reports.incidents.incident import Incident, Row
from kvcanary_fx.reports.incidents.story import story
from kvcanary_fx.reports.json_lines import JsonLines
from kvcanary_fx.reports.summary import log, muted

INCIDENT = Incident("2026-01-01T00:00:00+00:00", "violation", (), 0, (), {}, {})


def struck(folder=None, mode="log", ids=("alice", "bob"), **settings):
    """An engine of two requests in which one bit of a slot is flipped, and a row overwritten by another's."""
    toy = Toy(incidents=folder, **settings)
    for name, first in zip(ids, (1, 10), strict=True):
        toy.add(name, range(first, first + 8))
    toy.run({ids[0]: [1, 2, 3], ids[1]: [4, 5, 6]})
    toy.kv[1][0].view(torch.int32)[2, 0, 1] ^= 1 << 20
    toy.kv[0][1][5] = toy.kv[0][1][1]
    toy.run({ids[0]: [7], ids[1]: [8]})
    return toy


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The file that an engine's session has written."""
    path = tmp_path_factory.mktemp("incidents") / "new"
    struck(path)
    (found,) = path.iterdir()
    return found


def test_a_violation_leaves_one_file_that_its_owner_alone_can_read(written):
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert stat.S_IMODE(written.parent.stat().st_mode) == 0o700
    assert written.name.endswith("-content-none-pre.zip")
    with zipfile.ZipFile(written) as archive:
        assert archive.namelist() == ["incident.json", "tensors.safetensors"]
        assert json.loads(archive.read("incident.json"))["format"] == 1


def test_a_file_has_the_slot_its_neighbours_the_batch_and_the_settings(written):
    incident = file.load(written)
    (pool,) = incident.pools
    assert {(r.violation.slot, r.violation.layer, r.violation.half) for r in incident.records} == {
        (5, "layers.0", "V"),
        (2, "layers.1", "K"),
    }
    assert [(s.slot, s.owner, s.position, s.token) for s in pool.near if s.slot in (2, 3, 4)] == [
        (2, "alice", 1, 2),
        (3, "alice", 2, 3),
        (4, "bob", 0, 10),
    ]
    assert [(r.request, r.prefix, r.slots, r.table) for r in pool.batch] == [
        ("alice", 3, (7,), (1, 2, 3, 7)),
        ("bob", 3, (8,), (4, 5, 6, 8)),
    ]
    assert len(pool.halves) == 4
    assert all(half.rows.shape == (len(pool.near), 16) for half in pool.halves)
    assert incident.settings["mode"] == "log"
    assert incident.system["torch"] == torch.__version__
    assert any("halves guarded" in line for line in incident.graphs)
    assert any("kvcanary.violation check=content" in line for line in incident.log)


def test_a_file_from_before_a_field_was_added_is_read(written, tmp_path):
    with zipfile.ZipFile(written) as old, zipfile.ZipFile(tmp_path / "old.zip", "w") as new:
        told = json.loads(old.read("incident.json"))
        for slot in told["incident"]["pools"][0]["near"]:
            del slot["fits"]
        new.writestr("incident.json", json.dumps(told))
        new.writestr("tensors.safetensors", old.read("tensors.safetensors"))
    assert file.load(tmp_path / "old.zip").records == file.load(written).records


def slot_of_first_record(folder, number):
    """The slot that the first violation of the only file names, the record of that, and the story."""
    (found,) = folder.iterdir()
    incident = file.load(found)
    assert incident.records[0].slot == number
    pool = incident.pools[0]
    return pool.near[pool.place(number)], incident.records[0], story(incident)[0]


@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_of_a_freed_slot_the_file_says_whether_it_holds_what_the_request_needs(tmp_path, own, history):
    toy = Toy(incidents=tmp_path, history=history)
    toy.add("a", range(8))
    toy.add("b", range(20, 28))
    toy.run({"a": [1, 2, 3], "b": [4, 5, 6]})
    toy.pool.release([2] if own else [5], owner="a" if own else "b")
    if not own:
        toy.table[1, 1] = 5
    toy.run({"a": [7]})
    slot, record, told = slot_of_first_record(tmp_path, 2 if own else 5)
    assert record.violation.why == "READ_AFTER_FREE"
    assert slot.fits is own
    assert ("It still holds the request's own token." in told) is own


def test_a_row_that_was_written_far_away_is_found(tmp_path):
    writes = perturb.FaultyWrites()
    toy = Toy(incidents=tmp_path, inner=writes)
    toy.add("a", range(8))
    fault = perturb.Operand(probability=1.0, seed=3)
    fault.strike(toy.pool, [perturb.Spot(1, "a", 0)], writes)
    toy.run({"a": [1, 2]})
    landed = fault.strikes[0].partner.slot
    assert landed > 10
    _, record, _ = slot_of_first_record(tmp_path, 1)
    assert record.violation.check == "operand"
    assert record.evidence.moved_to == (landed,)


def test_a_flipped_bit_and_the_row_of_another_slot_are_told_apart(written):
    incident = file.load(written)
    seen = {r.slot: r.evidence for r in incident.records}
    assert (seen[2].bit, seen[2].same_as, seen[2].unchanged) == (32 + 20, (), True)
    value_of_layer_0 = incident.pools[0].halves[1].id
    assert (seen[5].bit, seen[5].same_as[0]) == (None, Row(value_of_layer_0, 1))
    told = "\n".join(story(incident))
    assert "K of layers.1 in slot 2 of kv (request alice, position 1) was not what had been written there" in told
    assert "bit 20 of element 1, head 0 (float32)" in told
    assert "recorded for V of layers.0 in slot 1 (request alice, position 0)" in told
    assert "read by request bob (position 1)" in told


def test_lines_still_reach_a_process_that_has_set_up_no_logging(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging, "lastResort", logging._StderrHandler(logging.WARNING))
    struck(tmp_path)
    err = capsys.readouterr().err
    assert "kvcanary.violation check=content" in err
    assert "kvcanary.incident" in err
    with muted():
        log.warning("planted")
    assert not any("planted" in line for line in log_tail.lines())


def test_a_model_without_an_engine_leaves_a_file(device, tmp_path):
    rig = Rig.build(layers=1, device=device, incidents=tmp_path, digest_bits=64)
    rig.step(4)
    rig.flip(half=1, row=1, position=2)
    with pytest.raises(KVCacheViolation):
        rig.step()
    (path,) = tmp_path.iterdir()  # before the exception was here
    (record,) = file.load(path).records
    assert (record.violation.half, record.violation.row, record.violation.index) == ("V", 1, 2)
    assert record.evidence.bit == 3 * 32 + 4


def test_who_did_what_to_whose_slot_is_told(device, tmp_path):
    toy = Toy(incidents=tmp_path, device=device)
    toy.add("alice", range(1, 9))
    toy.add("bob", range(10, 18))
    toy.run({"alice": [1, 2]})
    toy.requests["bob"].stored = 1
    toy.table[toy.requests["bob"].row, 0] = 2  # a slot of the other
    toy.run({"bob": [4]})
    toy.found()
    incident = file.load(next(tmp_path.iterdir()))
    assert incident.missing == ()
    told = "\n".join(story(incident))
    assert "request bob was about to read slot 2 of kv" in told
    assert "which belongs to request alice" in told


@pytest.mark.parametrize("private", ["tokens", "ids", "bytes"])
def test_what_is_private_is_not_in_the_file(private, tmp_path):
    toy = struck(None, ids=("secret-request", "another-one"), privacy=(private,))
    toy.session.snapshot(tmp_path / "snapshot.zip")
    incident = file.load(tmp_path / "snapshot.zip")
    told = file.pack(incident)
    with zipfile.ZipFile(io.BytesIO(told)) as archive:
        text = archive.read("incident.json").decode()
    (pool,) = incident.pools
    assert incident.hidden == (private,)
    assert ("secret-request" in text) == (private != "ids")
    assert (pool.batch[0].tokens == (4,)) == (private != "tokens")
    assert ({s.token for s in pool.near} & {1, 2, 3} != set()) == (private != "tokens")
    assert all((half.rows is None) == (private == "bytes") for half in pool.halves)
    assert all((half.recorded is None) == (private == "bytes") for half in pool.halves)
    # what is equal stays equal
    assert next(s.owner for s in pool.near if s.slot == 2) == pool.batch[0].request
    assert any(r.evidence.bit == 52 for r in incident.records)


def violation(why="READ_AFTER_FREE", check="owner"):
    return Violation(check, "pre", 1, "*", "*", "kv", None, 3, 3, None, 0, 0, why=why)


def test_a_thousand_violations_of_one_kind_are_one_file(tmp_path):
    described = []
    kept = folder.IncidentFolder(str(tmp_path), 20)
    for _ in range(1000):
        kept.note([violation()], lambda: described.append(1) or INCIDENT)
    assert len(described) == len(list(tmp_path.iterdir())) == 1
    kept.note([violation("DOUBLE_FREE")], lambda: INCIDENT)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_directory_keeps_so_many_files_and_the_rarer_kinds(tmp_path):
    (tmp_path / "mine.txt").write_text("not an incident")
    folder.IncidentFolder(str(tmp_path), 3).note([violation("DOUBLE_FREE")], lambda: INCIDENT)
    for _ in range(5):  # a process that is started again and again
        folder.IncidentFolder(str(tmp_path), 3).note([violation()], lambda: INCIDENT)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert len(names) == 4
    assert sum("double_free" in name for name in names) == 1


def test_old_files_are_removed(tmp_path):
    folder.IncidentFolder(str(tmp_path), 3).note([violation()], lambda: INCIDENT)
    (old,) = tmp_path.iterdir()
    os.utime(old, (0, 0))
    folder.IncidentFolder(str(tmp_path), 3).note([violation()], lambda: INCIDENT)
    assert old not in list(tmp_path.iterdir())


def test_a_full_disk_is_one_warning_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    kept = folder.IncidentFolder(str(tmp_path), 20)
    for why in ("READ_AFTER_FREE", "DOUBLE_FREE", "OVERWRITE"):
        kept.note([violation(why)], lambda: INCIDENT)
    assert [r.getMessage() for r in caplog.records if "No space left" in r.getMessage()] == [
        f"kvcanary.incident could not be written to {tmp_path} (OSError: [Errno 28] No space left on device). "
        "The run goes on; further failures are not told"
    ]
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_read_from_a_device_is_named_and_the_rest_is_written(tmp_path, monkeypatch):
    def lost(*_):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr("kvcanary_fx.runtime.incidents.pool_scene", lost)
    struck(tmp_path)
    incident = file.load(next(tmp_path.iterdir()))
    assert len(incident.records) == 2
    assert incident.missing == ("pool kv: RuntimeError: the device is lost",)


def test_without_safetensors_the_setting_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'kvcanary-fx\[incidents\]'"):
        Rig.build(incidents=tmp_path)


def test_a_snapshot_that_cannot_be_written_says_so(tmp_path):
    rig = Rig.build()
    with pytest.raises(IncidentError, match=r"the snapshot cannot be written .* writable directory"):
        rig.session.snapshot(tmp_path / "nowhere" / "snapshot.zip")
    rig.session.snapshot(tmp_path / "snapshot.zip")
    assert story(file.load(tmp_path / "snapshot.zip")) == ["No check had failed when this snapshot was taken."]


@pytest.mark.parametrize("private", [(), ("ids",)])
def test_an_id_that_utf_8_has_no_bytes_for_is_in_every_report(tmp_path, capsys, private):
    """What json.loads makes of a client's "\\ud800".  Seen: UnicodeEncodeError at the first call that named the id."""
    client = "chat-\ud800"
    toy = Toy(incidents=tmp_path / "incidents", privacy=private)
    json_log = logging.StreamHandler(io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    json_log.setFormatter(JsonLines())
    text_log = logging.FileHandler(tmp_path / "log", encoding="utf-8")
    logger = logging.getLogger("kvcanary")
    for handler in (json_log, text_log):
        logger.addHandler(handler)
    try:
        toy.add(client, [5, 6, 7, 8, 9])
        toy.run({client: [3, 4]})
        toy.kv[0][0].view(torch.int32)[3, 0, 1] ^= 1 << 20
        toy.run({client: [5]})
        (violation,) = toy.found()
    finally:
        for handler in (json_log, text_log):
            logger.removeHandler(handler)
            handler.flush()
    assert violation.request == client
    violation.explain().encode()
    toy.session.summary().encode()
    json_log.stream.seek(0)
    told = [json.loads(line) for line in json_log.stream]
    assert [line["request"] for line in told if line["event"] == "kvcanary.violation"] == [client]
    assert "chat-" in (tmp_path / "log").read_text(encoding="utf-8")
    (path,) = (tmp_path / "incidents").glob("*.zip")
    for options in ([], ["--html", str(tmp_path / "page.html")]):
        assert main(["inspect", str(path), *options]) == 0
    shown = (tmp_path / "page.html").read_text(encoding="utf-8") + capsys.readouterr().out
    shown.encode()
    assert ("chat-" in shown) == (not private)

"""``kvcanary inspect``: an incident in the terminal, and what it answers to files that are none."""

from __future__ import annotations

import dataclasses
import json
import re
import zipfile

import pytest
import torch

from kvcanary_fx import Violation
from kvcanary_fx.__main__ import main
from kvcanary_fx.reports.incidents import file
from kvcanary_fx.reports.incidents.incident import (
    Evidence,
    HalfScene,
    Incident,
    PoolScene,
    Record,
    RequestScene,
    SlotScene,
)
from kvcanary_fx.reports.incidents.terminal import Terminal

FLIPPED = Violation(
    "content", "pre", 7, "layers.3", "K", "kv", None, 5, 5, 2, 17, 18, request="evil\x1b[31m", text="engine content"
)


def incident() -> Incident:
    """A bit of a slot of a request whose id would colour a terminal."""
    rows = torch.arange(32, dtype=torch.uint8).view(2, 16)
    half = HalfScene(4, "layers.3", "K", "kv", 1, "float32", (2, 2), (1, 2), torch.ones(1, 2, dtype=torch.int32), rows)
    request = RequestScene("evil\x1b[31m", 1, 3, 1, (9,), (7,), (3,), (4, 6, 5, 7))
    near = (SlotScene(5, "written", 1, "evil\x1b[31m", 9, 2), SlotScene(6, "free", 0))
    pool = PoolScene("kv", 4000, 0, (half,), near, torch.zeros(4000, dtype=torch.uint8), batch=(request,))
    record = Record(FLIPPED, 0, 4, 5, Evidence(True, 34, 15, 0))
    return Incident("2026-01-01T00:00:00", "violation", (record,), 1, (pool,), {"mode": "log"}, {"torch": "2.13"})


@pytest.fixture
def saved(tmp_path):
    file.save(incident(), tmp_path / "one.zip")
    return tmp_path / "one.zip"


def test_a_file_is_read_as_it_was_written(saved):
    read, wrote = file.load(saved), incident()
    assert torch.equal(read.pools[0].halves[0].rows, wrote.pools[0].halves[0].rows)
    assert read.records == wrote.records
    assert read.pools[0].near == wrote.pools[0].near
    assert dataclasses.replace(read, pools=()) == dataclasses.replace(wrote, pools=())


def test_inspect_tells_the_story_and_shows_slots_and_bytes(saved, capsys):
    assert main(["inspect", str(saved)]) == 0
    out = capsys.readouterr().out
    told = " ".join(out.split())
    assert 'Step 7: K of layers.3 in slot 5 of kv (request "evil\\u001b[31m", position 2)' in told
    assert "One bit differs: bit 2 of element 1, head 0 (float32)." in told
    assert "read by request" in told
    assert re.search(r"K of layers.3 +!", out)
    assert "  written  00 01 02 03 00 05" in out
    assert "  now      00 01 02 03 04 05" in out
    assert "mode: log" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("colour", [False, True])
def test_the_width_of_the_terminal_is_kept(width, colour):
    text = Terminal(width, colour).render(incident())
    assert ("\x1b[1;31m" in text) == colour
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in text.splitlines()) <= width


def rewritten(saved, told=None, tensors=None):
    with zipfile.ZipFile(saved) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    document = json.loads(parts["incident.json"])
    (told or (lambda _: None))(document)
    with zipfile.ZipFile(saved, "w") as archive:
        archive.writestr("incident.json", json.dumps(document))
        archive.writestr("tensors.safetensors", tensors if tensors is not None else parts["tensors.safetensors"])
    return saved


def damaged(document):
    document["incident"]["pools"][0]["near"] = []


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.unlink(), "cannot be read (No such file or directory)"),
        (lambda path: path.write_bytes(b"PK\x03\x04 and no more"), "no incident of kvcanary, or damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-200]), "no incident of kvcanary, or damaged"),
        (lambda path: rewritten(path, lambda d: d.update(what="a model")), "it is no incident of kvcanary"),
        (lambda path: rewritten(path, lambda d: d.update(format=2)), "it has format 2, this version reads 1"),
        (lambda path: rewritten(path, lambda d: d["incident"].pop("total")), "it is damaged (KeyError: 'total')"),
        (lambda path: rewritten(path, lambda d: d["incident"].update(total="many")), "it is damaged (TypeError"),
        (lambda path: rewritten(path, damaged), "it is damaged (ValueError: rows of pool 'kv')"),
        (lambda path: rewritten(path, tensors=b"\x80\x04pickle"), "it is damaged ("),
    ],
    ids=[
        "gone",
        "foreign",
        "cut short",
        "foreign zip",
        "newer",
        "lacks a field",
        "wrong type",
        "wrong shape",
        "pickle",
    ],
)
def test_a_file_that_is_no_incident_is_a_clear_error(spoil, said, saved, capsys):
    spoil(saved)
    assert main(["inspect", str(saved)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert str(saved) in err

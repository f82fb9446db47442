"""``kvcanary inspect`` and ``replay``: an incident in the terminal, and what it answers to files that are none."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import zipfile
from html.parser import HTMLParser

import pytest
import torch

from kvcanary_fx import IncidentError, Violation
from kvcanary_fx.__main__ import main
from kvcanary_fx.reports.incidents import file, row_bytes
from kvcanary_fx.reports.incidents.incident import (
    Evidence,
    HalfScene,
    Incident,
    PoolScene,
    Record,
    RequestScene,
    SlotScene,
)
from kvcanary_fx.reports.incidents.page import page
from kvcanary_fx.reports.incidents.replay import replay
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
    assert (
        "Likeliest cause: bit flip (one bit changed: memory, or a stray write of one element). Else: wrong slot."
        in told
    )
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


def test_the_page_tells_the_story_first_and_loads_nothing(saved, tmp_path, capsys):
    assert main(["inspect", str(saved), "--html", str(tmp_path / "page.html")]) == 0
    assert "page.html" in capsys.readouterr().out
    text = (tmp_path / "page.html").read_text()
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o600
    HTMLParser().feed(text)
    assert text.index("Likeliest cause: bit flip") < text.index("One bit differs")
    assert text.index("One bit differs: bit 2 of element 1, head 0") < text.index("<h2>")
    assert "default-src &#x27;none&#x27;" in text or "default-src 'none'" in text
    assert not re.search(r"<script|<link|<img|@import|url\(|https?:", text)
    assert "slot 5, written, " in text
    assert "K of layers.3, damaged" in text
    assert '<b class="was">00</b>' in text
    assert '<b class="now">04</b>' in text


def test_what_a_client_sent_is_no_markup_in_the_page():
    evil = dataclasses.replace(FLIPPED, request="<script>alert(1)</script>", pool="<b>", layer='"><i>')
    one = incident()
    near = (dataclasses.replace(one.pools[0].near[0], owner="<script>"),)
    rows = dataclasses.replace(one.pools[0].halves[0], layer="<script>", rows=None, recorded=None)
    pool = dataclasses.replace(one.pools[0], near=near, halves=(rows,), name="<script>")
    log = ("<script>x</script>",)
    record = dataclasses.replace(one.records[0], violation=evil)
    text = page(dataclasses.replace(one, records=(record,), pools=(pool,), log=log, system={"<script>": "<script>"}))
    assert "<script" not in text
    assert "<i>" not in text
    assert "&lt;script&gt;" in text


def test_a_page_that_cannot_be_written_is_a_clear_error(saved, tmp_path, capsys):
    assert main(["inspect", str(saved), "--html", str(tmp_path / "nowhere" / "page.html")]) == 2
    assert "the page cannot be written (No such file or directory)" in capsys.readouterr().err


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


def test_replay_fails_again_on_stored_bytes_and_passes_on_repaired_ones(saved, tmp_path, capsys):
    assert main(["replay", str(saved)]) == 1
    out = capsys.readouterr().out
    assert "fails again: content, layer layers.3, half K" in out
    assert "recorded was 0x11" in out
    assert "1 of 1 checks fail again" in out
    one = incident()
    half = one.pools[0].halves[0]
    stored = int(row_bytes.digests_of(half.rows[:1], half.seeds, 1))
    right = dataclasses.replace(one.records[0], violation=dataclasses.replace(FLIPPED, stored=stored))
    file.save(dataclasses.replace(one, records=(right,)), tmp_path / "right.zip")
    assert main(["replay", str(tmp_path / "right.zip")]) == 0
    assert "passes now: content" in capsys.readouterr().out


def leaves(value, path=()):
    """Where every value of a document is."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from leaves(inner, (*path, key))


def test_a_file_in_which_any_value_is_another_is_shown_or_refused(saved, tmp_path):
    with zipfile.ZipFile(saved) as archive:
        text, tensors = (archive.read(name) for name in archive.namelist())
    refused = shown = 0
    values = itertools.cycle((None, -1, 10**30, "\x1b", 0.5, [], {}, [[]], {"tensor": "x"}, "\x1b"))
    for path, value in zip(leaves(json.loads(text)), values, strict=False):
        document = inner = json.loads(text)
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
            archive.writestr("incident.json", json.dumps(document))
            archive.writestr("tensors.safetensors", tensors)
        try:
            read = file.load(tmp_path / "other.zip")
        except IncidentError:
            refused += 1
            continue
        assert "\x1b" not in Terminal(80, False).render(read) + page(read)
        replay(read)
        shown += 1
    assert refused > shown > 10


def of_slot(why, request="bob", stored=0, found=0, check="owner", slot=5):
    return Violation(check, "pre", 7, "*", "*", "kv", None, slot, slot, 2, stored, found, request=request, why=why)


@pytest.mark.parametrize(
    ("violation", "fails"),
    [
        (of_slot("READ_AFTER_FREE", slot=6), True),
        (of_slot("READ_AFTER_FREE"), False),
        (of_slot("FOREIGN_READ"), True),
        (of_slot("FOREIGN_READ", "evil\x1b[31m"), False),
        (of_slot("FOREIGN_READ", None), None),
        (of_slot("WRITE_SHARED"), False),
        (of_slot("OUT_OF_RANGE", stored=4000), True),
        (of_slot("NEVER_WRITTEN"), False),
        (of_slot("NEVER_WRITTEN", slot=6), True),
        (of_slot("WRONG_TOKEN", stored=8, found=9), True),
        (of_slot("WRONG_POSITION", stored=1, found=2, check="chain"), True),
        (of_slot("PLANNED_TWICE", stored=7), False),
        (of_slot("READ_WHILE_WRITTEN", slot=5), False),
        (of_slot("DOUBLE_ALLOCATE"), None),
    ],
    ids=lambda v: f"{v.why}-{v.slot}-{v.request}" if isinstance(v, Violation) else str(v),
)
def test_replay_of_checks_of_slots(violation, fails):
    one = incident()
    (outcome,) = replay(dataclasses.replace(one, records=(Record(violation, 0, None, violation.slot),)))
    assert outcome.fails is fails


def test_replay_without_what_it_needs_says_so(saved, tmp_path, capsys):
    record = Record(of_slot("DOUBLE_ALLOCATE"), 0, None, 5)
    file.save(dataclasses.replace(incident(), records=(record,)), tmp_path / "one.zip")
    assert main(["replay", str(tmp_path / "one.zip")]) == 3
    assert "cannot be run: owner (double_allocate)" in capsys.readouterr().out
    record = Record(of_slot("FOREIGN_READ"), 0, None, 5)
    file.save(dataclasses.replace(incident(), records=(record,)), tmp_path / "one.zip")
    assert main(["replay", str(tmp_path / "one.zip")]) == 1
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "replay"])
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
def test_a_file_that_is_no_incident_is_a_clear_error(command, spoil, said, saved, capsys):
    spoil(saved)
    assert main([command, str(saved)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert str(saved) in err

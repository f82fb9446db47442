"""The false-alarm soak of the laboratory, for a few seconds; and what it does where there is something to report."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples" / "paged_engine"))

import serving
import soak
from faults import Faults

SIZES = [
    *("--width", "256", "--page", "8", "--max-running", "4", "--chunk", "48", "--token-budget", "64"),
    *("--requests", "10", "--every", "1"),
]


def table(out: str) -> dict[str, int]:
    return {name: int(value.replace(",", "")) for name, value in re.findall(r"^([a-z].*?)  +([\d,]+)$", out, re.M)}


def test_soak_goes_on_until_enough_was_checked_and_uses_every_feature(capsys):
    assert soak.main([*SIZES, "--slot-checks", "6e4"]) == 0
    out = capsys.readouterr().out
    counts = table(out)
    identity, content = counts["slots checked: identity"], counts["slots checked: bytes"]
    assert counts["slot checks"] == identity + content >= 60_000
    assert re.search("outputs equal the oracle's +True", out)
    assert counts["rounds"] > 1  # in bytes of both types
    assert counts["off-loads"] > counts["transfers"]  # which go by way of the host, too
    unused = [name for name, value in counts.items() if value == 0]
    assert set(unused) <= {"violations", "slots checked: sweeps"}  # every 50 steps, which may be too rare here


def test_soak_speculates_and_compares(capsys):
    """One round: the first kind of draft, 1 to 8 tokens; the others are in test_speculation."""
    assert soak.main([*SIZES, "--slot-checks", "1e4", "--requests", "6", "--speculate"]) == 0
    out = capsys.readouterr().out
    counts = table(out)
    assert re.search("outputs equal the oracle's +True", out)
    assert re.search("outputs equal those without speculation +True", out)
    assert counts["slot checks"] >= 10_000
    assert counts["violations"] == 0
    for used in ("drafted", "accepted", "chunks of prefills"):
        assert counts[used] > 0, used


def test_soak_notices_what_speculation_changes():
    done = soak.Soak(1.0)
    right, wrong = (soak.Request(name, [1, 2], 2, output=[3, 4]) for name in "ab")
    done.compare(serving.Served([right, wrong], []), [[3, 4], [3, 5]])
    assert done.different == ["b"]


class BadWire(Faults):
    def on_transfer(self, raw):
        raw[len(raw) // 3] ^= 4
        return raw


def test_soak_shows_what_was_reported_and_fails(capsys, monkeypatch):
    monkeypatch.setattr(soak, "serve", functools.partial(soak.serve, faults=BadWire()))
    assert soak.main([*SIZES, "--slot-checks", "1", "--requests", "3"]) == 1
    out = capsys.readouterr().out
    assert "[content] the bytes of a transferred slot are not those that its shadow came with" in out
    assert table(out)["violations"] > 0


def test_requests_that_do_not_fit_together_take_turns(monkeypatch):
    """Seen: two requests, each loaded back into the pages that the other had just left, for ever."""
    sizes = "--width 128 --page 4 --max-running 4 --requests 10 --chunk 24 --token-budget 48"
    args = soak.parse(sizes.split())
    monkeypatch.setattr(serving, "MAX_STEPS", 300)
    run = serving.serve(soak.requests_of(args, 1), soak.config_of(args, 1), transfer=True, mode="off")
    assert run.wrong() == []
    assert run.counts()["retracts"] > 0


@pytest.mark.gpu
def test_soak_on_a_gpu(capsys):
    assert soak.main(["--device", "cuda", "--slot-checks", "1e7", "--requests", "24", "--max-running", "12"]) == 0
    assert table(capsys.readouterr().out)["violations"] == 0

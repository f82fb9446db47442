"""Random schedules under SGLang's canary and ours, a few; `sglang_schedules.py` alone runs as many as one likes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_schedules import Outcome, report

SCRIPT = Path(__file__).with_name("sglang_schedules.py")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own: it puts empty packages where those of SGLang's server are."""
    known = [p for p in (str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")) if p]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(known))
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not on sys.path")
def test_whatever_sglang_reports_is_reported_in_that_step_or_before_and_clean_schedules_are_silent():
    done = run("--clean", "8", "--faulty", "24", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    total = re.search(r"^all +(\d+) +(\d+)", done.stdout, re.MULTILINE)
    assert total is not None, done.stdout
    planted, both = int(total[1]), int(total[2])
    assert planted >= 22  # the others found no place
    assert both >= 12  # SGLang's side is awake
    seen = re.findall(r"\d+ ([a-z ]+)", done.stdout.splitlines()[1])
    assert seen == [
        "cache hits",
        "chunks",
        "decodes",
        "drafts",
        "evictions",
        "left a window",
        "padded rows",
        "prefills",
        "rejected drafts",
        "requests",
        "retractions",
    ]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="sglang is installed")
def test_without_sglang_it_says_how_to_give_it():
    done = run("--clean", "1", "--faulty", "0")
    assert done.returncode == 1
    assert done.stderr.startswith("sglang_schedules: sglang is not on sys.path. Give it: `pip install --no-deps")


@pytest.mark.parametrize(
    ("name", "planted", "ours", "theirs", "status", "verdict"),
    [
        ("clean", None, None, None, 0, "neither"),
        ("clean", None, 3, None, 1, "ours"),
        ("wrong token", 4, 4, 5, 0, "both"),
        ("wrong token", 4, 5, 4, 1, "ours later"),
        ("wrong token", 4, None, 5, 1, "theirs"),
        ("wrong token", 4, 5, None, 0, "ours"),
        ("wrong token", 4, None, None, 0, "neither"),
        ("wrong token", 4, 3, 4, 1, "both"),  # ours spoke before the fault was there
    ],
)
def test_what_ends_with_an_error(name, planted, ours, theirs, status, verdict, capsys):
    outcome = Outcome(name, "0/0", planted, ours, theirs, "", {})
    assert report([outcome]) == status
    assert outcome.verdict == verdict
    assert ("'0/0' planted" in capsys.readouterr().out) == bool(status)

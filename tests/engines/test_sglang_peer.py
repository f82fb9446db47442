"""The benchmark beside SGLang's own canary, small and on a CPU: both find what they must, or it says what it lacks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The benchmark, with a folder in front of what is installed."""
    folders = [str(path)] if path is not None else []
    known = [p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([*folders, *known]))
    command = [sys.executable, str(ROOT / "tests/benchmarks/sglang_peer.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not on sys.path")


@needs_sglang
def test_both_canaries_look_at_every_slot_and_find_a_flipped_bit():
    done = run("--tiny")
    assert done.returncode == 0, done.stderr
    lines = [line.split("  ")[:2] for line in done.stdout.splitlines()]
    decode = ["identity check", "content check", "identity and content check"]
    records = ["record, identity", "record, identity and content"]
    assert lines == [[n, "2 x 24 + 1"] for n in decode + records] + [[n, "2 x 0 + 12"] for n in records]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="sglang is installed")
def test_without_sglang_it_says_how_to_give_it():
    done = run("--tiny")
    assert done.returncode == 1
    assert done.stderr.startswith("sglang_peer: sglang is not on sys.path. Give it: `pip install --no-deps --target")


def test_a_version_without_the_canary_is_named(tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").write_text("raise AssertionError('imported')")
    done = run("--tiny", path=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        f"sglang_peer: {tmp_path}/sglang has no kernels/ops/kv_canary: another version? 0.5.23 is known to work\n"
    )


@pytest.mark.parametrize(
    ("arguments", "told"), [(["--tiny", "--write"], "--tiny is no measurement"), (["--help"], "usage:")]
)
def test_arguments(arguments, told):
    done = run(*arguments)
    assert told in done.stdout + done.stderr

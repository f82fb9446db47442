"""What `run_gpu.py` prints of a job, which is all that is left when the machine with the GPU is gone."""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("run_gpu", Path(__file__).parents[1] / "run_gpu.py")
run_gpu = importlib.util.module_from_spec(_SPEC)
sys.modules["run_gpu"] = run_gpu  # where dataclasses look for the names of a module
_SPEC.loader.exec_module(run_gpu)

TESTS = """
import time

def test_that_fails():
    assert "one" == "other"

def test_that_takes_long():
    time.sleep(60)
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it starts in a second
    path = tmp_path / "test_it.py"
    path.write_text(TESTS)

    def made(test=""):
        return run_gpu.Job("tests", [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"{path}{test}"])

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a shell
    run_gpu.take_interrupts()
    yield made
    signal.signal(signal.SIGINT, before)


def test_a_job_that_fails_says_which_test_did_and_why(job, tmp_path, capsys):
    assert job("::test_that_fails").run(tmp_path, timeout=60).status == 1
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("FAIL")
    assert any("test_that_fails" in line for line in rest)
    assert any("assert 'one' == 'other'" in line for line in rest)


def test_a_job_whose_time_is_up_says_what_had_failed_before(job, tmp_path, capsys):
    assert job().run(tmp_path, timeout=15).status == 124
    out = capsys.readouterr().out
    assert out.startswith("FAIL")
    assert "test_that_fails" in out


def test_a_job_that_passes_is_one_line(tmp_path, capsys):
    assert run_gpu.Job("it", [sys.executable, "-c", "print('done')"]).run(tmp_path, timeout=60).status == 0
    assert capsys.readouterr().out.strip().endswith("it: done")
    assert run_gpu.why_failed("") == []


def test_jobs_side_by_side_begin_on_all_gpus_and_see_the_others(tmp_path, capsys):
    places = run_gpu.places_for(3, ["0", "5"])
    own = [places.get() for _ in range(3)]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in own] == ["0,5", "5,0", "0,5"]
    places.put(own[1])
    told = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    for _ in range(2):  # the place is free again when its job has ended
        assert run_gpu.Job("it", told).run(tmp_path, 60, places).last_line == "5,0"
    capsys.readouterr()


def test_on_one_gpu_a_job_sees_what_it_always_did():
    assert run_gpu.places_for(3, ["0"]) is None
    assert run_gpu.places_for(3, []) is None

"""The status file of a process, and ``kvcanary top --pid``; a snapshot on SIGUSR1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from toy import Toy

from kvcanary_fx.__main__ import main
from kvcanary_fx.reports import metrics_text
from kvcanary_fx.reports.incidents import file
from kvcanary_fx.reports.metrics_text import Reading, read, write
from kvcanary_fx.runtime import status

SAID = 'reason "with"\n\\ all'


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """A toy whose status file has been written, with two violations in it, and the directory."""
    monkeypatch.setattr(status, "EVERY", 0.01)
    toy = Toy(status=tmp_path)
    toy.add("a", range(8))
    toy.run({"a": [1, 2, 3]})
    toy.kv[1][0].view(torch.int32)[2, 0, 1] ^= 1 << 20
    toy.run({"a": [7]})
    status._writers[os.getpid(), str(tmp_path)].write()
    return toy, tmp_path


def top(folder, pid=None):
    return main(["top", "--pid", str(os.getpid() if pid is None else pid), "--status", str(folder), "--once"])


def test_the_counts_of_a_process_are_shown_by_its_pid(counted, capsys):
    toy, folder = counted
    assert top(folder) == 1
    out = capsys.readouterr().out
    assert "guarded     1 of 1 KV cache groups" in out
    assert "2 forwards" in out
    assert "violations  1 (content 1)" in out
    assert toy.session.stats().violations == 1


def test_a_server_is_asked_by_the_process_that_started_it(tmp_path, capsys):
    code = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        reading = Reading({"kvcanary_forwards_total": 3.0}, {"kv": ""}, {"content": 0.0}, 0.0)
        metrics_text.file_of(tmp_path, int(child.stdout.readline())).write_text(write(reading))
        assert top(tmp_path) == 0
        child.communicate("")
    assert "3 forwards" in capsys.readouterr().out


def test_without_a_file_the_error_names_the_remedy(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("KVCANARY_STATUS", raising=False)
    assert main(["top", "--pid", str(os.getpid()), "--once"]) == 2
    assert "Start it with KVCANARY_STATUS=DIR" in capsys.readouterr().err
    assert top(tmp_path) == 2
    assert f"has a status file in {tmp_path}" in capsys.readouterr().err
    assert top(tmp_path, pid=2**22 + 1) == 2
    assert "there is no such process" in capsys.readouterr().err


def test_what_is_written_is_read_again():
    reading = Reading({"kvcanary_forwards_total": 3.0}, {"kv": "", 'a "b"': SAID}, {"content": 2.0}, 1.5)
    assert read(write(reading)) == reading


@pytest.fixture
def free_signal():
    """SIGUSR1 as a process has it from the system; put back afterwards."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_on_sigusr1_each_session_writes_a_snapshot(tmp_path, free_signal):
    toy = Toy(incidents=tmp_path)
    toy.add("a", range(8))
    toy.run({"a": [1, 2, 3]})
    os.kill(os.getpid(), signal.SIGUSR1)
    for thread in threading.enumerate():
        if thread.name == "kvcanary snapshot":
            thread.join()
    (found,) = tmp_path.glob("*-snapshot-on-signal.zip")
    incident = file.load(found)
    assert incident.reason == "snapshot"
    assert [request.request for request in incident.pools[0].batch] == ["a"]


def test_a_handler_of_the_user_stays_and_without_incidents_there_is_none(tmp_path, free_signal):
    Toy()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL

    def theirs(*args):
        pass

    signal.signal(signal.SIGUSR1, theirs)
    Toy(incidents=tmp_path)
    assert signal.getsignal(signal.SIGUSR1) is theirs

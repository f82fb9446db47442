"""What Python's garbage collector looks at in the processes of a guarded vLLM."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import subprocess
import sys

import pytest

from kvcanary_fx.adapters.vllm import collector, known, plugin
from kvcanary_fx.adapters.vllm.collector import no_collections

#: What vLLM's modules alone are, and more.
MANY = 300_000

#: Prints how many objects are set aside in a process that vLLM's plugins were loaded in, and in one that it forks.
FORKS = """
import gc, json, os
from vllm import LLM
from vllm.plugins import load_general_plugins

load_general_plugins()
read, write = os.pipe()
if not os.fork():
    os.write(write, str(gc.get_freeze_count()).encode())
    os._exit(0)
os.wait()
print(json.dumps([gc.get_freeze_count(), int(os.read(read, 20)), gc.isenabled()]))
"""


def set_aside(mode):
    environment = dict(os.environ, KVCANARY_MODE=mode)
    done = subprocess.run([sys.executable, "-c", FORKS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_forked_engine_is_spared_what_was_imported():
    parent, child, collects = set_aside("log")
    assert parent == 0  # a user's own process is as it was
    assert child > MANY
    assert collects


def test_without_the_canary_nothing_is_set_aside():
    parent, child, _ = set_aside("off")
    assert parent == 0
    assert child < MANY  # Python sets some aside by itself


def test_a_vllm_that_cannot_be_guarded_is_left_as_it_is(monkeypatch):
    monkeypatch.setenv("KVCANARY_MODE", "log")
    monkeypatch.setattr(known, "can_be_guarded", lambda mode: False)
    monkeypatch.setattr(collector, "set_imports_aside", lambda: pytest.fail("what is not guarded was changed"))
    plugin.register()


def _loads_plugins(found):
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    found.put([gc.get_freeze_count(), gc.isenabled()])


@pytest.mark.parametrize(("name", "spared"), [("EngineCore", True), ("VllmWorker-0", True), ("of a user", False)])
def test_processes_that_vllm_starts_anew_are_spared_it_too(name, spared, monkeypatch):
    monkeypatch.setenv("KVCANARY_MODE", "log")
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    process = context.Process(target=_loads_plugins, args=(found,), name=name)
    process.start()
    aside, collects = found.get()
    process.join()
    assert (aside > MANY) == spared
    assert collects


def test_imports_set_off_no_collection():
    with no_collections():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with no_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_is_back_after_an_error():
    with pytest.raises(RuntimeError), no_collections():
        raise RuntimeError("no such module")
    assert gc.isenabled()

"""A graph's first launches are compiled while the inner backend compiles the graph."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch._inductor.config
import triton
from no_device import run_scenes
from toys import Rig

from kvcanary_fx.compile.rehearsal import PARSES_IN_THREADS
from kvcanary_fx.kernels.compile_ahead import InBackground


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles what it runs")
def test_first_launches_are_compiled_in_the_background():
    run_scenes(Path(__file__).with_name("rehearsal_scenes.py"))


def test_waiting_for_nothing_ends_at_once():
    ahead = InBackground()
    ahead.wait()
    ahead.wait()


def test_a_process_ends_while_kernels_are_compiled_in_the_background():
    """What compiles is waited for, a second or two; what has not begun does not run."""
    code = (
        "import threading, torch\n"
        "from kvcanary_fx.kernels import compile_ahead\n"
        "compile_ahead.compile_ahead = lambda run, device, turn: run()\n"
        "ahead = compile_ahead.InBackground()\n"
        "ahead.compile(lambda: threading.Event().wait(0.5), torch.device('cuda'))\n"
        "print('over')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not PARSES_IN_THREADS, reason="this Python's parser is not for threads")
@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_first_call_on_a_gpu_compiles_nothing_in_its_own_thread(tmp_path, monkeypatch, inner, tokens):
    from triton.runtime.jit import JITFunction

    for name, module in list(sys.modules.items()):
        if name.startswith("kvcanary_fx") and ".triton_" in name:
            for value in vars(module).values():
                if isinstance(value, JITFunction):
                    value.device_caches.clear()
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    # a graph that was compiled before looks for its kernels where that one's cache was: "Cubin file ... not found"
    monkeypatch.setattr(torch._inductor.config, "fx_graph_cache", False)
    compiling, found = triton.compiler.compile, []

    def noted(source, *args, **settings):
        function = getattr(getattr(source, "fn", None), "fn", None)
        if getattr(function, "__module__", "").startswith("kvcanary_fx"):
            found.append((function.__name__, threading.current_thread() is threading.main_thread()))
        return compiling(source, *args, **settings)

    monkeypatch.setattr(triton.compiler, "compile", noted)
    rig = Rig.build(device="cuda", inner=inner, checks=("content", "operand", "bounds", "poison"))
    for _ in range(3):
        rig.step(tokens)
    torch.cuda.synchronize()
    assert rig.session.violations() == []
    assert found
    assert not [name for name, in_main in found if in_main]

"""Scenes of test_compile_ahead.py, for a process in which Triton's compiler is not replaced by its interpreter."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import triton
import triton.language as tl
from no_device import NoDevice
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kvcanary_fx.kernels.bound_launch import BoundLaunch
from kvcanary_fx.kernels.compile_ahead import InBackground, compile_ahead, launch_or_compile

CPU = torch.device("cpu")


def fill(out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 1, mask=at < n)


def double(out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 2 * tl.load(out_ptr + at, mask=at < n), mask=at < n)


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Triton compiles for a GPU; the thread in which each kernel was loaded, and the names of what was compiled."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    loaded, compiled = [], []
    monkeypatch.setattr(CompiledKernel, "run", property(lambda self: loaded.append(threading.current_thread())))
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda *, repr, **_: compiled.append(repr.split("[")[0])
    )
    driver.set_active(NoDevice())
    return loaded, compiled


def test_kernels_are_compiled_and_loaded_in_other_threads_and_nothing_is_launched(compiler, monkeypatch):
    loaded, compiled = compiler
    monkeypatch.setattr(JITFunction, "__getitem__", lambda self, grid: pytest.fail("launched"))
    out, kernels = torch.zeros(4), [JITFunction(fill), JITFunction(double)]
    launches = [BoundLaunch(kernel, CPU, dict(out_ptr=out, BLOCK=8), ("n",), 4) for kernel in kernels]

    def warm_up():
        for launch in launches:
            launch.first((1, 1, 1), (4,), None)
        assert launch_or_compile(kernels[0], (1,), out, 4, BLOCK=8, num_warps=4) is None

    compile_ahead(warm_up, torch.device("cuda"))
    assert sorted(compiled) == ["double", "fill"]  # each once
    assert len(loaded) == 2
    assert threading.current_thread() not in loaded
    assert not any(launch.ready for launch in launches)
    assert not out.any()


def test_what_was_compiled_ahead_is_not_compiled_again(compiler):
    _, compiled = compiler
    kernel, out = JITFunction(fill), torch.zeros(4)
    compile_ahead(lambda: launch_or_compile(kernel, (1,), out, 4, BLOCK=8), torch.device("cuda"))
    kernel.warmup(out, 4, grid=(1,), BLOCK=8)
    assert compiled == ["fill"]
    kernel.warmup(out, 4, grid=(1,), BLOCK=16)
    assert compiled == ["fill", "fill"]


def test_a_kernel_that_cannot_be_compiled_says_so_when_it_is_launched(compiler):
    kernel, out = JITFunction(fill), torch.zeros(4)
    compile_ahead(lambda: launch_or_compile(kernel, (1,), out, 4, BLOCK=7), torch.device("cuda"))
    with pytest.raises(triton.CompilationError):
        kernel[(1,)](out, 4, BLOCK=7)
    compile_ahead(lambda: launch_or_compile(kernel, (1,), out, 4, BLOCK=8), torch.device("cuda"))


def test_one_kernel_is_compiled_at_a_time_until_somebody_waits(compiler, monkeypatch):
    compiling, busy, seen, beside = triton.compiler.compile, [], [], []
    waiting, fourth = threading.Event(), threading.Event()

    def noted(source, **settings):
        busy.append(source)
        seen.append(len(busy))
        if not waiting.is_set():
            waiting.wait(1)  # long enough for another one to begin
        elif len(seen) < 4:
            beside.append(fourth.wait(20))
        else:
            fourth.set()
        busy.remove(source)
        return compiling(source, **settings)

    monkeypatch.setattr(triton.compiler, "compile", noted)
    out, kernel = torch.zeros(4), JITFunction(fill)

    def warm_up():
        for block in (8, 16, 32, 64):
            launch_or_compile(kernel, (1,), out, 4, BLOCK=block)

    ahead = InBackground()
    ahead.compile(warm_up, torch.device("cuda"))
    while len(seen) < 2:
        threading.Event().wait(0.01)
    assert seen == [1, 1]
    waiting.set()
    ahead.wait()
    assert beside == [True]  # the third saw the fourth begin
    assert len(compiler[1]) == 4


def test_what_tritons_cache_has_is_loaded_out_of_turn(compiler):
    out = torch.zeros(4)

    def warm_up(kernel):
        return lambda: launch_or_compile(kernel, (1,), out, 4, BLOCK=8)

    turns = []

    @contextlib.contextmanager
    def turn():
        turns.append(threading.current_thread())
        yield

    for _ in range(2):  # as by another process
        compile_ahead(warm_up(JITFunction(fill)), torch.device("cuda"), turn())
    assert len(turns) == 1
    assert len(compiler[0]) == 2


def test_launches_of_other_threads_go_on(compiler, monkeypatch):
    launched = []
    monkeypatch.setattr(JITFunction, "__getitem__", lambda self, grid: lambda *_, **__: launched.append(grid))
    kernel = JITFunction(fill)

    def elsewhere():
        thread = threading.Thread(target=launch_or_compile, args=(kernel, (3,), torch.zeros(4), 4), kwargs={"BLOCK": 8})
        thread.start()
        thread.join()

    compile_ahead(elsewhere, torch.device("cuda"))
    assert launched == [(3,)]

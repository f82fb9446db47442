"""Scenes of test_rehearsal.py, for a process in which Triton's compiler is not replaced by its interpreter."""

from __future__ import annotations

import ast
import contextlib
import logging
import sys
import threading
from pathlib import Path

import pytest
import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "kernels")]
import toys
from gpu_on_cpu import use_gpu_kernels
from no_device import NoDevice

import kvcanary_fx.compile.backend as compile_backend
from kvcanary_fx.compile import rehearsal
from kvcanary_fx.kernels import compile_ahead
from kvcanary_fx.kernels.content import gpu
from kvcanary_fx.runtime.registry import PoolRegistry

STEP = ["begin_kernel", "identify_write_kernel", "record_write_kernel", "verify_write_kernel"]
AT_ONCE = [
    "begin_kernel", "identify_write_kernel", "record_layers_kernel", "verify_layers_kernel", "verify_turns_kernel",
]  # fmt: skip
WITHOUT_CHAIN = ("content", "operand", "bounds", "poison")  # of a prompt, chain computes with what kernels left
MAIN = threading.main_thread().name


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """What Triton compiled for any of these tests: it is asked for it in each of them, and has it on its disk."""
    return str(tmp_path_factory.mktemp("triton"))


@pytest.fixture
def compiled(monkeypatch, cache):
    """The code of a GPU runs over CPU tensors and launches nothing; kernels as they are compiled, each with its thread.

    No variant is known from another test: Triton keeps them with the kernel.
    """
    monkeypatch.setattr(triton.knobs.cache, "dir", cache)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(CompiledKernel, "run", property(lambda self: None))
    monkeypatch.setattr(compile_ahead, "compiles_for", lambda device: True)
    monkeypatch.setattr(rehearsal, "compiles_for", lambda device: True)
    monkeypatch.setattr(rehearsal, "_BEGUN", set())
    if not rehearsal.PARSES_IN_THREADS:
        monkeypatch.setattr(rehearsal, "PARSES_IN_THREADS", True)
        monkeypatch.setattr(ast, "parse", one_at_a_time(ast.parse))
    use_gpu_kernels(monkeypatch.setattr)
    driver.set_active(NoDevice())
    run, found, compiling = JITFunction.run, [], triton.compiler.compile

    def without_launch(self, *args, grid, warmup, **settings):
        kernel = run(self, *args, grid=grid, warmup=True, **settings)
        if not warmup and hasattr(kernel, "result"):
            kernel.result()  # a launch waits for it
        return kernel

    def noted(source, **settings):
        found.append((source.fn.__name__, threading.current_thread().name))
        return compiling(source, **settings)

    monkeypatch.setattr(JITFunction, "run", without_launch)
    monkeypatch.setattr(triton.compiler, "compile", noted)
    gpu._begin_launches.cache_clear()
    for module in [m for name, m in list(sys.modules.items()) if ".triton_" in name and name.startswith("kvcanary_fx")]:
        for value in vars(module).values():
            if isinstance(value, JITFunction):
                value.device_caches.clear()
    torch._dynamo.reset()
    return found


def one_at_a_time(function):
    lock = threading.RLock()

    def locked(*args, **kwargs):
        with lock:
            return function(*args, **kwargs)

    return locked


def step(tokens: int = 1, **settings) -> toys.Rig:
    """A first call.  What kernels would have written is missing, so nothing may wait for it."""
    rig = toys.Rig.build(mode="log", **settings)
    rig.session.report_lost = lambda *_: None  # the counters of ops stay at zero
    rig.step(tokens)
    return rig


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("budget", [None, "1%"])
def test_a_first_call_compiles_nothing_itself(compiled, inner, budget):
    step(inner=inner, layers=3, budget=budget)
    expected = STEP if budget is None else AT_ONCE
    assert sorted(name for name, _ in compiled) == expected  # each once, for all layers
    assert {thread.rstrip("_0123456789") for _, thread in compiled} == {"kvcanary compile"}


def test_the_kernels_are_compiled_while_the_inner_backend_compiles(compiled):
    """It waits for them here, which it could not if they were compiled behind it."""

    def inner(gm, example_inputs, **_):
        binding.append(gm)
        for _ in range(600):
            if len(compiled) == len(STEP):
                return gm.forward
            threading.Event().wait(0.1)
        pytest.fail(f"compiled only {compiled}")

    binding = []
    step(inner=inner)
    assert len(binding) == 1


@pytest.mark.parametrize(
    ("tokens", "batch", "kernel"),
    [(5, 2, "verify_write_kernel"), (60, 5, "resolve_kernel")],
    ids=["few", "more than 256"],
)
def test_a_prompt_is_foreseen_too(compiled, tokens, batch, kernel):
    step(tokens, batch=batch, slots=64, checks=WITHOUT_CHAIN)
    assert kernel in {name for name, _ in compiled}
    assert MAIN not in {thread for _, thread in compiled}


def test_sizes_that_are_dynamic_are_foreseen_as_they_are_now(compiled):
    step(5, slots=64, checks=WITHOUT_CHAIN, compile_options={"dynamic": True})
    assert compiled
    assert MAIN not in {thread for _, thread in compiled}


def test_a_kernel_that_cannot_be_compiled_fails_the_call(compiled, monkeypatch):
    def broken(source, **_):
        compiled.append((source.fn.__name__, threading.current_thread().name))
        raise triton.CompilationError("", None, f"no {source.fn.__name__}")

    monkeypatch.setattr(triton.compiler, "compile", broken)
    with pytest.raises(triton.CompilationError, match="no "):
        step()
    assert "kvcanary compile" in compiled[0][1]


def test_a_rehearsal_that_fails_is_told_and_the_call_runs(compiled, monkeypatch, caplog):
    monkeypatch.setattr(rehearsal._Op, "alike", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING, "kvcanary"):
        step()
    assert "kernels are compiled when they are launched" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert {name for name, thread in compiled if thread == MAIN} == set(STEP) - {"begin_kernel"}


def test_a_session_knows_nothing_of_caches_that_were_only_rehearsed(compiled, monkeypatch):
    known = []
    waited = compile_ahead.InBackground.wait

    def wait(self):
        waited(self)
        known.append(dict(rig.session.registry._storages))

    monkeypatch.setattr(compile_ahead.InBackground, "wait", wait)
    rig = toys.Rig.build(mode="log")
    rig.session.report_lost = lambda *_: None
    rig.step()
    assert known == [{}]
    assert rig.session.registry._storages


def test_a_rehearsal_is_no_other_session_over_the_caches(compiled, monkeypatch):
    """On an H200 every model that protect had compiled was told of one: the rehearsal's shadows were still there."""
    kept = []

    def registry(*args, **kwargs):
        kept.append(PoolRegistry(*args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(rehearsal, "PoolRegistry", registry)
    rig = toys.Rig.build(mode="log")
    rig.session.report_lost = lambda *_: None
    rig.step()
    assert kept
    assert kept[0]._storages
    assert rig.session.uncovered == []


def test_what_is_bound_for_all_graphs_is_not_launched_by_a_rehearsal(compiled, monkeypatch):
    begun = []
    monkeypatch.setattr(gpu, "begin", lambda words, gate: begun.append(threading.current_thread().name))
    step()
    torch._dynamo.reset()
    step()
    assert [name.rstrip("_0123456789") for name in begun] == ["kvcanary ahead", MAIN, MAIN]


def test_where_threads_may_not_parse_nothing_is_rehearsed(compiled, monkeypatch):
    monkeypatch.setattr(rehearsal, "PARSES_IN_THREADS", False)
    step()
    assert {thread for _, thread in compiled} == {MAIN}


def test_without_a_gpu_nothing_is_rehearsed(compiled, monkeypatch):
    monkeypatch.setattr(rehearsal, "compiles_for", lambda device: False)
    monkeypatch.setattr(compile_backend, "rehearse", lambda *a: found.append(rehearsal.rehearse(*a)))
    found = []
    step()
    assert found == [None]
    assert {thread for _, thread in compiled} == {MAIN}

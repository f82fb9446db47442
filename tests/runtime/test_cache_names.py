"""Names that the compilers' caches want, computed while our passes run; and the turns of threads that run Python."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
import torch._inductor.codecache
import triton

import kvcanary_fx
from kvcanary_fx.compile import backend, cache_names
from kvcanary_fx.compile.cache_names import computing_names, name_of_triton
from kvcanary_fx.kernels import compile_ahead
from kvcanary_fx.kernels.compile_ahead import SHORT_TURNS, InBackground


def as_for_a_gpu(monkeypatch):
    monkeypatch.setattr(cache_names, "compiles_for", lambda device: True)
    monkeypatch.setattr(cache_names, "_NAME_OF_TRITON", cache_names._NameOfTriton())


@pytest.fixture
def computed(monkeypatch):
    """Graphs compile as if for a GPU; what was computed, and in which thread."""
    found = []
    as_for_a_gpu(monkeypatch)
    monkeypatch.setattr(cache_names, "name_of_triton", lambda: found.append(("triton", threading.current_thread())))
    monkeypatch.setattr(
        torch._inductor.codecache, "torch_key", lambda: found.append(("torch", threading.current_thread()))
    )
    return found


def test_triton_has_one_name_for_itself_and_for_inductor():
    """So that it is computed once."""
    from torch._inductor.runtime.triton_compat import triton_key

    name = name_of_triton()
    assert triton_key() is name
    assert triton.__version__ in name


def test_both_names_are_there_before_inductor_is_asked(computed, monkeypatch):
    """Triton's is computed in another thread, so that the passes need not wait for it."""
    before = []
    compiling = backend.inner_compile
    monkeypatch.setattr(backend, "inner_compile", lambda *given: before.extend(computed) or compiling(*given))

    @torch.compile(backend=kvcanary_fx.CanaryBackend())
    def write(cache, row, at):
        cache.index_copy_(0, at, row)
        return cache.sum()

    write(torch.zeros(8, 2), torch.ones(1, 2), torch.tensor([3]))
    names = [name for name, _ in before]
    assert sorted(names) == ["torch", "triton"]
    threads = dict(before)
    assert threads["torch"] is threading.main_thread()
    assert threads["triton"] is not threading.main_thread()


@pytest.mark.parametrize(
    "backend", [kvcanary_fx.kvcanary_backend, kvcanary_fx.CanaryBackend(kvcanary_fx.CanaryConfig(inner="eager"))]
)
def test_the_name_of_triton_is_begun_when_dynamo_is(computed, monkeypatch, backend):
    """Tracing takes longer than it does."""
    monkeypatch.setattr(cache_names, "_on_a_gpu", lambda: True)
    cache_names.begin_with_dynamo()  # torch._dynamo.reset() has forgotten it

    @torch.compiler.assume_constant_result
    def begun_while_dynamo_traces():
        cache_names._NAME_OF_TRITON.wait()
        return [name for name, _ in computed] == ["triton"]

    @torch.compile(backend=backend)
    def write(cache, row, at):
        if begun_while_dynamo_traces():
            cache.index_copy_(0, at, row)
        return cache.sum()

    assert write(torch.zeros(8, 2), torch.ones(1, 2), torch.tensor([3])) == 2
    assert computed[0][1] is not threading.main_thread()


def test_no_name_is_begun_for_other_backends(monkeypatch):
    monkeypatch.setattr(cache_names, "_on_a_gpu", lambda: True)
    monkeypatch.setattr(cache_names._NAME_OF_TRITON, "begin", lambda: pytest.fail("begun"))
    cache_names.begin_with_dynamo()
    assert torch.compile(torch.sin, backend="eager")(torch.zeros(1)) == 0


def test_the_name_of_triton_is_computed_once(computed):
    for _ in range(2):
        with computing_names([torch.zeros(1)], "eager"):
            pass
    assert [name for name, _ in computed] == ["triton"]


def test_the_other_backends_want_no_name_of_torch(computed):
    with computing_names([torch.zeros(1)], "eager"):
        pass
    assert [name for name, _ in computed] == ["triton"]


def test_nothing_is_computed_for_a_cpu(monkeypatch):
    monkeypatch.setattr(cache_names, "name_of_triton", lambda: pytest.fail("computed"))
    monkeypatch.setattr(torch._inductor.codecache, "torch_key", lambda: pytest.fail("computed"))
    with computing_names([torch.zeros(1), 3], "inductor"):
        pass


def test_it_is_waited_for_also_if_a_pass_raises(computed):
    with pytest.raises(ValueError, match="a pass"), computing_names([torch.zeros(1)], "inductor"):
        raise ValueError("a pass")
    assert [name for name, _ in computed] == ["triton"]


@pytest.mark.parametrize("setting", [{"fx_graph_cache": False}, {"force_disable_caches": True}])
def test_no_name_of_torch_without_inductors_cache(computed, setting):
    with torch._inductor.config.patch(setting), computing_names([torch.zeros(1)], "inductor"):
        pass
    assert [name for name, _ in computed] == ["triton"]


def test_turns_are_short_while_kernels_are_compiled_in_the_background(monkeypatch):
    before, seen = sys.getswitchinterval(), []
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda run, device, turn: run())
    ahead = InBackground()
    ahead.compile(lambda: seen.append(sys.getswitchinterval()), torch.device("cuda"))
    ahead.wait()
    assert seen == [pytest.approx(2e-4)]
    assert sys.getswitchinterval() == before


def test_turns_are_short_while_a_name_is_computed_beside_the_passes(monkeypatch):
    before, seen = sys.getswitchinterval(), []
    as_for_a_gpu(monkeypatch)
    monkeypatch.setattr(cache_names, "name_of_triton", lambda: seen.append(sys.getswitchinterval()))
    with computing_names([torch.zeros(1)], "eager"):
        pass
    assert seen == [pytest.approx(2e-4)]
    assert sys.getswitchinterval() == before


def test_turns_are_short_until_the_last_has_left():
    before = sys.getswitchinterval()
    with SHORT_TURNS:
        with SHORT_TURNS:
            pass
        assert sys.getswitchinterval() == pytest.approx(2e-4)
    assert sys.getswitchinterval() == before


def test_turns_that_somebody_else_has_set_stay():
    before = sys.getswitchinterval()
    try:
        with SHORT_TURNS:
            sys.setswitchinterval(0.1)
        assert sys.getswitchinterval() == pytest.approx(0.1)
        sys.setswitchinterval(1e-5)
        with SHORT_TURNS:
            assert sys.getswitchinterval() == pytest.approx(1e-5)
        assert sys.getswitchinterval() == pytest.approx(1e-5)
    finally:
        sys.setswitchinterval(before)


def test_turns_are_as_they_were_after_an_error(monkeypatch, capfd):
    """Whoever needs the name raises it again."""
    before = sys.getswitchinterval()
    as_for_a_gpu(monkeypatch)
    monkeypatch.setattr(cache_names, "name_of_triton", lambda: 1 / 0)
    with computing_names([torch.zeros(1)], "eager"):
        pass
    assert sys.getswitchinterval() == before
    assert capfd.readouterr().err == ""

"""The backend as torch.compile calls it: by name, with modes and options, over any inner backend."""

from __future__ import annotations

import copy
import importlib.metadata
import logging
import pickle

import pytest
import torch
from render import render
from torch._dynamo.exc import BackendCompilerFailed
from toys import Rig

import kvcanary_fx
from kvcanary_fx import CanaryBackend, CanaryConfig, KVCacheViolation


def write(kc, k, pos):
    kc.index_copy_(2, pos, k)
    return kc.sum()


def args():
    return torch.zeros(2, 2, 8, 4), torch.randn(2, 2, 1, 4), torch.tensor([3])


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def test_callable_with_inductor_by_default():
    torch.compile(write, backend=kvcanary_fx.kvcanary_backend)(*args())
    assert kvcanary_fx.session().stats().recorded == 2


def test_by_name_without_importing_us():
    installed = [e for e in importlib.metadata.entry_points(group="torch_dynamo_backends") if e.name == "kvcanary"]
    if not installed:
        pytest.skip("the package is not installed, so its entry point does not exist")
    torch.compile(write, backend="kvcanary", options={"kvcanary.inner": "eager"})(*args())
    assert kvcanary_fx.session().stats().recorded == 2


@pytest.mark.parametrize("installed", [False, True])
def test_by_name_from_a_checkout_without_an_install(monkeypatch, installed):
    """Where there is an entry point, torch registers what it leads to, and refuses a name that is taken."""
    registry = torch._dynamo.backends.registry
    for names in (registry._BACKENDS, registry._COMPILER_FNS):
        monkeypatch.setattr(registry, "_BACKENDS" if names is registry._BACKENDS else "_COMPILER_FNS", dict(names))
    registry._BACKENDS.pop("kvcanary", None)
    registry._COMPILER_FNS.pop("kvcanary", None)
    found = (
        [importlib.metadata.EntryPoint("kvcanary", "kvcanary_fx.compile.backend:kvcanary_backend", "")]
        if installed
        else []
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **query: found)
    kvcanary_fx._register_name()
    kvcanary_fx._register_name()  # the package imported anew
    assert ("kvcanary" in registry._COMPILER_FNS) is not installed
    if not installed:
        torch.compile(write, backend="kvcanary", options={"kvcanary.inner": "eager"})(*args())
        assert kvcanary_fx.session().stats().recorded == 2


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_inner_backend_by_name(inner):
    torch.compile(write, backend=kvcanary_fx.kvcanary_backend, options={"kvcanary.inner": inner})(*args())
    assert kvcanary_fx.session().stats().recorded == 2


def test_inner_backend_as_a_callable_gets_the_rewritten_graph():
    graphs = []

    def inner(gm, example_inputs):
        graphs.append((render(gm), len(example_inputs)))
        return gm.forward

    torch.compile(write, backend=kvcanary_fx.kvcanary_backend, options={"kvcanary.inner": inner})(*args())
    assert "canary.verify(kc" in graphs[0][0]
    assert graphs[0][1] == 4


def test_mode_and_options_reach_the_inner_backend():
    seen = {}

    def inner(gm, example_inputs, mode=None, options=None):
        seen.update(mode=mode, options=options)
        return gm.forward

    backend = CanaryBackend(CanaryConfig(inner=inner))
    torch.compile(write, backend=backend, options={"kvcanary.mode": "log", "a": 1})(*args())
    assert seen == {"mode": None, "options": {"a": 1}}
    torch._dynamo.reset()
    torch.compile(write, backend=backend, mode="max-autotune")(*args())
    assert seen == {"mode": "max-autotune", "options": None}


def test_mode_reduce_overhead_is_inductors():
    torch.compile(write, backend=kvcanary_fx.kvcanary_backend, mode="reduce-overhead")(*args())
    assert kvcanary_fx.session().stats().recorded == 2


def test_option_that_inductor_does_not_know_is_inductors_error():
    with pytest.raises(BackendCompilerFailed, match="Unexpected optimization option nonsense"):
        torch.compile(write, backend=kvcanary_fx.kvcanary_backend, options={"nonsense": 1})(*args())


def test_unknown_setting_is_named_at_the_call():
    with pytest.raises(BackendCompilerFailed, match=r"unknown setting 'kvcanary\.mod' in options"):
        torch.compile(write, backend=kvcanary_fx.kvcanary_backend, options={"kvcanary.mod": "log"})(*args())


def test_typo_in_the_environment_is_named_at_the_call(monkeypatch):
    monkeypatch.setenv("KVCANARY_MOED", "log")
    with pytest.raises(BackendCompilerFailed, match="did you mean 'KVCANARY_MODE'"):
        torch.compile(write, backend=kvcanary_fx.kvcanary_backend)(*args())


def test_off_is_the_inner_backends_own_result():
    graphs, results = [], []

    def inner(gm, example_inputs):
        graphs.append((gm, render(gm), list(example_inputs)))
        results.append(gm.forward)
        return results[-1]

    compiled = []

    def spy(gm, example_inputs):
        before = render(gm)
        out = kvcanary_fx.kvcanary_backend(
            gm, example_inputs, options={"kvcanary.mode": "off", "kvcanary.inner": inner}
        )
        compiled.append((gm, before, example_inputs, out))
        return out

    torch.compile(write, backend=spy)(*args())
    (gm, before, inputs, out), (inner_gm, text, inner_inputs) = compiled[0], graphs[0]
    assert inner_gm is gm
    assert text == before
    assert all(a is b for a, b in zip(inner_inputs, inputs, strict=True))
    assert out is results[0]


def test_off_through_inductor_writes_the_same_code():
    sources = []
    for backend in ("inductor", kvcanary_fx.kvcanary_backend):
        torch._dynamo.reset()
        options = {} if backend == "inductor" else {"options": {"kvcanary.mode": "off"}}
        compiled = torch.compile(write, backend=backend, **options)
        _, (code,) = torch._inductor.utils.run_and_get_code(compiled, *args())
        sources.append([line for line in code.splitlines() if "call" in line or "empty_strided" in line])
    assert sources[0] == sources[1]


def test_graph_without_a_cache_goes_to_the_inner_backend_as_it_is(caplog):
    graphs = []

    def inner(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    received = []

    def spy(gm, example_inputs):
        received.append(gm)
        return CanaryBackend(CanaryConfig(inner=inner))(gm, example_inputs)

    with caplog.at_level(logging.WARNING, "kvcanary"):
        torch.compile(lambda x: x * 2, backend=spy)(torch.randn(3))
    assert graphs == received
    assert "no KV cache is written in this graph" in caplog.text
    assert "it writes none of its inputs" in caplog.text


def test_a_compiled_model_is_saved_with_its_settings_and_guarded_when_it_is_read():
    rig = Rig.build(inner="eager")
    rig.step(2)
    rig.guarded = pickle.loads(pickle.dumps(rig.guarded))
    rig.step()
    rig.flip(1, 0, row=0, position=1)
    with pytest.raises(KVCacheViolation):
        rig.step()
    assert rig.session.stats().steps == 1  # the backend that was read has its own


def test_a_backend_of_an_engine_is_not_saved():
    pool = kvcanary_fx.KVPool([(torch.zeros(4, 2, 8), torch.zeros(4, 2, 8))], torch.zeros(2, 4, dtype=torch.int32))
    engine = kvcanary_fx.install_canary(pool, mode="log", inner="eager")
    with pytest.raises(TypeError, match="knows this process's pools"):
        pickle.dumps(engine.backend)


def test_a_deep_copied_backend_keeps_its_session():
    backend = CanaryBackend()
    assert copy.deepcopy({"backend": backend})["backend"] is backend
    assert copy.copy(backend) is backend


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"verify_fraction": "1/2"}, {"digest_bits": 64}, {"rewrite_writes": True}])
def test_decoder_under_inductor(settings):
    rig = Rig.build(inner="inductor", compile_options={"dynamic": True}, **settings)
    rig.step(5)
    rig.step()
    rig.step()
    assert rig.found() == []
    rig.flip(1, 1, row=1, position=2)
    with pytest.raises(kvcanary_fx.KVCacheViolation):
        for _ in range(2):
            rig.step()
    assert rig.found() == [("content", "layers.1", "V", 1, 2)]


def test_lint_reports_a_copied_pool(caplog):
    def stacked(pool, k, slot):
        pool[1][0][slot] = k
        pool[1][1][slot] = k
        return pool[1].sum()

    inputs = (torch.zeros(2, 2, 512, 2, 8), torch.randn(2, 2, 8), torch.tensor([3, 4]))
    with caplog.at_level(logging.WARNING, "kvcanary"):
        torch.compile(stacked, backend=CanaryBackend(CanaryConfig(lint="warn", rewrite_writes=False)))(*inputs)
    assert "the code copies the pool each step" in caplog.text
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match=r"kvcanary\.rewrite_writes=True"):
        torch.compile(stacked, backend=CanaryBackend(CanaryConfig(lint="raise", rewrite_writes=False)))(*inputs)
    torch._dynamo.reset()
    torch.compile(stacked, backend=CanaryBackend(CanaryConfig(lint="raise")))(*inputs)

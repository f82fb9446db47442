"""Running unguarded is noticed: ops that were dropped, forwards that went eager, the recompile limit."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import logging

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode
from toys import Rig

import kvcanary_fx
from kvcanary_fx import CanaryBackend, CanaryConfig, CoverageError
from kvcanary_fx.passes import dynamo_calls
from kvcanary_fx.passes.state_inputs import is_canary


def dropping(kind: str):
    """An inner backend that throws away canary ops of one kind."""

    def inner(gm, example_inputs):
        for node in [n for n in gm.graph.nodes if is_canary(n) and kind in n.name]:
            gm.graph.erase_node(node)
        gm.recompile()
        return gm.forward

    return inner


@pytest.mark.parametrize(
    ("kind", "named"), [("verify", "verify layers.0.K"), ("record", "record layers.1.V"), ("begin", "begin")]
)
def test_ops_that_were_inserted_and_did_not_run(kind, named):
    rig = Rig.build(inner=dropping(kind))
    with pytest.raises(CoverageError, match=named):
        rig.step(3)


def test_log_mode_says_it_once_and_goes_on(caplog):
    rig = Rig.build(inner=dropping("verify"), mode="log")
    with caplog.at_level(logging.WARNING, "kvcanary"):
        rig.step(3)
        rig.step(3)
        rig.step(3)
    assert sum("kvcanary.coverage" in r.getMessage() for r in caplog.records) == 1
    assert "coverage lost: graph" in rig.session.summary()


def test_recompile_limit_raises_in_raise_mode():
    rig = Rig.build(compile_options={"dynamic": False})
    with torch._dynamo.config.patch(recompile_limit=2):
        rig.step(2)
        rig.step(3)
        with pytest.raises(CoverageError) as caught:
            rig.step(4)
    text = str(caught.value)
    assert "'forward' (" in text
    assert "toys.py" in text
    assert "hit torch._dynamo.config.recompile_limit (2)" in text
    assert "mark_dynamic" in text


def test_recompile_limit_warns_in_log_mode(caplog):
    rig = Rig.build(compile_options={"dynamic": False}, mode="log")
    with torch._dynamo.config.patch(recompile_limit=2), caplog.at_level(logging.WARNING, "kvcanary"):
        for n in (2, 3, 4):
            rig.step(n)
    assert "kvcanary.coverage 'forward'" in caplog.text
    assert len(rig.session.uncovered) == 1


def test_recompile_limit_of_an_unguarded_function_is_none_of_ours():
    rig = Rig.build()
    rig.step(2)
    plain = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        for n in (2, 3, 4):
            plain(torch.zeros(n))
    assert rig.session.uncovered == []


def test_protected_module_whose_forward_went_eager():
    rig = Rig.protected_model(dynamic=False)
    rig.step(2)
    with torch._dynamo.config.patch(disable=True), pytest.raises(CoverageError) as caught:
        rig.step(1)
    assert "Decoder ran without a single check" in str(caught.value)
    assert "layers.0, layers.1" in str(caught.value)
    assert "compilation is disabled" in str(caught.value)
    rig.step(1)  # and afterwards it is guarded again
    assert rig.session.stats().steps == 2


def counted_under_a_mode(rig):
    with FlopCounterMode(display=False):
        rig.step(1)


def in_the_stance(name):
    def run(rig):
        with torch.compiler.set_stance(name):
            rig.step(1)

    return run


def with_another_backend(rig):
    with torch.compiler.set_stance("default", force_backend="eager"):
        rig.step(1)


def with_dynamo_off(rig):
    with torch._dynamo.config.patch(disable=True):
        rig.step(1)


def under_vmap(rig):
    torch.vmap(lambda x: (rig.step(1), x)[1], randomness="same")(torch.zeros(2))


EAGER = {
    "force_eager": (in_the_stance("force_eager"), "set_stance('force_eager') is in force"),
    "eager_on_recompile": (in_the_stance("eager_on_recompile"), "set_stance('eager_on_recompile') is in force"),
    "force_backend": (with_another_backend, "set_stance(force_backend='eager') is in force"),
    "disabled": (with_dynamo_off, "compilation is disabled"),
    "vmap": (under_vmap, "under a function transform"),
    "dispatch mode": (counted_under_a_mode, "a TorchDispatchMode is active"),
}


@pytest.mark.parametrize(("run", "cause"), EAGER.values(), ids=EAGER)
def test_a_protected_module_that_runs_eagerly_is_told_why(run, cause):
    rig = Rig.protected_model(mode="log", dynamic=False)
    first = cause not in (EAGER["eager_on_recompile"][1], EAGER["dispatch mode"][1])
    if not first:
        rig.step(2)
    run(rig)
    (said,) = rig.session.uncovered
    assert "Decoder ran without a single check" in said
    assert cause in said
    assert ("layers.0, layers.1" in said) is not first
    assert cause in rig.session.summary()
    rig.step(2)  # guarded again
    assert rig.session.entered.guarded == (1 if first else 2)


def test_vmap_over_a_protected_module_leaves_the_next_one_guarded():
    rigs = [Rig.protected_model(mode="log") for _ in range(2)]
    under_vmap(rigs[0])
    rigs[1].step(2)
    assert rigs[1].session.stats().steps == 1
    assert rigs[1].session.uncovered == []


def test_a_protected_module_that_runs_eagerly_raises():
    rig = Rig.protected_model()
    with torch.compiler.set_stance("force_eager"), pytest.raises(CoverageError, match="set_stance"):
        rig.step(2)


def test_a_protected_module_that_dynamo_passes_over_raises():
    class Broken(nn.Module):
        def forward(self, x):
            for _ in range(2):
                with open("/dev/null"):
                    torch._dynamo.graph_break()
            return x + 1

    model = kvcanary_fx.protect(Broken(), inner="eager")
    with pytest.raises(CoverageError, match=r"Broken ran without a single check.* Dynamo passed over it"):
        model(torch.zeros(2))


@pytest.mark.parametrize("by", ["setting", "environment"])
def test_a_process_in_which_nothing_is_compiled_is_told_so(by, monkeypatch, caplog):
    """As in a CI that sets TORCHDYNAMO_DISABLE=1: nobody calls a backend there."""
    if by == "environment":
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with torch._dynamo.config.patch(disable=by == "setting"), caplog.at_level(logging.WARNING, "kvcanary"):
        rig = Rig.build()
        rig.step(2)
        (said,) = rig.backend.session.uncovered
        assert "what is compiled with this backend runs unguarded: compilation is disabled" in said
        assert said in caplog.text
        with pytest.raises(CoverageError, match="single check of its KV cache: compilation is disabled"):
            Rig.protected_model().step(2)


def test_every_instance_of_a_protected_class_is_guarded(caplog):
    with torch._dynamo.config.patch(recompile_limit=2), caplog.at_level(logging.WARNING):
        rigs = [Rig.protected_model(mode="log", break_at=1) for _ in range(3)]
        for rig in rigs:
            rig.step(2)
    if dynamo_calls.isolation():
        assert [r.session.stats().recorded for r in rigs] == [2 * 2 * 2 * 2] * 3
        assert [r.session.uncovered for r in rigs] == [[]] * 3
    else:
        assert rigs[-1].session.uncovered
        assert rigs[0].session.uncovered == []


def test_recompile_limit_is_told_to_the_model_that_hit_it_and_what_to_do():
    rigs = [Rig.build(mode="log") for _ in range(3)]
    with torch._dynamo.config.patch(recompile_limit=2):
        for rig in rigs:
            rig.step(2)
    assert [len(r.session.uncovered) for r in rigs] == [0, 0, 1]
    assert "use one for all models" in rigs[2].session.uncovered[0]
    assert "mark_dynamic" not in rigs[2].session.uncovered[0]


def test_recompile_limit_is_noticed_whatever_the_level_of_torchs_log():
    rig = Rig.build(compile_options={"dynamic": False})
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with torch._dynamo.config.patch(recompile_limit=2):
            rig.step(2)
            rig.step(3)
            with pytest.raises(CoverageError, match=r"hit torch\._dynamo\.config\.recompile_limit \(2\)"):
                rig.step(4)
    finally:
        logger.setLevel(level)


@pytest.mark.parametrize(("run", "cause"), list(EAGER.values())[:5], ids=list(EAGER)[:5])
def test_a_compiled_model_that_runs_eagerly_after_it_was_guarded(run, cause):
    rig = Rig.build(mode="log", compile_options={"dynamic": False})
    rig.step(2)
    run(rig)
    (said,) = rig.session.uncovered
    assert "'forward' (" in said
    assert "layers.0, layers.1" in said
    assert cause in said


def test_a_call_in_another_stance_that_is_guarded_all_the_same():
    rig = Rig.build(compile_options={"dynamic": False})
    rig.step(2)
    with torch.compiler.set_stance("eager_on_recompile"):
        rig.step(2)
    assert rig.session.uncovered == []


class MayCache(nn.Module):
    """Writes a cache only if it is given one."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x, pos=None, cache=None):
        k = self.lin(x)
        if cache is None:
            return k
        cache[:, pos] = k
        return x @ cache.transpose(1, 2)


def test_a_protected_module_called_without_a_cache_has_nothing_to_guard():
    model, x = kvcanary_fx.protect(MayCache(), inner="eager"), torch.randn(1, 1, 8)
    with torch.no_grad():
        model(x)
        for step in range(2):
            model(x, torch.tensor([step]), torch.zeros(1, 16, 8))
            model(x)
    session = kvcanary_fx.session_of(model)
    assert session.uncovered == []
    assert session.entered.guarded == 2


def test_a_protected_module_without_a_cache_may_run_eagerly():
    model = kvcanary_fx.protect(MayCache(), inner="eager")
    with torch.no_grad():
        model(torch.randn(1, 1, 8))
        with torch.compiler.set_stance("force_eager"):
            model(torch.randn(1, 1, 8))
    assert kvcanary_fx.session_of(model).uncovered == []


def test_a_protected_module_without_an_operation_is_none_that_runs_eagerly():
    class Passes(nn.Module):
        def forward(self, x):
            return {"x": x, "done": True}

    model = kvcanary_fx.protect(Passes(), inner="eager")
    model(torch.zeros(2))
    assert kvcanary_fx.session_of(model).uncovered == []


def test_stale_binding_is_not_coverage_of_a_new_cache():
    rig = Rig.build()
    rig.step(3)
    from toys import new_caches

    rig.caches, rig.length = new_caches(), 0
    rig.step(3)
    assert rig.session.stats().recorded == 2 * 3 * 2 * 4


def test_two_backends_count_for_themselves():
    first, second = (CanaryBackend(CanaryConfig(inner="eager")) for _ in range(2))
    rigs = [Rig.build(backend=first), Rig.build(backend=second)]
    for rig in rigs:
        rig.step(3)
    assert [b.session.stats().steps for b in (first, second)] == [1, 1]


def test_a_pass_that_fails_is_an_error_in_raise_mode_and_a_warning_in_log_mode(monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise NotImplementedError("no such thing")

    monkeypatch.setattr("kvcanary_fx.passes.guarded_halves.find_halves", broken)
    with pytest.raises(BackendCompilerFailed, match="the graph could not be analysed"):
        Rig.build().step(2)
    torch._dynamo.reset()
    rig = Rig.build(mode="log")
    with caplog.at_level(logging.WARNING, "kvcanary"):
        rig.step(2)
    assert "NotImplementedError: no such thing" in caplog.text
    assert rig.session.uncovered


class OneToken(nn.Module):
    """A decode step whose position is a 0-d tensor."""

    def __init__(self, write):
        super().__init__()
        self.qkv, self.write = nn.Linear(16, 48), write
        self.register_buffer("k_cache", torch.zeros(2, 2, 8, 8))
        self.register_buffer("v_cache", torch.zeros(2, 2, 8, 8))

    def forward(self, x, position):
        q, k, v = (t.view(2, 1, 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        self.write(self.k_cache, position, k[:, :, 0])
        self.write(self.v_cache, position, v[:, :, 0])
        visible = torch.arange(8)[None] <= position
        return nn.functional.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=visible)


def run_one_token(write, inner, mode):
    """Three steps, with the outputs and the cache of the plain model; the session."""
    torch._dynamo.reset()
    plain = OneToken(write)
    model, backend = copy.deepcopy(plain), CanaryBackend(CanaryConfig(inner=inner, mode=mode))
    guarded = torch.compile(model, backend=backend)
    with torch.no_grad():
        for position in range(3):
            x, at = torch.randn(2, 1, 16), torch.tensor(position)
            torch.testing.assert_close(guarded(x, at), plain(x, at))
    torch.testing.assert_close(model.k_cache, plain.k_cache)
    return backend.session


@pytest.mark.parametrize("mode", ["off", "log", "raise"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_write_at_a_position_of_no_axis_is_guarded(inner, mode):
    def write(cache, position, new):
        cache[:, :, position] = new

    session = run_one_token(write, inner, mode)
    assert session.stats().recorded == (0 if mode == "off" else 3 * 2 * 2)
    assert session.uncovered == []


@pytest.mark.parametrize("mode", ["off", "log", "raise"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_graph_that_depends_on_data_runs_as_without_us_and_says_that_it_is_unguarded(inner, mode):
    def write(cache, position, new):
        cache[torch.arange(2), :, position] = new

    session = run_one_token(write, inner, mode)
    told = session.uncovered
    assert bool(told) == (mode != "off")
    for why in told:
        assert "needs a number out of a tensor" in why
        assert "test_coverage.py" in why
        assert ("its graph runs unguarded" if inner == "eager" else "Dynamo breaks the graph there") in why
        assert "bug" not in why
    assert mode == "off" or "coverage lost: setitem" in session.summary()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("mode", ["raise", "log"])
def test_a_forward_that_was_stopped_leaves_nothing_missing(stop, mode):
    armed = []

    def inner(gm, example_inputs):
        class Stopped(torch.fx.Interpreter):
            def run_node(self, node):
                if armed and "record" in str(node.target):
                    raise armed.pop()
                return super().run_node(node)

        return lambda *args: Stopped(gm).run(*args)

    rig = Rig.build(inner=inner, mode=mode, compile_options={"dynamic": False})
    rig.step(1)
    armed.append(stop())
    with pytest.raises(stop):
        rig.step(1)
    rig.length -= 1  # the token is run again
    rig.step(1)
    rig.step(1)
    assert rig.session.violations() == []
    assert rig.session.uncovered == []
    rig.flip(position=0)
    if mode == "raise":
        with pytest.raises(kvcanary_fx.KVCacheViolation):
            rig.step(1)
    else:
        rig.step(1)
        assert rig.session.violations()


def unguarded(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if "kvcanary.unguarded" in r.getMessage()]


def test_model_without_a_cache_is_told_so_once(caplog):
    backend = CanaryBackend(CanaryConfig(inner="eager"))

    @torch.compile(backend=backend)
    def two_graphs(x):
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1

    with caplog.at_level(logging.WARNING, "kvcanary"):
        two_graphs(torch.zeros(3))
    (message,) = unguarded(caplog)
    assert "no KV cache is written in this graph" in message
    assert "python -m kvcanary_fx explain" in message
    assert len(backend.session.plans) == 2
    assert "nothing is guarded" in backend.session.summary()


def test_cache_rebuilt_by_cat_is_named_once(caplog):
    def attend(q, keys, k):
        keys = torch.cat([keys, k], dim=2)
        return (q @ keys.transpose(-1, -2)).softmax(-1), keys

    compiled = torch.compile(attend, backend=CanaryBackend(CanaryConfig(inner="eager")), dynamic=False)
    with caplog.at_level(logging.WARNING, "kvcanary"):
        for length in (5, 6, 7):
            compiled(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, length, 4), torch.zeros(1, 2, 1, 4))
    (message,) = unguarded(caplog)
    assert "the cache is rebuilt by cat each step (keys)" in message
    assert "StaticCache" in message


@pytest.mark.parametrize("mode", ["raise", "log"])
def test_cache_in_a_tensor_subclass_is_named_once(mode, caplog):
    """Like a DTensor: seen in mode raise as checks that did not run, and as a bug of ours."""
    rig = Rig.build(mode=mode, inner="aot_eager")
    plain = rig.caches[1]
    rig.caches[1] = (TwoTensor(plain[0], plain[0].clone()), TwoTensor(plain[1], plain[1].clone()))
    with caplog.at_level(logging.WARNING, "kvcanary"):
        rig.step(3)
        rig.step()
    (message,) = unguarded(caplog)
    assert "caches[1][0], caches[1][1]: a tensor subclass, whose bytes are in tensors inside it" in message
    assert "caches[1][0]: a tensor subclass" in rig.session.summary()
    assert rig.session.stats().recorded == 2 * 2 * 4  # the other layer: halves, rows, tokens
    assert rig.session.uncovered == []


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_cache_without_elements_is_none_to_guard(inner, caplog):
    """As an idle rank has it, whose batch is empty."""
    rig = Rig.build(batch=0, inner=inner)
    with caplog.at_level(logging.WARNING, "kvcanary"):
        assert rig.step(3).shape[0] == 0
    (message,) = unguarded(caplog)
    assert "caches[0][0]: it has no elements: one of its sizes is 0" in message


def test_a_cache_that_two_sessions_guard_is_named_by_both(caplog):
    """As a prefill and a decode that are compiled with a backend object each: a flip between them is adopted."""
    prefill = Rig.build(mode="log")
    decode = dataclasses.replace(Rig.build(mode="log"), caches=prefill.caches)
    with caplog.at_level(logging.WARNING, "kvcanary"):
        prefill.step(3)
        assert prefill.session.uncovered == []
        for at in (3, 4):
            decode.step(at=at)
        prefill.step(3, at=0)
        decode.step(at=3)
    assert len(caplog.records) == 2
    for session in (prefill.session, decode.session):
        (said,) = session.uncovered
        assert "another session guards caches[0][0], caches[0][1], caches[1][0], caches[1][1], too" in said
        assert "with one backend object" in said
        assert said in session.summary()


def test_sessions_over_parts_of_one_tensor_are_none_of_each_others_business():
    whole = torch.zeros(2, 2, 2, 2, 2, 24, 8)  # model, layer, half: a cache each
    rigs = [Rig.build(mode="log") for _ in whole]
    for rig, caches in zip(rigs, whole, strict=True):
        rig.caches = [(k, v) for k, v in caches]
        rig.step(3)
        rig.step()
    assert [rig.session.uncovered for rig in rigs] == [[], []]


def test_a_cache_whose_session_is_gone_is_new():
    rig = Rig.build(mode="log")
    rig.step(3)
    caches = rig.caches
    del rig
    torch._dynamo.reset()
    gc.collect()
    rig = dataclasses.replace(Rig.build(mode="log"), caches=caches)
    rig.step(at=3)
    assert rig.session.uncovered == []


class Holds(nn.Module):
    """A layer with a cache of its own."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 16)
        self.register_buffer("k_cache", torch.zeros(1, 2, 16, 4))
        self.register_buffer("v_cache", torch.zeros(1, 2, 16, 4))

    def forward(self, x, pos):
        k, v = self.lin(x).view(1, -1, 2, 8).transpose(1, 2).chunk(2, -1)
        self.k_cache.index_copy_(2, pos, k)
        self.v_cache.index_copy_(2, pos, v)
        y = nn.functional.scaled_dot_product_attention(k, self.k_cache, self.v_cache)
        return x + y.transpose(1, 2).flatten(-2)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Holds(), Holds()])

    def forward(self, x, pos):
        for layer in self.layers:
            x = layer(x, pos)
        return x


@pytest.mark.parametrize("left_out", [True, False], ids=["disabled", "traced"])
@pytest.mark.parametrize("how", ["compile", "protect"])
def test_a_layer_that_dynamo_leaves_out_is_named(how, left_out, caplog):
    model, config = TwoLayers(), CanaryConfig(inner="eager")
    if left_out:
        model.layers[1].forward = torch.compiler.disable(model.layers[1].forward)
    backend = CanaryBackend(config)
    run = torch.compile(model, backend=backend) if how == "compile" else kvcanary_fx.protect(model, inner="eager")
    session = backend.session if how == "compile" else kvcanary_fx.session_of(model)
    with caplog.at_level(logging.WARNING, "kvcanary"), torch.no_grad():
        for at in range(6):
            run(torch.randn(1, 1, 8), torch.tensor([at]))
    assert session.stats().recorded == 6 * (2 if left_out else 4)
    assert len(session.uncovered) == len(caplog.records) == left_out
    if left_out:
        assert "TwoLayers writes layers.1.k_cache, layers.1.v_cache in code" in session.summary()
        assert "torch.compiler.disable keeps code out of graphs" in caplog.text


def test_a_model_that_the_canary_never_compiled_says_so_in_its_summary():
    """Its backend is not called, so the log cannot say it."""
    rig = Rig.build()
    assert "no graph was compiled for this session" in rig.session.summary()
    inner = rig.guarded
    rig.guarded = torch.compile(lambda *args: inner(*args), backend="eager")
    rig.step(2)
    assert "a function that was compiled with another backend calls it" in rig.session.summary()
    rig.guarded = inner
    torch._dynamo.reset()
    rig.step()
    assert "no graph was compiled" not in rig.session.summary()

"""Running unguarded is noticed: ops that were dropped, forwards that went eager, the recompile limit."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from toys import Rig

import kvcanary_fx
from kvcanary_fx import CanaryBackend, CanaryConfig, CoverageError
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
    rig = Rig.build()
    model = kvcanary_fx.protect(rig.model, inner="eager", dynamic=False)
    rig.guarded = model
    rig.step(2)
    with torch._dynamo.config.patch(disable=True), pytest.raises(CoverageError) as caught:
        rig.step(1)
    assert "Decoder ran without a single check" in str(caught.value)
    assert "layers.0, layers.1" in str(caught.value)


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

    monkeypatch.setattr("kvcanary_fx.passes.insert_canaries.find_halves", broken)
    with pytest.raises(BackendCompilerFailed, match="the graph could not be analysed"):
        Rig.build().step(2)
    torch._dynamo.reset()
    rig = Rig.build(mode="log")
    with caplog.at_level(logging.WARNING, "kvcanary"):
        rig.step(2)
    assert "NotImplementedError: no such thing" in caplog.text
    assert rig.session.uncovered


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

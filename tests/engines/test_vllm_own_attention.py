"""A model whose attention is none of vLLM's ops: guarded by what is in the cache, and what cannot be is named."""

from __future__ import annotations

import logging

import pytest
from vllm_rig import Rig, mixed_load, prompt

LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(2)]


@pytest.fixture
def own(models, monkeypatch, caplog):
    import vllm_own_attention
    from vllm.model_executor.models import llama

    monkeypatch.setattr(llama, "Attention", vllm_own_attention.OwnAttention)
    with caplog.at_level(logging.INFO, "kvcanary"):
        rig = Rig("llama", models)
    yield rig
    rig.close()


def said(caplog, what):
    (line,) = [r.getMessage() for r in caplog.get_records("setup") if what in r.getMessage()]
    return line


def test_its_layers_are_guarded_and_what_is_beside_them_is_named(own, caplog):
    assert "2 layers of KV cache group 0" in said(caplog, "have attention of their own (OwnAttention)")
    assert "2 layers of KV cache group 0" in said(caplog, "SideCache is not supported by this adapter")
    (group,) = own.guard.groups
    assert list(group.layers) == LAYERS

    mixed_load(own)
    assert own.session.violations() == []
    own.session.health.check()
    assert own.session.uncovered == []
    assert own.guard.calls_outside == 2 * own.session.steps
    assert own.session.stats().recorded > 4 * 400

    for number, layer in enumerate(LAYERS):
        for half in range(2):
            name, before, slots = f"flip{number}{half}", len(own.session.violations()), []
            own.add(name, prompt(70 + 2 * number + half, 70))

            def at(step, slots=slots, given=(layer, half, name)):
                if step == 3:
                    slots.append(own.flip(*given, 57))

            own.run(at)
            new = own.session.violations()[before:]
            assert {(v.check, v.layer, v.half, v.slot) for v in new} == {("content", layer, "KV"[half], slots[0])}

"""Caches of Hugging Face that cannot be guarded: each is told by name, with the reason and what to do."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from kvcanary_fx import CanaryBackend, CanaryConfig
from kvcanary_fx.adapters.huggingface.caches import cache_name
from kvcanary_fx.proof import tiny

transformers = pytest.importorskip("transformers")

STATIC = "cache_implementation='static'"


def decode(model: Any, cache: Any, name: str | None = None, steps: int = 3) -> CanaryBackend:
    """An eager prefill and compiled steps over a cache, which each forward hands on under its name."""
    name = name or cache_name(model)
    backend = CanaryBackend(CanaryConfig(inner="eager"))
    run = torch.compile(model.forward, backend=backend)
    given = {} if cache is None else {name: cache}
    with torch.no_grad():
        out = model(torch.randint(1, 128, (1, 12)), use_cache=True, **given)
        for _ in range(steps):
            out = run(torch.randint(1, 128, (1, 1)), use_cache=True, **{name: out[name]})
    return backend


def test_quantised_cache(caplog):
    """Both of its tensors grow by cat: the quantised ones, and what was not quantised yet."""
    model = tiny.build("llama")
    try:
        cache = transformers.QuantizedCache(backend="fp8", config=model.config)
    except (ValueError, TypeError) as e:
        pytest.skip(f"transformers {transformers.__version__} has no fp8 cache: {e}")
    with caplog.at_level(logging.WARNING, "kvcanary"):
        backend = decode(model, cache)
    assert backend.session.registry.halves() == []
    assert f"rebuilt by cat each step ({cache_name(model)}.layers[0]._quantized_keys[0]" in caplog.text
    assert STATIC in caplog.text


def test_dynamic_cache_with_a_window(caplog):
    model = tiny.build("gemma3")
    with caplog.at_level(logging.WARNING, "kvcanary"):
        backend = decode(model, transformers.DynamicCache(config=model.config))
    assert backend.session.registry.halves() == []
    for layer in range(2):  # the sliding layer keeps a part of what it concatenated
        assert f"{cache_name(model)}.layers[{layer}].keys" in caplog.text


def test_dynamic_cache_of_a_hybrid_has_its_states_guarded():
    """States are written in place in every cache; K and V of a dynamic one are not."""
    if not hasattr(transformers, "JambaForCausalLM"):
        pytest.skip("no Jamba")
    model = tiny.build("jamba")
    backend = decode(model, transformers.DynamicCache(config=model.config))
    plan = backend.session.plans[-1]
    assert plan.functional == [f"{cache_name(model)}.layers[1].{half}" for half in ("keys", "values")]
    assert [s.label for s in plan.sites] == ["conv", "state"]
    assert f"cannot   {cache_name(model)}.layers[1].keys: rebuilt by cat each step" in backend.session.summary()
    assert backend.session.violations() == []


def test_rwkv_state_is_told_by_name(caplog):
    if not hasattr(transformers, "RwkvForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no RWKV")
    torch.manual_seed(0)
    sizes = dict(vocab_size=128, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, context_length=64)
    model = transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes)).eval()
    with caplog.at_level(logging.WARNING, "kvcanary"):
        backend = decode(model, None, "state")
    assert backend.session.registry.halves() == []
    assert "state[1]: an op that hides where it writes changed it" in caplog.text


def test_minimax_state_is_told_by_name():
    if not hasattr(transformers, "MiniMaxForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no MiniMax")
    torch.manual_seed(0)
    config = transformers.MiniMaxConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        block_size=4,
        layer_types=["full_attention", "linear_attention"],
    )
    model = transformers.MiniMaxForCausalLM(config).eval()
    said = decode(model, None).session.summary()
    assert f"not      {cache_name(model)}.linear_cache[1]: replaced by a new tensor each step" in said
    assert f"cannot   {cache_name(model)}.layers[0].keys: rebuilt by cat each step" in said


def test_state_replaced_by_a_new_tensor_is_told(caplog):
    """RecurrentGemma keeps its states as attributes of its modules and assigns new tensors to them."""
    if not hasattr(transformers, "RecurrentGemmaForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no RecurrentGemma")
    torch.manual_seed(0)
    config = transformers.RecurrentGemmaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        lru_width=32,
        attention_window_size=8,
        conv1d_width=4,
    )
    backend = CanaryBackend(CanaryConfig(inner="eager"))
    model = transformers.RecurrentGemmaForCausalLM(config).eval()
    run = torch.compile(model.forward, backend=backend)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "kvcanary"):
        model(torch.randint(1, 128, (1, 12)), use_cache=True)
        run(torch.randint(1, 128, (1, 1)), use_cache=True)
    assert backend.session.registry.halves() == []
    assert "nothing is guarded in it (it writes none of its inputs)" in caplog.text

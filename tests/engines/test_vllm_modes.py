"""Every way in which vLLM compiles a model on a CPU, its caches, and engines in processes of their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny_configs
import torch
import vllm_runs

from kvcanary_fx import EngineError

EAGER = {"enforce_eager": False}
MODES = {
    "trace once": {"arguments": EAGER},
    "piecewise": {"arguments": EAGER | {"compilation_config": {"mode": 3}}, "forced": True},
    "no splitting": {"arguments": EAGER | {"compilation_config": {"mode": 3, "splitting_ops": []}}, "forced": True},
    "graph partition": {
        "arguments": EAGER | {"compilation_config": {"mode": 3, "use_inductor_graph_partition": True}},
        "forced": True,
    },
    "stock": {"arguments": EAGER | {"compilation_config": {"mode": 1}}},
}
EXPECTED = {"trace once": 2, "piecewise": 3, "no splitting": 3, "graph partition": 3, "stock": 1}


def run(models, cache, mode, guard, model="llama"):
    """One run, with vLLM's compile caches in the directory ``cache``."""
    (found,) = vllm_runs.results(models, [MODES[mode] | {"model": model}], guard, VLLM_CACHE_ROOT=str(cache))
    return found


@pytest.fixture(scope="module")
def eager(models):
    """What the models say eagerly and unprotected."""
    runs = [{"model": name} for name in tiny_configs.CONFIGS]
    return dict(zip(tiny_configs.CONFIGS, vllm_runs.results(models, runs, mode=None), strict=True))


def assert_guarded(found, expected, in_graph=True):
    assert found["tokens"] == expected["tokens"]
    assert found["violations"] == []
    assert found["uncovered"] == []
    assert found["stats"]["recorded"] > 4 * 400
    assert found["stats"]["checked"] > 4 * 1000
    assert (found["in_graph"] > 0, found["outside"] > 0) == (in_graph, not in_graph)


@pytest.mark.parametrize("mode", MODES)
def test_mode_is_guarded(models, tmp_path, eager, mode):
    found = run(models, tmp_path, mode, "log")
    assert found["mode"] == str(EXPECTED[mode])
    # vLLM's CPU runner never compiles in mode STOCK_TORCH_COMPILE: its model runs eagerly, guarded as such
    assert_guarded(found, eager["llama"], in_graph=mode != "stock")


@pytest.mark.parametrize("model", [name for name in tiny_configs.CONFIGS if name != "llama"])
def test_compiled_model_is_guarded(models, tmp_path, eager, model):
    assert_guarded(run(models, tmp_path, "trace once", "log", model), eager[model])


def test_pieces_are_as_many_as_without_the_canary(models, tmp_path):
    guarded, plain = (run(models, tmp_path / guard, "piecewise", guard) for guard in ("log", "off"))
    assert (guarded["pieces"], guarded["compiled"]) == (plain["pieces"], plain["compiled"])
    assert guarded["pieces"] > 3


@pytest.mark.parametrize("mode", ["trace once", "piecewise"])
def test_warm_caches_are_guarded(models, tmp_path, eager, mode):
    """First the caches are filled by an unprotected run, then by a guarded one."""
    plain = run(models, tmp_path, mode, "off")
    cold = run(models, tmp_path, mode, "log")
    warm = run(models, tmp_path, mode, "log")
    plain_again = run(models, tmp_path, mode, None)
    assert_guarded(cold, eager["llama"])
    assert_guarded(warm, eager["llama"])
    assert (plain["aot_compiled"], cold["aot_compiled"]) == (1, 1)
    # vLLM 0.32 cannot load what it saved in mode DYNAMO_TRACE_ONCE on CPUs, and compiles anew
    expected = (0, 1) if mode == "piecewise" else (plain_again["aot_compiled"], plain_again["aot_loaded"])
    assert (warm["aot_compiled"], warm["aot_loaded"]) == expected
    assert (plain_again["aot_compiled"], plain_again["aot_loaded"]) == expected


def test_settings_that_change_a_graph_are_in_the_cache_key(models, tmp_path):
    first = run(models, tmp_path, "trace once", "log")
    (other,) = vllm_runs.results(
        models,
        [MODES["trace once"] | {"model": "llama"}],
        "log",
        VLLM_CACHE_ROOT=str(tmp_path),
        KVCANARY_CHECKS="content",
    )
    assert (first["aot_compiled"], other["aot_compiled"]) == (1, 1)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("decode_context_parallel_size", 2, "context parallelism"),
        ("prefill_context_parallel_size", 2, "context parallelism"),
        ("enable_dbo", True, "batches in two parts"),
    ],
)
def test_batches_that_the_first_runner_lays_out_in_another_way_are_refused(field, value, why):
    """Their slots are those of a rank, or lists of those of each part, which ended the engine's first step."""
    from vllm.config import ParallelConfig

    from kvcanary_fx.adapters.vllm import runner

    parallel = ParallelConfig()
    assert runner._unguarded(parallel) is None
    setattr(parallel, field, value)
    with pytest.raises(EngineError, match=why):
        runner._guard(SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel)), None, False, {})


def test_attention_that_keeps_its_blocks_in_another_way_than_what_it_is_derived_from_is_refused():
    """With reference windows (R-SWA) blocks are given up between a request's first tokens and its last; static sinks
    have blocks before a request's; and where a slot has several tokens, tokens are not slots."""
    from vllm.v1 import kv_cache_interface as specs

    from kvcanary_fx.adapters.vllm import pools

    parts = dict(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    assert pools._reach(specs.FullAttentionSpec(**parts), cross=True) == (None, None)
    assert pools._reach(specs.MLAAttentionSpec(**parts), cross=True) == (None, None)
    assert pools._reach(specs.SlidingWindowSpec(**parts, sliding_window=8), cross=True) == (8, None)
    for spec, name in (
        (specs.RSWASpec(**parts, rswa_window=8), "RSWASpec"),
        (specs.SinkFullAttentionSpec(**parts, sink_len=16), "SinkFullAttentionSpec"),
        (specs.SlidingWindowMLASpec(**parts, sliding_window=8), "SlidingWindowMLASpec"),
        (specs.MLAAttentionSpec(**parts, tokens_per_state=4), "MLAAttentionSpec with 4 tokens to a slot"),
    ):
        assert pools._reach(spec, cross=True) == f"{name} is not supported by this adapter"

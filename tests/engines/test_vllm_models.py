"""Every kind of model, eagerly: nothing changes, nothing is reported without cause, and every flipped bit is."""

from __future__ import annotations

import pytest
import tiny_configs
import torch
import vllm_runs
from vllm_rig import Rig, mixed_load, prompt

MODELS = list(tiny_configs.CONFIGS)

#: 8 pages of 32 slots for four requests: some are preempted.
FEW_PAGES = {"num_gpu_blocks_override": 9}


@pytest.fixture(scope="module")
def unprotected(models):
    """What each model says without the canary, in a process of its own."""
    runs = [{"model": name, "arguments": {}} for name in MODELS]
    runs.append({"model": "llama", "arguments": FEW_PAGES})
    found = vllm_runs.results(models, runs, mode=None)
    return dict(zip([*MODELS, "few pages"], found, strict=True))


@pytest.fixture(scope="module", params=MODELS)
def rig(request, models):
    made = Rig(request.param, models)
    made.name = request.param
    yield made
    made.close()


def test_same_tokens_and_no_violation_over_hits_chunks_and_aborts(rig, unprotected):
    mixed_load(rig)
    assert rig.tokens == unprotected[rig.name]["tokens"]
    for request, found in rig.logprobs.items():
        assert found == pytest.approx(unprotected[rig.name]["logprobs"][request], abs=1e-5)
    assert rig.session.violations() == []
    rig.session.health.check()
    assert rig.session.uncovered == []
    stats = rig.session.stats()
    assert stats.recorded > 4 * 400
    assert stats.checked > 4 * 1000
    assert rig.guard.calls_outside == 2 * rig.session.steps
    if rig.name != "deepseek_v3":  # whose prefixes vLLM does not cache on CPUs
        assert rig.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("half", [0, 1])
def test_flipped_bit_is_found_in_its_layer_half_request_and_position(rig, layer, half):
    name = list(rig.layers())[layer]
    request, position = f"flip{layer}{half}", 57
    rig.add(request, prompt(70 + 2 * layer + half, 70))
    before, slots = len(rig.session.violations()), []

    def at(step):
        if step == 3:
            slots.append(rig.flip(name, half, request, position))

    rig.run(at)
    new = rig.session.violations()[before:]
    assert new
    first = new[0]
    assert (first.check, first.layer, first.position, first.slot) == ("content", name, position, slots[0])
    assert first.half == (("latent", "rope") if rig.name == "deepseek_v3" else ("K", "V"))[half]
    assert str(first.request).startswith(f"{request}-")
    assert {(v.check, v.layer, v.slot) for v in new} == {("content", name, slots[0])}


def test_preempted_requests_are_silent(models, unprotected):
    rig = Rig("llama", models, **FEW_PAGES)
    mixed_load(rig)
    assert rig.preempted > 0
    assert rig.preempted == unprotected["few pages"]["preempted"]
    assert rig.tokens == unprotected["few pages"]["tokens"]
    assert rig.session.violations() == []
    rig.close()


def test_unprotected_runs_load_no_hook(unprotected):
    for found in unprotected.values():
        ours = {m for m in found["modules"] if m.startswith("kvcanary_fx.adapters.vllm.")}
        assert ours <= {"kvcanary_fx.adapters.vllm.plugin", "kvcanary_fx.adapters.vllm.settings"}


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="a CPU without AMX")
@pytest.mark.parametrize("half", [0, 1])
def test_mla_on_amx_tiles_is_guarded_with_the_backend_that_vllm_takes(models, half):
    rig = Rig("deepseek_v3", models, dtype="bfloat16", attention_config={})
    try:
        name = list(rig.layers())[1]
        assert type(rig.layers()[name].impl).__name__ == "AMXMLAImpl"
        rig.add("clean", prompt(90, 70))
        rig.run()
        assert rig.session.violations() == []
        assert rig.session.uncovered == []
        rig.add("damaged", prompt(91, 70))
        slots = []
        rig.run(lambda step: slots.append(rig.flip(name, half, "damaged", 57)) if step == 3 else None)
        found = {(v.check, v.layer, v.half, v.slot) for v in rig.session.violations()}
        assert found == {("content", name, ("latent", "rope")[half], slots[0])}
    finally:
        rig.close()


@pytest.mark.parametrize(
    "arguments",
    [{}, {"enforce_eager": False}, {"disable_hybrid_kv_cache_manager": True}],
    ids=["eager", "compiled", "all blocks kept"],
)
def test_chunked_local_attention_is_guarded(models, arguments, caplog):
    """Llama 4: layers 0 and 2 see the tokens of a chunk of 64, and vLLM gives the blocks of earlier chunks away."""
    (plain,) = vllm_runs.results(models, [{"model": "llama4", "arguments": arguments}], mode=None)
    rig = Rig("llama4", models, **arguments)
    try:
        assert not [r.message for r in caplog.records if "kvcanary.unguarded" in r.message]
        mixed_load(rig)
        assert rig.tokens == plain["tokens"]
        assert rig.session.violations() == []
        rig.session.health.check()
        assert rig.session.uncovered == []
        names = [f"model.layers.{number}.self_attn.attn" for number in range(4)]
        chunks = {name: group.chunk for group in rig.guard.groups for name in group.layers}
        kept = "disable_hybrid_kv_cache_manager" in arguments
        assert chunks == {name: None if kept or number % 2 else 64 for number, name in enumerate(names)}
        assert [group.layer_with_table for group in rig.guard.groups if group.chunk is None] == [names[1]]
        for number, name in enumerate(names):
            for half, position in enumerate((66, 69)):
                _flip_is_found(rig, name, half, position, prompt(80 + 2 * number + half, 70))
        before = len(rig.session.violations())
        rig.add("behind", prompt(95, 70))
        rig.run(lambda step: rig.flip(names[0], 0, "behind", 57) if step == 3 else None)  # which nothing reads again
        assert len(rig.session.violations()) == before + kept  # where all are kept, all are compared
    finally:
        rig.close()


def _flip_is_found(rig, layer, half, position, tokens):
    request, slots, before = f"{layer}-{half}", [], len(rig.session.violations())
    rig.add(request, tokens)
    rig.run(lambda step: slots.append(rig.flip(layer, half, request, position)) if step == 3 else None)
    found = {(v.check, v.layer, v.half, v.slot, v.position) for v in rig.session.violations()[before:]}
    assert found == {("content", layer, "KV"[half], slots[0], position)}

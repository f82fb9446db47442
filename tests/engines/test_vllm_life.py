"""The life of pages: salts, idle pages of the prefix cache, resets, and a long random load."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import vllm_runs
from vllm_rig import Rig, prompt

from kvcanary_fx import EngineError
from kvcanary_fx.errors import SelfTestError


@pytest.fixture
def engine(models):
    made = []

    def make(model="llama", **arguments):
        made.append(Rig(model, models, **arguments))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def test_hits_on_pages_that_the_same_forward_fills(engine):
    """vLLM caches a page when it plans to fill it: two prompts that come at once share what neither has written."""
    rig = engine(max_num_batched_tokens=256)
    for name in ("A", "B", "C"):
        rig.add(name, prompt(5, 96) + prompt(6 + len(name), 3), length=4)
    pages = []
    rig.run(lambda step: pages.append([rig.pages(r)[0][0] for r in ("A", "B", "C")]) if step == 1 else None)
    assert len(set(pages[0])) == 1
    assert rig.session.violations() == []
    assert rig.session.steps == 4
    page = pages[0][0]
    name = next(iter(rig.layers()))
    rig.layers()[name].kv_cache[page, 1].view(-1)[7] += 1.0
    rig.add("D", prompt(5, 96) + [9], length=2)
    rig.run()
    assert [(v.check, v.layer, v.slot) for v in rig.session.violations()][:1] == [("content", name, page * 32 + 7)]


def test_prompts_of_one_step_that_are_stairs_of_one_text_are_silent(engine):
    """Each prompt's prefix ends in a page that the one before fills in the same forward."""
    rig = engine(max_num_batched_tokens=256)
    text, lens = prompt(7, 160), {"A": 40, "B": 80, "C": 120, "D": 160}
    for name, length in lens.items():
        rig.add(name, text[:length], length=4)
    computed = []

    def look(step):
        if step == 1:
            requests = rig.scheduler.requests.values()
            computed.append(sorted(r.num_computed_tokens for r in requests))

    rig.run(look)
    assert computed == [sorted(lens.values())]  # all in the first step
    rig.add("again", text + prompt(8, 5), length=2)
    rig.run()
    assert rig.session.violations() == []


def test_host_that_runs_ahead_of_the_device_is_silent(engine, monkeypatch):
    """With asynchronous scheduling the host takes drafts for accepted, until the forward has been launched.

    vLLM does not schedule so on CPUs; the host's counts are put where they would be.
    """
    rig = engine()
    forward, counts = rig.runner._model_forward, rig.runner.input_batch.num_computed_tokens_cpu

    def optimistic(*args, **kwargs):
        decoding = counts >= 40
        counts[decoding] += 3
        try:
            return forward(*args, **kwargs)
        finally:
            counts[decoding] -= 3

    monkeypatch.setattr(rig.runner, "_model_forward", optimistic)
    rig.add("A", prompt(5, 50), length=8)
    rig.run()
    assert rig.session.violations() == []
    assert rig.session.stats().slots_checked > 7 * 50


def test_bfloat16_is_guarded_also_where_vllm_would_take_amx_tiles(engine, monkeypatch, caplog):
    """Where this CPU has no AMX, vLLM's choice is made for it."""
    from vllm.v1.attention.backends import cpu_attn

    from kvcanary_fx.adapters.vllm import cpu_attention, plugin

    plugin.register()  # as vLLM does
    with monkeypatch.context() as patch:
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
        assert cpu_attn._get_attn_isa(torch.bfloat16, 32, 32, "auto") == "vec"
    caplog.clear()
    caplog.set_level("WARNING", "kvcanary")
    with monkeypatch.context() as patch:
        if not torch.cpu._is_amx_tile_supported():
            patch.setattr(cpu_attn, "_get_attn_isa", lambda *g: cpu_attention.without_tiles(lambda *_: "amx", *g))
        rig = engine(dtype="bfloat16")
    assert "kvcanary.vllm attention runs without AMX tiles" in caplog.text
    name = list(rig.layers())[1]

    def flip(step):
        if step == 4:
            page = rig.layers()[name].kv_cache.view(torch.int16)[rig.pages("A")[0][0], 1]
            page.view(-1)[7:8].bitwise_xor_(1 << 4)

    rig.add("A", prompt(5, 50), length=6)
    rig.run(flip)
    assert {(v.check, v.layer, v.half, str(v.request)[:2]) for v in rig.session.violations()} == {
        ("content", name, "K", "A-")
    }


def test_model_of_which_nothing_can_be_guarded_runs_in_mode_log_and_says_so(engine, monkeypatch, caplog, tmp_path):
    from kvcanary_fx.adapters.vllm import counts, pools, runner, settings

    monkeypatch.setenv(settings.COUNTS_VARIABLE, str(tmp_path))
    caplog.set_level("WARNING", "kvcanary")
    monkeypatch.setattr(pools, "_halves", lambda *_: "it is a riddle")
    rig = engine()
    assert rig.guard is None
    riddle, nothing = [r.message for r in caplog.records if "kvcanary.unguarded" in r.message]
    assert "it is a riddle" in riddle
    assert nothing.startswith("kvcanary.unguarded nothing is guarded: no KV cache group of this model can be guarded")
    assert counts.guarded()["group0"] == "layer model.layers.0.self_attn.attn: it is a riddle"
    assert counts.guarded()["all"].startswith("EngineError: no KV cache group")
    rig.add("A", prompt(5, 50), length=3)
    rig.run()
    assert len(rig.tokens["A"]) == 3
    with pytest.raises(EngineError, match="KVCANARY_MODE=log or off runs it unguarded"):
        runner.guard(rig.runner, settings.from_env({"KVCANARY_MODE": "raise"}), False, runner._guard)


def test_layer_that_leaves_no_fingerprints_keeps_no_engine_from_starting_in_mode_log(
    engine, monkeypatch, caplog, tmp_path
):
    from kvcanary_fx.adapters.vllm import counts, proof, runner, settings

    record = proof.record_layer

    def all_but_the_first(key, value, device, layer):
        if layer != "model.layers.0.self_attn.attn":
            record(key, value, device, layer)

    monkeypatch.setattr(proof, "record_layer", all_but_the_first)
    monkeypatch.setenv(settings.COUNTS_VARIABLE, str(tmp_path))
    rig = engine()
    assert rig.guard is None
    said = "planted a changed byte in half K of model.layers.0.self_attn.attn, reported nothing"
    assert said in next(r.message for r in caplog.records if "kvcanary.unguarded nothing is guarded: " in r.message)
    (why,) = counts.guarded().values()
    assert why.startswith("SelfTestError: ")
    with pytest.raises(SelfTestError, match=r"half V of model\.layers\.0"):
        runner.guard(rig.runner, settings.from_env({"KVCANARY_MODE": "raise"}), False, runner._guard)


def test_proof_finds_every_half_and_leaves_nothing_behind(engine):
    from kvcanary_fx.adapters.vllm import proof

    rig = engine()
    proof.prove(rig.guard.groups, rig.guard.settings.config)
    assert not any(layer.kv_cache.any() for layer in rig.layers().values())
    assert rig.session.violations() == []


def test_model_without_a_kv_cache_is_told(caplog, monkeypatch, tmp_path):
    from kvcanary_fx.adapters.vllm import runner, settings

    monkeypatch.setenv(settings.COUNTS_VARIABLE, str(tmp_path))
    caplog.set_level("WARNING", "kvcanary")
    bare = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=[]))
    runner.guard(bare, settings.from_env({"KVCANARY_MODE": "raise"}), False, runner._guard)
    assert {r.message for r in caplog.records} == {
        "kvcanary.unguarded this model has no KV cache: there is nothing to guard"
    }


def test_salts_keep_prefixes_apart(engine):
    rig = engine()
    for salt in ("red", "blue", "red"):
        rig.add(f"{salt}{len(rig.tokens)}", prompt(5, 96), cache_salt=salt)
        rig.run()
    assert rig.session.violations() == []


def test_prefix_of_another_salt_is_reported(engine, monkeypatch):
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", lambda *args: (None, args[-1]))
    rig = engine()
    rig.add("A", prompt(5, 96), cache_salt="red")
    rig.run()
    rig.add("B", prompt(5, 96), cache_salt="blue")
    rig.run()
    assert rig.told() == {("namespace", "OTHER_NAMESPACE", "B")}


def test_flip_in_an_idle_page_is_found_by_the_next_hit(engine):
    rig = engine()
    name = list(rig.layers())[1]
    rig.add("A", prompt(5, 96), length=4)
    slots = []
    rig.run(lambda step: slots.append(rig.pages("A")[0]) if step == 3 else None)
    page = slots[0][1]
    rig.layers()[name].kv_cache[page, 0].view(-1)[40] += 1.0
    assert rig.session.violations() == []
    rig.add("B", prompt(5, 96) + prompt(6, 5), length=2)
    rig.run()
    found = rig.session.violations()[0]
    assert (found.check, found.layer, found.slot // 32, found.position) == ("content", name, page, 32 + 40 % 32)
    assert str(found.request).startswith("B-")


def test_reset_of_the_prefix_cache(engine):
    rig = engine()
    for number in range(2):
        rig.add(f"A{number}", prompt(5, 96))
        rig.run()
        assert rig.engine.reset_prefix_cache()
    assert rig.session.violations() == []


def test_sleep_forgets_what_was_stored_and_a_flip_after_it_is_found(engine, monkeypatch):
    """A GPU's worker gives the KV cache's memory back and gets other; a CPU's would keep it."""
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    rig = engine(num_gpu_blocks_override=12)
    caches = [layer.kv_cache for layer in rig.layers().values()]
    backend = SimpleNamespace(suspend=lambda level: [cache.fill_(7.0) for cache in caches])
    monkeypatch.setattr(Worker, "sleep_mode_backend", backend)
    monkeypatch.setattr(CPUWorker, "sleep", Worker.sleep)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (0, 0))
    for name in ("before", "after"):
        for number in range(3):
            rig.add(f"{name} {number}", prompt(number, 90), length=4)
        rig.run()
        rig.llm.sleep(1)
        rig.llm.wake_up()
    assert rig.session.violations() == []
    assert [rig.tokens[f"after {number}"] for number in range(3)] == [
        rig.tokens[f"before {number}"] for number in range(3)
    ]
    rig.add("A", prompt(1, 90), length=6)
    name = next(iter(rig.layers()))
    rig.run(lambda step: rig.flip(name, 0, "A", 10) if step == 3 else None)
    assert {(v.check, v.layer, v.position) for v in rig.session.violations()} == {("content", name, 10)}


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_random_load_with_few_pages_is_silent(engine, model):
    """Prompts that share prefixes of any length, aborts at any time, pages that are evicted and taken again."""
    rig = engine(model, num_gpu_blocks_override=15 if model == "llama" else 40)
    rng = random.Random(7)
    trunk = [prompt(number, 200) for number in range(3)]
    waiting = [
        (f"r{i}", rng.choice(trunk)[: rng.randint(1, 180)] + prompt(100 + i, rng.randint(1, 30)), rng.randint(1, 30))
        for i in range(40)
    ]
    rig.add(*waiting.pop())

    def at(step):
        if waiting and rng.random() < 0.35:
            rig.add(*waiting.pop())
        elif rig.scheduler.requests and rng.random() < 0.03:
            rig.engine.abort_request([rng.choice(sorted(rig.scheduler.requests))], internal=True)
        if waiting and not rig.engine.has_unfinished_requests():
            rig.add(*waiting.pop())

    rig.run(at, limit=1500)
    assert not waiting
    assert rig.session.violations() == []
    rig.session.health.check()
    assert rig.session.uncovered == []
    assert rig.session.stats().recorded > 5000
    if model == "llama":
        from kvcanary_fx.adapters.vllm.blocks import journal_of

        assert rig.preempted > 0
        # all along the tables of the one manager have said who got blocks
        assert journal_of(rig.scheduler.kv_cache_manager.block_pool).holders is not None


def test_what_the_scheduler_does_to_blocks_is_told_with_its_stack(monkeypatch):
    from vllm.v1.core.block_pool import BlockPool

    from kvcanary_fx.adapters.vllm import blocks, plugin

    plugin.register()
    monkeypatch.setenv("KVCANARY_STACKS", "10")
    pool = BlockPool(num_gpu_blocks=8, enable_caching=False, hash_block_size=16)

    def finish():
        pool.free_blocks(pool.get_new_blocks(1))

    for _ in range(2):
        finish()
    first, second = blocks.journal_of(pool).take().stacks
    assert first is second  # a message names it once
    assert first[0].startswith("test_vllm_life.py:")
    assert first[0].endswith("finish")
    assert blocks.journal_of(pool).take().stacks == []


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["connector", "connector, compiled"])
def test_what_a_connector_loads_from_files_is_taken_as_it_is(models, scene):
    """It waits for each layer, and saves it, around attention: also where ours is called between compiled pieces."""
    (found,) = vllm_runs.results(models, [{"model": "llama", "scene": scene}], "log")
    assert found["stored"] == 3
    first, both = found["recorded"]
    assert both - first < first / 2  # most of the second time was loaded
    assert found["adopted"] > 0
    assert found["violations"] == found["uncovered"] == []
    assert all(found["tokens"][f"1 {i}"] == found["tokens"][f"0 {i}"] for i in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["loads that fail", "loads that take steps"])
def test_requests_that_share_what_one_of_them_is_about_to_write_are_silent(models, scene):
    """A block that could not be loaded is written by one request, while others have it; and a request takes up a block
    that another is about to write, and waits for what is loaded behind it: it is in no batch yet."""
    (found,) = vllm_runs.results(models, [{"model": "llama", "scene": scene}], "log")
    assert found["violations"] == found["uncovered"] == []
    assert found["failed"] == (scene == "loads that fail")
    assert all(found["alike"].values())
    assert found["adopted"] > 0
    assert found["told"] == [["content", found["layer"], 40], ["content", found["layer"], 100]]


@pytest.mark.slow
def test_requests_whose_input_comes_in_pieces_are_guarded(models):
    """The last sampled token of a piece is dropped, and the next piece is written in its place."""
    runs = [{"model": "llama", "scene": "input in pieces"}]
    (plain,), (found,) = (vllm_runs.results(models, runs, mode) for mode in (None, "log"))
    assert found["violations"] == found["uncovered"] == []
    assert found["tokens"] == plain["tokens"]
    assert found["left"] == 3
    assert found["told"] == [["content", "model.layers.1.self_attn.attn", 35]]


@pytest.mark.slow
def test_attention_of_a_hybrid_is_guarded_beside_states_that_are_not(models):
    (found,) = vllm_runs.results(models, [{"model": "hybrid", "scene": "hybrid"}], "log")
    assert found["halves"] == {"group1": 4}
    assert found["violations"] == found["uncovered"] == []
    assert found["flips"] == [True] * 4

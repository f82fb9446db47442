"""Damage in a block: which requests it may reach, and what becomes of them, with each outcome."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
from vllm_rig import Rig, prompt

import kvcanary_fx

LAYER = "model.layers.1.self_attn.attn"
SHARED = prompt(7, 64)
PROMPTS = {"A": SHARED + prompt(8, 5), "B": SHARED + prompt(9, 5), "C": SHARED + prompt(10, 5), "D": prompt(11, 69)}


@pytest.fixture(scope="module")
def engine(models, vllm_environment):
    made = Rig("llama", models, max_num_batched_tokens=128)
    yield made
    made.close()


@pytest.fixture(scope="module")
def clean(engine):
    """What the requests say undamaged."""
    for name, tokens in PROMPTS.items():
        engine.add(name, tokens, length=12)
    engine.run()
    return dict(engine.tokens)


@pytest.fixture
def rig(engine, clean):
    """The engine as if it were new."""
    engine.engine.reset_prefix_cache()
    engine.guard.reactions.take_verdict()
    engine.session.found.clear()
    engine.tokens.clear()
    engine.finished.clear()
    engine.reasons.clear()
    engine.preempted = 0
    return engine


def contain(rig, outcome):
    from kvcanary_fx.adapters.vllm.settings import VllmSettings

    rig.guard.reactions.settings = VllmSettings(kvcanary_fx.CanaryConfig(mode="log"), outcome)


def ruin(rig, page):
    """Change a page so that what attention reads there changes tokens."""
    rig.layers()[LAYER].kv_cache[page].mul_(-1e5)


def damage_a_block_that_three_share(rig):
    """A, B and C share a prefix, D does not; its second page is ruined in A's eighth step."""
    rig.add("A", PROMPTS["A"], length=12)
    sent = {}

    def at(step):
        if step == 2:
            for name in "BCD":
                rig.add(name, PROMPTS[name], length=12)
        if step == 7:
            assert rig.pages("A")[0][:2] == rig.pages("B")[0][:2] == rig.pages("C")[0][:2]
            sent.update({n: len(rig.scheduler.requests[rig.internal(n)].output_token_ids) for n in "ABCD"})
            ruin(rig, rig.pages("A")[0][1])

    rig.run(at)
    return sent


def test_abort_ends_all_readers_of_a_block_before_a_token_leaves(rig, clean, caplog):
    contain(rig, "abort")
    sent = damage_a_block_that_three_share(rig)
    assert rig.finished == {"A": "error", "B": "error", "C": "error", "D": "length"}
    assert rig.tokens == {name: clean[name][: sent[name]] for name in "ABC"} | {"D": clean["D"]}
    assert {v.check for v in rig.session.violations()} == {"content"}
    (told,) = {r.message for r in caplog.records if "kv_cache_corruption" in r.message}
    assert sorted(id.rpartition("-")[0] for id in told.partition("aborted: ")[2].split()) == ["A", "B", "C"]
    before = len(rig.session.violations())
    rig.add("again", PROMPTS["B"], length=12)  # the block has left the prefix cache
    rig.run()
    assert rig.tokens["again"] == clean["B"]
    assert len(rig.session.violations()) == before


def test_recompute_ends_with_the_tokens_of_a_clean_run(rig, clean):
    contain(rig, "recompute")
    damage_a_block_that_three_share(rig)
    assert rig.finished == dict.fromkeys("ABCD", "length")
    assert rig.tokens == clean
    assert rig.preempted == 3
    assert rig.session.violations()


@pytest.mark.parametrize("outcome", ["abort", "recompute"])
def test_under_a_budget_log_and_clients_learn_how_many_tokens_had_been_sent(rig, clean, caplog, monkeypatch, outcome):
    contain(rig, outcome)
    monkeypatch.setattr(rig.guard.reactions, "late", True)
    sent = damage_a_block_that_three_share(rig)
    (told,) = {r.message for r in caplog.records if "kv_cache_corruption" in r.message}
    counts = told.partition("; tokens sent before: ")[2].split()
    assert {id.rpartition("-")[0]: int(n) for id, n in zip(counts[::2], counts[1::2], strict=True)} == {
        name: sent[name] for name in "ABC"
    }
    incident = told.split()[2].rstrip(":")
    for name in "ABC":
        assert rig.reasons[name] == f"kv_cache_corruption {incident}, {sent[name]} tokens had been sent"
    assert rig.reasons["D"] is None


def test_the_rest_of_a_damaged_block_which_is_told_when_it_is_given_up_lets_nobody_begin_again(rig, clean, request):
    """An eighth of its slots is compared in a step: the others are when the requests give it up to begin again."""
    contain(rig, "recompute")
    for space in [pool.space for pool in rig.session.pools.values()]:
        request.addfinalizer(functools.partial(object.__setattr__, space, "verify_every", space.verify_every))
        object.__setattr__(space, "verify_every", 8)
    damage_a_block_that_three_share(rig)
    assert {v.phase for v in rig.session.violations()} == {"pre", "life"}
    assert rig.finished == dict.fromkeys("ABCD", "length")
    assert rig.preempted == 3


@pytest.mark.parametrize("outcome", ["log", "recompute"])
def test_each_violation_is_one_line_of_the_log(rig, clean, caplog, outcome):
    contain(rig, outcome)
    damage_a_block_that_three_share(rig)
    lines = [r.message for r in caplog.records if r.message.startswith("kvcanary.violation ")]
    assert sorted(lines) == sorted(str(v.line()) for v in rig.session.violations())
    assert lines


def test_log_goes_on_with_the_damage_which_no_later_request_finds(rig, clean):
    contain(rig, "log")
    damage_a_block_that_three_share(rig)
    assert rig.finished == dict.fromkeys("ABCD", "length")
    assert rig.tokens["D"] == clean["D"]
    assert any(rig.tokens[name] != clean[name] for name in "ABC")  # the damage matters
    rig.session.found.clear()
    rig.add("later", PROMPTS["C"], length=12)
    rig.run()
    assert rig.tokens["later"] == clean["C"]
    assert rig.session.violations() == []


@pytest.mark.parametrize("every", [1, 512], ids=["all bytes", "under a budget"])
@pytest.mark.parametrize(("outcome", "finished"), [("abort", "error"), ("recompute", "length")])
def test_idle_block_of_the_prefix_cache(rig, clean, outcome, finished, every, request):
    contain(rig, outcome)
    for space in [pool.space for pool in rig.session.pools.values()]:
        request.addfinalizer(functools.partial(object.__setattr__, space, "verify_every", space.verify_every))
        object.__setattr__(space, "verify_every", every)
    rig.add("A", PROMPTS["A"], length=12)
    pages = []
    rig.run(lambda step: pages.append(rig.pages("A")[0][1]) if step == 3 else None)
    ruin(rig, pages[0])
    rig.add("B", PROMPTS["B"], length=12)
    rig.run()
    assert rig.finished == {"A": "length", "B": finished}
    assert rig.tokens["B"] == (clean["B"] if outcome == "recompute" else [])
    assert rig.told() == {("content", None, "B")}


def test_damage_that_comes_back_ends_the_request(rig, clean):
    contain(rig, "recompute")
    rig.add("A", PROMPTS["A"], length=12)
    rig.add("D", PROMPTS["D"], length=12)

    def at(step):
        found = [r for r in rig.scheduler.requests if r.startswith("A-")]
        if step > 3 and found and rig.pages("A")[0]:
            ruin(rig, rig.pages("A")[0][1])

    rig.run(at)
    assert rig.finished == {"A": "error", "D": "length"}
    assert rig.preempted == 3
    assert rig.tokens["D"] == clean["D"]


def test_log_probabilities_of_a_prompt_are_those_of_a_clean_run(rig, clean):
    """Seen: damage found in the step that ends the prompt, and the client got None for each of its tokens."""
    from vllm import SamplingParams

    contain(rig, "recompute")
    text = {"prompt_token_ids": prompt(12, 150)}  # two chunks of 128
    wanted = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False, prompt_logprobs=1)
    (undamaged,) = rig.llm.generate([text], wanted, use_tqdm=False)
    rig.engine.add_request("again", text, wanted)
    rig.engine.step()
    ruin(rig, rig.pages("again")[0][0])
    while rig.engine.has_unfinished_requests():
        given = rig.engine.step()
    assert rig.preempted == 1
    assert [numbers and list(numbers) for numbers in given[0].prompt_logprobs] == [
        numbers and list(numbers) for numbers in undamaged.prompt_logprobs
    ]
    assert given[0].outputs[0].token_ids == undamaged.outputs[0].token_ids


@pytest.mark.slow
def test_a_request_that_begins_again_loads_nothing_that_a_connector_has_stored(models):
    """It may have been stored after it was damaged, and what is loaded is taken as it is."""
    import vllm_runs

    runs = [{"model": "llama", "scene": "stored damage"}]
    (found,) = vllm_runs.results(models, runs, "log", KVCANARY_VLLM_ON_VIOLATION="recompute")
    assert found["stored"] == 3
    assert found["found"] > 0
    assert found["preempted"] == 1
    assert found["tokens"]["A"] == found["tokens"]["clean"]


@pytest.mark.parametrize("several", [False, True])
def test_what_connectors_have_stored_of_a_damaged_block_is_dropped_or_said_to_stay(caplog, several):
    """A store that others may share is not emptied."""
    from kvcanary_fx.adapters.vllm import stores

    dropped = []

    class OffloadingConnector:
        def reset_cache(self):
            dropped.append(self)

    class Mine(OffloadingConnector):
        """Somebody's subclass."""

    class SimpleCPUOffloadConnector:
        def reset_cache(self):
            return False  # a transfer is under way

    class MooncakeStoreConnector:
        def reset_cache(self):
            raise AssertionError("it is not this engine's alone")

    ours = [OffloadingConnector(), Mine()]
    shared = MooncakeStoreConnector()
    connector = SimpleNamespace(_connectors=[*ours, SimpleCPUOffloadConnector(), shared]) if several else shared
    stores.drop(SimpleNamespace(connector=connector))
    assert dropped == ours * several
    (told,) = [r.message for r in caplog.records]
    named = "SimpleCPUOffloadConnector and MooncakeStoreConnector" if several else "MooncakeStoreConnector"
    assert f"what {named} has stored" in told
    request = SimpleNamespace(skip_reading_prefix_cache=False)
    stores.compute_anew(SimpleNamespace(connector=None), [request])
    stores.drop(SimpleNamespace(connector=None))
    assert not request.skip_reading_prefix_cache

"""Hybrids: the running states of Mamba, short convolutions and linear attention, beside attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import vllm_runs
from vllm_rig import Rig, growing_load, mixed_load, prompt

import kvcanary_fx
from kvcanary_fx.errors import SelfTestError

#: One state a request: no prefix cache keeps any.  Blocks of vLLM's own choice, so that all groups' are alike.
PLAIN = {"block_size": None, "enable_prefix_caching": False}
COMPILED = {"enforce_eager": False}

#: 6 blocks of 128 tokens, those with states among them.
FEW_BLOCKS = {"num_gpu_blocks_override": 7}

#: vLLM's kernel of linear attention on CPUs takes nothing else.
ONLY_BFLOAT16 = {"dtype": "bfloat16"}

#: What is run: a model and what its engine gets besides.
RUNS = {
    "convolutions": ("hybrid", {}),
    "convolutions, compiled": ("hybrid", COMPILED),
    "convolutions, few blocks": ("hybrid", FEW_BLOCKS),
    "Mamba 2": ("granite", {}),
    "Mamba 2, compiled": ("granite", COMPILED),
    "Mamba 2, few blocks": ("granite", FEW_BLOCKS),
    "linear attention": ("qwen3_next", ONLY_BFLOAT16),
}

#: The states of a layer of each model.
NAMES = {"hybrid": ["conv"], "granite": ["conv", "state"], "qwen3_next": ["conv", "state"]}


def load_of(run):
    return growing_load if "few blocks" in run else mixed_load


@pytest.fixture(scope="module")
def unprotected(models):
    """What each run says without the canary, in a process of its own."""
    runs = [
        {"model": model, "arguments": PLAIN | arguments, "load": load_of(run).__name__}
        for run, (model, arguments) in RUNS.items()
    ]
    return dict(zip(RUNS, vllm_runs.results(models, runs, mode=None), strict=True))


@pytest.fixture
def engine(models):
    made = []

    def make(model="granite", **arguments):
        made.append(Rig(model, models, **(PLAIN | arguments)))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def violations(rig, since=0):
    return rig.guard.states.session.violations()[since:]


def states(rig):
    """``(layer, state, tensor)`` of every state."""
    found = []
    for layer, module in rig.layers().items():
        if not isinstance(module.kv_cache, torch.Tensor):
            names = ["conv"] if len(module.kv_cache) == 1 else ["conv", "state"]
            found += [(layer, name, tensor) for name, tensor in zip(names, module.kv_cache, strict=True)]
    return found


def block_of(rig, layer, request):
    """The block that has a running request's states of a layer."""
    return rig.pages(request)[rig.group_of(layer)][0]


def flip(state, block):
    """Flip a bit of a state."""
    word = state[block].view(torch.int16 if state.element_size() == 2 else torch.int32)
    word[(0,) * word.dim()] ^= 1 << 4


@pytest.mark.parametrize("run", RUNS)
def test_same_tokens_and_no_violation_over_chunks_aborts_and_preemption(engine, unprotected, run):
    model, arguments = RUNS[run]
    rig, plain = engine(model, **arguments), unprotected[run]
    load_of(run)(rig)
    assert rig.tokens == plain["tokens"]
    for request, found in rig.logprobs.items():
        assert found == pytest.approx(plain["logprobs"][request], abs=1e-5)
    assert rig.preempted == plain["preempted"]
    assert (rig.preempted > 0) == ("few blocks" in run)
    for session in rig.guard.sessions:
        assert session.violations() == []
        session.health.check()
        assert session.uncovered == []
    guarded = rig.guard.states.session
    assert guarded.stats().recorded > len(states(rig)) * 80
    assert guarded.stats().checked > len(states(rig)) * 80
    assert {half.info.half for pool in guarded.pools.values() for half in pool.halves} == set(NAMES[model])
    # each behind its own op, not only when the model has run
    layers = sum(len(group.layers) for group in rig.guard.states.groups)
    assert rig.guard.states.recorded_in_ops == layers * rig.session.stats().engine_steps


@pytest.mark.slow
@pytest.mark.parametrize("model", ["hybrid", "granite"])
def test_model_that_is_compiled_in_pieces(models, model):
    """As on a GPU by default: the graph is split at the ops of states, too."""
    run = {"model": model, "arguments": {**PLAIN, **COMPILED, "compilation_config": {"mode": 3}}, "forced": True}
    plain, found = (vllm_runs.results(models, [run], mode)[0] for mode in (None, "log"))
    assert found["mode"] == "3"
    assert found["pieces"] == plain["pieces"]
    assert found["tokens"] == plain["tokens"]
    assert found["violations"] == found["uncovered"] == []
    assert found["states"]["recorded"] > 160
    assert found["states"]["in_ops"] == 2 * found["states"]["steps"]


@pytest.mark.parametrize("model", NAMES)
def test_a_flip_in_each_state_is_found_in_its_layer_request_and_block(engine, model):
    rig = engine(model, **(ONLY_BFLOAT16 if model == "qwen3_next" else {}))
    assert {name for _, name, _ in states(rig)} == set(NAMES[model])
    for number, (layer, name, tensor) in enumerate(states(rig)):
        before, flipped = len(violations(rig)), []
        rig.add(f"other{number}", prompt(60, 30), length=12)
        rig.add(f"flip{number}", prompt(70 + number, 90), length=12)  # in chunks of 64 tokens

        def at(step, number=number, layer=layer, tensor=tensor, flipped=flipped):
            if step == (1, 4)[number % 2]:  # between two chunks of the prompt, and between two tokens
                flipped.append(block_of(rig, layer, f"flip{number}"))
                flip(tensor, flipped[0])

        rig.run(at)
        (told,) = violations(rig, before)
        assert (told.check, told.layer, told.half, told.slot) == ("content", layer, name, flipped[0])
        assert str(told.request).startswith(f"flip{number}-")
    assert rig.session.violations() == []


def two_requests(rig):
    """A and B decode from their second step on, each with its state in a block of its own."""
    rig.add("A", prompt(50, 20), length=10)
    rig.add("B", prompt(51, 30), length=10)


def told(rig):
    """Check, reason and request of every violation about states."""
    return {(v.check, v.why, str(v.request).rpartition("-")[0]) for v in violations(rig)}


def test_block_tables_of_two_requests_that_are_swapped_in_the_worker(engine):
    rig = engine("hybrid")
    layer, _, _ = states(rig)[0]
    two_requests(rig)
    blocks = {}

    def at(step):
        if step == 4:
            blocks.update({name: block_of(rig, layer, name) for name in "AB"})
            rig.runner.input_batch.block_table[rig.group_of(layer)].swap_row(0, 1)

    rig.run(at)
    swapped = [v for v in violations(rig) if v.why == "NOT_THE_PLANNED_SLOT"]
    first = {str(v.request)[0]: (v.check, v.layer, v.stored, v.found) for v in reversed(swapped)}
    a, b = blocks["A"], blocks["B"]
    assert first == {"A": ("index", layer, a, b), "B": ("index", layer, b, a)}


def test_states_of_two_requests_that_are_exchanged(engine):
    rig = engine("hybrid")
    two_requests(rig)

    def at(step):
        if step == 4:
            for layer, _, tensor in states(rig):
                pair = [block_of(rig, layer, "A"), block_of(rig, layer, "B")]
                tensor[pair] = tensor[pair[::-1]]

    rig.run(at)
    found = {(v.check, v.layer, str(v.request)[0]) for v in violations(rig)}
    assert found == {("content", layer, request) for layer, _, _ in states(rig) for request in "AB"}


def test_block_of_a_state_that_another_request_is_given_too(engine, monkeypatch):
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    rig, allocate, given = engine("hybrid"), MambaManager.allocate_new_blocks, []

    def allocate_twice(self, request_id, *args):
        new = allocate(self, request_id, *args)
        if new and request_id.startswith("B-"):
            given.extend(next(blocks for name, blocks in self.req_to_blocks.items() if name.startswith("A-")))
            self.req_to_blocks[request_id][:] = given
            return list(given)
        return new

    monkeypatch.setattr(MambaManager, "allocate_new_blocks", allocate_twice)
    rig.add("A", prompt(50, 20), length=10)
    with pytest.raises(AssertionError, match="left after"):
        rig.run(lambda step: rig.add("B", prompt(51, 30), length=10) if step == 3 else None, limit=6)
    # both write to it in one forward; B then reads what is A's, and A what B has left
    kinds = {("bounds", "PLANNED_TWICE", "B"), ("owner", "FOREIGN_READ", "B"), ("token", "WRONG_TOKEN", "A")}
    assert told(rig) == kinds
    assert {v.slot for v in violations(rig)} == {given[0].block_id}
    assert rig.session.violations() == []


def test_block_of_a_state_that_is_freed_while_its_request_runs(engine, monkeypatch):
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    rig, allocate, freed = engine("hybrid"), MambaManager.allocate_new_blocks, []

    def allocate_and_free(self, request_id, *args):
        new = allocate(self, request_id, *args)
        if not new and request_id.startswith("A-") and not freed:
            freed.extend(self.req_to_blocks[request_id])
            self.block_pool.free_blocks(freed)
        return new

    monkeypatch.setattr(MambaManager, "allocate_new_blocks", allocate_and_free)
    two_requests(rig)
    with pytest.raises(AssertionError, match="left after"):
        rig.run(limit=5)
    assert ("owner", "READ_AFTER_FREE", "A") in told(rig)
    assert {request for _, _, request in told(rig)} == {"A"}


def test_a_layer_that_writes_to_the_state_of_another_is_found_in_the_same_forward(engine, monkeypatch):
    from vllm.model_executor.layers.mamba.short_conv import ShortConv

    rig, run = engine("hybrid"), ShortConv.forward_native
    (first, _, tensor), (last, _, _) = states(rig)
    armed = []

    def run_and_hit(self, *args, **kwargs):
        run(self, *args, **kwargs)
        if armed and self.prefix == last:
            flip(tensor, armed.pop())

    monkeypatch.setattr(ShortConv, "forward_native", run_and_hit)
    two_requests(rig)
    steps = []

    def at(step):
        steps.append(len(violations(rig)))
        if step == 4:
            armed.append(block_of(rig, first, "A"))

    rig.run(at)
    assert (steps[4], steps[5]) == (0, 1)
    assert {(v.check, v.layer, str(v.request)[0]) for v in violations(rig)} == {("content", first, "A")}


def test_a_freed_state_is_compared_once_more(engine):
    rig = engine("hybrid")
    layer, _, tensor = states(rig)[0]
    rig.add("A", prompt(50, 20), length=5)
    blocks = []

    def at(step):
        if rig.engine.has_unfinished_requests():
            blocks.append(block_of(rig, layer, "A")) if step == 2 else None
        else:
            flip(tensor, blocks[0])  # the worker has not heard yet that A has ended

    rig.run(at)
    (found,) = violations(rig)
    assert (found.check, found.phase, found.layer, found.slot) == ("content", "life", layer, blocks[0])


def test_a_request_with_a_damaged_state_begins_again_from_its_tokens(engine, caplog):
    from kvcanary_fx.adapters.vllm.settings import VllmSettings

    rig = engine("hybrid")
    two_requests(rig)
    clean = dict(rig.run())
    rig.tokens.clear()
    rig.guard.reactions.settings = VllmSettings(kvcanary_fx.CanaryConfig(mode="log"), "recompute")
    two_requests(rig)
    blocks = []

    def at(step):
        if step == 5:
            for layer, _, tensor in states(rig):
                blocks.append(block_of(rig, layer, "A"))
                tensor[blocks[-1]].mul_(-1e5)

    rig.run(at)
    assert {(v.check, str(v.request)[0]) for v in violations(rig)} == {("content", "A")}
    assert rig.preempted == 1
    assert rig.tokens == clean
    (told,) = [r.message for r in caplog.records if "kv_cache_corruption" in r.message]
    assert f"; blocks {blocks[0]} left the prefix cache; recomputed: A-" in told


def test_states_whose_op_was_not_seen_are_fingerprinted_when_the_model_has_run(engine, monkeypatch):
    from kvcanary_fx.adapters.vllm import hybrids

    monkeypatch.setattr(hybrids.States, "ran", lambda self, layer: None)
    rig = engine("hybrid")
    layer, _, tensor = states(rig)[1]
    mixed_load(rig)
    assert violations(rig) == []
    assert rig.guard.states.session.stats().recorded > 160
    rig.add("A", prompt(50, 20))
    rig.run(lambda step: flip(tensor, block_of(rig, layer, "A")) if step == 3 else None)
    assert [(v.check, v.layer) for v in violations(rig)] == [("content", layer)]


def test_states_without_guarded_attention_are_named_as_unguarded(engine, monkeypatch, caplog):
    from kvcanary_fx.adapters.vllm import pools

    monkeypatch.setattr(pools, "_halves", lambda *_: "it is a riddle")
    rig = engine("hybrid")
    assert rig.guard is None
    riddle, named, nothing = [r.message for r in caplog.records if "kvcanary.unguarded" in r.message]
    assert "it is a riddle" in riddle
    assert named.endswith(
        "group 0 (model.layers.0.short_conv, ...): MambaSpec: states are guarded beside attention alone"
    )
    assert "nothing is guarded" in nothing


def test_attention_is_guarded_as_without_states(engine, monkeypatch, tmp_path):
    """The states have a session of their own: the pools of attention, and what their checks are told, stay alike."""
    from kvcanary_fx.adapters.vllm import counts, settings

    monkeypatch.setenv(settings.COUNTS_VARIABLE, str(tmp_path))
    rig = engine("hybrid")
    assert counts.guarded() == {"group0": "", "group1": ""}
    attention = {name for name, module in rig.layers().items() if isinstance(module.kv_cache, torch.Tensor)}
    (pool,) = rig.session.pools.values()
    assert set(pool.declared.layer_names) == attention
    assert pool.rivals == []
    assert {*rig.guard.states.session.pools} == {f"group{rig.group_of(layer)}" for layer, _, _ in states(rig)}


def test_states_that_the_prefix_cache_keeps_are_named_as_unguarded(engine, caplog):
    rig = engine("hybrid", enable_prefix_caching=True)
    (named,) = [r.message for r in caplog.records if "kvcanary.unguarded" in r.message]
    assert "group 0 (model.layers.0.short_conv, ...): MambaSpec with mamba_cache_mode=align" in named
    mixed_load(rig)
    assert rig.session.violations() == []
    assert list(rig.session.pools) == ["group1"]


@pytest.mark.parametrize(
    ("metadata", "blocks"),
    [
        ({"state_indices_tensor_d": [[5], [7], [0]], "state_indices_tensor_p": []}, [5, 7]),  # padded for a CUDA graph
        ({"state_indices_tensor_d": [[5]], "state_indices_tensor_p": [7]}, [5, 7]),
        ({"state_indices_tensor_d": None, "state_indices_tensor_p": [5, 7]}, [5, 7]),
        ({"non_spec_state_indices_tensor": [5, 7, 0]}, [5, 7]),
        ({"state_indices_tensor_d": [[5]], "state_indices_tensor_p": []}, None),
        ({}, None),
    ],
)
def test_blocks_that_the_op_of_a_layer_gets(metadata, blocks):
    from kvcanary_fx.adapters.vllm.hybrids import blocks_of

    given = SimpleNamespace(**{k: None if v is None else torch.tensor(v).int() for k, v in metadata.items()})
    found = blocks_of(given, 2)
    assert (None if found is None else found.tolist()) == blocks


def made_up_group():
    from kvcanary_fx.adapters.vllm.state_groups import StateGroup

    layers = {f"layers.{i}": (torch.zeros(8, 2, 4, dtype=torch.bfloat16), torch.zeros(8, 3)) for i in range(2)}
    return StateGroup(0, layers, ("conv", "state"))


def test_guard_proves_itself_on_each_state_before_the_first_request():
    from kvcanary_fx.adapters.vllm import state_proof

    group = made_up_group()
    state_proof.prove([group], kvcanary_fx.CanaryConfig(mode="raise"))
    assert not any(state.any() for layer in group.layers.values() for state in layer)


def test_state_that_is_not_compared_fails_the_proof(monkeypatch):
    from kvcanary_fx.adapters.vllm import state_proof

    fill = state_proof._fill
    monkeypatch.setattr(state_proof, "_fill", lambda rows, number: fill(rows[:-1], number))  # no byte changes there
    with pytest.raises(SelfTestError, match=r"a changed byte in state state of layers\.1"):
        state_proof.prove([made_up_group()], kvcanary_fx.CanaryConfig(mode="raise"))


def runner_with_states(config, **spec):
    """A runner with one group of states, as far as it is looked at."""
    from vllm.v1.kv_cache_interface import MambaSpec

    plain = dict(speculative_config=None, cache_config=SimpleNamespace(use_replayssm=False), kv_transfer_config=None)
    group = SimpleNamespace(
        layer_names=["conv"],
        kv_cache_spec=MambaSpec(**{"shapes": ((2, 4),), "dtypes": (torch.float32,), "block_size": 256, **spec}),
    )
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        vllm_config=SimpleNamespace(**(plain | config)),
        max_model_len=256,
    )


def refusals():
    """What keeps each runner's guard from states: in V1 and V2."""
    from kvcanary_fx.adapters.vllm import state_groups
    from kvcanary_fx.adapters.vllm.v2.hybrids import why_not_by_the_second

    return state_groups.why_not_by_the_first(None), why_not_by_the_second


@pytest.mark.parametrize("second", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize(
    ("spec", "config", "why"),
    [
        ({"num_speculative_blocks": 2}, {}, "with drafts"),
        ({}, {"speculative_config": object()}, "with drafts"),
        ({}, {"cache_config": SimpleNamespace(use_replayssm=True)}, "use_replayssm"),
        ({}, {"kv_transfer_config": object()}, "a KV connector"),
        ({"block_size": 128}, {}, "blocks of 128 tokens"),
    ],
)
def test_states_that_are_not_one_a_request_are_refused_by_name(spec, config, why, second):
    from kvcanary_fx.adapters.vllm import state_groups

    unguarded = {}
    assert state_groups.state_groups(runner_with_states(config, **spec), unguarded, refusals()[second]) == []
    assert why in unguarded["group0"]
    assert unguarded["group0"].startswith("MambaSpec with ")


def copies_of_all_layers(caches, num_blocks, copies):
    for cache in caches:
        for copy in copies:
            cache[copy.dst_block_id] = cache[copy.src_block_id]


@pytest.mark.parametrize("copied", ["all", "what vLLM copies", "a damaged source"])
def test_prefixes_that_end_inside_a_block_are_compared_with_what_was_copied(engine, monkeypatch, copied):
    """``--prefix-match-unit``: a request gets a copy of the block, which was taken for given up before it was read.

    vLLM 0.32.0 copies the states of such a block alone, where attention's layers begin at the same address.
    """
    from vllm.v1.worker import gpu_model_runner

    if copied != "what vLLM copies":
        monkeypatch.setattr(gpu_model_runner, "copy_kv_cache_blocks_inplace", copies_of_all_layers)
    rig = engine("hybrid", enable_prefix_caching=True, mamba_cache_mode="align", prefix_match_unit=16)
    shared = prompt(1, 100)
    ((layer, module),) = [(n, m) for n, m in rig.layers().items() if isinstance(m.kv_cache, torch.Tensor)][:1]
    pages = []
    rig.add("a", shared + prompt(2, 5), length=4)
    rig.run(lambda step: pages.append(rig.pages("a")[rig.group_of(layer)][0]) if step == 1 else None)
    if copied == "a damaged source":
        module.kv_cache[pages[0], 1].view(-1)[7] += 1.0
    for name, length in (("b", 9), ("c", 3)):
        rig.add(name, shared + prompt(len(rig.tokens) + 5, length), length=4)
    rig.run()
    rig.add("again", shared + prompt(2, 5), length=4)
    rig.run()
    assert [rig.cached[name] for name in ("b", "c", "again")] == [96] * 3
    told = {(v.check, v.layer, v.position) for v in rig.session.violations()}
    if copied == "all":
        assert told == set()
    elif copied == "a damaged source":
        assert told == {("content", layer, 7)}
    else:
        assert {check for check, _, _ in told} == {"content"}
        assert {position for _, _, position in told} == set(range(96))


@pytest.mark.parametrize("model", ["hybrid", "granite"])
def test_states_that_a_prefix_cache_keeps_are_guarded_with_the_second_runner_alone(engine, model):
    from kvcanary_fx.adapters.vllm import state_groups
    from kvcanary_fx.adapters.vllm.v2.hybrids import why_no_words

    rig, (first, second) = engine(model, enable_prefix_caching=True), refusals()
    groups, unguarded = rig.runner.kv_cache_config.kv_cache_groups, {}
    found = state_groups.state_groups(rig.runner, unguarded, second, why_no_words)
    assert unguarded == {}
    assert [group.tokens for group in found] == [group.kv_cache_spec.block_size for group in groups[: len(found)]]
    assert state_groups.state_groups(rig.runner, unguarded, first) == []
    assert all("mamba_cache_mode=align" in why for why in unguarded.values())
    assert len(unguarded) == len(found) == len(groups) - 1


@pytest.mark.parametrize(("unit", "attention"), [(64, 256), (None, 128)])
def test_prefixes_that_end_inside_a_block_of_states_leave_them_unguarded(unit, attention):
    from kvcanary_fx.adapters.vllm import state_groups

    cache = SimpleNamespace(use_replayssm=False, prefix_match_unit=unit)
    runner, unguarded = runner_with_states({"cache_config": cache}, mamba_cache_mode="align"), {}
    other = SimpleNamespace(layer_names=["attention"], kv_cache_spec=SimpleNamespace(block_size=attention))
    runner.kv_cache_config.kv_cache_groups.append(other)
    assert state_groups.state_groups(runner, unguarded, refusals()[1]) == []
    assert "where a prefix ends inside a block" in unguarded["group0"]


def test_states_that_are_no_rows_of_words_are_refused_with_the_second_runner():
    from kvcanary_fx.adapters.vllm.v2.hybrids import why_no_words

    assert why_no_words(torch.zeros(5, 2, 3)) is None
    assert why_no_words(torch.zeros(5, 3, 3, dtype=torch.bfloat16)).startswith(
        "a state of torch.bfloat16 [3, 3] is not"
    )


def test_a_budget_leaves_states_unguarded_with_the_first_runner_and_says_how_to_guard_them(engine):
    """They are compared in full or not at all: a budget of 1 % would not be kept."""
    from kvcanary_fx.adapters.vllm import state_groups

    rig, unguarded = engine("hybrid"), {}
    assert state_groups.state_groups(rig.runner, unguarded, state_groups.why_not_by_the_first(0.01)) == []
    assert set(unguarded) == {group.name for group in rig.guard.states.groups}
    for why in unguarded.values():
        assert "under a budget (1.0%)" in why
        assert "KVCANARY_BUDGET=none" in why


@pytest.mark.slow
def test_states_are_compared_in_each_step_whatever_share_of_attention_is(models):
    """The step replaces them: what is not compared before it will never be."""
    (found,) = vllm_runs.results(
        models, [{"model": "hybrid", "scene": "states"}], "log", KVCANARY_VERIFY_FRACTION="1/64"
    )
    assert found["violations"] == []
    assert found["every"] == 64
    assert found["told"] == [["content", found["layer"], str(number)] for number in range(4)]


@pytest.mark.slow
def test_a_damaged_state_ends_the_engine_in_mode_raise(models):
    (found,) = vllm_runs.results(models, [{"model": "hybrid", "scene": "states"}], "raise")
    assert found["violations"] == []
    assert found["error"] is not None
    assert found["told"] == [["content", found["layer"], "0"]]

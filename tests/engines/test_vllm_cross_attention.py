"""Cross-attention: what a decoder keeps of its encoder's output, checked in each step of a request."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_whisper
import torch
import vllm_runs
import vllm_sounds
from vllm_rig import Rig, prompt, spoken_load
from vllm_sounds import CROSS, DECODER

from kvcanary_fx.adapters.vllm.identity import encoded_numbers
from kvcanary_fx.reports.violation import Violation


@pytest.mark.parametrize("arguments", [{}, {"enforce_eager": False}], ids=["eager", "compiled"])
def test_cross_attention_is_guarded(models, arguments, caplog):
    """Whisper: the decoder's own K and V, and what it keeps of the encoder's."""
    run = {"model": "whisper", "arguments": arguments, "load": "spoken_load"}
    (plain,) = vllm_runs.results(models, [run], mode=None)
    rig = Rig("whisper", models, **arguments)
    try:
        assert not [r.message for r in caplog.records if "kvcanary.unguarded" in r.message]
        spoken_load(rig)
        assert rig.tokens == plain["tokens"]
        first, other = rig.logprobs["first"], rig.logprobs["other"]
        assert first != pytest.approx(other, abs=1e-4)  # the sound is heard
        for request, found in rig.logprobs.items():
            assert found == pytest.approx(plain["logprobs"][request], abs=1e-5)
        assert rig.session.violations() == []
        rig.session.health.check()
        assert rig.session.uncovered == []
        assert [list(group.layers) for group in rig.guard.groups] == [DECODER, CROSS]
        assert [pool.declared.written_once for pool in rig.session.pools.values()] == [False, True]
        request = dict(tokens=[tiny_whisper.START, *prompt(91, 70)], audio=tiny_whisper.sound(4))
        for layer, half, position in [(0, 0, 10), (0, 1, 57), (1, 0, 57), (1, 1, 10)]:
            told = flip_while_a_request_decodes(rig, DECODER[layer], half, position, **request)
            assert told.token == request["tokens"][position]  # no number of the sound, which has positions of its own
        for layer, half, position in [(0, 0, 0), (0, 1, 31), (1, 0, 32), (1, 1, 49)]:
            told = flip_while_a_request_decodes(rig, CROSS[layer], half, position, **request)
            assert told.token > 1 << 30  # a number of the sound's
    finally:
        rig.close()


def flip_while_a_request_decodes(
    rig: Rig, layer: str, half: int, position: int, tokens: Sequence[int], audio: Any
) -> Violation:
    """A flip there is found in the request's slot, in its fourth step; what is told."""
    before, slots = len(rig.session.violations()), []
    rig.add("damaged", tokens, audio=audio)
    rig.run(lambda step: slots.append(rig.flip(layer, half, "damaged", position)) if step == 3 else None)
    new = rig.session.violations()[before:]
    told = {(v.check, v.layer, v.half, v.slot, v.position, str(v.request).rpartition("-")[0]) for v in new}
    assert told == {("content", layer, "KV"[half], slots[0], position, "damaged")}
    assert {v.phase for v in new} == {"pre"}  # before the forward that reads it: a CPU compares once more behind it
    return new[0]


def test_graphs_in_pieces_have_the_checks_of_cross_attention(models):
    """As on a GPU by default: attention runs between the pieces, from Python, and its checks at their end."""
    arguments = {"enforce_eager": False, "compilation_config": {"mode": 3}}
    run = {"model": "whisper", "arguments": arguments, "forced": True, "load": "spoken_load"}
    (plain,) = vllm_runs.results(models, [run], mode=None)
    (guarded,) = vllm_runs.results(models, [run], mode="log")
    assert guarded["tokens"] == plain["tokens"]
    assert guarded["violations"] == guarded["uncovered"] == []
    assert guarded["in_graph"] > 4 * 20
    assert guarded["outside"] > 0  # the steps in which the encoder runs are not compiled


def test_sounds_of_other_lengths_are_silent(models):
    """The longest has 200 positions, and a request has 64 tokens at most."""
    run = {"model": "whisper_4s", "scene": "other lengths"}
    (plain,) = vllm_runs.results(models, [run], mode=None)
    with vllm_sounds.lengths_heard():
        rig = Rig("whisper_4s", models, max_model_len=64)
        try:
            vllm_sounds.other_lengths(rig)
            assert rig.tokens == plain["tokens"]
            assert rig.session.violations() == []
            rig.session.health.check()
            sound = tiny_whisper.sound(7, 3.1)  # 155 positions
            for half, position in enumerate((154, 96)):
                flip_while_a_request_decodes(rig, CROSS[1], half, position, tokens=prompt(91, 9), audio=sound)
            before = len(rig.session.violations())
            rig.add("behind", prompt(91, 9), audio=sound)
            rig.run(lambda step: rig.flip(CROSS[1], 0, "behind", 155) if step == 3 else None)  # never written
            assert len(rig.session.violations()) == before
        finally:
            rig.close()


def test_preempted_request_that_hears_again_is_silent(models):
    run = {"model": "whisper", "scene": "preempted"}
    (plain,) = vllm_runs.results(models, [run], mode=None)
    (guarded,) = vllm_runs.results(models, [run], mode="log")
    assert plain["preempted"] == guarded["preempted"] == 1
    assert guarded["tokens"] == plain["tokens"]
    assert guarded["told"] == []


def test_sounds_that_vllm_mixes_up_are_told(models):
    """A request that begins again in the step of a new one: vLLM 0.32.0's first runner puts the new one first in the
    batch, and the encoder's output of the other.  Each gets the other's sound."""
    runs = [
        {"model": "whisper", "scene": f"{what}"}
        for what in ("preempted beside a new one", "the same with pages for all")
    ]
    few, right = vllm_runs.results(models, runs, mode=None)
    assert few["preempted"] == 1
    assert few["tokens"] != right["tokens"]  # wrong, and nothing says so
    told, silent = vllm_runs.results(models, runs, mode="log")
    assert told["tokens"] == few["tokens"]
    assert told["told"] == [["token", "WRONG_TOKEN", "new"], ["token", "WRONG_TOKEN", "second"]]
    assert (silent["tokens"], silent["told"]) == (right["tokens"], [])
    (again, _) = vllm_runs.results(models, runs, mode="log", KVCANARY_VLLM_ON_VIOLATION="recompute")
    assert again["tokens"] == right["tokens"]  # both begin again, and then their order is the same
    assert again["preempted"] == 3


def test_damage_is_recomputed_from_the_sound(models):
    runs = [{"model": "whisper", "scene": scene} for scene in ("the same with pages for all", "damaged")]
    clean, damaged = vllm_runs.results(models, runs, mode="log", KVCANARY_VLLM_ON_VIOLATION="recompute")
    assert damaged["told"] == [["content", None, "second"]]
    assert damaged["preempted"] == 1
    assert damaged["tokens"] == clean["tokens"]


@pytest.fixture
def pair(models):
    """Two requests that hear different sounds."""
    rig = Rig("whisper", models)
    for number, name in enumerate("AB"):
        rig.add(name, prompt(60 + number, 40), length=12, audio=tiny_whisper.sound(number))
    yield rig
    rig.close()


def test_request_that_reads_anothers_sound_is_told(pair):
    """The runner's rows of two requests are swapped, in the table of cross-attention alone."""

    def at(step):
        if step == 4:
            table = pair.runner.input_batch.block_table[1].block_table.np
            table[[0, 1]] = table[[1, 0]]

    pair.run(at)
    assert pair.told() == {("index", "READ_DIFFERS", "A"), ("index", "READ_DIFFERS", "B")}
    assert {(v.pool, v.position) for v in pair.session.violations()} == {("group1", p) for p in range(50)}


def test_request_that_is_given_anothers_blocks_is_told(pair, monkeypatch):
    from vllm.v1.core.single_type_kv_cache_manager import CrossAttentionManager

    allocate = CrossAttentionManager.allocate_new_blocks

    def allocate_anothers(self, request_id, *args):
        new = allocate(self, request_id, *args)
        if new and request_id.startswith("C-"):
            (a,) = [request for request in self.req_to_blocks if request.startswith("A-")]
            new = self.req_to_blocks[request_id] = list(self.req_to_blocks[a])
        return new

    monkeypatch.setattr(CrossAttentionManager, "allocate_new_blocks", allocate_anothers)
    add = functools.partial(pair.add, "C", prompt(7, 40), audio=tiny_whisper.sound(7))
    with pytest.raises(AssertionError, match="left after"):
        pair.run(lambda step: add() if step == 3 else None, limit=6)
    assert pair.told() == {
        ("owner", "OVERWRITE", "C"),  # the encoder's output, in its first step
        ("owner", "FOREIGN_READ", "C"),
        ("index", "READ_WHILE_WRITTEN", "A"),
        ("token", "WRONG_TOKEN", "A"),  # what A hears from there on
    }
    assert {(v.pool, v.position) for v in pair.session.violations()} == {("group1", p) for p in range(50)}


def test_sound_that_is_freed_while_its_request_reads_it_is_told(pair):
    def at(step):
        if step == 4:
            manager = pair.scheduler.kv_cache_manager.coordinator.single_type_managers[1]
            manager.block_pool.free_blocks(manager.req_to_blocks[pair.internal("A")][:1])

    with pytest.raises(AssertionError, match="left after"):
        pair.run(at, limit=6)
    assert pair.told() == {("owner", "READ_AFTER_FREE", "A")}
    assert {v.position for v in pair.session.violations()} == set(range(32))


def test_slot_mapping_of_a_sound_that_is_off_by_one_is_told(pair, monkeypatch):
    from vllm.model_executor.layers.attention import cross_attention

    mapping = cross_attention._get_cross_slot_mapping
    monkeypatch.setattr(cross_attention, "_get_cross_slot_mapping", lambda *args: mapping(*args) + 1)
    pair.run()
    assert {("index", "TABLE_DIFFERS", "A"), ("index", "TABLE_DIFFERS", "B")} <= pair.told()
    assert {v.pool for v in pair.session.violations()} == {"group1"}


def feature(identifier: str, length: int, data: object = "sound") -> SimpleNamespace:
    return SimpleNamespace(identifier=identifier, data=data, mm_position=SimpleNamespace(offset=0, length=length))


@pytest.fixture
def batch_of(monkeypatch):
    """The batch of cross-attention for three requests, of which ``begun`` have begun, with such slots."""
    from kvcanary_fx.adapters.vllm import encoder

    heard = {"a": [feature("x", 3)], "b": [feature("y", 2), feature("z", 1)], "c": []}

    def make(begun: Sequence[bool], encoded: dict[str, list[int]], slots: Sequence[int]) -> dict[str, Any]:
        metadata = {"cross": SimpleNamespace(slot_mapping=torch.tensor(slots, dtype=torch.int64))}
        monkeypatch.setattr(encoder, "get_forward_context", lambda: SimpleNamespace(attn_metadata=metadata))
        runner = SimpleNamespace(
            requests={name: SimpleNamespace(mm_features=features) for name, features in heard.items()},
            input_batch=SimpleNamespace(num_computed_tokens_cpu=np.array([5 * here for here in begun] + [0, 0])),
            device=torch.device("cpu"),
        )
        fields = {"request_ids": list(heard), "request_rows": torch.arange(3)}
        group = SimpleNamespace(number=1, layers={"cross": None})
        return encoder.make_batch(runner, SimpleNamespace(scheduled_encoder_inputs=encoded), [group], fields)

    return make


X, Y, Z = (encoded_numbers([(name, 3)]) for name in "xyz")
FIRST, SECOND = X.tolist(), [*Y[:2].tolist(), int(Z[0])]


def test_batch_has_what_an_encoder_was_given_and_what_each_request_is_to_read(batch_of):
    made = batch_of((False, False, False), {"a": [0], "b": [0, 1]}, range(40, 46))
    assert made["input_ids"].tolist() == FIRST + SECOND
    assert made["slots_1"].tolist() == list(range(40, 46))
    assert (made["prefix_lens"], made["extend_lens"]) == ([0, 0, 0], [3, 3, 0])
    assert made["history"].tolist() == [FIRST, SECOND, [0, 0, 0]]
    assert made["history_lens"] == [3, 3, 0]
    later = batch_of((True, False, True), {"b": [0, 1]}, range(43, 46))
    assert (later["prefix_lens"], later["extend_lens"]) == ([3, 0, 0], [0, 3, 0])
    assert later["input_ids"].tolist() == SECOND
    assert later["history"] is made["history"]  # kept, as the requests are the same


def test_sounds_that_are_encoded_in_another_order_have_their_own_numbers(batch_of):
    made = batch_of((False, False, False), {"b": [0, 1], "a": [0]}, range(40, 46))
    assert made["input_ids"].tolist() == SECOND + FIRST


@pytest.mark.parametrize("slots", [range(40, 43), range(40, 48)], ids=["too few", "too many"])
def test_slots_and_sounds_that_do_not_fit_make_a_batch_that_can_be_checked(batch_of, slots):
    made = batch_of((False, False, False), {"a": [0]}, slots)
    most = max(6, len(slots))
    assert made["input_ids"].tolist() == FIRST + [0] * (most - 3)
    assert made["slots_1"].tolist() == [*slots, *[-1] * (most - len(slots))]


def test_second_runner_names_cross_attention_as_unguarded_and_has_room_for_its_pages(caplog):
    from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec

    from kvcanary_fx.adapters.vllm import pools
    from kvcanary_fx.adapters.vllm.guard import widths

    parts = dict(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [SimpleNamespace(layer_names=["cross"], kv_cache_spec=CrossAttentionSpec(**parts))]
    runner, unguarded = SimpleNamespace(kernel_block_sizes=[32], max_model_len=448), {}
    runner.compilation_config = SimpleNamespace(static_forward_context={"cross": None})
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
    assert pools.groups_with_drafts(runner, None, unguarded) == []
    assert unguarded == {"group0": "cross-attention is guarded with Model Runner V1 only"}
    assert "kvcanary.unguarded KV cache group 0 (cross, ...): cross-attention" in caplog.text
    groups.append(SimpleNamespace(kv_cache_spec=FullAttentionSpec(**parts)))
    runner.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_encoder_input_tokens=1500))
    assert widths(runner, drafts=0) == [47 + 1, 15 + 1]

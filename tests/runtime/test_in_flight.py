"""Requests whose prefix another request writes in the very same forward; and layers of graphs that are not ours."""

from __future__ import annotations

import pytest
import torch

import kvcanary_fx
from kvcanary_fx import Batch, KVPool, SessionStateError
from kvcanary_fx.engine.layers import LayerChecks
from kvcanary_fx.kernels.layer_ops import record_layer, verify_layer

SLOTS, HEADS, DIM = 16, 2, 4
HISTORY = [[5, 6, 7, 8, 0], [5, 6, 7, 9, 0]]


class Rig:
    """Request A writes three tokens and B one after them, all in one forward; slots 3 to 5 are shared."""

    def __init__(self, **declared):
        self.ids = ["A", "B"]
        self.kv = [tuple(torch.zeros(SLOTS, HEADS, DIM) for _ in range(2))]
        self.table = torch.tensor([[3, 4, 5, 6], [3, 4, 5, 7]], dtype=torch.int32)
        self.session = kvcanary_fx.install_canary(
            KVPool(self.kv, self.table, layer_names=["L"], **declared), mode="log"
        )
        self.session.mark_ready()
        self.layers = LayerChecks(self.session)
        self.session.pool.allocate([3, 4, 5])
        self.session.pool.allocate([6], owner="A")
        self.session.pool.allocate([7], owner="B")

    def run(self, tokens, slots, prefix, extend, in_flight=False, shift=0):
        batch = Batch(
            tokens, slots, [0, 1], prefix, extend, request_ids=self.ids, history=HISTORY, history_lens=[4, 4],
            in_flight=in_flight,
        )  # fmt: skip
        key, value = torch.randn(2, len(slots), HEADS, DIM)
        with self.session.step(batch), self.session.forward(), self.layers.publish():
            where = torch.tensor(slots, dtype=torch.int64) + shift
            self.kv[0][0][where], self.kv[0][1][where] = key, value
            verify_layer(key.device, "L")
            record_layer(key, value, key.device, "L")
        return [(v.check, v.why, v.position, v.request) for v in self.session.violations()]


def test_prefix_that_the_same_forward_writes_is_silent_and_then_guarded():
    rig = Rig()
    assert rig.run([5, 6, 7, 8, 9], [3, 4, 5, 6, 7], [0, 3], [4, 1], in_flight=True) == []
    assert rig.run([], [], [4, 4], [0, 0]) == []
    rig.kv[0][1].view(torch.int32)[5, 1, 2] ^= 1 << 9
    found = rig.run([], [], [4, 4], [0, 0])
    assert [(check, position) for check, _, position, _ in found] == [("content", 2)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1)], ids=str)
def test_prefixes_that_are_stairs_of_one_text_are_silent(order):
    """Each request's prefix ends in what another one writes in the same forward, in whatever order they stand."""
    kv = [tuple(torch.zeros(SLOTS, HEADS, DIM) for _ in range(2))]
    text, slots, lens = [9, 8, 7, 6, 5, 4, 3, 2], [4, 5, 6, 7, 8, 9, 10, 11], [2, 4, 6, 8]
    table = torch.tensor([slots] * 4, dtype=torch.int32)
    session = kvcanary_fx.install_canary(KVPool(kv, table, layer_names=["L"]), mode="log")
    session.mark_ready()
    session.pool.allocate(slots)
    steps = {r: (lens[r] - 2, lens[r]) for r in order}

    def run(prefix, extend, added):
        batch = Batch(
            [text[p] for p in added], [slots[p] for p in added], list(order), prefix, extend, request_ids=list(order),
            history=[text] * 4, history_lens=[8] * 4, in_flight=True,
        )  # fmt: skip
        with session.step(batch), session.forward(), LayerChecks(session).publish():
            key, value = torch.randn(2, len(added), HEADS, DIM)
            where = torch.tensor([slots[p] for p in added], dtype=torch.int64)
            kv[0][0][where], kv[0][1][where] = key, value
            verify_layer(key.device, "L")
            record_layer(key, value, key.device, "L")
        return [(v.check, v.why, v.position, v.request) for v in session.violations()]

    assert run([steps[r][0] for r in order], [2] * 4, [p for r in order for p in range(*steps[r])]) == []
    assert run([lens[r] for r in order], [0] * 4, []) == []
    session.pool.space.chain[slots[3]] += 1
    found = run([lens[r] for r in order], [0] * 4, [])
    assert {(check, why, position) for check, why, position, _ in found} == {
        ("chain", "WRONG_PREDECESSOR", 3),
        ("chain", "WRONG_PREDECESSOR", 4),
    }


def test_without_the_word_of_the_engine_it_is_a_read_of_what_nobody_wrote():
    found = Rig().run([5, 6, 7, 8, 9], [3, 4, 5, 6, 7], [0, 3], [4, 1])
    assert {(check, why, request) for check, why, _, request in found} == {("poison", "NEVER_WRITTEN", "B")}


def written_under_a_reader(ids=("A", "B"), in_flight=False, **declared):
    """A prefix that two requests have, and then a forward in which A writes its second slot again, as B reads it."""
    rig = Rig(**declared)
    rig.ids = list(ids)
    rig.run([5, 6, 7], [3, 4, 5], [0, 0], [3, 0])
    found = rig.run([6, 9], [4, 7], [1, 3], [1, 1], in_flight=in_flight)
    return [v for v in found if v[0] == "index"]  # the rig looks at the bytes after it wrote


@pytest.mark.parametrize("allocations", [True, False])
def test_slot_that_another_request_of_the_forward_writes_is_reported_to_its_reader(allocations):
    """The slot is anybody's, and the token is the one that was there: no other check of who is where can tell."""
    assert written_under_a_reader(allocations=allocations) == [("index", "READ_WHILE_WRITTEN", 1, "B")]


def test_slot_that_the_engine_says_is_written_in_flight_may_be_read():
    assert written_under_a_reader(in_flight=True) == []


def test_two_entries_of_a_batch_that_are_one_request_may_write_what_they_read():
    assert written_under_a_reader(ids=("A", "A")) == []


def test_wrong_token_in_flight_is_found():
    found = Rig().run([5, 6, 2, 8, 9], [3, 4, 5, 6, 7], [0, 3], [4, 1], in_flight=True)
    assert ("token", "WRONG_TOKEN", 2, "B") in found


def test_bytes_from_before_are_no_violation():
    rig = Rig()
    rig.run([5, 6, 7, 8, 9], [3, 4, 5, 6, 7], [0, 3], [4, 1], in_flight=True)
    assert rig.run([5, 6, 7, 8, 9], [3, 4, 5, 6, 7], [0, 3], [4, 1], in_flight=True) == []


def test_write_that_goes_elsewhere_is_found_by_its_operand():
    found = Rig().run([5, 6, 7, 8, 9], [3, 4, 5, 6, 7], [0, 3], [4, 1], in_flight=True, shift=1)
    assert {check for check, _, _, _ in found} == {"operand"}


def test_layer_checks_outside_a_forward_are_refused():
    rig = Rig()
    with pytest.raises(SessionStateError, match="outside forward"), rig.layers.publish():
        pass


def test_slots_handed_over_keep_what_they_hold():
    rig = Rig()
    rig.run([5, 6, 7, 8, 9], [3, 4, 5, 6, 7], [0, 3], [4, 1], in_flight=True)
    rig.session.pool.hand_over([3, 4, 5], owner="the cache")
    found = rig.run([], [], [4, 4], [0, 0])
    assert {(check, why) for check, why, _, _ in found} == {("owner", "FOREIGN_READ")}
    rig.session.pool.hand_over([3, 4, 5])
    assert rig.run([], [], [4, 4], [0, 0]) == found
    rig.session.pool.hand_over([9], owner="A")
    assert rig.session.violations()[-1].why == "SHARE_AFTER_FREE"

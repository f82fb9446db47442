"""What an engine's session knows of drafted tokens: trees, rejected slots, and which forward found what."""

from __future__ import annotations

import pytest
import torch

import kvcanary_fx
from kvcanary_fx import Batch, KVPool

SLOTS, WIDTH = 32, 12


class Rig:
    """One layer, one request in row 1 with tokens 10, 11, 12 in slots 1, 2, 3, and slots up to 11 allocated to it."""

    def __init__(self, history: bool = False, **settings):
        self.kv = [(torch.zeros(SLOTS, 1, 4), torch.zeros(SLOTS, 1, 4))]
        self.table = torch.zeros(3, WIDTH, dtype=torch.int32)
        self.table[1] = torch.arange(1, WIDTH + 1)
        self.history = history
        self.session = kvcanary_fx.install_canary(KVPool(self.kv, self.table), mode="log", inner="eager", **settings)
        self.session.mark_ready()
        self.pool = self.session.pool
        self.pool.allocate(range(1, 12), owner="r")

        def write(kv, slots, x):
            for k, v in kv:
                k[slots], v[slots] = x, 2 * x
            return kv[0][0].sum()

        self.model = torch.compile(write, backend=self.session.backend, dynamic=True)
        self.forward([10, 11, 12], 0)

    def batch(self, tokens, prefix, slots=None, **more) -> Batch:
        slots = list(range(1 + prefix, 1 + prefix + len(tokens))) if slots is None else slots
        return Batch(tokens, slots, [1], [prefix], [len(tokens)], request_ids=["r"], **more)

    def forward(self, tokens, prefix, index=0, **more):
        batch = self.batch(tokens, prefix, **more)
        with self.session.step(batch), self.session.forward(index), torch.no_grad():
            self.model(self.kv, torch.tensor(batch.slots), torch.randn(len(tokens), 1, 4))

    def found(self):
        return [(v.why, v.forward, v.slot, v.position, v.token) for v in self.session.violations()]


def test_a_rejected_slot_is_silent_until_it_is_read():
    rig = Rig()
    rig.forward([13, 40, 41], 3)  # 40 and 41 are rejected
    rig.pool.reject([5, 6])
    rig.forward([14, 50], 4)  # overwrites both
    rig.forward([15], 5)  # 50 in slot 6 is rejected as well, and overwritten
    rig.forward([16], 6)
    assert rig.found() == []


def test_a_rejected_slot_that_is_read_is_reported_without_any_history():
    rig = Rig()
    rig.forward([13, 40, 41], 3)
    rig.pool.reject([5, 6])
    rig.forward([14], 5, index=2)
    assert rig.found() == [("REJECTED_TOKEN", 2, 5, 4, 40)]


def test_without_reject_nothing_tells_a_rejected_token_from_another():
    """What a history is for, where an engine does not call reject."""
    rig = Rig()
    rig.forward([13, 40, 41], 3)
    rig.forward([14], 5)
    assert rig.found() == []


def test_rejecting_what_holds_nothing_leaves_it_unwritten():
    rig = Rig()
    rig.pool.reject([4])
    rig.forward([14], 4)
    assert [why for why, *_ in rig.found()] == ["NEVER_WRITTEN"]


def test_a_slot_that_is_allocated_anew_is_not_rejected():
    rig = Rig()
    rig.forward([13], 3)
    rig.pool.reject([4])
    rig.pool.release([4], owner="r")
    rig.pool.allocate([4], owner="r")
    rig.forward([13], 3)
    rig.forward([14], 4)
    assert rig.found() == []


def test_a_rejected_slot_stays_rejected_where_it_is_moved_to():
    rig = Rig()
    rig.forward([13], 3)
    rig.pool.reject([4])
    shadow = rig.pool.export([4])
    for half in rig.kv[0]:
        half[5] = half[4]
    rig.table[1, 3] = 5
    rig.pool.import_(shadow, [5])
    rig.forward([14], 4, slots=[6])
    assert ("REJECTED_TOKEN", 0, 5, 3, 13) in rig.found()


# ---- trees


TREE = dict(parents=[-1, 0, 1, 0, 3], positions=[3, 4, 5, 4, 5])


@pytest.mark.parametrize("positions", [True, False])
def test_a_branch_that_was_accepted_and_moved_is_one_chain(positions):
    rig = Rig()
    tree = TREE if positions else dict(parents=TREE["parents"])
    rig.forward([13, 40, 41, 14, 15], 3, **tree)
    shadow = rig.pool.export([7, 8])
    for half in rig.kv[0]:
        half[[5, 6]] = half[[7, 8]]
    rig.pool.import_(shadow, [5, 6])
    rig.pool.reject([7, 8])
    rig.forward([16], 6)
    assert rig.found() == []


def test_the_branch_that_was_not_accepted_breaks_the_chain():
    """Node 15 was moved behind 40, which it does not follow."""
    rig = Rig()
    rig.forward([13, 40, 41, 14, 15], 3, **TREE)
    shadow = rig.pool.export([8])
    for half in rig.kv[0]:
        half[6] = half[8]
    rig.pool.import_(shadow, [6])
    rig.forward([16], 6)
    assert rig.found() == [("WRONG_PREDECESSOR", 0, 6, 5, 15)]


def test_a_node_at_the_wrong_depth_is_reported():
    rig = Rig()
    rig.forward([13, 40, 14], 3, parents=[-1, 0, 0], positions=[3, 4, 5])
    assert rig.found() == [("WRONG_POSITION", 0, 6, 4, 14)]


def test_nodes_without_parents_are_a_row():
    rig = Rig()
    rig.forward([13, 40, 14], 3, positions=[3, 4, 4])
    assert rig.found() == [("WRONG_POSITION", 0, 6, 5, 14)]


# ---- the forward in a record


def test_each_record_has_the_forward_that_found_it_also_after_later_ones():
    rig = Rig()
    for index, slot in enumerate([1, 2, 3]):
        rig.kv[0][1][slot] += 1
        with rig.session.step():
            batch = rig.batch([13 + index], 3 + index)
            with rig.session.forward(index, batch), torch.no_grad():
                rig.model(rig.kv, torch.tensor(batch.slots), torch.randn(1, 1, 4))
    found = rig.session.violations()
    assert [(v.check, v.slot, v.forward) for v in found] == [("content", 1, 0), ("content", 2, 1), ("content", 3, 2)]
    assert "forward=2" in found[2].line()
    assert "forward 2\n" in found[2].explain()


def test_what_is_found_between_forwards_has_none():
    rig = Rig()
    rig.kv[0][0][2] += 1
    rig.session.sweep.run()
    rig.pool.release([1, 1])
    found = rig.session.violations()
    assert {(v.phase, v.forward) for v in found} == {("sweep", None), ("life", None)}
    assert "forward=-" in found[0].line()


def test_request_ids_may_be_a_tensor_that_the_session_made():
    rig = Rig()
    batch = rig.batch([13], 4)
    batch.request_ids = rig.session.owners(["r"])
    with rig.session.step(batch), rig.session.forward(), torch.no_grad():
        rig.model(rig.kv, torch.tensor(batch.slots), torch.randn(1, 1, 4))
    (v,) = rig.session.violations()  # slot 4 was never written
    assert (v.why, v.request, v.slot) == ("NEVER_WRITTEN", "r", 4)

"""What a prefix cache lists, checked while nobody reads it."""

from __future__ import annotations

import pytest
import torch
from toy import Toy

from kvcanary_fx import EngineError, Prefix


@pytest.fixture
def toy() -> Toy:
    """A cache holds the prefix 5 6 7 in slots 3, 4, 5, and behind it 8 9 in 6, 7 and 20 21 in 8, 9; all have ended."""
    toy = Toy()
    toy.add("A", [5, 6, 7, 8, 9])
    toy.run({"A": [3, 4, 5]})
    toy.run({"A": [6, 7]})
    toy.pool.share([3, 4, 5], owner="B")
    toy.add("B", [5, 6, 7, 20, 21], prefix=[3, 4, 5])
    toy.run({"B": [8, 9]})
    toy.pool.release([3, 4, 5], owner="B")
    toy.pool.hand_over(range(3, 10), owner="cache")
    return toy


def told(toy: Toy) -> list[tuple[str, str, int, int | None]]:
    found = toy.found()
    assert {v.phase for v in found} <= {"sweep"}
    return [(v.check, v.why, v.slot, v.position) for v in found]


def tree(**changes) -> list[Prefix]:
    """The cache's nodes, children first as often as not."""
    top = Prefix([])
    root = Prefix(changes.get("root", [3, 4, 5]), parent=top, owner="cache", tokens=[5, 6, 7])
    return [
        Prefix(changes.get("one", [6, 7]), parent=root, owner="cache", tokens=[8, 9]),
        top,
        root,
        Prefix(changes.get("other", torch.tensor([8, 9], dtype=torch.int32)), parent=root),
    ]


def test_a_tree_as_it_was_written_is_silent_and_each_slot_looked_at_once(toy):
    assert toy.session.sweep.run(prefixes=tree()) == 7 * 4
    assert toy.session.sweep.run(prefixes=[Prefix([3, 4, 5, 8, 9], tokens=[5, 6, 7, 20, 21])]) == 5 * 4
    assert toy.session.sweep.run(prefixes=[]) == 0
    assert toy.found() == []


def test_slots_in_a_wrong_order_are_found_while_idle(toy):
    toy.session.sweep.run(prefixes=[Prefix([3, 5, 4, 6, 7])])
    assert told(toy) == [
        ("chain", "WRONG_POSITION", 5, 1),
        ("chain", "WRONG_POSITION", 4, 2),
        ("chain", "WRONG_PREDECESSOR", 6, 3),
    ]


def test_a_branch_that_hangs_under_another_parent_is_found_at_its_first_slot(toy):
    toy.add("C", [1, 2, 3])
    toy.run({"C": [10, 11, 12]})
    stranger = Prefix([10, 11, 12])
    toy.session.sweep.run(prefixes=[stranger, Prefix([6, 7], parent=stranger)])
    assert told(toy) == [("chain", "WRONG_PREDECESSOR", 6, 3)]
    toy.session.sweep.run(prefixes=[Prefix([8, 9], parent=stranger)])  # the parent itself is not among them
    assert told(toy)[1:] == [("chain", "WRONG_PREDECESSOR", 8, 3)]


def test_slots_given_back_and_taken_by_another_request_are_found_while_idle(toy):
    toy.pool.release([3, 4, 5], owner="cache")
    toy.add("C", [5, 6, 7])  # the same tokens at the same places: only the owner tells
    toy.run({"C": [3, 4]})
    toy.session.sweep.run(prefixes=tree())
    assert told(toy) == [
        ("owner", "FOREIGN_READ", 3, 0),
        ("owner", "FOREIGN_READ", 4, 1),
        ("owner", "READ_AFTER_FREE", 5, 2),
    ]
    assert "a prefix cache lists a slot that is free" in toy.found()[2].explain()
    assert [v.request for v in toy.found()] == ["cache"] * 3


def test_another_text_in_the_slots_is_found_without_owners_and_tokens(toy):
    toy.pool.release([4], owner="cache")
    toy.add("C", [30, 31])
    toy.run({"C": [10, 4]})
    toy.session.sweep.run(prefixes=[Prefix([3, 4, 5])])
    assert told(toy) == [("chain", "WRONG_PREDECESSOR", 4, 1), ("chain", "WRONG_PREDECESSOR", 5, 2)]


def test_bytes_tokens_namespaces_and_slots_that_cannot_be(toy):
    toy.kv[1][0].view(torch.int32)[7, 0, 2] ^= 1 << 7
    toy.session.sweep.run(prefixes=[Prefix([3, 4], tokens=[5, 66], namespace=3), Prefix([7, 99, 0, 15], start=4)])
    assert sorted(told(toy)) == [
        ("bounds", "OUT_OF_RANGE", 99, 5),
        ("bounds", "RESERVED_SLOT", 0, 6),
        ("content", None, 7, 4),
        ("namespace", "OTHER_NAMESPACE", 3, 0),
        ("owner", "READ_AFTER_FREE", 15, 7),
        ("token", "WRONG_TOKEN", 4, 1),
    ]


def test_scheduled_sweeps_take_the_prefixes_that_are_watched():
    toy = Toy(sweep_every=2)
    toy.add("A", [5, 6, 7, 8, 9])
    toy.run({"A": [3, 4]})
    toy.session.sweep.watch(lambda: [Prefix([4, 3])])
    toy.run({"A": [5]})
    assert {(v.check, v.why, v.slot) for v in toy.found()} >= {("chain", "WRONG_POSITION", 3)}
    found = len(toy.found())
    toy.session.sweep.watch(None)
    toy.run({"A": [6]})
    toy.run({"A": [7]})
    assert len(toy.found()) == found
    with pytest.raises(EngineError, match="has no pool 'swa'"):
        toy.session.sweep.watch(list, pool="swa")


def test_prefixes_that_cannot_be():
    root = Prefix([3, 4, 5])
    with pytest.raises(EngineError, match=r"start=2: it must be a position, and where its parent ends \(3\)"):
        Prefix([6], parent=root, start=2)
    with pytest.raises(EngineError, match="start=-1"):
        Prefix([6], start=-1)
    with pytest.raises(EngineError, match="2 slots and 1 tokens"):
        Prefix([6, 7], tokens=[1])

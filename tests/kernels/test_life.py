"""What a call of an allocator leaves of the slots that it names, one call at a time."""

from __future__ import annotations

import pytest
import torch
from random_plans import ALL

from kvcanary_fx.kernels.checks import Why
from kvcanary_fx.kernels.ring import Control, Ring, Word
from kvcanary_fx.kernels.slots.events import Event
from kvcanary_fx.kernels.slots.life import apply_one, name, report_taken
from kvcanary_fx.kernels.slots.space import REFERENCE, Flag, SlotSpace

SLOTS, A, B = 6, 70, 80


class Pool:
    """Slots, of which calls are made one by one."""

    def __init__(self) -> None:
        self.control = Control.allocate(16, torch.device("cpu"))
        self.space = SlotSpace.allocate(SLOTS, torch.device("cpu"), self.control, 5, ALL)

    def call(self, event: Event, slots: list[int], owner: int = 0) -> tuple[list[int], list[int]] | None:
        """What a release made free, and whose it was."""
        freed = apply_one(self.space, event, torch.tensor(slots), owner)
        return None if freed is None else (freed[0].tolist(), freed[1].tolist())

    def held(self, slot: int) -> tuple[int, int]:
        """References, and the owner."""
        return int(self.space.flags[slot]) // REFERENCE, int(self.space.owners[slot])

    def told(self) -> list[tuple[int, int]]:
        ring = self.control.ring[: int(self.control.words[Word.HEAD])]
        return [(row[Ring.SLOT], row[Ring.WHY]) for row in ring.tolist()]


@pytest.fixture
def pool() -> Pool:
    made = Pool()
    made.call(Event.ALLOCATE, [1, 2], A)
    return made


def test_a_slot_is_free_when_all_who_share_it_have_released_it(pool):
    assert pool.held(1) == (1, A)
    assert pool.call(Event.SHARE, [1], B) is None
    assert pool.held(1) == (2, A)
    assert pool.call(Event.RELEASE, [1, 2], A) == ([-1, 2], [A, A])
    assert pool.held(1) == (1, 0)
    assert pool.call(Event.RELEASE, [1], B) == ([1], [0])
    assert pool.held(1) == (0, 0)
    assert pool.told() == []


def test_a_slot_that_is_handed_over_keeps_its_references(pool):
    pool.call(Event.SHARE, [2], B)
    pool.call(Event.HAND_OVER, [2], B)
    assert pool.held(2) == (2, B)
    assert pool.told() == []


def test_a_slot_released_twice_in_a_call_becomes_free_once(pool):
    assert pool.call(Event.RELEASE, [1, 1], A) == ([1, -1], [A, A])
    assert pool.told() == [(1, Why.DOUBLE_FREE)]
    assert pool.call(Event.RELEASE, [1], A) == ([-1], [0])
    assert pool.told() == [(1, Why.DOUBLE_FREE)] * 2


def test_drafted_tokens_are_rejected_and_rewritten_slots_forgotten(pool):
    pool.space.flags[1:3] |= int(Flag.WRITTEN)
    pool.call(Event.REJECT, [1])
    pool.call(Event.FORGET, [2])
    marks = [int(pool.space.flags[slot]) % REFERENCE for slot in (1, 2)]
    assert marks == [Flag.WRITTEN | Flag.REJECTED, Flag.WRITTEN | Flag.NAMELESS]


@pytest.mark.parametrize(("owner", "told"), [(A, []), (0, []), (B, [(1, Why.OVERWRITE)])])
def test_slots_filled_for_a_request_that_has_others(pool, owner, told):
    """Slot 3 is anybody's."""
    pool.call(Event.ALLOCATE, [3])
    name(pool.space, torch.tensor([1, 3]), torch.full((2,), int(Flag.WRITTEN), dtype=torch.int32), None, owner)
    assert pool.told() == told


def test_slots_that_another_pool_has_in_the_same_memory(pool):
    """Those that it keeps back for padding are nobody's."""
    pool.space.flags[3] = int(Flag.RESERVED) + REFERENCE
    other = Pool()
    report_taken(other.space, pool.space, torch.tensor([-1, 2, 3, 4, SLOTS + 1]), B)
    assert other.told() == [(2, Why.DOUBLE_ALLOCATE)]
    assert pool.told() == []

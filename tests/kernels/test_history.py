"""What the history of a slot keeps, by each implementation.  That they are bit-equal is in `test_slot_spaces.py`."""

from __future__ import annotations

import pytest
import torch
from random_plans import ALL

from kvcanary_fx.kernels.ring import Control, Word
from kvcanary_fx.kernels.slots import gpu_life, history, life, past
from kvcanary_fx.kernels.slots.events import STACK_UNIT, Event, Events
from kvcanary_fx.kernels.slots.past import Kind
from kvcanary_fx.kernels.slots.space import SlotSpace

LAYERS, ROW_BYTES = 32, 2 * 8 * 128 * 2  # of an 8B model with grouped-query attention, bf16: K and V of a token


def space_of(events: int = 8, slots: int = 6) -> SlotSpace:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return SlotSpace.allocate(slots, device, Control.allocate(64, device), 7, ALL, history=events)


def at_step(space: SlotSpace, step: int, forward: int = 0) -> None:
    space.control.words[Word.FORWARD] = (step << 32) | forward


def past_of(space: SlotSpace, slot: int) -> past.SlotPast:
    return past.read_back(space.past[slot : slot + 1].tolist())[0]


def kinds(space: SlotSpace, slot: int) -> list[tuple[Kind, int]]:
    return [(e.kind, e.step) for e in past_of(space, slot).events]


def in_torch(space: SlotSpace, event: Event, slots: list[int], owner: int, stack: int) -> None:
    life.apply_one(space, event, torch.tensor(slots, device=space.block.device), owner, stack)


def in_triton(space: SlotSpace, event: Event, slots: list[int], owner: int, stack: int) -> None:
    device = space.block.device
    rows = torch.tensor([[event + stack * STACK_UNIT, 0, owner]], device=device)
    digests = torch.zeros(1, 1, space.slots, dtype=torch.int32, device=device)
    gpu_life.Apply(space, digests)(Events(rows, torch.tensor(slots, device=device), 1))


@pytest.mark.parametrize("call", [in_torch, in_triton])
def test_the_calls_that_named_a_slot_are_kept_with_step_request_and_stack(call):
    space = space_of()
    at_step(space, 3)
    call(space, Event.ALLOCATE, [1, 2], 5 + (7 << 32), 9)
    at_step(space, 4)
    call(space, Event.RELEASE, [2, 2], -6, (1 << 19) - 1)
    assert past_of(space, 1).events == (past.Happened(Kind.ALLOCATE, 3, None, 9, 5),)
    freed = past.Happened(Kind.RELEASE, 4, None, (1 << 19) - 1, -6)
    assert past_of(space, 2).events[1:] == (freed, freed)  # a double free is what a report is about
    assert past_of(space, 3).events == ()


@pytest.mark.parametrize("call", [in_torch, in_triton])
def test_the_newest_events_displace_the_oldest_also_within_one_call(call):
    space = space_of(events=3)
    for step in range(1, 5):
        at_step(space, step)
        call(space, Event.SHARE, [1] * step, 0, 0)
    assert kinds(space, 1) == [(Kind.SHARE, 4)] * 3
    assert past_of(space, 1).earlier == 7


def test_reads_and_other_events_never_displace_the_last_write():
    space = space_of(events=2)
    slots, owners = torch.tensor([1], device=space.block.device), torch.tensor([5], device=space.block.device)
    for step in (2, 3):
        at_step(space, step, forward=1)
        history.note_writes(space, slots, owners)
    assert past_of(space, 1).events == (past.Happened(Kind.WRITE, 3, 1, 0, 5),)  # of one request: the last
    for step in (7, 8, 9):
        at_step(space, step)
        history.note_reads(space, slots)
        history.note(space, slots, Kind.SHARE)
    told = past_of(space, 1)
    assert [e.kind for e in told.events] == [Kind.SHARE, Kind.SHARE]
    assert told.written == past.Happened(Kind.WRITE, 3, 1, 0, 5)
    assert (told.first_read, told.read_before, told.last_read, told.reads) == (7, 8, 9, 3)
    history.note(space, slots, Kind.ALLOCATE)
    assert past_of(space, 1)[-4:] == (-1, -1, -1, 0)


def test_what_happened_in_the_warm_up_was_before_the_first_step():
    space = space_of()
    at_step(space, 900)
    in_torch(space, Event.ALLOCATE, [1], 5, 0)
    space.count_steps_anew()
    at_step(space, 1)
    in_torch(space, Event.RELEASE, [1], 5, 0)
    assert kinds(space, 1) == [(Kind.ALLOCATE, 0), (Kind.RELEASE, 1)]


def test_the_history_takes_less_than_a_thousandth_of_an_8b_models_pool_and_nothing_if_it_is_off():
    assert space_of(events=8).past[0].nbytes <= LAYERS * ROW_BYTES / 1000
    assert space_of(events=0).past.nbytes == 0

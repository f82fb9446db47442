"""The order in which violations are told: the same for the same fault, though a GPU's programs find it in any order."""

from __future__ import annotations

import random

import pytest
import torch

from kvcanary_fx.kernels.checks import Check, Phase
from kvcanary_fx.kernels.ring import Control, append
from kvcanary_fx.runtime.registry import PoolRegistry
from kvcanary_fx.runtime.rows import take_judged

#: Check, half and slot of what a wrong stride did to K and V.
FOUND = [(Check.OPERAND, half, slot) for half in (4, 5) for slot in (7, 8, 9)]


def told(control):
    verdict, _ = take_judged(control, PoolRegistry(planes=1, unseen=True))
    return [(Check(check), half, slot) for _, half, check, _, _, slot, *_ in verdict.violations]


def note(control, found, phase, request=0):
    for check, half, slot in found:
        append(control, True, half=half, check=int(check), phase=phase, slot=slot, stored=1, found=2, request=request)


@pytest.mark.parametrize("phase", [Phase.PRE, Phase.POST])
def test_what_one_launch_finds_is_told_in_the_order_of_its_slots(phase):
    for seed in range(9):
        control, arrived = Control.allocate(64, torch.device("cpu")), FOUND[:]
        random.Random(seed).shuffle(arrived)
        note(control, arrived, phase)
        assert told(control) == FOUND


def test_what_was_found_first_is_told_first():
    """A launch comes before the next one, and its check may name the cause."""
    control = Control.allocate(64, torch.device("cpu"))
    read, written = (Check.OWNER | Check.CHAIN, 4, 9), (Check.BOUNDS, 4, 1)
    note(control, [read, written, (Check.OWNER | Check.CHAIN, 4, 8)], Phase.PRE)
    assert told(control) == [(Check.OWNER | Check.CHAIN, 4, 8), read, written]


def test_what_one_request_read_is_told_together():
    """Two requests got each other's row of the table, the second one with lower slots."""
    control = Control.allocate(64, torch.device("cpu"))
    first, second = ([(Check.OWNER, 4, slot) for slot in slots] for slots in ((8, 9), (3, 4)))
    for one, other in zip(first[::-1], second, strict=True):
        note(control, [one], Phase.PRE, request=11)
        note(control, [other], Phase.PRE, request=7)
    assert told(control) == [*first, *second]


def test_a_layer_is_told_before_the_next_one():
    """What comes before the writes of the second layer comes behind those of the first."""
    control = Control.allocate(64, torch.device("cpu"))
    first, second = (Check.OPERAND, 4, 9), (Check.BOUNDS, 6, 1)
    note(control, [first], Phase.POST)
    note(control, [second], Phase.PRE)
    assert told(control) == [first, second]


@pytest.mark.parametrize("phase", [Phase.SWEEP, Phase.LIFE])
def test_calls_and_slices_are_told_as_they_come(phase):
    control, arrived = Control.allocate(64, torch.device("cpu")), FOUND[::-1]
    note(control, arrived, phase)
    assert told(control) == arrived

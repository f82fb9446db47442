"""Who is in the slots of a pool without rows: stored for reports, where the graph shows it."""

from __future__ import annotations

import pytest
import torch

from kvcanary_fx.kernels.buffers import IdentityBuffers
from kvcanary_fx.kernels.ring import UNKNOWN
from kvcanary_fx.kernels.slots.identity import name_slots


def named(positions):
    identity = IdentityBuffers.allocate(4, torch.device("cpu"))
    name_slots(identity, torch.tensor([2, -1, 0]), torch.tensor([[7], [8], [9]]), positions)
    return identity.tokens[:-1].tolist(), identity.positions[:-1].tolist()


def test_tokens_and_positions_are_stored_and_skipped_slots_are_left_alone():
    assert named(torch.tensor([[5], [6], [3]])) == ([9, -1, 7, -1], [3, UNKNOWN, 5, UNKNOWN])


@pytest.mark.parametrize("positions", [None, torch.tensor([5])])
def test_positions_that_are_not_one_a_token_are_unknown(positions):
    assert named(positions) == ([9, -1, 7, -1], [UNKNOWN] * 4)

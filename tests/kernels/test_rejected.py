"""The kernel that marks rejected drafts, against its plain code."""

from __future__ import annotations

import random

import pytest
import torch
from scenes import ALL_CHECKS

from kvcanary_fx.adapters.vllm.v2.rejected import Rejected, naive
from kvcanary_fx.kernels.ring import Control
from kvcanary_fx.kernels.slots.space import Flag, SlotSpace

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DRAFTS = 3


def random_batch(seed, requests):
    """A marker for two spaces, of groups 0 and 2; and where each request's tokens begin, and how many are rejected."""
    rng = random.Random(seed)
    spaces = [
        SlotSpace.allocate(40 + number, DEVICE, Control.allocate(64, DEVICE), number, ALL_CHECKS) for number in range(2)
    ]
    for space in spaces:
        space.flags[:] = torch.tensor([rng.choice((0, 1, 5, 257, 513)) for _ in range(space.flags.shape[0])])
    added = [rng.randint(1, DRAFTS + 2) for _ in range(requests)]
    starts = torch.tensor([0, *added], device=DEVICE).cumsum(0).to(torch.int32)
    rejected = [rng.randint(0, min(DRAFTS, n)) for n in added]
    slots = [rng.sample(range(-1, 40), 40)[: sum(added)] + [0] * sum(added) for _ in range(3)]
    mapping = torch.tensor([row[: sum(added)] for row in slots], dtype=torch.int64, device=DEVICE)
    return Rejected(spaces, [0, 2], mapping, DRAFTS), starts, torch.tensor(rejected, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("requests", [1, 7])
def test_the_kernel_marks_what_the_plain_code_marks(requests):
    marker, starts, rejected = random_batch(requests, requests)
    before = [space.block.clone() for space in marker._spaces]
    naive(marker._spaces, marker._groups, marker._mapping, starts, rejected)
    wanted = [space.block.clone() for space in marker._spaces]
    assert requests == 1 or any((w != b).any() for w, b in zip(wanted, before, strict=True))
    for space, block in zip(marker._spaces, before, strict=True):
        space.block.copy_(block)
    marker.launch(starts, rejected)
    assert all(torch.equal(space.block, w) for space, w in zip(marker._spaces, wanted, strict=True))


def test_only_the_last_tokens_of_a_request_are_marked_and_only_if_they_are_stored():
    marker, _, _ = random_batch(0, 1)
    (space, _), mapping = marker._spaces, torch.tensor([[3, 4, 5, -1, 9]] * 3, device=DEVICE)
    space.flags[:] = int(Flag.WRITTEN)
    space.flags[5] = 0
    marker = Rejected(marker._spaces[:1], [0], mapping, DRAFTS)
    marker.mark(torch.tensor([0, 3, 5], device=DEVICE), torch.tensor([2, 1], device=DEVICE))
    assert ((space.flags & int(Flag.REJECTED)) != 0).nonzero().flatten().tolist() == [4, 9]

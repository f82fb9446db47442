"""The kernel that marks rejected drafts, against its plain code."""

from __future__ import annotations

import random

import pytest
import torch
from scenes import ALL_CHECKS

from kvcanary_fx.adapters.vllm.v2.rejected import Marked, Rejected, naive
from kvcanary_fx.kernels.ring import Control
from kvcanary_fx.kernels.slots.space import Flag, SlotSpace

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DRAFTS = 3


def random_batch(seed, requests):
    """A marker for two pools, one with a draft; where each request's tokens begin, and how many are rejected."""
    rng = random.Random(seed)
    added = [rng.randint(1, DRAFTS + 2) for _ in range(requests)]
    starts = torch.tensor([0, *added], device=DEVICE).cumsum(0).to(torch.int32)
    rejected = [rng.randint(0, min(DRAFTS, n)) for n in added]
    pools = []
    for number in range(2):
        space = SlotSpace.allocate(40 + number, DEVICE, Control.allocate(64, DEVICE), number, ALL_CHECKS)
        space.flags[:] = torch.tensor([rng.choice((0, 1, 5, 257, 513)) for _ in range(space.flags.shape[0])])
        slots = rng.sample(range(-1, 42), 42)[: sum(added)]
        digests = torch.full((2 * number, space.slots), 7, dtype=torch.int32, device=DEVICE)
        pools.append(Marked(space, torch.tensor(slots, dtype=torch.int64, device=DEVICE), list(digests)))
    return Rejected(pools, DRAFTS), starts, torch.tensor(rejected, dtype=torch.int32, device=DEVICE)


def state(marker):
    return [tensor.clone() for pool in marker._pools for tensor in (pool.space.block, *pool.digests)]


@pytest.mark.parametrize("requests", [1, 7])
def test_the_kernel_marks_what_the_plain_code_marks(requests):
    marker, starts, rejected = random_batch(requests, requests)
    before = state(marker)
    naive(marker._pools, starts, rejected)
    wanted = state(marker)
    assert requests == 1 or all((w != b).any() for w, b in zip(wanted, before, strict=True))
    for tensor, old in zip((t for p in marker._pools for t in (p.space.block, *p.digests)), before, strict=True):
        tensor.copy_(old)
    marker.launch(starts, rejected)
    assert all(torch.equal(got, w) for got, w in zip(state(marker), wanted, strict=True))


def test_only_the_last_tokens_of_a_request_are_marked_and_only_if_they_are_stored():
    marker, _, _ = random_batch(0, 1)
    space = marker._pools[0].space
    space.flags[:] = int(Flag.WRITTEN)
    space.flags[5] = 0
    digest = torch.full((space.slots,), 7, dtype=torch.int32, device=DEVICE)
    marker = Rejected([Marked(space, torch.tensor([3, 4, 5, -1, 9], device=DEVICE), [digest])], DRAFTS)
    marker.mark(torch.tensor([0, 3, 5], device=DEVICE), torch.tensor([2, 1], device=DEVICE))
    assert ((space.flags & int(Flag.REJECTED)) != 0).nonzero().flatten().tolist() == [4, 9]
    assert (digest == 0).nonzero().flatten().tolist() == [4, 9]

"""The bytes of slots in all tensors of a pool at once: the Triton kernel and plain torch say the same."""

from __future__ import annotations

import random

import pytest
import torch

from kvcanary_fx import KVPool
from kvcanary_fx.config import CanaryConfig
from kvcanary_fx.engine.guarded_pool import EnginePool
from kvcanary_fx.engine.request_ids import RequestIds
from kvcanary_fx.kernels.buffers import RowState
from kvcanary_fx.kernels.checks import Check, Phase
from kvcanary_fx.kernels.content import cpu
from kvcanary_fx.kernels.content import gpu_pool as gpu_pool_bytes
from kvcanary_fx.kernels.content import pool as pool_bytes
from kvcanary_fx.kernels.ring import Ring, Word
from kvcanary_fx.runtime.binding import Controls
from kvcanary_fx.runtime.registry import PoolRegistry

SLOTS = 24


@pytest.fixture(autouse=True)
def there_are_kernels(device):
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter stands in for a missing GPU")


def tensors(kind: str, device: str) -> list[list[torch.Tensor]]:
    """Two layers of a pool, with random bytes."""
    generator = torch.Generator("cpu").manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device="cpu").to(device)

    if kind == "slots":
        return [[drawn(SLOTS, 2, 24) for _ in "kv"] for _ in range(2)]
    if kind == "unlike":  # rows of K, of V and of a scale differ: a launch each
        return [[drawn(SLOTS, 2, 24), drawn(SLOTS, 16), drawn(SLOTS, 3)] for _ in range(2)]
    if kind == "interleaved":
        both = drawn(2, SLOTS, 2, 2, 8)
        return [[both[layer, :, 0], both[layer, :, 1]] for layer in range(2)]
    return [[drawn(6, 2, 4, 7) for _ in "kv"] for _ in range(2)]


def made(kind: str, bits: int, device: str, capacity: int) -> EnginePool:
    table = torch.zeros(1, SLOTS, dtype=torch.int32, device=device)
    declared = KVPool(tensors(kind, device), table, paged=kind == "HND", order="HND" if kind == "HND" else "NHD")
    config = CanaryConfig(digest_bits=bits, ring_capacity=capacity)
    pool = EnginePool(declared, PoolRegistry(config.planes), Controls(capacity), config, RequestIds())
    pool.allocate(range(1, SLOTS), owner="A")
    pool.adopt(range(1, 20), tokens=range(19), positions=range(19))
    return pool


def rows(pool: EnginePool) -> list[list[int]]:
    control = pool.space.control
    kept = min(int(control.words[Word.HEAD]), control.capacity)
    return sorted(control.ring[:kept].tolist())


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("kind", ["slots", "unlike", "interleaved", "HND"])
@pytest.mark.parametrize("listed", [True, False], ids=["listed on the device", "told by an allocator"])
def test_both_find_the_same_and_keep_the_same(kind, bits, listed, device):
    rng = random.Random(kind)
    one, other = made(kind, bits, "cpu", 64), made(kind, bits, device, 64)
    for _ in range(6):
        half, slot = rng.randrange(len(one.halves)), rng.randrange(1, SLOTS)
        for pool in (one, other):
            layout = pool.halves[half].place.layout
            first = layout.slots_first(pool.views[half])
            at = (slot // layout.positions, slot % layout.positions) if layout.two_axes else (slot,)
            row = first[at]
            row[(0,) * row.dim()] ^= 1 << 3
    slots = [rng.randrange(-1, SLOTS) for _ in range(3)] + list(range(1, SLOTS))
    slots = list(dict.fromkeys(slots))
    for verify, pool in ((pool_bytes.verify_slots, one), (gpu_pool_bytes.verify_slots, other)):
        where = pool.space.block.device
        given = torch.tensor(slots, dtype=torch.int32 if listed else torch.int64, device=where)
        count = torch.tensor([len(slots) - 5], dtype=torch.int32, device=where) if listed else None
        owners = None if listed else torch.arange(len(slots), device=where)
        positions = None if listed else torch.arange(len(slots), device=where) + 1000
        for _ in range(2):  # what was told is not told again
            verify(pool.content.bytes, given, count, owners, Phase.POST if listed else Phase.LIFE, positions)
    assert rows(other) == rows(one) != []
    assert torch.equal(other.digests.cpu(), one.digests)
    assert {row[Ring.HALF] for row in rows(one)} <= {half.id for half in one.halves}


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("kind", ["slots", "unlike", "interleaved", "HND"])
@pytest.mark.parametrize("in_flight", [True, False], ids=["in flight", "written before"])
def test_what_a_forward_reads_is_compared_in_all_layers_at_once_as_in_each(kind, bits, in_flight, device):
    """Reports, digests and counts; a slot that nobody wrote is reported, unless this forward is to write it."""
    rng, told = random.Random(kind), []
    flips = [(rng.randrange(64), rng.randrange(1, 20)) for _ in range(6)]
    for kernels, where in ((cpu, "cpu"), (pool_bytes, "cpu"), (gpu_pool_bytes, device)):
        pool = made(kind, bits, where, 64)
        for half, slot in flips:
            half %= len(pool.halves)
            layout = pool.halves[half].place.layout
            row = layout.slots_first(pool.views[half])[divmod(slot, layout.positions) if layout.two_axes else slot]
            row[(0,) * row.dim()] ^= 1 << 3
        space = pool.space
        space.listed[:20] = torch.arange(3, 23, device=where)
        space.listed_count.fill_(20)
        space.planned[21] = -space.epoch()
        for half in pool.halves:
            half.buffers.rows[0, RowState.NEXT] = 1
        for _ in range(2):
            if kernels is cpu:
                for site, view in zip(pool.content.bytes.sites, pool.content.bytes.views, strict=True):
                    cpu.verify_halves([site], [view], 1, in_flight)
            else:
                kernels.verify_listed(pool.content.bytes, in_flight)
        counts = [counters.tolist() for counters in pool.content.counters]
        told.append((rows(pool), pool.digests.tolist(), counts))
    assert told[0] == told[1] == told[2]
    never = {(row[Ring.HALF], row[Ring.SLOT]) for row in told[0][0] if row[Ring.CHECK] == Check.POISON}
    lost = (20, 22) if in_flight else (20, 21, 22)
    assert never == {(half.id, slot) for half in pool.halves for slot in lost}
    assert counts == [[2, 0, 17 + 17 + len(lost), 0, 0]] * len(pool.halves)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("kind", ["slots", "unlike", "interleaved", "HND"])
@pytest.mark.parametrize("count", [0, 1, 7, 40])
def test_both_keep_the_digests_of_slots_as_they_are(kind, bits, count, device):
    """Of any slots, some twice and some that do not exist; all others keep theirs."""
    rng = random.Random(f"{kind}{bits}{count}")
    slots = [rng.randrange(-2, SLOTS + 2) for _ in range(count)]
    one, other = made(kind, bits, "cpu", 64), made(kind, bits, device, 64)
    before = one.digests.clone()
    for fingerprint, pool in ((pool_bytes.fingerprint_slots, one), (gpu_pool_bytes.fingerprint_slots, other)):
        for view in pool.views:
            view.add_(1)
        for dtype in (torch.int64, torch.int32):
            fingerprint(pool.content.bytes, torch.tensor(slots, dtype=dtype, device=pool.space.block.device))
    assert torch.equal(other.digests.cpu(), one.digests)
    changed = (one.digests != before).any(0).any(0).nonzero().squeeze(1).tolist()
    assert changed == sorted({slot for slot in slots if 0 <= slot < SLOTS})
    if count:
        one.content.verify(torch.arange(1, SLOTS), None, None, Phase.LIFE)
        told = {row[Ring.SLOT] for row in rows(one)}
        assert told == set(range(1, 20)) - set(slots), "only the bytes of those that were not given differ"


def test_more_findings_than_the_ring_holds_are_counted(device):
    one, other = made("slots", 32, "cpu", 3), made("slots", 32, device, 3)
    for verify, pool in ((pool_bytes.verify_slots, one), (gpu_pool_bytes.verify_slots, other)):
        pool.views[0].add_(1)
        verify(pool.content.bytes, torch.arange(1, 20, device=pool.space.block.device), None, None, Phase.LIFE)
        assert int(pool.space.control.words[Word.HEAD]) == 19

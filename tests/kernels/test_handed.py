"""Numbers that a kernel reads in the host's memory arrive as those that are copied."""

from __future__ import annotations

import random
import threading
from array import array

import pytest
import torch

from kvcanary_fx.kernels import handed as module
from kvcanary_fx.kernels.bound_launch import BoundLaunch
from kvcanary_fx.kernels.handed import BLOCK, Handed, Places
from kvcanary_fx.kernels.triton_handed import scatter_from_kernel
from kvcanary_fx.kernels.waiting import Waiting

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def reference(outs: list[torch.Tensor], words: array) -> None:
    numbers = torch.tensor(list(words), device=DEVICE)
    torch._foreach_copy_(outs, list(numbers.split([len(out) for out in outs])))


@pytest.mark.parametrize("seed", range(5))
def test_numbers_arrive_where_copies_of_each_part_would(seed):
    rng = random.Random(seed)
    sizes = [rng.choice((1, 3, BLOCK, BLOCK + 1, 700)) for _ in range(rng.randint(1, 9))]
    room = [torch.full((2, n + 4), -77, device=DEVICE) for n in sizes]  # parts begin at any alignment of their type
    starts = [rng.randrange(4) for _ in sizes]
    got, wanted = ([r[k, s : s + n] for r, s, n in zip(room, starts, sizes, strict=True)] for k in (0, 1))
    places = Places(Handed(DEVICE), got)
    for _ in range(3):
        words = array("q", [rng.randrange(-(2**63), 2**63) for _ in range(sum(sizes))])
        places.fill(words)
        reference(wanted, words)
        assert all(torch.equal(r[0], r[1]) for r in room)


def numbers(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(-(1 << 62), 1 << 62) for _ in range(n)]


def strided(rng: random.Random, n: int) -> torch.Tensor:
    """``[n]`` of int32 or int64, every so many entries of a tensor of the device."""
    dtype, stride = rng.choice([torch.int32, torch.int64]), rng.choice([1, 1, 2, 5])
    most = torch.iinfo(dtype).max
    whole = torch.tensor([rng.randrange(-most, most) for _ in range(n * stride + 3)], dtype=dtype, device=DEVICE)
    return whole[3::stride][:n]


@pytest.mark.parametrize("seed", range(5))
def test_tensors_of_the_device_arrive_with_the_numbers_and_nothing_elsewhere(seed):
    rng = random.Random(seed)
    sizes = [rng.choice([1, 2, 7, BLOCK, BLOCK + 1]) for _ in range(rng.randint(1, 4))]
    copied = [rng.choice([1, 3, BLOCK - 1, 2 * BLOCK + 5]) for _ in range(rng.randint(0, 3))]
    memory = [torch.full((n + 2,), -77, dtype=torch.int64, device=DEVICE) for n in (*sizes, *copied)]
    outs = [whole[1:-1] for whole in memory]
    handed = Handed(DEVICE)
    sources = [strided(rng, n) for n in copied]
    places = Places(
        handed, outs[: len(sizes)], [(o, s.dtype) for o, s in zip(outs[len(sizes) :], sources, strict=True)]
    )
    for turn in range(2):
        sent = [numbers(rng, n) for n in sizes]
        sources = [s if turn else s.clone() for s in sources]  # their addresses and strides are not the same
        said = [number for s in sources for number in (s.data_ptr(), s.stride(0))]
        parts = [array("q", part) if rng.random() < 0.5 else part for part in sent]
        if rng.random() < 0.5:
            places.fill(*parts, said)
        else:
            put = places.put(*parts, said)
            put.launch(put.grid, put.at)
        expected = sent + [s.tolist() for s in sources]
        assert [whole.tolist() for whole in memory] == [[-77, *part, -77] for part in expected]


def test_numbers_arrive_from_an_address_that_the_device_is_told():
    outs = [torch.full((n + 2,), -77, dtype=torch.int64, device=DEVICE) for n in (1, BLOCK + 3, 7)]
    places = Places(Handed(DEVICE), [out[1:-1] for out in outs])
    at = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    launch = BoundLaunch(scatter_from_kernel, DEVICE, dict(at_ptr=at, BLOCK=BLOCK), (), 4)
    for seed in range(3):
        words = array("q", random.Random(seed).randbytes(8 * (BLOCK + 11)))
        put = places.put(words)
        at.fill_(put.at)
        (launch if launch.ready else launch.first)(put.grid, (), None)
        assert torch.cat([out[1:-1] for out in outs]).tolist() == list(words)
        assert all(out[[0, -1]].tolist() == [-77, -77] for out in outs)


def test_numbers_wait_for_a_launch_of_their_own_thread_and_are_sent_before_others_wait():
    outs = [torch.zeros(3, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    handed, waiting, seen = Handed(DEVICE), Waiting(), []
    first, second = Places(handed, [outs[0]]), Places(handed, [outs[1]])
    waiting.add(first.put(array("q", (1, 2, 3))))
    other = threading.Thread(target=lambda: (seen.append(waiting.held()), waiting.send()))
    other.start()
    other.join()
    assert seen == [None]
    assert outs[0].tolist() == [0, 0, 0]
    waiting.add(second.put(array("q", (4, 5, 6))))
    assert outs[0].tolist() == [1, 2, 3]
    assert outs[1].tolist() == [0, 0, 0]
    waiting.send()
    assert outs[1].tolist() == [4, 5, 6]
    assert waiting.held() is None


def test_memory_that_is_full_is_followed_by_other_memory(monkeypatch):
    monkeypatch.setattr(module, "ROOM", 512)
    out = torch.zeros(20, dtype=torch.int64, device=DEVICE)
    handed = Handed(DEVICE)
    places = Places(handed, [out])
    for number in range(12):
        places.fill(array("q", range(number, number + 20)))
        assert out.tolist() == list(range(number, number + 20))
    large = torch.zeros(100, dtype=torch.int64, device=DEVICE)
    Places(handed, [large]).fill(array("q", range(100)))
    assert large.tolist() == list(range(100))


def test_each_launch_reads_at_an_address_that_the_kernel_was_compiled_for():
    handed = Handed(DEVICE)
    assert {handed.put(array("q", range(n))) % 16 for n in (1, 2, 3, 4, 5)} == {0}


@pytest.mark.gpu
def test_memory_that_a_kernel_may_still_read_is_not_written(monkeypatch):
    monkeypatch.setattr(module, "ROOM", 512)
    outs = [torch.zeros(20, dtype=torch.int64, device="cuda") for _ in range(200)]
    handed = Handed(DEVICE)
    Places(handed, [outs[0]]).fill(array("q", [0] * 20))  # compiled
    torch.cuda._sleep(200_000_000)
    for number, out in enumerate(outs):
        Places(handed, [out]).fill(array("q", [number] * 20))
    assert [int(out[-1]) for out in outs] == list(range(200))


def test_memory_that_is_too_small_is_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(module, "ROOM", 512)
    handed = Handed(torch.device("cpu"))
    handed._last = handed  # in the place of a stream

    class Done:
        def record(self, stream):
            pass

        def query(self):
            return True

    monkeypatch.setattr(torch.cuda, "Event", Done)
    for words in [10] * 20 + [1000] * 20 + [10] * 20:
        handed.put(array("q", range(words)))
        assert len(handed._full) <= 2

"""The ring in which allocator calls travel, against its plain code."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from kvcanary_fx.kernels.slots.event_ring import AHEAD, CALLS, FIRST_PAGE, HEAD, PAGES, EventRing, naive
from kvcanary_fx.kernels.slots.events import RECORD, Along, Due, Event

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def numbers(rng: random.Random, count: int) -> array:
    return array("q", [rng.randrange(-(2**63), 2**63) for _ in range(count)])


def test_the_kernel_lands_what_the_plain_code_does_round_after_round():
    rng = random.Random(0)
    ring, other = EventRing(DEVICE), EventRing(DEVICE)
    ring.landed.fill_(-77)
    other.landed.fill_(-77)
    sizes = [(1, 1, 64), (CALLS, PAGES, PAGES), (2, 64, 64), (3, 65, 512)]
    for number in range(AHEAD + 5):
        calls, pages, room = sizes[number] if number < len(sizes) else (rng.randint(1, 9), rng.randint(1, 64), 64)
        rows, named = numbers(rng, 3 * calls), numbers(rng, pages)
        assert ring.offer(rows, [named[:1], named[1:].tolist()], len(named), 16)
        ring.land(room)
        assert other.offer(rows, [named[:1], named[1:].tolist()], len(named), 16)
        naive(other)
        assert torch.equal(ring.landed, other.landed)
        assert torch.equal(ring.turn[:1], other.turn[:1])
        assert int(ring.turn[1]) == 0
        assert (ring.counts.tolist(), ring.slots.tolist()) == ([calls, pages], [16 * pages])
        assert ring.ring[:, 0].tolist() == other.ring[:, 0].tolist() == [0] * AHEAD  # its entry is free again
        assert ring.rows[:calls].flatten().tolist() == rows.tolist()
        assert ring.pages[:pages].tolist() == named.tolist()


def test_a_step_lands_an_entry_if_the_host_says_that_one_is_for_it():
    """Else there are no calls, and the entry stays for the next launch."""
    rng = random.Random(2)
    rows = torch.zeros(3, 5, dtype=torch.int64, pin_memory=DEVICE.type == "cuda")
    turn = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    ring, other = EventRing(DEVICE), EventRing(DEVICE)
    due = Due(rows, turn, 4)
    lands = ring.lands_if_due(512, due, 16)
    for each in (ring, other):
        each.landed.fill_(-77)
    for number in range(2 * AHEAD + 5):
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        rows.fill_(-1)
        rows[number % 3, 4] = is_due = rng.randint(0, 1)
        turn[0] = number % 3
        calls, pages = rng.randint(1, 9), rng.randint(1, 300)
        if is_due or number == 0:  # the first one waits
            given = numbers(rng, 3 * calls), [numbers(rng, pages)], pages, 16
            assert ring.offer(*given)
            assert other.offer(*given)
        lands()
        naive(other, due)
        assert torch.equal(ring.landed, other.landed)
        assert torch.equal(ring.turn[:1], other.turn[:1])
        assert int(ring.turn[1]) == 0
        assert (ring.counts.tolist() == [0, 0] and ring.slots.tolist() == [0]) == (not is_due)


@pytest.mark.parametrize("holder", [0, -(2**61) + 7])
def test_pages_that_the_step_hands_out_itself_are_the_calls_of_an_entry_that_says_so(holder):
    """Whoever had all of them releases them first; the entry that waits in the ring stays for a later step."""
    rng, said, at = random.Random(3), 7, 3
    rows = torch.zeros(4, 40 + RECORD * 256, dtype=torch.int64, pin_memory=DEVICE.type == "cuda")
    turn = torch.tensor([2, 0], dtype=torch.int64, device=DEVICE)
    ring, other, offered = (EventRing(DEVICE) for _ in range(3))
    due = Due(rows, turn, column=at, pages=1, holder=5, records=said)
    lands = ring.lands_if_due(512, due, 16)
    for each in (ring, other):
        assert each.offer(array("q", [1, 0, 0]), [array("q", [4])], 1, 16)
    for count in (1, 9, 85, 86, 128):  # 86 calls are more than a program's words
        for each in (ring, other):
            each.landed.fill_(-77)
        pages, owners = [rng.sample(range(9999), count), numbers(rng, count).tolist()]
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        rows.fill_(-5)
        rows[2, at], rows[2, 1], rows[2, 5] = Along.HANDED_OUT, count, holder
        rows[2, said : said + RECORD * count] = torch.tensor(
            [n for page, owner in zip(pages, owners, strict=True) for n in (0, rng.randrange(99), page, owner)]
        )
        lands()
        naive(other, due, 16)
        assert torch.equal(ring.landed, other.landed)
        assert torch.equal(ring.turn, other.turn)
        assert int(ring.turn[0]) == 0
        calls = [(Event.RELEASE, 0, holder)] * bool(holder)
        first = count * bool(holder)
        calls += [(Event.ALLOCATE, first + number, owner) for number, owner in enumerate(owners)]
        offered.landed.fill_(-77)
        named = pages * (2 if holder else 1)
        assert offered.offer([n for call in calls for n in call], [named], len(named), 16)
        offered.land(512)
        assert torch.equal(ring.landed, offered.landed)
    rows[2, at] = Along.OF_RING
    lands()
    assert ring.pages[0] == 4


def test_few_calls_are_written_as_others_are():
    rng = random.Random(1)
    ring, other = EventRing(torch.device("cpu")), EventRing(torch.device("cpu"))
    for each in (ring, other):
        each.ring.zero_()
    for number in range(AHEAD + 3):
        rows = numbers(rng, 3 * (CALLS if number == 1 else rng.randint(1, 9))).tolist()
        pages = numbers(rng, rng.randint(1, 40)).tolist()
        assert ring.offer_few(rows, pages, 16)
        assert other.offer(rows, [pages], len(pages), 16)
        assert torch.equal(ring.ring, other.ring)
        assert ring._turn == other._turn


def test_addresses_are_those_that_the_kernels_are_compiled_for():
    ring = EventRing(DEVICE)
    assert {t.data_ptr() % 16 for t in (ring.counts, ring.slots, ring.rows, ring.pages)} == {0}
    assert HEAD + ring.rows.numel() == FIRST_PAGE


def test_memory_that_may_still_be_read_is_not_offered_and_the_turn_stays():
    ring = EventRing(torch.device("cpu"))
    ring._on_gpu = True  # as there, what was offered is not read yet
    one = array("q", [1, 0, 0])
    for number in range(AHEAD - 1):
        assert ring.offer(one, [array("q", [number])], 1, 1)
    for _ in range(2):
        assert not ring.offer(one, [array("q", [8])], 1, 1)
        assert not ring.offer_few([1, 0, 0], [8], 1)
        assert ring._turn == AHEAD - 1
    for number in range(3):  # each that is read makes room for one
        naive(ring)
        assert ring.pages[0] == number
        assert ring.offer_few([1, 0, 0], [9], 1)
        assert not ring.offer(one, [array("q", [8])], 1, 1)
    for number in (*range(3, AHEAD - 1), 9, 9, 9):
        naive(ring)
        assert ring.pages[0] == number
    assert not ring.ring[:, 0].any()


@pytest.mark.gpu
def test_a_host_that_is_far_ahead_waits_for_nothing_and_overwrites_nothing():
    ring = EventRing(DEVICE)
    ring.offer(array("q", [1, 0, 0]), [array("q", [0])], 1, 1)
    ring.land(64)
    seen, pages = torch.zeros(3 * AHEAD, dtype=torch.int64, device="cuda"), list[int]()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    for number in range(3 * AHEAD):
        if ring.offer(array("q", [1, 0, 0]), [array("q", [number])], 1, 1):
            ring.land(64)
            seen[len(pages)].copy_(ring.pages[0])
            pages.append(number)
    assert not torch.cuda.current_stream().query(), "the host waited"
    assert seen[: len(pages)].tolist() == pages
    assert AHEAD - 1 <= len(pages) < 3 * AHEAD

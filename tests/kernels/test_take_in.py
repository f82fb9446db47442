"""The kernel that takes in what a runner of vLLM prepared, against its plain code."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch

from kvcanary_fx.adapters.vllm.v2.take_in import (
    AHEAD,
    BLOCK,
    DUE,
    PAGES,
    WRITTEN,
    Inputs,
    Landing,
    TakeIn,
    most_pages,
    naive,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROOM = 300


def poisoned(*shape, dtype=torch.int64):
    return torch.full(shape, -77, dtype=dtype, device=DEVICE)


def numbers(rng, count, most, dtype=torch.int32):
    return torch.tensor([rng.randrange(most) for _ in range(count)], dtype=dtype, device=DEVICE)


def random_inputs(rng, groups=(0, 2), positions=torch.int64):
    """Step inputs that hold what an earlier step left, and what a runner has prepared for this one."""
    inputs = Inputs(
        counts=poisoned(3),
        live=poisoned(3),
        **{name: poisoned(ROOM) for name in ("rows", "owners", "namespaces", "prefix_lens", "extend_lens")},
        tokens=poisoned(2 * ROOM),
        positions=poisoned(2 * ROOM),
        slots=[poisoned(2 * ROOM) for _ in groups],
        tables=[poisoned(8, 90 + group, dtype=torch.int32) for group in (0, 1, 2)],
        clock=poisoned(1),
        stored=numbers(rng, ROOM, 5000),
        starts=numbers(rng, ROOM + 1, 9).cumsum(0).to(torch.int32),
        given_tokens=numbers(rng, 2 * ROOM, 2**31 - 1),
        given_positions=numbers(rng, 2 * ROOM, 5000, positions),
        mapping=numbers(rng, 3 * 2 * ROOM, 10**9, torch.int64).view(3, -1),
        groups=list(groups),
    )
    return TakeIn(Landing(ROOM, DEVICE), inputs)


def send(rng, landing, requests, tokens, pages):
    fields = [[rng.randrange(-(2**62), 2**62) for _ in range(requests)] for _ in range(3)]
    index = np.array([rng.randrange(ROOM) for _ in range(requests)], dtype=np.int64)
    added = [rng.choice((-1, 0, 1, 5)) for _ in range(requests)]
    landing.requests(*fields, index, added)
    places = rng.sample(range(8 * 90), pages)
    records = [(rng.randrange(3), place, rng.randrange(9999), rng.randrange(-(2**62), 2**62)) for place in places]
    landing.send(requests, tokens, rng.randrange(2**31), [n for record in records for n in record])


def compare(taking):
    landing, inputs = taking._landing, taking._inputs
    expected, told = copy.deepcopy(inputs), copy.copy(landing)
    told.fields, told.turn, told.ring = landing.fields.clone(), landing.turn.clone(), landing.ring.clone()
    naive(told, expected)
    taking.launch(ROOM, 2 * ROOM)
    for name, got, wanted in zip(Inputs._fields, inputs, expected, strict=True):
        pairs = zip(got, wanted, strict=True) if isinstance(got, list) and name != "groups" else [(got, wanted)]
        assert all(a == b if name == "groups" else torch.equal(a, b) for a, b in pairs), name
    assert torch.equal(landing.fields, told.fields)
    assert torch.equal(landing.turn, told.turn)
    assert torch.equal(landing.ring, told.ring)  # the entry is free again
    assert not landing.ring[:, 0].any()


@pytest.mark.parametrize(
    ("requests", "tokens", "pages"),
    [(1, 0, 0), (1, 1, 1), (ROOM, 2 * ROOM, most_pages(2 * ROOM)), (7, BLOCK + 1, 3), (BLOCK, 5, 0)],
)
def test_the_kernel_takes_in_what_the_plain_code_does(requests, tokens, pages):
    rng = random.Random(requests)
    taking = random_inputs(rng, positions=rng.choice((torch.int32, torch.int64)))
    send(rng, taking._landing, requests, tokens, pages)
    compare(taking)


def test_a_launch_for_many_tokens_takes_in_many_pages():
    """It has a program for each block of them, and an entry has room for ``PAGES``."""
    assert [most_pages(n) for n in (1, 256, 600, 16384)] == [512, 512, 600, PAGES]


def test_requests_that_were_told_before_are_kept_on_the_device():
    rng = random.Random(5)
    taking = random_inputs(rng)
    send(rng, taking._landing, 4, 4, 2)
    compare(taking)
    fields, owners = taking._landing.fields.clone(), taking._inputs.owners.clone()
    taking._landing.ring[:, -5 * ROOM :] = -77  # the entries of later steps have none
    taking._landing.send(4, 4, 9, [1, 3, 77, 0])
    compare(taking)
    assert torch.equal(taking._landing.fields, fields)
    assert torch.equal(taking._inputs.owners, owners)
    assert taking._inputs.counts.tolist() == [4, 4, 9]
    assert taking._inputs.tables[1].view(-1)[3] == 77


def test_the_ring_is_gone_through_more_than_once():
    rng = random.Random(6)
    taking = random_inputs(rng)
    for number in range(2 * AHEAD + 3):
        if number % 3:
            taking._landing.send(1 + number % 2, 1, number, [])
        else:
            send(rng, taking._landing, 1 + number, 2, 1)
        compare(taking)
        assert taking._inputs.counts[2] == number or number % 3 == 0


@pytest.mark.parametrize("groups", [(0,), (0, 2)])
def test_a_launch_of_which_nothing_is_said_goes_on_as_the_last_one_did(groups):
    """With the next step, the requests that were told last, no new pages and no calls of the allocator."""
    rng = random.Random(10)
    taking = random_inputs(rng, groups)
    landing, inputs = taking._landing, taking._inputs
    for number in range(1, 2 * AHEAD + 3):
        if landing.next % WRITTEN and number % 5:
            before, step = inputs.counts.tolist()[:2], int(inputs.counts[2])
            inputs.stored.add_(1)
            landing.ring[landing.next, 1:] = -77  # what an earlier round left
            landing.ring[landing.next, DUE] = 0
            landing.next = (landing.next + 1) % AHEAD
            compare(taking)
            assert inputs.counts.tolist() == inputs.live.tolist() == [*before, step + 1]
        else:
            send(rng, landing, 1 + rng.randrange(ROOM), 1 + rng.randrange(ROOM), 2)
            compare(taking)
    assert not landing.ring[:, DUE].any()


def test_an_entry_whose_calls_were_taken_says_so_no_longer():
    """Else the step that goes on there a round later would launch them again."""
    taking = random_inputs(random.Random(11))
    taking._landing.send(3, 3, 1, [], calls=True)
    assert taking._landing.ring[0, DUE] == 1
    compare(taking)
    assert taking._landing.ring[0, DUE] == 0


def test_a_replay_that_is_no_forward_takes_its_turn_and_leaves_the_step_before_as_it_is():
    """And what was said of the requests meanwhile comes with the next one."""
    rng = random.Random(8)
    taking = random_inputs(rng)
    send(rng, taking._landing, 4, 5, 2)
    compare(taking)
    left = copy.deepcopy(taking._inputs)
    taking._landing.requests(*([value] * 3 for value in range(5)))
    taking._landing.skip()
    compare(taking)
    assert taking._inputs.live.tolist() == [-1, 0, 0]
    for name in ("counts", "clock", "rows", "owners", "prefix_lens", "tokens", "positions"):
        assert torch.equal(getattr(taking._inputs, name), getattr(left, name)), name
    taking._landing.send(3, 3, 6, [])
    compare(taking)
    assert taking._inputs.rows[:4].tolist() == [0, 0, 0, left.rows[3]]
    assert taking._inputs.live.tolist() == taking._inputs.counts.tolist() == [3, 3, 6]


def test_a_host_that_is_nearly_a_round_ahead_waits_before_it_writes_what_may_still_be_read(monkeypatch):
    """Here the device reads nothing until the host waits, and then all that there is."""
    landing, sent, waits = Landing(ROOM, DEVICE), 0, []
    monkeypatch.setattr(Landing, "_catch_up", lambda self: waits.append(sent) or self.ring[:, 0].zero_())
    for sent in range(3 * AHEAD):
        landing.send(2, 2, sent, [])
    assert waits == [WRITTEN * n for n in range(1, 6)]
    landing, waits[:] = Landing(ROOM, DEVICE), []
    for sent in range(3 * AHEAD):
        if landing.next % WRITTEN:
            landing.next = (landing.next + 1) % AHEAD
        else:
            landing.send(2, 2, sent, [])
    assert waits == [WRITTEN * n for n in range(1, 6)], "also where most entries are left as they are"


@pytest.mark.gpu
@pytest.mark.parametrize("said", [lambda _: True, lambda n: not n % WRITTEN, lambda n: not n % WRITTEN or n % 3 == 1])
def test_a_host_that_is_far_ahead_overwrites_nothing_of_what_the_device_has_to_read(said):
    taking = random_inputs(random.Random(9))
    taking.launch(ROOM, 2 * ROOM)  # compiled
    taking._landing.restart()
    seen = torch.zeros(3 * AHEAD, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    for number in range(3 * AHEAD):
        if said(number):
            taking._landing.send(2, 2, 1000 + number, [])
        else:
            taking._landing.next = (taking._landing.next + 1) % AHEAD
        taking.launch(ROOM, 2 * ROOM)
        seen[number].copy_(taking._inputs.counts[2])
    assert seen.tolist() == list(range(1000, 1000 + 3 * AHEAD))


def test_launches_of_a_warm_up_take_no_turn():
    taking = random_inputs(random.Random(7))
    taking._inputs.live.zero_()  # as it was made
    for _ in range(3):
        compare(taking)
        assert taking._inputs.counts[:2].tolist() == [0, 0], "and are of no request"
    taking._landing.restart()
    taking._landing.send(1, 1, 5, [])
    compare(taking)
    assert taking._inputs.counts.tolist() == [1, 1, 5]

"""The kernels that fingerprint and compare running states for vLLM, against their plain code."""

from __future__ import annotations

import pytest
import torch

import kvcanary_fx
from kvcanary_fx.adapters.vllm.v2.state_checks import Moved, StateChecks
from kvcanary_fx.adapters.vllm.v2.state_memory import CHUNK, PLACES, StateHalf, StateTable, StepInputs, words_of
from kvcanary_fx.adapters.vllm.v2.state_places import StatePlaces
from kvcanary_fx.kernels.checks import Check

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCKS, REQUESTS = 9, 4


def strided(shape, dtype, gap=16):
    """States of blocks that have something else behind each."""
    size = torch.Size(shape).numel()
    storage = torch.randn(BLOCKS, size + gap, device=DEVICE).to(dtype)
    return storage[:, :size].view(BLOCKS, *shape)


class States:
    """Two groups: of one layer with two states, one of them for several programs, and of a layer with one."""

    def __init__(self, digest_bits=32, shapes=(((6, 3), (5, CHUNK // 2 + 3)), ((2, 7),))):
        torch.manual_seed(0)
        self.layers = [
            tuple(strided(shape, (torch.bfloat16, torch.float32)[i]) for i, shape in enumerate(states))
            for states in shapes
        ]
        pools = [
            kvcanary_fx.KVPool([states], torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), name=f"g{i}", state=True)
            for i, states in enumerate(self.layers)
        ]
        self.session = kvcanary_fx.install_canary(
            *pools, mode="log", checks=("index", "owner"), digest_bits=digest_bits
        )
        for pool in self.session.pools.values():
            pool.rivals.clear()
            pool.allocate([1, 2, 3], owner="a")
            pool.allocate([4, 5, 6, 7], owner="b")
        self.session.mark_ready()
        # as for a large batch: what the runner has, and what the scheduler said
        made = torch.zeros(2, len(pools), PLACES + REQUESTS, 3, dtype=torch.int32, device=DEVICE)
        self.given, self.planned = [[*tables] for tables in made]
        self.checks = self.made()
        self.owners = {name: self.session.ids.hash(name) for name in "ab"}

    def made(self):
        halves = []
        for number, pool in enumerate(self.session.pools.values()):
            sites = pool.content.bytes.sites
            halves += [StateHalf(site, view, number) for site, view in zip(sites, pool.views, strict=True)]
        return StateChecks(halves, len(self.given), self.session.controls(DEVICE), REQUESTS)

    def places(self, page, *fields):
        """Of requests: row, owner, stored and added tokens of each."""
        pools = self.session.pools.values()
        tables = [
            StateTable(pool.space, given, planned, pool.content.bytes.sites[0].half_id)
            for pool, given, planned in zip(pools, self.given, self.planned, strict=True)
        ]
        inputs = StepInputs(*(torch.tensor(field, dtype=torch.int64, device=DEVICE) for field in fields))
        return StatePlaces(tables, inputs, page, self.session.controls(DEVICE), Check.INDEX | Check.OWNER)

    def digests(self):
        return [pool.digests.clone() for pool in self.session.pools.values()]

    def found(self):
        told = [(v.check, v.why, v.pool, v.half, v.slot, v.request, v.position) for v in self.session.violations()]
        self.session.found.clear()
        return sorted(map(str, told))


@pytest.fixture(params=["plain", "kernels"])
def check(request):
    """Checks where states are, by plain code or by the kernel."""

    def call(places, requests, step):
        counts = torch.tensor([requests, requests, step], dtype=torch.int64, device=DEVICE)
        if request.param == "kernels":
            places._launch.check(counts)
        elif DEVICE.type == "cuda":
            pytest.skip("the plain code is for a CPU")
        else:
            places.check(counts)

    return call


@pytest.fixture(params=["plain", "kernels"])
def run(request):
    """Calls a check of states by its plain code, or its kernels."""

    def call(states, name, *args):
        checks = states.checks
        if request.param == "plain":
            if DEVICE.type == "cuda":
                pytest.skip("the plain code is for a CPU")
            getattr(checks, name)(*args)
        elif name == "compare" and checks._compared:
            checks.launches.run(0, checks._compared, True)
        elif name == "record" and checks._recorded:
            checks.launches.run(checks._compared, checks._recorded, False)

    return call


def at(owner, known, blocks=None, position=7):
    return Moved(owner, position, known, blocks or known)


@pytest.mark.parametrize("digest_bits", [32, 64])
def test_each_changed_state_is_told_and_what_was_compared_is_forgotten(run, digest_bits):
    states = States(digest_bits)
    a, b = states.owners["a"], states.owners["b"]
    rows = [at(a, (1, 3), position=4), at(b, (4, 7))]
    states.checks.begin(1, [], rows)
    run(states, "record")
    states.checks.begin(2, rows, rows)
    run(states, "compare")
    assert states.found() == []
    assert all(not digests[:, 0].any() for digests in states.digests())
    run(states, "record")
    (conv, ssm), (other,) = states.layers
    for state in (conv[1].view(torch.int16), ssm[4].view(torch.int32), other[7].view(torch.int16)):
        state.view(-1)[-1] ^= 1 << 3
    states.checks.begin(3, rows, [])
    run(states, "compare")
    told = [("g0", "K", 1, "a", 4), ("g0", "V", 4, "b", 7), ("g1", "K", 7, "b", 7)]
    assert states.found() == sorted(str(("content", None, *where)) for where in told)
    stats = states.session.stats()
    assert (stats.recorded, stats.checked) == (12, 12)


@pytest.mark.parametrize("digest_bits", [32, 64])
def test_digests_are_those_of_all_other_checks(run, digest_bits):
    states = States(digest_bits)
    states.checks.begin(1, [], [at(1, (2, 5)), at(1, (8, 1))])
    run(states, "record")
    found = states.digests()
    for pool, blocks in zip(states.session.pools.values(), ([2, 8], [5, 1]), strict=True):
        pool.digests.zero_()
        pool.content.fingerprint(torch.tensor(blocks, device=DEVICE))
    assert all(map(torch.equal, found, states.digests()))
    assert all(digests.any() for digests in found)


def test_a_state_that_was_copied_to_another_block_is_compared_there_and_its_first_block_keeps_its_digest(run):
    states = States()
    owner = states.owners["a"]
    states.checks.begin(1, [], [at(owner, (1, 1))])
    run(states, "record")
    kept = states.digests()
    for layer in states.layers:
        for state in layer:
            state[2] = state[1]
    twice = [at(owner, (1, 1), (2, 2)), at(owner, (1, 1), (2, 2))]
    states.checks.begin(2, twice, [])
    run(states, "compare")
    assert states.found() == []
    assert all(map(torch.equal, kept, states.digests()))
    states.layers[0][1][2, 0, 0] += 1
    run(states, "compare")
    assert states.found() == [str(("content", None, "g0", "V", 2, "a", 7))] * 2


def test_what_was_not_fingerprinted_is_not_compared(run):
    states = States()
    states.checks.begin(1, [at(1, (1, 1)), at(1, (2, 2), (3, 3))], [])
    run(states, "compare")
    states.checks.begin(2, [], [])
    run(states, "compare")
    run(states, "record")
    assert states.found() == []
    assert (states.session.stats().checked, states.session.stats().recorded) == (0, 0)


@pytest.mark.parametrize("page", [0, 16])
def test_blocks_that_are_not_those_of_the_batch_and_of_its_requests_are_told(check, page):
    states = States()
    a, b = states.owners["a"], states.owners["b"]
    for pool in states.session.pools.values():
        pool.release([3], owner="a")
        pool.share([7], owner="c")
        pool.flush()
    states.session.violations()
    column = 1 if page else 0
    rows, stored, added = [2, 0, 3, 1], [16, 15, 31, 0], [1, 2, 1, 32]  # the first token of a block, and its last
    for given, planned in zip(states.given, states.planned, strict=True):
        given[:4, column] = torch.tensor([1, 4, 5, 8], device=DEVICE)
        planned[rows, column] = torch.tensor([1, 4, 5, 0], dtype=torch.int32, device=DEVICE)  # nobody knows the last
    places = states.places(page, rows, [a, b, b, b], stored, added)
    check(places, 4, 4)
    assert states.found() == []
    states.given[1][0, column] = 4
    for planned, last in zip(states.planned, ([3, 7], [5, 8]), strict=True):
        planned[[0, 3, 1], column] = torch.tensor([4, *last], dtype=torch.int32, device=DEVICE)
    places = states.places(page, rows, [a, a, a, b], stored, added)
    check(places, -1, 5)  # no step
    assert states.found() == []
    check(places, 4, 5)
    assert {v.step for v in states.session.violations()} == {5}
    found = {(v.check, v.why, v.pool, v.slot, v.request) for v in states.session.violations()}
    states.session.found.clear()
    assert found == {
        ("index", "NOT_THE_PLANNED_SLOT", "g1", 1, "a"),
        ("index", "NOT_THE_PLANNED_SLOT", "g0", 3, "a"),
        ("index", "NOT_THE_PLANNED_SLOT", "g0", 7, "b"),
        ("owner", "OVERWRITE", "g0", 4, "a"),
        ("owner", "OVERWRITE", "g1", 4, "a"),
        ("owner", "WRITE_AFTER_FREE", "g0", 3, "a"),
        ("owner", "OVERWRITE", "g1", 5, "a"),
        ("owner", "WRITE_SHARED", "g0", 7, "b"),
        ("owner", "WRITE_AFTER_FREE", "g1", 8, "b"),
    }


def test_each_request_of_a_large_batch_is_looked_at_and_columns_that_no_table_has_are_not(check):
    states, n = States(), PLACES + 3
    b = states.owners["b"]
    for given, planned in zip(states.given, states.planned, strict=True):
        given[:, 2] = planned[:, 2] = 5
    states.given[1][PLACES + 1, 2] = 6
    stored = [2 * 4] * n
    stored[0] = 3 * 4  # behind the last column
    places = states.places(4, range(n), [b] * n, stored, [1] * n)
    check(places, n, 1)
    assert states.found() == [str(("index", "NOT_THE_PLANNED_SLOT", "g1", "K", 5, "b", None))]
    check(places, PLACES + 1, 2)
    assert states.found() == []


def test_states_are_seen_as_words_where_they_are_such():
    view = strided((6, 3), torch.bfloat16)
    words = words_of(view)
    assert torch.equal(words, torch.stack([row.reshape(-1).view(torch.int32) for row in view]))
    assert words_of(strided((3, 3), torch.bfloat16)) is None
    assert words_of(strided((6, 3), torch.bfloat16, gap=1)) is None
    assert words_of(view.transpose(1, 2)) is None
    assert words.data_ptr() == view.data_ptr()


def test_more_requests_than_a_batch_may_have_are_left_out(run):
    states = States()
    states.checks.begin(1, [], [at(1, (block, block)) for block in range(1, 7)])
    run(states, "record")
    assert [bool(pool.digests[0, 0, block]) for pool in states.session.pools.values() for block in (4, 5)] == [
        True,
        False,
    ] * 2

"""A budget in the place of a fixed share: the logic over made-up times, and what a session makes of it."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcanary_fx.runtime.budget import FEWEST, IDLE, LEFT_FOR_BYTES, MOST, READINGS, START, Controller, Reading, Tour

SHARES = st.integers(0, 6).map(lambda k: 1 << k)


@given(st.lists(st.tuples(SHARES, st.integers(1, 40)), min_size=1, max_size=12), st.integers(0, 200))
def test_each_slot_is_compared_within_the_largest_n_in_use_however_n_changes(runs, first):
    shares = [every for every, steps in runs for _ in range(steps)]
    largest = max(shares)
    for start in range(len(shares) - largest + 1):
        window = list(enumerate(shares[start : start + largest], first + start))
        assert all(any((slot + step) % every == 0 for step, every in window) for slot in range(largest))


@given(st.lists(st.tuples(SHARES, st.integers(1, 40)), max_size=12))
def test_a_tour_knows_how_many_slots_had_no_turn(runs):
    tour, had = Tour(), set()
    for every, calls in runs:
        for _ in range(calls):
            had |= {slot for slot in range(64) if (slot + tour.calls) % every == 0}
            tour.note(every)
    assert tour.unseen() == (1 - len(had) / 64 if runs else 0)


class Machine:
    """A device whose steps take what they take, and a controller that watches it."""

    def __init__(self, budget: float, step: float, price: float, rest: float = 0.0, noise: float = 0.0):
        self.controller = Controller(budget)
        self.step, self.price, self.rest, self.noise = step, price, rest, noise
        self.random = random.Random(0)
        self.calls = self.spent = 0.0

    def call(self, every: int) -> float:
        """Seconds of a step that compares a share of 1/every; counted."""
        own = self.step * (1 + self.rest + self.price / every)
        self.calls += 1
        self.spent += own / self.step - 1
        return own * (1 + self.random.uniform(-self.noise, self.noise))

    def run(self, calls: int) -> Controller:
        """So many steps; ``growth`` of them is how much longer they took."""
        now, self.calls, self.spent = self.controller, 0, 0.0
        while self.calls < calls:
            for _ in range(now.period):
                self.call(now.every)
            every, probed = now.every, now.probed
            before, probe, after = self.call(every), self.call(probed), self.call(every)
            waits = self.rest * self.step, self.rest * self.step
            now.take(Reading(before, probe, after, every, probed, waits, between=before))
        return now

    @property
    def growth(self) -> float:
        return self.spent / self.calls


@pytest.mark.parametrize("budget", [0.005, 0.01, 0.03, 0.1])
@pytest.mark.parametrize("price", [0.02, 0.7, 3.0], ids="all costs {}".format)
@pytest.mark.parametrize("noise", [0.0, 0.003, 0.02], ids="noise {}".format)
def test_steps_grow_by_no_more_than_the_budget(budget, price, noise):
    machine = Machine(budget, 0.005, price, noise=noise)
    now = machine.run(2000)
    assert now.settled
    machine.run(20000)
    assert machine.growth <= 1.1 * budget
    if noise <= 0.003:  # and the budget is made use of
        assert now.every == FEWEST or price / now.every > 0.3 * budget


def test_on_a_noisy_machine_bytes_are_not_given_up():
    machine = Machine(0.05, 0.005, 0.8, noise=0.12)
    seen = [machine.run(2000).every for _ in range(20)]
    assert max(seen) <= 4 * 16, seen
    assert machine.growth <= 1.1 * 0.05


def test_what_is_hidden_behind_the_model_is_compared_in_full():
    assert Machine(0.01, 0.005, 0.0).run(2000).every == FEWEST


def test_the_rest_is_taken_off_the_budget():
    alone, beside = (Machine(0.02, 0.005, 0.7, rest=rest) for rest in (0.0, 0.01))
    assert (alone.run(3000).every, beside.run(3000).every) == (64, 128)
    assert max(alone.growth, beside.growth) <= 1.1 * 0.02


def test_a_rest_above_the_budget_is_told_and_bytes_are_still_compared():
    machine = Machine(0.01, 0.005, 0.7, rest=0.05)
    now = machine.run(3000)
    assert now.over
    assert 0.7 / now.every <= 0.01 * LEFT_FOR_BYTES


def test_work_that_the_device_waits_for_in_one_call_of_four_is_a_quarter_of_it():
    now = Controller(0.01)
    for number in range(4 * READINGS):
        waits = (0.0001, 0.0) if number % 2 else (0.0, 0.0)
        now.take(Reading(0.005, 0.005, 0.005, now.every, now.probed, waits))
        assert not now.over
    assert now.rest == pytest.approx(0.02 / 4, rel=0.25)


def test_a_garbage_collection_in_one_call_is_not_taken_for_what_each_costs():
    now = Controller(0.01)
    for number in range(READINGS):
        now.take(Reading(0.005, 0.005, 0.005, now.every, now.probed, (0.00002, 0.00002 if number else 0.05)))
    assert now.rest == pytest.approx(0.00002 / 0.005)


def test_a_rest_above_the_budget_is_told_once_several_decisions_in_a_row_say_so():
    now, told = Controller(0.01), []
    for over in [True, False, True, True, True, False]:
        for _ in range(READINGS):
            now.take(Reading(0.005, 0.005, 0.005, now.every, now.probed, (0.0002,) if over else (0.0,)))
        told.append(now.over)
    assert told == [False, False, False, False, True, False]


class Served(Machine):
    """A small model that is served: its engine waits for the host, and times of the device vary by a factor of three.

    As it was seen on an H200, in seconds: a graph takes 130 us, and each 2.2 ms one begins.
    """

    def call(self, every: int) -> float:
        usual = self.random.choice([130e-6] * 9 + [180e-6] * 4 + [420e-6] * 5) * self.random.uniform(0.97, 1.03)
        return usual + 10e-6 / every

    def take(self) -> int:
        """A reading, and how many steps came before it."""
        now = self.controller
        steps, every, probed = now.period, now.every, now.probed
        times = self.call(every), self.call(probed), self.call(every)
        between = self.random.uniform(2e-3, 2.8e-3)
        now.take(Reading(*times, every, probed, (19e-6, 25e-6), guessed=15e-6, between=between))
        return steps


def test_an_engine_that_waits_for_the_host_has_all_bytes_compared_soon():
    """As fractions of the device's time our Python was 15 % of a step, and N was above 1,000 for 30 seconds."""
    seldom = steps = 0
    for seed in range(20):
        served, taken = Served(0.01, 130e-6, 0), 0
        served.random.seed(seed)
        while taken < 6000:
            every = served.controller.every
            now = served.take()
            taken += now
            if taken > 1000:
                steps, seldom = steps + now, seldom + now * (every > 256)
        assert not served.controller.over
        assert served.controller.rest == pytest.approx(0.009, abs=0.002)
    assert seldom <= 0.05 * steps, "by times that differ by chance"


@pytest.mark.parametrize(("between", "step"), [(0.001, 0.002), (0.003, 0.003), (10.0, 0.002 + IDLE)])
def test_a_step_is_as_long_as_until_the_next_one_unless_the_caller_was_idle(between, step):
    reading = Reading(0.002, 0.0022, 0.002, 64, 16, between=between)
    assert reading.step == step
    assert reading.more == pytest.approx(0.0002 / step)


@pytest.mark.parametrize("grown", [8, 1 / 8])
def test_other_work_is_noticed_within_few_calls(grown):
    machine = Machine(0.01, 0.002, 0.4)
    before = machine.run(3000).every
    machine.step *= 4
    machine.price *= grown
    now = machine.run(400)
    assert now.every == before * grown
    assert now.settled


@given(
    stored=st.integers(1, 1 << 22),
    learned=st.integers(0, 1 << 22),
    needed=st.integers(1, 12),
    more=st.integers(0, 2),
    part=st.floats(0, 1),
)
def test_nothing_is_to_be_done_while_about_as_much_is_stored(stored, learned, needed, more, part):
    now = Controller(0.01)
    now.needed, now.stored = 1 << needed, learned
    every = min(now.every_for(stored) << more, MOST)  # as a step with more before it left it
    least, most = now.alike(every, stored)
    assert least <= stored <= most
    other = now.every_for(least + part * (most - least))
    assert other <= every <= 4 * other


def test_calls_that_are_not_alike_say_nothing():
    now = Controller(0.01)
    for _ in range(100):
        assert not now.take(Reading(0.005, 0.08, 0.011, now.every, now.probed))
    assert (now.every, now.settled, now.price) == (START, False, None)
    assert now.period > 4, "nor is it tried for ever"


def test_the_share_does_not_go_to_and_fro():
    machine, seen = Machine(0.01, 0.005, 0.64, noise=0.004), []
    for _ in range(40):
        seen.append(machine.run(700).every)
    changes = sum(a != b for a, b in itertools.pairwise(seen[4:]))
    assert changes <= 2, seen


@given(st.floats(0.001, 0.5), st.lists(st.tuples(*[st.floats(1e-6, 10)] * 3), max_size=60))
def test_n_stays_a_power_of_two_within_its_bounds(budget, times):
    now = Controller(budget)
    for before, probe, after in times:
        now.take(Reading(before, probe, after, now.every, now.probed, (before / 3, 0.0)))
        assert FEWEST <= now.every <= MOST
        assert now.every & (now.every - 1) == 0
        assert 1 <= now.probed < now.every

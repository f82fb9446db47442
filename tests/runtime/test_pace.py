"""A budget in sessions: what is measured, what the devices are told, and what is said."""

from __future__ import annotations

import logging
import random
import threading
from types import SimpleNamespace

import pytest
import torch
from test_engine_session import flip, prefilled
from toys import Rig

from kvcanary_fx.kernels.host_time import HOST_TIME, timed, waiting
from kvcanary_fx.kernels.ring import Word
from kvcanary_fx.runtime import pace as measuring
from kvcanary_fx.runtime.binding import Controls
from kvcanary_fx.runtime.budget import FEWEST, MOST, START
from kvcanary_fx.runtime.pace import Clocks, Pace, Sample

CPU = torch.device("cpu")


class Graph:
    """A guarded graph over a made-up clock: a call takes ``step`` seconds, and comparing all bytes ``price`` times
    that; our own work on the host ``ours`` seconds."""

    def __init__(self, monkeypatch, budget: float = 0.01, step: float = 0.005, price: float = 0.7, ours: float = 0.0):
        self.now = self.spent = 0.0
        self.step, self.price, self.ours = step, price, ours
        monkeypatch.setattr(measuring.time, "perf_counter", lambda: self.now)
        self.controls = Controls(8)
        self.control = self.controls(CPU)
        self.pace = Pace(budget, self.controls)
        self.binding = SimpleNamespace(key=1, plan=SimpleNamespace(devices=[CPU], ops=4))
        self.call = self.pace.calls(self._run)

    @property
    def every(self) -> int:
        """What kernels read."""
        return int(self.control.words[Word.EVERY])

    def _run(self, binding, compiled, args):
        self.now += self.ours
        return compiled(*args)

    def _model(self, fails: bool = False):
        if fails:
            raise ValueError("the model's own")
        self.now += self.step * (1 + self.price / self.every)

    def run(self, calls: int) -> float:
        """So many calls; how much longer they took than without a canary."""
        begun = self.now
        for _ in range(calls):
            self.call(self.binding, self._model, ())
        return (self.now - begun) / (calls * self.step) - 1


def test_devices_are_told_a_share_that_fits_into_the_budget(monkeypatch):
    graph = Graph(monkeypatch)
    assert graph.every == START
    assert graph.run(100) <= 2 * 0.01, "on the cheap side before anything is known"
    assert graph.run(5050) <= 1.05 * 0.01
    assert graph.every == graph.pace.every == 128
    assert graph.pace.within == pytest.approx(128 * 0.005, rel=0.1)
    assert graph.controls(torch.device("meta")).words.shape == (len(Word),), "a device that comes later is told as well"


class Steps:
    """Steps of an engine over a made-up clock: without a canary 5 ms, and comparing a token takes 80 ns."""

    TOKEN = 80e-9

    def __init__(self, monkeypatch, tell=True, noise=0.0, passes=True):
        self.now, self.tell, self.noise, self.passes = 0.0, tell, noise, passes
        self.random = random.Random(0)
        monkeypatch.setattr(measuring.time, "perf_counter", lambda: self.now)
        self.controls = Controls(8)
        self.word = self.controls(CPU).words
        self.pace = Pace(0.01, self.controls)

    def run(self, calls: int, stored: int, step: float = 0.005) -> float:
        """So many steps of batches with so many tokens stored; how much longer they took."""
        begun = self.now
        for _ in range(calls):
            told = stored if self.tell else 0
            passes = self.passes and self.pace.passes("step", told)
            sample = None if passes else self.pace.begin("step", CPU, 2, told)
            if sample is not None:
                sample.model_runs()
            self.now += step * (1 + self.random.uniform(-self.noise, self.noise))
            self.now += stored * self.TOKEN / int(self.word[Word.EVERY])
            if sample is not None:
                sample.model_ran()
                sample.end()
        return (self.now - begun) / (calls * step) - 1


def test_a_larger_batch_is_compared_within_the_budget_from_its_first_step_on(monkeypatch):
    steps = Steps(monkeypatch)
    steps.run(2000, stored=600)
    assert steps.pace.every == FEWEST, "one request is compared for next to nothing"
    assert steps.run(100, stored=64 * 600, step=0.0065) <= 1.25 * 0.01
    assert steps.run(2000, stored=64 * 600, step=0.0065) <= 1.25 * 0.01
    assert int(steps.word[Word.EVERY]) == steps.pace.every >= 32
    steps.run(1, stored=600)
    assert steps.pace.every <= 2 * FEWEST, "and a smaller one, when it comes, about as often as before"


def test_what_a_larger_batch_costs_is_soon_known_where_a_small_one_costs_less_than_can_be_seen(monkeypatch):
    """A bound that noise gave for one request, times 64, would be a share that compares next to nothing."""
    steps = Steps(monkeypatch, noise=0.02)
    steps.run(2000, stored=600)
    steps.run(150, stored=64 * 600, step=0.0065)
    assert 32 <= steps.pace.every <= 256, "47 would be enough"
    told = []
    for _ in range(20):  # and once it is known, batches of both sizes are measured as seldom as others
        steps.run(20, stored=600)
        steps.run(20, stored=64 * 600, step=0.0065)
        told.append(steps.pace.controller.settled)
    assert all(told)


def test_steps_that_pass_are_counted_and_measured_as_others(monkeypatch):
    seen, looked_at = {}, {}
    for passes in (True, False):
        steps, looks = Steps(monkeypatch, noise=0.02, passes=passes), []
        begin = steps.pace.begin
        monkeypatch.setattr(
            steps.pace, "begin", lambda *given, begin=begin, looks=looks: looks.append(1) or begin(*given)
        )
        told = []
        for calls, stored in ((900, 600), (60, 38_400), (1, 600), (500, 39_000), (300, 600), (700, 0), (200, 600)):
            for number in range(calls):
                steps.run(1, stored, step=0.005)
                told.append(int(steps.word[Word.EVERY]))
                if number == 37:
                    told.append((steps.pace.unseen(), steps.pace._longest().calls))
        assert not steps.pace.passes("another graph", 600)
        steps.pace.new_sequence()
        steps.run(3, 600)
        seen[passes], looked_at[passes] = [*told, steps.pace.unseen(), steps.pace._longest().calls], len(looks)
    assert seen[True] == seen[False]
    assert looked_at[False] == 2661 + 3
    assert looked_at[True] < 1000


@pytest.fixture
def looked_at(monkeypatch):
    """The steps that do not pass."""
    begin, found = Pace.begin, []
    monkeypatch.setattr(Pace, "begin", lambda pace, *given: found.append(given) or begin(pace, *given))
    return found


def test_steps_of_a_host_whose_speed_changes_are_looked_at_as_seldom_as_others(monkeypatch, looked_at):
    """Each change was a reason to measure anew: 17 steps of 100 were looked at, each 0.16 ms longer (1B, H200)."""
    steps = Steps(monkeypatch)
    steps.run(2000, stored=20_000)
    looked_at.clear()
    grown = [steps.run(60, 20_000, step) for _ in range(20) for step in (0.002, 0.005)]
    assert len(looked_at) <= 0.04 * 2400
    assert sum(grown[10:]) / 30 <= 1.1 * 0.01
    assert steps.pace.every >= 64, "what 0.002 s ask for"


def test_a_host_that_has_become_faster_compares_less_after_one_reading(monkeypatch):
    steps = Steps(monkeypatch)
    steps.run(2000, stored=20_000)
    before = steps.pace.every
    steps.run(140, 20_000, step=0.002)
    assert steps.pace.every == 2 * before
    assert steps.run(400, 20_000, step=0.002) <= 1.1 * 0.01


def test_a_host_that_has_become_slower_is_said_to_take_longer_until_all_bytes_are_compared(monkeypatch):
    steps = Steps(monkeypatch)
    steps.run(2000, stored=20_000, step=0.002)
    every = steps.pace.every
    steps.run(140, stored=20_000, step=0.005)
    assert steps.pace.every == every
    assert steps.pace.within == pytest.approx(every * 0.005, rel=0.05)


def test_steps_of_requests_that_grow_pass(monkeypatch, looked_at):
    steps = Steps(monkeypatch)
    steps.run(2000, stored=512)
    for _ in range(4):  # and one that comes behind another one
        for stored in range(512, 640):
            steps.run(1, stored)
    looked_at.clear()
    for stored in range(512, 640):
        steps.run(1, stored)
    assert len(looked_at) <= 4


def test_steps_of_several_ranks_pass_until_one_of_them_says_something(monkeypatch, looked_at):
    """None of them did: each step of an engine over two GPUs took its host the longer way."""
    steps = Steps(monkeypatch)
    ranks = SimpleNamespace(heard=False, largest=1, slowest=1, tell=lambda *_: None)
    ranks.news = lambda: ranks.heard

    def changed():
        heard, ranks.heard = ranks.heard, False
        return heard

    ranks.changed = changed
    steps.pace._ranks = steps.pace.passing.ranks = ranks
    steps.run(2000, stored=20_000)
    looked_at.clear()
    steps.run(600, stored=20_000)
    assert len(looked_at) <= 0.05 * 600
    before, ranks.largest, ranks.heard = steps.pace.every, 8 * steps.pace.every, True
    steps.run(1, stored=20_000)
    assert steps.pace.every == 8 * before


def test_an_engine_that_does_not_say_what_is_stored_is_within_its_budget_later(monkeypatch):
    steps = Steps(monkeypatch, tell=False)
    steps.run(2000, stored=600)
    assert steps.run(100, stored=64 * 600, step=0.0065) > 0.1
    steps.run(2000, stored=64 * 600, step=0.0065)
    assert steps.run(2000, stored=64 * 600, step=0.0065) <= 1.25 * 0.01


def test_batches_in_turn_do_not_have_the_devices_told_in_each_step(monkeypatch):
    steps, told = Steps(monkeypatch), []
    steps.run(2000, stored=20_000)
    write = steps.pace._write
    monkeypatch.setattr(steps.pace, "_write", lambda every: told.append(every) or write(every))
    for _ in range(200):
        steps.run(1, stored=20_000)
        steps.run(1, stored=28_000)
    assert len([n for n in told if n >= steps.pace.every]) <= 20


def test_what_the_host_does_besides_is_taken_off(monkeypatch):
    graph = Graph(monkeypatch, ours=0.00004)
    assert graph.run(5050) <= 1.05 * 0.01
    assert graph.every == 512


def test_waiting_for_the_device_is_no_work_of_ours(monkeypatch):
    """Mode raise waits for each step: that was nearly all of it, and next to nothing was compared."""
    graph = Graph(monkeypatch)

    def run_and_wait(binding, compiled, args):
        compiled(*args)
        graph.now += 0.00004
        with waiting():
            graph.now += 0.004

    call = graph.pace.calls(run_and_wait)
    for _ in range(5000):
        call(graph.binding, graph._model, ())
    assert graph.pace.controller.rest == pytest.approx(0.00004 / 0.009, rel=0.05)
    assert graph.every <= 512
    assert not graph.pace.controller.over


def test_what_measuring_takes_is_no_work_of_ours(monkeypatch):
    """An event takes a host some 10 us to make and to record, in front of a device that waits for it."""
    graph, sample = Graph(monkeypatch), calls_of_an_idle_device()
    made = sample(graph, device=0.0052)
    assert made.waited_for
    assert made.ours == pytest.approx(0.00006)


@pytest.mark.parametrize(
    ("device", "waits", "ours"),
    [(0.0052, 0.0, 0.00006), (0.02, 0.0, 0.00003), (0.02, 0.015, 0.00003)],
    ids=["the host is late", "the device is", "it is waited for"],
)
def test_work_that_is_done_while_the_device_is_busy_keeps_it_from_nothing(monkeypatch, device, waits, ours):
    """As in a `generate` on a GPU: the host waits for each token, and what comes behind the model costs nothing."""
    graph, sample = Graph(monkeypatch), calls_of_an_idle_device()
    assert sample(graph, device, waits).kept_waiting() == pytest.approx(ours)


def test_events_are_used_again_once_a_reading_was_taken_in(monkeypatch):
    """To make the events of a call took longer than to record them."""
    steps, made, arrived = Steps(monkeypatch), [], [True]

    class Event:
        def __init__(self, enable_timing=True):
            made.append(self)

        def record(self, stream):
            self.at = steps.now

        def query(self):
            return arrived[0]

        def elapsed_time(self, other):
            return 1000 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clocks = steps.pace._clocks[CPU] = Clocks(CPU)
    monkeypatch.setattr(clocks, "_current", lambda: None)
    steps.run(300, stored=20_000)
    assert len(made) == 6, "three calls of a reading, and never more at once"
    arrived[0] = False
    steps.run(300, stored=20_000)
    assert len(made) == 6, "one that has not arrived is waited for"


def calls_of_an_idle_device():
    """Makes measured calls: 30 us before the model, 5 ms of launches with 10 us of our ops in them, 20 us behind it."""

    def sample(graph: Graph, device: float, waits: float = 0.0) -> Sample:
        class Event:
            def __init__(self):
                graph.now += 0.00001

            def record(self, stream):
                graph.now += 0.00001

            def query(self):
                graph.now += 0.00001
                return True

            def elapsed_time(self, other):
                return 1000 * device

        clocks = SimpleNamespace(take=lambda: (None, (Event(), Event())))
        before = Sample(clocks, None)
        before.end()
        made = Sample(clocks, before)
        graph.now += 0.00003
        made.model_runs()
        HOST_TIME.seconds = 0.00001
        graph.now += 0.005
        made.model_ran()
        graph.now += 0.00002
        with waiting():
            graph.now += waits
        made.end()
        return made

    return sample


def test_ops_that_the_host_launches_are_work_of_ours(monkeypatch):
    graph = Graph(monkeypatch)

    def op() -> None:
        graph.now += 0.0002

    def model() -> None:
        graph._model()
        launch()

    launch, graph.pace.controller.budget = timed(op), 0.1
    for _ in range(200):
        graph.call(graph.binding, model, ())
    assert graph.pace.controller.rest == pytest.approx(0.0002 / 0.0053, rel=0.05)
    assert not HOST_TIME.measured


def test_it_is_said_once_what_the_budget_buys_and_when_that_changes(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "kvcanary")
    graph = Graph(monkeypatch)
    (first,) = graph.pace.describe()
    assert first == "budget 1 %: every stored byte is compared within 64 steps until it is known what comparing costs"
    graph.run(5000)
    line = "kvcanary.budget 1 %: every stored byte is compared within {} steps)"
    assert [r.message for r in caplog.records] == [line.format("0.65 s (128")]
    graph.price *= 8
    graph.run(5000)
    assert [r.message for r in caplog.records][1:] == [line.format("5.1 s (1024")]
    assert graph.pace.describe()[0] == line.format("5.1 s (1024").removeprefix("kvcanary.")


def test_more_than_the_budget_without_any_bytes_is_a_warning(monkeypatch, caplog):
    graph = Graph(monkeypatch, ours=0.0002)
    graph.run(2000)
    (warned,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "what is done besides comparing bytes takes 3.8 % of a step, more than the budget of 1 %" in warned
    assert any("more than the budget" in line for line in graph.pace.describe())
    assert FEWEST < graph.every < MOST


def test_another_budget_is_kept_from_there_on(monkeypatch):
    graph = Graph(monkeypatch)
    graph.run(500)
    graph.pace.restart(0.1)
    assert graph.every == START
    graph.run(500)
    assert graph.run(5000) <= 1.05 * 0.1
    assert graph.every == 16


def test_a_call_that_fails_leaves_the_share_as_it_was(monkeypatch):
    graph = Graph(monkeypatch)
    for number in range(200):
        if number % 3:
            graph.call(graph.binding, graph._model, ())
        else:
            with pytest.raises(ValueError, match="the model's own"):
                graph.call(graph.binding, graph._model, (True,))
        assert graph.every in (graph.pace.every, graph.pace.controller.probed)
    graph.run(5000)
    assert graph.every == 128


def test_another_graph_in_between_does_not_compare_more(monkeypatch):
    graph = Graph(monkeypatch)
    other = SimpleNamespace(key=2, plan=graph.binding.plan)
    for _ in range(400):
        graph.call(graph.binding, graph._model, ())
        seen = graph.call(other, lambda: graph.every, ())
        assert seen == graph.pace.every or graph.pace._trio.key == id(other)


def test_calls_that_pass_are_counted_and_measured_as_others(monkeypatch):
    looked_at, begin = [], Pace.begin
    monkeypatch.setattr(Pace, "begin", lambda pace, *given: looked_at.append(given) or begin(pace, *given))
    seen, looks = {}, {}
    for passes in (True, False):
        graph = Graph(monkeypatch)
        if not passes:
            monkeypatch.setattr(graph.pace, "passes", lambda key, stored: False)
        looked_at.clear()
        told = []
        for _ in range(40):
            graph.run(100)
            told.append((graph.every, graph.pace.every, graph.pace.unseen(), graph.pace._longest().calls))
        seen[passes], looks[passes] = told, len(looked_at)
    assert seen[True] == seen[False]
    assert looks[False] == 4000
    assert looks[True] < 800


def test_calls_of_another_thread_are_looked_at(monkeypatch):
    graph = Graph(monkeypatch)
    graph.run(400)
    assert graph.pace.passing.left
    looked_at, begin = [], Pace.begin
    monkeypatch.setattr(Pace, "begin", lambda pace, *given: looked_at.append(given) or begin(pace, *given))
    other = threading.Thread(target=graph.run, args=(1,))
    other.start()
    other.join()
    assert len(looked_at) == 1


def test_what_had_no_turn_when_a_sequence_ends_is_said(monkeypatch):
    graph = Graph(monkeypatch)
    graph.run(16)
    assert graph.pace.unseen() == 0.75
    assert graph.pace.describe()[-1] == "never compared, of what was stored before these 16 steps: 75 %"
    graph.run(2000)
    assert graph.pace.unseen() == 0
    graph.pace.new_sequence()
    graph.run(32)
    assert graph.pace.unseen() == 0.75


# ---- sessions


def test_a_flip_is_found_within_the_steps_that_are_said():
    rig = Rig.build(mode="log", budget="10%")
    rig.step(8)
    rig.flip(1, 1, row=1, position=5)
    for _ in range(START):
        rig.step(at=8)
    assert rig.found() == [("content", "layers.1", "V", 1, 5)]


def test_a_share_that_the_word_changes_is_followed():
    rig = Rig.build(mode="log", budget="10%")
    rig.step(8)
    rig.session.controls(CPU).words[Word.EVERY] = 1
    rig.flip(0, 0, row=1, position=5)
    rig.step()
    assert len(rig.found()) == 1


def test_a_session_says_what_its_budget_buys():
    rig = Rig.build(mode="log", budget="10%")
    rig.step(8)
    first, second = rig.session.summary().splitlines()[:2]
    assert first.endswith("bytes of 1/64 of the slots checked each step")
    assert (
        second == "  budget 10 %: every stored byte is compared within 64 steps until it is known what comparing costs"
    )
    assert "budget" not in Rig.build(mode="log").session.summary()


def test_nothing_is_promised_where_no_bytes_are_compared():
    rig = Rig.build(mode="log", budget="10%", checks=("bounds", "operand"))
    rig.step(8)
    assert "every stored byte" not in rig.session.summary()


def test_what_a_step_rewrites_is_compared_first_whatever_the_share():
    rig = Rig.build(mode="log", budget="10%")
    rig.step(8)
    rig.flip(1, 0, row=1, position=5)
    rig.step(at=5)
    assert [f[0] for f in rig.found()] == ["content"]


def test_steps_of_an_engine_are_measured_whole(monkeypatch):
    """Over a made-up clock: in a step the engine itself takes 1 ms, its forward 5 ms, and comparing all bytes 4.2 ms;
    from one step to the next it takes 3 ms."""
    toy = prefilled(budget="10%")
    pace, word = toy.session.pace, toy.session.controls(CPU).words
    now = 0.0
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now)
    for _ in range(60):
        now += 0.003
        with toy.session.step():
            now += 0.001
            with toy.session.forward():
                now += 0.005 + 0.0042 / int(word[Word.EVERY])
    monkeypatch.undo()
    assert pace.controller.price == pytest.approx(0.0042 / 0.009, rel=0.05)
    assert pace.controller.between == pytest.approx(0.009, rel=0.05)
    assert int(word[Word.EVERY]) == pace.every == 8
    stats = toy.session.stats()
    assert (stats.compared_every, stats.compared_within) == (pace.every, pace.within)
    assert f"compared_every={pace.every} compared_within={pace.within}" in stats.line()
    assert "budget 10 %: every stored byte is compared within" in toy.session.summary()
    assert toy.found() == []


def test_an_engine_finds_a_flip_within_the_steps_that_are_said():
    toy = prefilled(budget="10%", width=100, slots=128)
    flip(toy, 1, 0, 4)
    toy.requests["A"].tokens += [0] * 80
    steps = 0
    while not toy.found():
        toy.run({"A": [6 + steps]})
        steps += 1
    assert steps <= START


def test_a_step_that_raises_ends_as_it_would_without_a_budget():
    toy = prefilled(budget="10%", width=100, slots=128)
    toy.requests["A"].tokens += [0] * 80
    for step in range(40):
        if step % 3 == 0:
            with pytest.raises(ZeroDivisionError), toy.session.step(), toy.session.forward():
                raise ZeroDivisionError
        toy.run({"A": [6 + step]})
    assert toy.found() == []
    assert toy.session.steps == 41

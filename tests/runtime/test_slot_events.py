"""What an engine's allocator says is told to a GPU together, in one launch before somebody looks: the reports stay."""

from __future__ import annotations

import itertools
import random
import re
import sys
import threading
from array import array

import numpy as np
import pytest
import torch
from gpu_on_cpu import Graph, use_gpu_kernels
from toy import Toy, prefilled

import kvcanary_fx
from kvcanary_fx import Batch, EngineError, KVPool
from kvcanary_fx.engine import gathered, kept_calls, slot_events, steps
from kvcanary_fx.engine.kept_calls import KeptCalls
from kvcanary_fx.engine.layers import LayerChecks
from kvcanary_fx.engine.queued_calls import in_words, in_words_one_by_one, one_by_one
from kvcanary_fx.engine.step_inputs import StepInputs
from kvcanary_fx.engine.steps import Steps
from kvcanary_fx.kernels import bound_launch, compile_ahead, replay
from kvcanary_fx.kernels.handed import Handed
from kvcanary_fx.kernels.slots import gpu_life
from kvcanary_fx.kernels.slots.events import Due, Event
from kvcanary_fx.kernels.slots.space import REFERENCE
from kvcanary_fx.kernels.staging import Staging
from kvcanary_fx.kernels.waiting import Waiting

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in for a missing GPU")


@pytest.fixture
def launches(monkeypatch):
    """Sessions keep what the allocator says, as on a GPU; how many calls each launch took."""
    taken = []
    apply = gpu_life.Apply.__call__

    def counted(self, events, imported, gone, counts=None):
        taken.append(events.rows.shape[0] if counts is None else int(counts[0]))
        apply(self, events, imported, gone, counts)

    monkeypatch.setattr(gpu_life.Apply, "__call__", counted)
    use_gpu_kernels(monkeypatch.setattr)
    return taken


def faulty_life(toy: Toy) -> list[tuple]:
    """Everything that an allocator can do wrong, and some that is right; what is reported."""
    pool = toy.pool
    pool.allocate([6, 7, 8], owner="B")
    pool.allocate([7, 9, 9], owner="C")
    pool.share([3, 9, 10], owner="B")
    pool.release([6, 6], owner="B")
    pool.release([6, 4], owner="C")
    pool.hand_over([5, 11], owner="B")
    pool.reject([5, 99])
    pool.allocate([0, -2, 6], owner="C")
    pool.forget([8, 0, 24])
    pool.release([3], owner="A")
    pool.release([3], owner="A")
    return sorted((v.why, v.slot, v.request, v.position, v.token, v.phase, v.step) for v in toy.found())


@interpreted
def test_calls_become_a_replay_and_report_the_same(launches, monkeypatch):
    graphs = []
    monkeypatch.setattr(replay, "capture", lambda device, run: graphs.append(Graph(run)) or graphs[-1])
    toy, other = prefilled(), prefilled()
    for _ in range(replay.ONE_BY_ONE):
        for each in (toy, other):
            each.pool.allocate([12, 13], owner="C")
            each.pool.share([13], owner="B")
            each.pool.release([12, 13], owner="C")
            each.pool.release([13], owner="B")
            each.session.flush()
    assert sum(graph.replays for graph in graphs) == 0
    replays = len(graphs)
    assert replays > 0
    monkeypatch.setattr(KeptCalls, "apply", lambda *_: False)
    expected = faulty_life(other)
    monkeypatch.undo()
    use_gpu_kernels(monkeypatch.setattr)
    monkeypatch.setattr(replay, "capture", lambda device, run: graphs.append(Graph(run)) or graphs[-1])
    assert faulty_life(toy) == expected
    assert expected
    assert sum(graph.replays for graph in graphs) > 0


def hand_out(pool, pages, owners, lengths, page_size, released=(), by=None) -> bool:
    """Owners get pages, and before that somebody releases some: whether the pool was told at once."""
    return pool.tell_handed_out(released, by, pages, owners, lengths, page_size)


@pytest.mark.parametrize("released", [[], [5], [9, 5]])
def test_pages_that_are_handed_out_are_told_as_the_calls_that_they_are(released, monkeypatch):
    toy, told = prefilled(), []
    monkeypatch.setattr(type(toy.pool._events), "tell_now", lambda self, *given: told.append(given) or True)
    calls = [(Event.RELEASE, released, "B")] if released else []
    calls += [(Event.ALLOCATE, [5, 8], "A"), (Event.ALLOCATE, [9], "C")]
    live = toy.pool.live_slots
    for owner in "ABC":
        toy.session.ids.hash(owner)
    for by_calls in (False, True):
        if by_calls:
            assert toy.pool.tell_now(calls, 2, into_step=False)
        else:
            assert toy.pool.tell_handed_out(released, "B", [5, 8, 9], ["A", "C"], [2, 1], 2, into_step=False)
        assert toy.pool.live_slots - live == 2 * (3 - len(released))
        live = toy.pool.live_slots
    assert told[0] == told[1]
    assert not toy.pool.tell_handed_out([5], "nobody", [5], ["A"], [1], 2)
    assert not toy.pool.tell_handed_out([], "B", [5], ["nobody"], [1], 2)
    assert len(told) == 2


def handed_out(toy: Toy, other: Toy, steps: int) -> int:
    """Requests of both get pages of two slots, some of which were never released; how often the first one's
    :meth:`.EnginePool.tell_handed_out` did it."""
    done = 0
    for number in range(steps):
        pages, owners = [4 + 2 * (number % 2), 7], ["A", "C"]
        if hand_out(toy.pool, pages, owners, [1, 1], 2):
            done += 1
        else:
            toy.pool.allocate_each([([pages[0]], "A"), ([pages[1]], "C")], 2, written_in_step=True)
        other.pool.allocate_each([([pages[0]], "A"), ([pages[1]], "C")], 2, written_in_step=True)
        for each in (toy, other):
            each.session.flush()
            each.pool.release([pages[0] if number != steps - 3 else 9], owner="A", page_size=2)
            each.pool.release([7], owner="C", page_size=2)
            if number % 5 != 4:  # else it waits for the next allocation
                each.session.flush()
    for each in (toy, other):
        each.session.flush()
    return done


@interpreted
def test_pages_that_are_handed_out_at_once_are_those_of_calls_that_wait(launches, monkeypatch):
    monkeypatch.setattr(replay, "capture", lambda device, run: Graph(run))
    toy, other = prefilled(), prefilled()
    done = handed_out(toy, other, steps=4 * replay.ONE_BY_ONE)
    assert replay.ONE_BY_ONE < done < 4 * replay.ONE_BY_ONE - 4, "not before it is a replay, and not while calls wait"
    assert toy.pool.live_slots == other.pool.live_slots
    assert faulty_life(toy) == faulty_life(other) != []
    for name in ("flags", "owners", "references"):
        if hasattr(toy.pool.space, name):
            assert torch.equal(*(getattr(each.pool.space, name) for each in (toy, other))), name


def given_up(toy: Toy, other: Toy, steps: int) -> int:
    """The same of pages that a prefix cache has; once they are not its own, and once a bit was flipped in them."""
    done, pages = 0, [2, 7]
    for each in (toy, other):
        each.pool.hand_over([2], owner="the cache", page_size=2)  # A's, with two of its tokens
        each.pool.allocate([7], owner="the cache", page_size=2)
        each.session.flush()
    for number in range(steps):
        given = [([2], "A"), ([7], "C")]
        if hand_out(toy.pool, pages, ["A", "C"], [1, 1], 2, pages, "the cache"):
            done += 1
        else:
            toy.pool.release(pages, owner="the cache", page_size=2)
            toy.pool.allocate_each(given, 2, written_in_step=True)
        other.pool.release(pages, owner="the cache", page_size=2)
        other.pool.allocate_each(given, 2, written_in_step=True)
        for each in (toy, other):
            each.session.flush()
            each.pool.adopt([4, 5], owner="A")  # they hold something again
            each.pool.hand_over(pages, owner="B" if number == steps - 4 else "the cache", page_size=2)
            each.session.flush()
            each.kv[1][0].view(-1, each.kv[1][0][0].numel())[5] += number == steps - 2
    return done


@interpreted
def test_pages_that_a_cache_gives_up_are_handed_out_at_once(launches, monkeypatch):
    """Their bytes are compared first, and whose they are."""
    monkeypatch.setattr(replay, "capture", lambda device, run: Graph(run))
    toy, other = prefilled(), prefilled()
    done = given_up(toy, other, steps=3 * replay.ONE_BY_ONE)
    assert replay.ONE_BY_ONE < done < 3 * replay.ONE_BY_ONE, "not before it is a replay"
    assert toy.pool.live_slots == other.pool.live_slots
    found = [
        sorted((v.check, v.why, v.slot, v.request, v.position, v.phase) for v in each.found()) for each in (toy, other)
    ]
    assert found[0] == found[1]
    assert {check for check, *_ in found[0]} == {"content", "owner"}
    assert torch.equal(toy.pool.digests, other.pool.digests)
    assert not hand_out(toy.pool, [6], ["A"], [1], 2, [6], "somebody unknown")


class StepOfAGraph:
    """What a graph of the model launches of calls, with a word of the host's for each replay."""

    def __init__(self, toy: Toy):
        device = toy.pool.space.block.device
        self._calls = toy.pool.calls
        self._rows = torch.zeros(4, 3, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        launch = self._calls.in_step(Due(self._rows, self._turn, 2), 2)
        launch()  # of a warm-up
        self._graph = replay.capture(device, launch)
        self.claimed = 0

    def replay(self, begins: bool = False) -> None:
        """The next step, which takes the calls along if there are any that wait for it.

        Args:
            begins: and sends what it cannot take.
        """
        claimed = self._calls.claim_or_flush() if begins else self._calls.claim()
        assert not (begins and self._calls._calls)
        self.claimed += claimed
        if self._rows.is_pinned():
            torch.cuda.synchronize()
        self._rows[int(self._turn)] = torch.tensor([-1, -1, claimed])
        self._graph.replay()
        self._turn.copy_((self._turn + 1) % 4)


def give_up(toy: Toy, pages, owner, at_once: bool) -> None:
    """A request ends; a cache keeps its pages but for the first."""
    calls = [(Event.HAND_OVER, pages[1:], "C")] if pages[1:] else []
    calls.append((Event.RELEASE, pages[:1], owner))
    if at_once and toy.pool.tell_now(calls, 2):
        return
    for event, some, whose in calls:
        (toy.pool.release if event is Event.RELEASE else toy.pool.hand_over)(some, whose, 2)


#: A step takes the interpreter half a second; behind a few the calls are a replay.
INTERPRETED_STEPS = 30


def taken_by_steps(toy: Toy, other: Toy, seed: int, steps: int) -> StepOfAGraph:
    """Pages go from hand to hand: the steps of the first one take what waits for them, if they can."""
    rng, taken = random.Random(seed), StepOfAGraph(toy)
    names = ["A", "B", "C"]
    for each in (toy, other):
        each.pool.hand_over([2], owner="B", page_size=2)  # A's, with two of its tokens
        each.pool.allocate([5, 6, 7], owner="C", page_size=2)
        each.session.flush()
    for number in range(steps):
        pages = rng.sample([2, 5, 6, 7], rng.randint(1, 3))
        owners, by, how = (
            rng.choices(names, k=len(pages)),
            rng.choice(names),
            rng.choice(["claims", "flushes", "none", "begins"]),
        )
        released = pages if rng.random() < 0.7 else []
        flipped, queued, odd = number == steps - 3, rng.random() < 0.4, rng.choice(pages)
        ends = rng.random() < 0.3
        for each in (toy, other):
            each.kv[1][0].view(-1, each.kv[1][0][0].numel())[pages[0] * 2] += flipped
            if number % 9 == 8:
                each.pool.release([odd], owner=by, page_size=2)
            if not (each is toy and hand_out(each.pool, pages, owners, [1] * len(pages), 2, released, by)):
                if released:
                    each.pool.release(released, owner=by, page_size=2)
                each.pool.allocate_each([([p], o) for p, o in zip(pages, owners, strict=True)], 2, True)
            if ends:
                give_up(each, pages, owners[0], at_once=each is toy)
            if queued:  # behind it
                each.pool.hand_over(pages, owner="B", page_size=2)
        if how == "flushes" or (queued and how != "begins"):
            toy.session._stepping.flush(into_step=True)
        elif how == "none":
            toy.session.flush()
        taken.replay(begins=how == "begins")
        for each in (toy, other):
            each.session.flush()
            each.pool.adopt([4, 5], owner="A")  # they hold something again
            each.session.flush()
    return taken


@interpreted
@pytest.mark.parametrize("seed", range(2))
def test_calls_that_a_step_takes_along_leave_what_they_leave_sent_before_it(launches, monkeypatch, seed):
    monkeypatch.setattr(replay, "capture", lambda device, run: Graph(run))
    compare_steps(prefilled(), prefilled(), seed, steps=INTERPRETED_STEPS)


def compare_steps(toy: Toy, other: Toy, seed: int, steps: int = 60) -> None:
    taken = taken_by_steps(toy, other, seed, steps)
    assert taken.claimed > steps / 6
    found = [
        sorted(str((v.check, v.why, v.slot, v.request, v.position, v.phase)) for v in each.found())
        for each in (toy, other)
    ]
    assert found[0] == found[1] != []
    assert torch.equal(toy.pool.space.block[:-1], other.pool.space.block[:-1])
    assert torch.equal(toy.pool.digests, other.pool.digests)
    assert toy.pool.live_slots == other.pool.live_slots


@interpreted
def test_calls_that_wait_for_a_step_are_sent_by_whoever_needs_them_before(launches, monkeypatch):
    """A step without their launches, another call, a reader of violations; and a step then launches none."""
    monkeypatch.setattr(replay, "capture", lambda device, run: Graph(run))
    toy, other = prefilled(), prefilled()
    assert taken_by_steps(toy, other, 1, INTERPRETED_STEPS).claimed
    calls = toy.pool.calls
    for each in (toy, other):
        each.pool.release([6], owner=None, page_size=2)
        each.session.flush()
    assert hand_out(toy.pool, [6], ["A"], [1], 2)
    assert calls._kept.waits is not None
    held = threading.Thread(target=lambda: toy.session.stats())
    held.start()
    held.join()
    assert calls._kept.waits is None
    assert not calls.claim()
    assert hand_out(toy.pool, [7], ["B"], [1], 2)
    assert hand_out(toy.pool, [5], ["B"], [1], 2), "the one before is sent"
    toy.pool.share([5], owner="C", page_size=2)
    assert not calls.claim(), "what is queued comes behind it"
    toy.session.flush()
    other.pool.allocate([6], owner="A", page_size=2)
    other.pool.allocate_each([([7], "B"), ([5], "B")], 2, written_in_step=True)
    other.pool.share([5], owner="C", page_size=2)
    other.session.flush()
    assert torch.equal(toy.pool.space.block[:-1], other.pool.space.block[:-1])
    assert len(toy.found()) == len(other.found())


@interpreted
@pytest.mark.parametrize("released", [True, False], ids=["released", "kept by a cache"])
def test_what_a_request_that_ended_gives_up_waits_for_the_step(launches, monkeypatch, released):
    monkeypatch.setattr(replay, "capture", lambda device, run: Graph(run))
    toy, other = prefilled(), prefilled()
    steps = StepOfAGraph(toy)
    for _ in range(replay.ONE_BY_ONE + 1):  # by then such calls are a replay
        for each in (toy, other):
            each.pool.allocate([5, 6], owner="B", page_size=2)
            each.session.flush()
            if released:
                each.pool.release([5, 6], owner="B", page_size=2)
            else:
                each.pool.hand_over([5, 6], owner="a cache", page_size=2)
                each.pool.release([7], owner="B", page_size=2)
        toy.session._stepping.flush(into_step=True)
        waits, claimed = toy.pool.calls._kept.waits is not None, steps.claimed
        steps.replay()
        assert steps.claimed == claimed + waits
        other.session.flush()
        assert torch.equal(toy.pool.space.block[:-1], other.pool.space.block[:-1])
    assert waits


@interpreted
def test_no_page_is_handed_out_at_once_while_another_thread_sends_calls(launches, monkeypatch):
    monkeypatch.setattr(replay, "capture", lambda device, run: Graph(run))
    toy, answers = prefilled(), []
    for _ in range(2 * replay.ONE_BY_ONE):
        toy.pool.allocate([12], owner="A")
        toy.session.flush()
    handing_out = threading.Thread(target=lambda: answers.append(hand_out(toy.pool, [13], ["A"], [1], 1)))
    with toy.pool.calls._lock:
        handing_out.start()
        handing_out.join(10)
    assert answers == [False]
    assert hand_out(toy.pool, [13], ["A"], [1], 1)


@interpreted
def test_pages_for_somebody_unknown_or_with_stacks_to_keep_are_not_handed_out_at_once(launches, monkeypatch):
    monkeypatch.setattr(replay, "capture", lambda device, run: Graph(run))
    toy, other = prefilled(), prefilled(stacks=4)
    for each in (toy, other):
        for _ in range(2 * replay.ONE_BY_ONE):
            each.pool.allocate([12, 13], owner="A")
            each.session.flush()
            each.pool.release([12, 13], owner="A")
            each.session.flush()
    assert not hand_out(toy.pool, [12], ["nobody"], [1], 1)
    assert hand_out(toy.pool, [12], ["A"], [1], 1)
    assert not hand_out(other.pool, [12], ["A"], [1], 1)


@interpreted
@pytest.mark.parametrize("wrong", ["a page", "a call", "on the device"])
def test_what_no_replay_has_room_for_is_sent_as_before(launches, monkeypatch, wrong):
    toy = prefilled()
    toy.session.flush()
    monkeypatch.setattr(kept_calls, "ROOMS", (2,))
    monkeypatch.setattr(kept_calls, "CALLS", 3)
    sent, send = [], Staging.send
    monkeypatch.setattr(Staging, "send", lambda self, words, out: (sent.append(len(words)), send(self, words, out)))
    toy.pool.allocate([12, 13], owner="C")
    toy.session.flush()
    assert not sent
    if wrong == "a page":
        toy.pool.release([12, 13, 13], owner="C")
    elif wrong == "a call":
        for _ in range(4):
            toy.pool.share([], owner="D")
            toy.pool.reject([12])
    else:
        monkeypatch.setattr(slot_events, "pages_of", torch.tensor)
        toy.pool.release([12], owner="C")
    toy.session.flush()
    assert len(sent) == 1


@interpreted
def test_what_is_compiled_ahead_takes_no_turn_of_the_ring(launches, monkeypatch):
    toy = prefilled()
    toy.session.flush()
    ring = toy.pool._events._kept._ring
    turn = ring._turn
    monkeypatch.setattr(compile_ahead._COLLECTING, "mode", object())
    monkeypatch.setattr(bound_launch, "launch_or_compile", lambda *_, **__: None)
    toy.pool.allocate([12], owner="C")
    toy.session.flush()
    assert ring._turn == turn == int(ring.turn[0])


@interpreted
def test_steps_of_one_shape_share_the_launches_and_not_the_reports(launches):
    toy = Toy(history=False)
    request = toy.add("A", [5, 6, 7])

    def step(slot: int) -> None:
        toy.take("A", [slot])
        with toy.session.step(toy.plan({"A": [slot]})), toy.session.forward():
            request.stored += 1

    step(6)
    (plan,) = toy.session.inputs.view().kept_plans.values()
    kept = dict(plan.launches)
    assert sorted(kept) == ["ahead", "check_writes", "held before", "store", "walk"]
    step(7)
    assert not toy.found()
    toy.table[request.row, 1] = 9  # a free slot
    step(8)
    assert plan.launches == kept
    assert {(v.why, v.slot) for v in toy.found()} == {("READ_AFTER_FREE", 9)}


@interpreted
@pytest.mark.parametrize("in_flight", [False, True])
def test_steps_share_the_launches_whatever_history_they_come_with(launches, in_flight):
    toy = Toy(history=False)
    request = toy.add("A", [5, 6, 7, 8, 9])

    def step(slot: int, *told: int) -> None:
        toy.take("A", [slot])
        history = torch.tensor([told])  # another tensor, of another width, in each step
        batch = toy.plan({"A": [slot]}, history=history, history_lens=[len(told)], in_flight=in_flight)
        with toy.session.step(batch), toy.session.forward():
            request.stored += 1

    step(6, 5)
    (plan,) = toy.session.inputs.view().kept_plans.values()
    kept = set(plan.launches)
    assert len(kept) == (2 if in_flight else 3)
    step(7, 5, 6)
    step(8, 5, 6, 7)
    assert set(plan.launches) == kept
    assert plan.history is None
    assert toy.found() == []
    step(9, 5, 4, 7, 8)
    assert {(v.why, v.position) for v in toy.found()} == {("WRONG_TOKEN", 1)}


@interpreted
def test_steps_that_complete_fewer_slots_than_tokens_share_the_launches_of_what_they_write(launches):
    kv, table = [(torch.zeros(16, 1, 4), torch.zeros(16, 1, 4))], torch.zeros(3, 8, dtype=torch.int32)
    session = kvcanary_fx.install_canary(KVPool(kv, table, tokens_per_slot=2), mode="log", health_every=0)
    assert session is not None
    session.mark_ready()
    session.pool.allocate([5, 6, 7], owner="A")
    table[1, :3] = torch.tensor([5, 6, 7], dtype=torch.int32)

    def step(start: int, slots: list[int]) -> None:
        with session.step(Batch([9, 9], slots, [1], [start], [2], request_ids=["A"])), session.forward():
            pass

    step(0, [0, 5])
    (plan,) = session.inputs.view().kept_plans.values()
    kept = dict(plan.launches)
    assert set(kept) == {"walk", "check_writes", "store", "ahead", "held before"}
    step(2, [0, 6])
    step(4, [0, 7])
    assert plan.launches == kept
    assert session.violations() == []
    assert session.pool.space.positions[[5, 6, 7]].tolist() == [0, 1, 2]
    table[1, 0] = 9  # a free slot
    step(6, [0, 8])
    assert ("READ_AFTER_FREE", 9) in {(v.why, v.slot) for v in session.violations()}


@interpreted
def test_reports_are_those_of_calls_told_one_by_one(launches, monkeypatch):
    together = faulty_life(prefilled())
    assert max(launches) >= 4
    monkeypatch.undo()
    assert together == faulty_life(prefilled())
    assert {why for why, *_ in together} == {
        "DOUBLE_ALLOCATE", "SHARE_AFTER_FREE", "DOUBLE_FREE", "FOREIGN_FREE", "RESERVED_SLOT", "OUT_OF_RANGE",
    }  # fmt: skip


@interpreted
def test_the_calls_of_a_step_are_one_launch_and_two_where_one_request_gets_what_another_released(launches):
    toy = prefilled()
    launches.clear()
    for slot in (7, 8, 9):
        toy.pool.allocate([slot], owner="B")
    toy.pool.share([7, 8], owner="C")
    toy.pool.release([7, 8], owner="C")
    toy.run({"A": [6]})
    assert launches == [6]
    toy.pool.release([7, 8], owner="B")
    toy.pool.allocate([8], owner="C")  # the bytes of what was released are compared before anybody gets it
    assert launches == [6, 1]
    toy.pool.release([9], owner="B")
    assert toy.found() == []
    assert launches == [6, 1, 2]


@interpreted
def test_counting_sends_nothing(launches):
    """Seen in a server under load: a thread that counts sent the calls in a stream of its own.  Those that the engine
    sent meanwhile took their place, and blocks of the prefix cache were handed out before it gave them up."""
    toy = prefilled()
    launches.clear()
    toy.pool.allocate([7], owner="B")
    assert toy.session.stats(drain=False).slots is None
    assert launches == []
    toy.run({"A": [6]})  # allocates one more
    assert launches == [2]
    assert toy.found() == []


@interpreted
def test_owners_for_a_graph_that_is_replayed_take_the_calls_along(launches):
    """Seen in a loop of drafts that is one graph: a page handed out in the step itself was reported as free."""
    toy = prefilled()
    with toy.session.step():
        toy.pool.allocate([7], owner="B")
        launches.clear()
        toy.session.owners(["B"])
        assert launches == [1]


def random_life(seed: int) -> tuple:
    """Calls of an allocator, right and wrong, and writes to what was just allocated; what is reported and known."""
    rng, toy = random.Random(seed), Toy()
    toy.pool.allocate([3, 4, 5], owner="A")
    toy.pool.adopt([3, 4, 5], [5, 6, 7], range(3), owner="A")
    kinds = (list, tuple, torch.tensor, lambda pages: np.array(pages, dtype=np.int32))
    toy.kv[0][0].view(torch.int32)[rng.choice([3, 4]), 0, 1] ^= 4  # found when the slot is released, once
    names = ["allocate", "release", "share", "hand_over", "forget", "reject"]
    for name in rng.choices(names, (3, 3, 1, 1, 1, 1), k=10):
        pages, size = [rng.randint(2, 6) for _ in range(rng.randint(1, 3))], rng.choice([1, 1, 1, 2])
        owner = () if name in ("forget", "reject") else (rng.choice(["A", "B", None]),)
        getattr(toy.pool, name)(rng.choice(kinds)(pages), *owner, page_size=size)
        if name == "allocate":  # the new owner may write at once
            for page in pages:
                toy.kv[0][0][page * size : (page + 1) * size] = rng.random()
    found = sorted((v.check, v.why or "", v.slot, v.request or "", v.half) for v in toy.found())
    return found, toy.pool.space.block[:-1].tolist(), toy.pool.digests.tolist(), toy.pool.live_slots


@interpreted
def test_random_calls_leave_what_they_leave_told_one_by_one(launches, monkeypatch):
    seeds = (0, 1, 4, 8, 12)  # not in all of them the flipped bit is found
    together = [random_life(seed) for seed in seeds]
    monkeypatch.undo()
    assert together == [random_life(seed) for seed in seeds]
    assert {check for found, *_ in together for check, *_ in found} >= {"content", "owner"}


def slots_taken(seed: int, how: str) -> tuple:
    """Requests take slots, now and then what another has released; what is reported and known."""
    rng, toy = random.Random(seed), prefilled()
    toy.kv[0][0].view(torch.int32)[4, 0, 1] ^= 4  # found when the slot is released
    for _ in range(4):
        toy.pool.release([rng.randint(3, 8)], owner="A")
        given = [
            ([rng.randint(2, 10) for _ in range(rng.choice([0, 1, 1, 1, 2]))], rng.choice(["A", "B", "C", "new", None]))
            for _ in range(rng.randint(0, 5))
        ]
        if how == "one by one":
            for slots, owner in given:
                toy.pool.allocate(slots, owner)
        else:
            toy.pool.allocate_each(given, written_in_step=how == "written in the step")
        if how == "written in the step":
            toy.session.flush()
        toy.kv[0][0][[slot for slots, _ in given for slot in slots]] = rng.random()  # the new owners may write at once
    found = sorted((v.check, v.why or "", v.slot, v.request or "", v.half, v.position) for v in toy.found())
    return found, toy.pool.space.block[:-1].tolist(), toy.pool.digests.tolist(), toy.pool.live_slots


@interpreted
@pytest.mark.parametrize("how", ["at once", "written in the step"])
def test_slots_taken_at_once_leave_what_calls_one_by_one_leave(launches, how):
    seeds = range(4)  # Dynamo compiles no ninth model of one class
    together = [slots_taken(seed, how) for seed in seeds]
    assert together == [slots_taken(seed, "one by one") for seed in seeds]
    assert {check for found, *_ in together for check, *_ in found} >= {"content", "owner"}


@interpreted
@pytest.mark.parametrize("replayed", [True, False], ids=["a replay", "launches"])
def test_what_is_released_and_handed_out_again_in_one_launch_is_compared_before_its_bytes_are_forgotten(
    launches, monkeypatch, replayed
):
    if not replayed:
        monkeypatch.setattr(KeptCalls, "takes", lambda *_: False)
    toy = prefilled()
    launches.clear()
    toy.kv[0][0].view(torch.int32)[4, 0, 1] ^= 4
    toy.pool.release([3, 4, 5], owner="A")
    toy.pool.allocate_each([([4], "B"), ([5], "C")], written_in_step=True)
    assert launches == []
    toy.session.flush()
    assert launches == [3]
    toy.kv[0][0][4:6] = 1.0  # the new owners write
    toy.pool.release([4], owner="B")
    toy.pool.release([5], owner="C")
    (found,) = toy.found()
    assert (found.check, found.slot, found.request, found.position) == ("content", 4, "A", 1)


@interpreted
def test_slots_taken_at_once_wait_with_the_calls_before_them(launches):
    toy = prefilled()
    toy.session.ids.hash("B"), toy.session.ids.hash("C")
    launches.clear()
    toy.pool.allocate_each([([7], "B"), ([8], "C"), ([9, 10], "B")])
    toy.pool.release([9], owner="B")
    toy.pool.allocate_each([([11], "C"), ([12], "B")])
    assert launches == []
    toy.pool.allocate_each([([13], "C"), ([9], "C")])  # the bytes of what was released are compared before
    assert launches == [7]
    assert toy.found() == []
    assert launches == [7, 1]


@interpreted
def test_slots_taken_at_once_that_are_more_than_one_launch_has_room_for_are_told_by_themselves(launches, monkeypatch):
    monkeypatch.setattr(slot_events, "SLOTS", 2)
    toy = prefilled()
    toy.session.ids.hash("B"), toy.session.ids.hash("C")
    launches.clear()
    toy.pool.allocate_each([([7], "B"), ([8, 9, 10], "C"), ([11], "B")])
    toy.pool.flush()
    assert launches == [1, 1]
    assert (toy.pool.space.flags[[7, 8, 9, 10, 11]] // REFERENCE).tolist() == [1] * 5
    assert toy.found() == []


@interpreted
@pytest.mark.parametrize("wrong", [[1.5], ["a"]])
def test_a_wrong_slot_among_those_taken_at_once_is_refused_by_name_and_those_before_it_are_told(launches, wrong):
    toy = prefilled()
    with pytest.raises(EngineError, match="slots"):
        toy.pool.allocate_each([([7], "B"), ([8], "C"), (wrong, "C")])
    assert toy.pool.live_slots == 5
    assert (toy.pool.space.flags[[7, 8]] // REFERENCE).tolist() == [1, 1]


@interpreted
def test_bytes_of_a_slot_that_was_released_are_compared_before_the_next_owner_gets_it(launches):
    toy = prefilled()
    toy.kv[1][0].view(torch.int32)[4, 0, 2] ^= 1 << 7
    toy.pool.release([3, 4, 5], owner="A")
    toy.pool.allocate([4], owner="B")
    toy.kv[1][0][4] = 7.0  # B's to write
    (v,) = toy.found()
    assert (v.check, v.phase, v.slot, v.request) == ("content", "life", 4, "A")


@interpreted
@pytest.mark.parametrize("few", [64, 1], ids=["looked at one by one", "too many to look at"])
def test_another_page_than_those_released_waits_unless_they_are_too_many_to_look_at(launches, monkeypatch, few):
    monkeypatch.setattr(slot_events, "FEW", few)
    toy = prefilled()
    toy.pool.allocate([6], owner="B")
    toy.pool.flush()
    launches.clear()
    toy.pool.release([6], owner="B")
    toy.pool.release([4, 5], owner="A")
    toy.pool.allocate([7], owner="C")
    toy.pool.flush()
    assert launches == ([3] if few == 64 else [2, 1])
    assert not toy.found()


@interpreted
def test_bytes_of_released_slots_may_be_rewritten_once_the_device_was_told(launches):
    toy = prefilled()
    toy.pool.release([3, 4, 5], owner="A")
    toy.session.flush()
    toy.kv[0][0][3:6] = float("nan")
    assert toy.found() == []


@pytest.mark.parametrize("together", [pytest.param(True, marks=interpreted), False])
def test_pages_stand_for_all_of_their_slots(together, request):
    if together:
        request.getfixturevalue("launches")
    toy, by_slots = Toy(), Toy()
    pages, slots = dict(slots=[1, 3], page_size=4), dict(slots=[4, 5, 6, 7, 12, 13, 14, 15])
    pages["slots"] = np.array(pages["slots"], dtype=np.int32)
    for pool, given in ((toy.pool, pages), (by_slots.pool, slots)):
        pool.allocate(**given, owner="A")
        pool.share(**given, owner="B")
        pool.hand_over(**given, owner="B")
        pool.release(**given, owner="B")
        assert pool.live_slots == 8
    assert torch.equal(toy.pool.space.block, by_slots.pool.space.block)
    assert [flags // 256 for flags in toy.pool.space.flags.tolist()[4:8]] == [1] * 4
    toy.pool.release([1], page_size=4)
    toy.pool.release([6], page_size=4)  # the slots from 24 on
    assert {(v.why, v.slot) for v in toy.found()} == {("OUT_OF_RANGE", slot) for slot in range(24, 28)}
    with pytest.raises(EngineError, match="page_size is 0: give a whole number of slots, at least 1"):
        toy.pool.release([1], page_size=0)


@interpreted
def test_a_call_that_names_more_than_is_kept_is_told_by_itself_in_its_place(launches, monkeypatch):
    monkeypatch.setattr("kvcanary_fx.engine.slot_events.PAGES", 4)
    toy = Toy()
    toy.pool.allocate([3, 4], owner="A")
    toy.pool.release([3, 4, 5, 6, 7], owner="A")
    toy.pool.allocate([3, 4], owner="B")
    toy.pool.allocate([5, 6, 7], owner="B")
    assert sorted((v.why, v.slot) for v in toy.found()) == [("DOUBLE_FREE", slot) for slot in (5, 6, 7)]
    assert toy.pool.space.flags.tolist()[3:8] == [256] * 5


@interpreted
def test_calls_may_come_in_inference_mode_and_outside_of_it(launches):
    toy = Toy()
    for number, inside in enumerate((True, False, True)):
        with torch.inference_mode(inside):
            toy.pool.allocate([3 + number, 7 + number], owner="A")
            toy.pool.release([7 + number], owner="A")
            toy.pool.flush()
    assert toy.found() == []


@interpreted
def test_a_violation_belongs_to_the_step_in_which_the_allocator_did_it(launches):
    toy = prefilled()
    toy.pool.release([9], owner="B")  # behind the first step
    toy.run({"A": [6]})
    (v,) = toy.found()
    assert (v.why, v.step) == ("DOUBLE_FREE", 1)


@interpreted
@pytest.mark.parametrize("wrong", [4.0, "4", None, 2**70], ids=str)
def test_a_call_with_something_else_among_its_slots_is_refused_by_name_and_the_others_are_told(launches, wrong):
    toy = Toy()
    toy.pool.allocate([5], owner="A")
    toy.pool.allocate([6, wrong], owner="A")
    toy.pool.allocate([7], owner="A")
    with pytest.raises(EngineError, match=re.escape(f"slots are integers, and were given as {[6, wrong]}")):
        toy.session.flush()
    toy.session.flush()
    assert toy.pool.space.flags[[5, 6, 7]].tolist() == [256, 0, 256]


@interpreted
def test_behind_calls_that_were_left_out_pages_that_are_released_are_known(launches):
    """Of the calls that were looked at there are fewer."""
    toy = prefilled()
    toy.pool.share([3], owner="A")
    for _ in range(2):
        toy.pool.share([4, "a"], owner="A")
    toy.pool.allocate([9], owner="A")
    for _ in range(2):
        with pytest.raises(EngineError, match="left out"):
            toy.session.flush()
    toy.pool.release([9], owner="A")
    launches.clear()
    toy.pool.allocate([9], owner="A")
    assert launches == [3], "before the new owner writes"


@interpreted
@pytest.mark.parametrize("how", ["a call like most", "at once", "a tuple"])
def test_pages_that_are_released_behind_an_allocation_are_known_to_the_next(launches, how):
    toy = prefilled()
    toy.pool.release([3], owner="A")
    toy.pool.allocate([9], owner="A")  # looks at what was released so far
    if how == "at once":
        toy.pool.release_each([([4], "A"), ([5], "A")])
    else:
        toy.pool.release([4] if how == "a call like most" else (4,), owner="A")
    launches.clear()
    toy.pool.allocate([4], owner="A")
    assert launches == [4 if how == "at once" else 3]


@interpreted
def test_something_that_can_be_in_no_set_is_refused_by_name(launches):
    toy = prefilled()
    toy.pool.release([3], owner="A")
    with pytest.raises(EngineError, match="slots"):
        toy.pool.allocate([9, [10]], owner="A")
    toy.pool.release([4, [5]], owner="A")
    with pytest.raises(EngineError, match=re.escape("were given as [4, [5]]")):
        toy.pool.allocate([9], owner="A")
    toy.pool.flush()
    assert (toy.pool.space.flags[[3, 4, 5, 9]] // REFERENCE).tolist() == [0, 1, 1, 0]


def in_thread(work) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.3)
    return thread


@interpreted
def test_while_another_thread_sends_calls_an_allocation_waits_only_for_pages_that_may_be_released(launches):
    toy = prefilled()
    toy.pool.release([3], owner="A")
    toy.pool.allocate([9], owner="B")  # looks at what was released so far
    with toy.pool.calls._lock:
        other = in_thread(lambda: toy.pool.allocate([10], owner="B"))
        assert not other.is_alive()
        same = in_thread(lambda: toy.pool.allocate([3], owner="B"))
        assert same.is_alive()
    same.join(10)
    launches.clear()
    toy.session.flush()
    assert launches == [1], "the others were sent before it"
    toy.pool.release([10], owner="B")
    with toy.pool.calls._lock:
        unseen = in_thread(lambda: toy.pool.allocate([11], owner="B"))
        assert unseen.is_alive(), "nobody has looked at the release yet"
    unseen.join(10)


@pytest.mark.parametrize("seed", range(20))
def test_calls_one_by_one_are_the_same_numbers_with_fewer_questions(seed):
    rng = random.Random(seed)
    calls: list = []
    for _ in range(rng.randint(1, 9)):
        pages = [rng.randint(0, 2**40) for _ in range(rng.choice([1, 1, 3, 20]))]
        held = array("q", pages) if rng.random() < 0.1 else pages
        calls.append((rng.choice(list(Event)), held, rng.randint(-(2**63), 2**63 - 1), rng.choice([16] * 20 + [1])))
    alone, known = in_words_one_by_one(calls), in_words(calls)
    assert (alone is None) == (known is None)
    if alone is not None and known is not None:
        assert (alone.rows, alone.pages, alone.released) == (known.rows, known.pages, known.released)
        assert [*itertools.chain(*alone.parts)] == [*itertools.chain(*known.parts)]


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("source", [list, torch.tensor, lambda slots: torch.tensor(slots, device="cuda")])
def test_on_a_gpu_reports_are_those_of_the_cpu_whatever_the_slots_are_given_in(source):
    def told(device: str) -> list[tuple]:
        toy = prefilled(device=device)
        given = {name: getattr(toy.pool, name) for name in ("allocate", "share", "release", "hand_over")}
        for name, call in given.items():
            if device == "cuda":
                setattr(toy.pool, name, lambda slots, owner=None, call=call: call(source(slots), owner))
        return faulty_life(toy)

    assert told("cuda") == told("cpu")


@pytest.mark.gpu
def test_on_a_gpu_calls_that_became_a_replay_report_what_the_cpu_does():
    def told(device: str) -> list[tuple]:
        toy = prefilled(device=device)
        for _ in range(3 * replay.ONE_BY_ONE):  # more than the ring has entries
            toy.pool.allocate([12, 13], owner="C")
            toy.pool.share([13], owner="B")
            toy.pool.release([12, 13], owner="C")
            toy.pool.release([13], owner="B")
            toy.session.flush()
        if device == "cuda":
            ((_, replayed),) = [run for form, run in toy.pool._events._kept._runs.items() if form[2]]
            assert isinstance(replayed.graph, torch.cuda.CUDAGraph)
        life = faulty_life(toy)
        toy.kv[0][0].view(torch.int32)[5, 0, 2] ^= 1 << 7
        toy.pool.release([5], owner="B")  # which compares the bytes of what it frees
        return life, [(v.slot, v.layer, v.half, v.phase) for v in toy.found() if v.check == "content"]

    assert told("cuda") == told("cpu")


@pytest.mark.gpu
def test_on_a_gpu_pages_that_are_handed_out_at_once_are_those_of_calls_that_wait():
    toy, other = prefilled(device="cuda"), prefilled(device="cuda")
    assert handed_out(toy, other, steps=4 * replay.ONE_BY_ONE) > replay.ONE_BY_ONE
    assert faulty_life(toy) == faulty_life(other) != []
    assert torch.equal(toy.pool.space.flags, other.pool.space.flags)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_on_a_gpu_calls_that_a_step_takes_along_leave_what_they_leave_sent_before_it(seed):
    compare_steps(prefilled(device="cuda"), prefilled(device="cuda"), seed)


@pytest.mark.gpu
def test_slots_given_on_the_device_may_be_changed_by_the_engine_at_once():
    toy = Toy(device="cuda")
    slots = torch.tensor([3, 4], device="cuda")
    toy.pool.allocate(slots, owner="A")
    slots.fill_(9)
    assert toy.pool.space.flags[[3, 4, 9]].tolist() == [256, 256, 0]


@pytest.mark.gpu
def test_calls_in_a_capture_are_refused_and_those_before_it_have_to_be_told():
    toy = Toy(device="cuda")
    torch.cuda.synchronize()
    scratch = torch.zeros(1, device="cuda")
    with toy.session.step():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            scratch.add_(1)
            with pytest.raises(EngineError, match="while a CUDA graph is being captured"):
                toy.pool.allocate([4], owner="A")
        toy.pool.allocate([3], owner="A")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            scratch.add_(1)
            with pytest.raises(EngineError, match=r"call session.flush\(\) before"), toy.session.forward():
                pass
    assert toy.pool.space.flags[[3, 4]].tolist() == [256, 0]


@pytest.mark.gpu
def test_calls_that_are_sent_in_another_stream_come_behind_those_before_them():
    toy = Toy(device="cuda")
    torch.cuda._sleep(400_000_000)
    toy.pool.allocate([3], owner="A")
    toy.session.flush()
    toy.pool.release([3], owner="A")
    with torch.cuda.stream(torch.cuda.Stream()):
        toy.session.flush()
    toy.pool.allocate([3], owner="B")
    toy.session.flush()
    assert toy.pool.space.flags[3].item() == 256
    assert toy.found() == []


@pytest.fixture
def handed_over(launches, monkeypatch):
    """Sessions hand numbers over as on a GPU; how many launches there were for nothing but these."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter stands in for a missing GPU")
    alone, launch = [], Handed.launch_at
    monkeypatch.setattr(StepInputs, "_gathers", lambda self: not self._captured)
    monkeypatch.setattr(gathered, "hands_over", lambda device: True)
    monkeypatch.setattr(steps, "hands_over", lambda device: True)
    monkeypatch.setattr(Handed, "launch_at", lambda self, *put: (alone.append(put), launch(self, *put)))
    return alone


def steps_alike(toy: Toy) -> tuple:
    """Steps that differ in their numbers alone, each behind calls of the allocator, the last behind none."""
    toy.add("B", list(range(20, 34)))
    toy.kv[0][0].view(torch.int32)[5, 0, 1] ^= 4
    for place, slot in enumerate(range(10, 18)):
        if place == 6:
            toy.pool.release([5], owner="A")
        toy.run({"B": [slot]})  # allocates it
    alike = dict(input_ids=[1], slots=[18], request_rows=[0], prefix_lens=[0], extend_lens=[1])
    for _ in range(3):
        with toy.session.step(alike):
            pass
    found = [(v.check, v.slot, v.request, v.step, v.forward) for v in toy.found()]
    buffers = [toy.session.inputs.buffer(name) for name in ("input_ids", "prefix_lens", "owners", "positions")]
    return found, [None if b is None else b.tolist() for b in buffers], toy.session.inputs.counts.tolist()


@interpreted
def test_the_numbers_of_a_step_travel_with_the_calls_before_it(handed_over, monkeypatch):
    taken_along, sent = [], Waiting.sent
    monkeypatch.setattr(Waiting, "sent", lambda self: (taken_along.append(1), sent(self)))
    toy = prefilled(history=False)
    handed_over.clear()
    got = steps_alike(toy)
    assert len(taken_along) >= 5  # steps whose batch is like the one before, and calls
    launched = len(handed_over)
    monkeypatch.setattr(Steps, "_let_wait", lambda self: None)
    toy = prefilled(history=False)
    handed_over.clear()
    assert got == steps_alike(toy)
    assert len(handed_over) == launched + len(taken_along)
    assert got[0]


@interpreted
def test_numbers_of_a_step_that_no_replay_takes_along_are_sent(handed_over, monkeypatch):
    toy = prefilled(history=False)
    got = steps_alike(toy)
    monkeypatch.setattr(kept_calls, "ALONG", 0)
    assert got == steps_alike(prefilled(history=False))
    monkeypatch.setattr(KeptCalls, "apply", lambda *_: False)
    assert got == steps_alike(prefilled(history=False))


@interpreted
def test_numbers_of_a_step_that_cannot_begin_are_sent_to_no_place(handed_over):
    toy = prefilled(history=False)
    steps_alike(toy)
    alike = dict(input_ids=[1], slots=[18], request_rows=[0], prefix_lens=[0], extend_lens=[1])
    toy.pool.allocate([20], owner="B")
    toy.pool.allocate([21, "a"], owner="B")  # found where it is sent, when the batch was looked at
    handed_over.clear()
    with pytest.raises(EngineError, match="slots"), toy.session.step(alike | dict(input_ids=[2])):
        pass
    assert int(toy.session.inputs.buffer("input_ids")[0]) == 1
    with toy.session.step(alike | dict(input_ids=[3])):
        assert int(toy.session.inputs.buffer("input_ids")[0]) == 3
    assert handed_over == []


@interpreted
def test_numbers_that_are_filled_in_outside_of_a_step_wait_for_nothing(handed_over):
    """As for a graph that an engine replays by itself, and for a batch without requests."""
    toy = prefilled(history=False)
    inputs = toy.session.inputs
    alike = dict(input_ids=[1], slots=[18], request_rows=[0], prefix_lens=[0], extend_lens=[1])
    for token in range(20, 25):
        inputs.fill_from(alike | dict(input_ids=[token]))
        assert int(inputs.buffer("input_ids")[0]) == token
    assert inputs.may_come_again
    LayerChecks(toy.session).reserve(1, 1)
    assert inputs.counts.tolist()[:2] == [0, 0]


def calls_of_a_kind(how: str, seed: int) -> tuple:
    """Slots that are shared, handed over and released, right and wrong; what is reported and known."""
    rng, toy = random.Random(seed), prefilled()
    toy.pool.allocate(range(6, 12), owner="B")
    for _ in range(6):
        name = rng.choice(["release", "share", "hand_over"])
        given = [
            ([rng.randint(2, 12) for _ in range(rng.choice([0, 1, 1, 2]))], rng.choice(["A", "B", "C", "new", None, 7]))
            for _ in range(rng.randint(0, 5))
        ]
        if how == "at once":
            getattr(toy.pool, f"{name}_each")(given)
        else:
            for slots, owner in given:
                getattr(toy.pool, name)(slots, owner)
    found = sorted((v.check, v.why or "", v.slot, str(v.request), v.half, v.position) for v in toy.found())
    return found, toy.pool.space.block[:-1].tolist(), toy.pool.live_slots


@interpreted
def test_calls_of_a_kind_at_once_leave_what_they_leave_one_by_one(launches):
    seeds = range(4)
    together = [calls_of_a_kind("at once", seed) for seed in seeds]
    assert together == [calls_of_a_kind("one by one", seed) for seed in seeds]
    assert any(found for found, *_ in together)


def more_than_a_launch(how: str) -> tuple:
    """Shares and releases of more calls, or more pages, than a launch has room for: what is found and left behind."""
    toy = prefilled()
    toy.pool.allocate(range(6, 12), owner="B")
    for shift in range(3):
        given = [([6 + (slot + shift) % 6, 11], "B" if slot % 2 else None) for slot in range(4)]
        if how == "at once":
            toy.pool.share_each(given)
        else:
            for slots, owner in given:
                toy.pool.share(slots, owner)
    toy.pool.release_each([([3], "A"), ([4], "B"), ([5], "A")])
    found = sorted((v.check, v.why or "", v.slot, str(v.request)) for v in toy.found())
    return found, toy.pool.space.block[:-1].tolist(), toy.pool.live_slots


@interpreted
@pytest.mark.parametrize(("limit", "most"), [("CALLS", 5), ("PAGES", 7)])
def test_calls_at_once_that_one_launch_has_no_room_for_are_sent_in_several(launches, monkeypatch, limit, most):
    alone = more_than_a_launch("one by one")
    monkeypatch.setattr(slot_events, limit, most)
    launches.clear()
    assert more_than_a_launch("at once") == alone
    assert alone[0]
    assert len(launches) > 1
    assert max(launches) <= 5


@interpreted
def test_a_wrong_slot_among_those_released_at_once_is_refused_by_name_and_those_before_it_are_told(launches):
    toy = prefilled()
    with pytest.raises(EngineError, match="slots"):
        toy.pool.release_each([([3], "A"), ([4], "A"), (["a"], "A"), ([5], "A")])
    assert (toy.pool.space.flags[[3, 4, 5]] // REFERENCE).tolist() == [0, 0, 1]
    assert toy.pool.live_slots == 1


@interpreted
@pytest.mark.parametrize("wrong", ["a", 2**63, 1.5])
@pytest.mark.parametrize("sent", [False, True], ids=["first calls", "later calls"])
def test_of_calls_at_once_the_one_with_a_wrong_slot_behind_others_is_left_out_when_they_are_sent(launches, wrong, sent):
    toy = prefilled()
    toy.pool.release([3], "A") if sent else toy.pool.share([3], "A")
    if sent:
        toy.pool.flush()
        toy.pool.share([4], "A")
    toy.pool.share_each([([4], "A"), ([5], "A"), ([3, 4, wrong], "A"), ([5], "A")])
    with pytest.raises(EngineError, match="left out"):
        toy.pool.flush()
    toy.pool.flush()
    assert (toy.pool.space.flags[[3, 4, 5]] // REFERENCE).tolist() == ([0, 3, 3] if sent else [2, 2, 3])
    assert not toy.pool.calls.pending


@pytest.mark.usefixtures("launches")
@interpreted
def test_calls_of_several_threads_arrive_once_each_and_in_their_order_while_another_sends_them(monkeypatch):
    """An engine's allocator in a thread, and another one that reads violations."""
    toy, calls, sent = prefilled(), 20000, []
    toy.pool.allocate([12], owner="A")
    toy.pool.flush()
    owners = {toy.session.ids.hash(name): name for name in ("B", "C")}

    def send(self, into_step=False):
        taken = self._calls[:]
        del self._calls[: len(taken)]
        sent.extend(one_by_one(taken))
        return True

    def share(name: str) -> None:
        for number in range(calls):
            toy.pool.share([number, number + 1], owner=name)

    monkeypatch.setattr(slot_events.SlotEvents, "_send_few", send)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # several calls come in between
    try:
        threads = [threading.Thread(target=share, args=(name,)) for name in owners.values()]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            toy.pool.flush()
    finally:
        sys.setswitchinterval(before)
    toy.pool.flush()
    for whose in owners:
        assert [list(pages) for _, pages, owner, _ in sent if owner == whose] == [[n, n + 1] for n in range(calls)]

"""Launches that come again are captured once, and replayed from then on."""

from __future__ import annotations

import pytest
import torch
from gpu_on_cpu import Graph, use_gpu_kernels
from toy import Toy

from kvcanary_fx.kernels import replay
from kvcanary_fx.kernels.compile_ahead import _COLLECTING
from kvcanary_fx.kernels.replay import ONE_BY_ONE, Replayed
from kvcanary_fx.kernels.slots import gpu
from kvcanary_fx.kernels.slots.space import REFERENCE, Column, Flag, SpaceCount

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in for a missing GPU")


@pytest.fixture
def graphs(monkeypatch):
    made = []

    def capture(device, run):
        made.append(Graph(run))
        return made[-1]

    monkeypatch.setattr(replay, "capture", capture)
    return made


def test_what_runs_often_is_captured_once(graphs):
    replayed, ran = Replayed(torch.device("cpu")), []
    for _ in range(ONE_BY_ONE - 1):
        replayed(lambda: ran.append("run"))
    assert not graphs
    for _ in range(4):
        replayed(lambda: ran.append("run"))
    (graph,) = graphs
    assert graph.replays == 3
    assert len(ran) == ONE_BY_ONE + 3


def test_what_is_compiled_ahead_was_not_run(graphs):
    replayed = Replayed(torch.device("cpu"))
    _COLLECTING.mode = object()
    try:
        for _ in range(2 * ONE_BY_ONE):
            replayed(lambda: None)
    finally:
        _COLLECTING.mode = None
    assert not graphs


def decode(toy: Toy, slot: int, **fields) -> None:
    toy.take("A", [slot])
    with toy.session.step(toy.plan({"A": [slot]}, **fields)), toy.session.forward():
        toy.requests["A"].stored += 1


@interpreted
def test_the_checks_around_a_decode_step_become_one_replay_and_find_the_same(graphs, monkeypatch):
    use_gpu_kernels(monkeypatch.setattr)
    toy = Toy(history=False)
    request = toy.add("A", list(range(1, 15)))
    for slot in range(3, 3 + ONE_BY_ONE):
        decode(toy, slot)
    (plan,) = toy.session.inputs.view().kept_plans.values()
    graph = plan.launches["ahead"].graph
    assert graph in graphs
    launched = []
    launch = gpu._launch
    monkeypatch.setattr(gpu, "_launch", lambda *args: (launched.append(args[2]), launch(*args)))
    decode(toy, 11)
    assert (graph.replays, launched) == (1, ["walk", "check_writes", "store"])
    assert not toy.found()
    toy.table[request.row, 1] = 20  # a free slot
    decode(toy, 12)
    assert {(v.why, v.slot) for v in toy.found()} == {("READ_AFTER_FREE", 20)}
    assert graph.replays == 2
    decode(toy, 13, history=torch.tensor([list(range(1, 15))]), history_lens=[14])
    assert graph.replays == 2, "the history is another tensor in each step"


@interpreted
@pytest.mark.parametrize("steps", [1, ONE_BY_ONE + 1])
def test_a_forward_that_fails_has_stored_nothing(graphs, monkeypatch, steps):
    use_gpu_kernels(monkeypatch.setattr)
    toy = Toy(history=False)
    toy.add("A", list(range(1, 20)))
    for slot in range(3, 3 + steps):
        decode(toy, slot)
    space, slot = toy.session.pool.space, 3 + steps
    before, counted = space.block.clone(), int(space.counters[SpaceCount.RECORDED])

    def fail() -> None:
        with pytest.raises(ZeroDivisionError), toy.session.step(toy.plan({"A": [slot]})), toy.session.forward():
            assert int(space.flags[slot]) & Flag.WRITTEN, "stored ahead"
            toy.session.pool.share([slot], owner="B")
            toy.session.flush()
            raise ZeroDivisionError

    toy.take("A", [slot])
    fail()
    columns = [Column.TOKEN, Column.POSITION, Column.CHAIN, Column.CHAIN + 1]
    assert torch.equal(space.block[:-1, columns], before[:-1, columns])
    assert int(space.flags[slot]) == 2 * REFERENCE | Flag.DUE, "what was told meanwhile stays"
    assert int(space.counters[SpaceCount.RECORDED]) == counted
    assert not toy.found()
    toy.session.pool.release([slot], owner="B")
    toy.requests["A"].stored += 1  # as if it had run
    decode(toy, slot + 1)
    assert ("NEVER_WRITTEN", slot) in {(v.why, v.slot) for v in toy.found()}


@interpreted
def test_a_forward_whose_checks_fail_takes_nothing_back(graphs, monkeypatch):
    """What the slots of the step before had held is still in memory."""
    use_gpu_kernels(monkeypatch.setattr)
    toy = Toy(history=False)
    toy.add("A", [1, 2, 3])
    decode(toy, 3)
    before = toy.session.pool.space.block.clone()

    def fail(*args: object) -> None:
        raise ZeroDivisionError

    toy.take("A", [4])
    plan = toy.plan({"A": [4]})
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(gpu, "check_and_store", fail)
        with toy.session.step(plan), toy.session.forward():
            pass
    columns = [Column.TOKEN, Column.POSITION, Column.CHAIN, Column.CHAIN + 1]
    assert torch.equal(toy.session.pool.space.block[:-1, columns], before[:-1, columns])
    assert int(toy.session.pool.space.flags[3]) & Flag.WRITTEN


@interpreted
@pytest.mark.parametrize("most", [1, 2])
def test_what_long_prompts_write_is_stored_behind_the_model(graphs, monkeypatch, most):
    use_gpu_kernels(monkeypatch.setattr)
    monkeypatch.setattr(gpu, "MOST_AHEAD", most)
    toy = Toy(history=False)
    toy.add("A", [1, 2, 3])
    toy.take("A", [3, 4])
    with toy.session.step(toy.plan({"A": [3, 4]})), toy.session.forward():
        stored = int(toy.session.pool.space.flags[3]) & Flag.WRITTEN
    (plan,) = toy.session.inputs.view().kept_plans.values()
    assert bool(stored) == ("ahead" in plan.launches) == (most == 2)
    assert int(toy.session.pool.space.flags[3]) & Flag.WRITTEN


@interpreted
def test_only_the_capture_of_a_plans_own_replay_has_the_memory_of_its_launches(graphs, monkeypatch):
    """A graph of the engine's may live longer than the plan; one of the plan's would take memory of its own."""
    use_gpu_kernels(monkeypatch.setattr)
    toy = Toy(history=False)
    toy.add("A", list(range(1, 15)))
    decode(toy, 3)
    (plan,) = toy.session.inputs.view().kept_plans.values()
    made, launches = [], gpu._store_launches
    monkeypatch.setattr(gpu, "_store_launches", lambda *args: made.append(args) or launches(*args))
    monkeypatch.setattr(gpu, "capturing", lambda device: True)
    gpu.store(toy.session.pool.space, plan)
    assert len(made) == 1
    gpu._store(toy.session.pool.space, plan, own_replay=True)
    assert len(made) == 1


@pytest.mark.gpu
def test_a_gpu_replays_the_checks_around_a_decode_step_and_finds_the_same():
    toy = Toy(history=False, device="cuda")
    request = toy.add("A", list(range(1, 15)))
    for slot in range(3, 3 + ONE_BY_ONE + 1):
        decode(toy, slot)
    (plan,) = toy.session.inputs.view().kept_plans.values()
    assert isinstance(plan.launches["ahead"].graph, torch.cuda.CUDAGraph)
    assert not toy.found()
    toy.table[request.row, 1] = 20
    decode(toy, 12)
    assert {(v.why, v.slot) for v in toy.found()} == {("READ_AFTER_FREE", 20)}
    with torch.cuda.stream(torch.cuda.Stream()):
        toy.session.pool.release([5], owner="A")
        decode(toy, 13)
        assert ("READ_AFTER_FREE", 5) in {(v.why, v.slot) for v in toy.found()}

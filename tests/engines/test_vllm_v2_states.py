"""The running states of a hybrid under Model Runner V2, with a runner that is made up."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from v2_hybrid_runner import HybridRunner
from v2_runner import PAGE, goes_on

from kvcanary_fx.engine import kept_calls  # noqa: F401  which a session imports when it has calls to send

LAYERS = {"m0": 0, "m1": 1}


def violations(runner, since=0):
    return runner.guard.states.session.violations()[since:]


def flip(state, block):
    word = state[block].view(torch.int16 if state.element_size() == 2 else torch.int32)
    word[(0,) * word.dim()] ^= 1 << 4


def silent(runner):
    return runner.guard.session.violations() == violations(runner) == [] and runner.guard.session.uncovered == []


@pytest.mark.parametrize("align", [0, 4])
@pytest.mark.parametrize("graph", [False, True])
def test_a_flip_in_each_state_is_told_with_its_layer_request_and_block(align, graph):
    runner = HybridRunner(align=align)
    given = {"wrong": 1} if graph else {}
    runner.read(runner.step({"x": 6, "y": 2}, new={"x": [1, 2, 3, 4], "y": [5, 6, 7]}, **given))
    for number, (layer, name) in enumerate([(layer, name) for layer in LAYERS for name in ("conv", "state")]):
        assert runner.read(runner.step({"x": 1, "y": 1}, **given)) is None
        before = len(violations(runner))
        request = "xy"[number % 2]
        group = LAYERS[layer]
        block = runner.state_blocks(request)[group]
        flip(runner.state_layers[layer][("conv", "state").index(name)], block)
        verdict = runner.read(runner.step({"x": 1, "y": 1}, **given))
        (told,) = violations(runner, before)
        assert (told.check, told.layer, told.half, told.request) == ("content", layer, name, request)
        assert told.slot == runner.state_blocks(request)[group]
        assert verdict.damaged == {1 + group: {told.slot}}
        assert told.step == 3 + 2 * number
        assert told.position == (6, 2)[request == "y"] + 2 * number
    assert runner.guard.session.violations() == []


class Load:
    """Requests that come and end at random, also before they are done; with a prefix cache some go on from there.

    Args:
        calm: the part of the steps in which all requests add a token, and nobody comes.
    """

    def __init__(self, runner, seed, calm=0.0):
        self.runner, self.rng, self.calm = runner, random.Random(seed), calm
        self.left: dict[str, int] = {}  # steps of each running request
        self.number = self.hits = 0

    def step(self):
        """What :meth:`HybridRunner.step` is given; None: nothing is to be run."""
        rng, runner = self.rng, self.runner
        calm = bool(self.calm) and rng.random() < self.calm
        over = {r for r, left in self.left.items() if left <= 0 or runner._stored(r) > 22}
        finished = [r for r in self.left if r in over or (not calm and rng.random() < 0.04)]
        kept = {page for request in finished for page in runner.keeps(request).pages}
        free = len(runner.free_pages) + sum(len({*runner.pages[r]} - kept) for r in finished)
        for request in finished:
            del self.left[request]
        if runner.cached and (free < 6 or rng.random() < 0.1):
            free += len(runner.cached[0].pages)
            runner.evict()
        tokens = {r: 1 if calm else self.count(runner._stored(r)) for r in self.left if calm or rng.random() < 0.9}
        given = {"new": {}, "more": {}, "taken_up": {}}
        while len(self.left) < 3 and (not calm or not tokens) and rng.random() < 0.6 and free > 7:
            free -= self.begin(given, tokens)
        for request in [r for r in tokens if r not in given["new"]]:
            missing = -(-(runner._stored(request) + tokens[request]) // PAGE) - len(runner.pages[request])
            given["more"] |= {request: missing} if missing > 0 else {}
        for request in tokens:
            self.left[request] -= 1
        if not tokens:
            self.left |= dict.fromkeys(finished, 0)
            return None
        order = list(tokens.items())
        if not calm:
            rng.shuffle(order)
        return {"tokens": dict(order), "finished": finished, **given}

    def count(self, stored):
        """Tokens of a step: one, or a part of a prompt, which ends where a block does if it ends behind it."""
        room = 4 - stored % 4
        return self.rng.choice([1, 1, 1, 1, room, 8 if room == 4 and not self.left else 1])

    def begin(self, given, tokens):
        request, runner = f"r{self.number}", self.runner
        self.number += 1
        kept = None
        if runner.cached and runner.cached[-1].tokens < 16 and self.rng.random() < 0.7:
            kept = given["taken_up"][request] = runner.cached.pop()
            self.hits += 1
        stored = kept.tokens if kept is not None else 0
        tokens[request] = self.count(stored)
        pages = -(-(stored + tokens[request]) // PAGE)
        given["new"][request] = pages
        self.left[request] = self.rng.randrange(2, 9)
        return pages

    def run(self, step, graph):
        """Run it; as one graph, if it may be."""
        runner, given = self.runner, dict(step)
        first = next(iter(step["tokens"]))
        free = runner.free_pages
        gone = [p for r in step["finished"] for p in runner.pages[r] if p not in runner.keeps(r).pages]
        usable = free + gone
        for name in ("new", "more"):
            given[name] = {}
            for request, count in step[name].items():
                kept = step["taken_up"][request].pages if name == "new" and request in step["taken_up"] else []
                given[name][request] = kept + [usable.pop(0) for _ in range(count - len(kept))]
                given["zeroed"] = given.get("zeroed", []) + given[name][request][len(kept) :]
        page = (given["new"].get(first) or runner.pages[first])[0]
        runner.step(**given, **({"wrong": page} if graph and not step["taken_up"] else {}))
        runner.free_pages = usable
        return runner.guard.read()


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("align", [0, 4])
@pytest.mark.parametrize("settings", [{}, {"KVCANARY_VERIFY_FRACTION": "1/3"}])
def test_requests_that_come_and_go_are_silent(align, graph, settings):
    hits = 0
    for seed in range(4):
        torch.manual_seed(seed)
        runner = HybridRunner(align=align, **settings)
        load = Load(runner, seed)
        for _ in range(100):
            step = load.step()
            assert step is None or load.run(step, graph and load.rng.random() < 0.8) is None
        assert silent(runner)
        assert {*runner.guard.states._left, *runner.guard.states._last_turn} <= {*runner.states}  # of who runs
        hits += load.hits
        stats = runner.guard.states.session.stats()
        assert stats.recorded > 4 * (10 if settings else 40)
        assert stats.checked > stats.recorded / 2
    assert (hits > 12) == bool(align)


def test_blocks_of_a_new_request_are_told_at_once_in_all_groups():
    runner, left = HybridRunner(align=4), []
    runner.step({"x": 3}, new={"x": [1]})
    tell_now = runner.guard.books.tell_now
    runner.guard.books.tell_now = lambda *given, **how: left.append(tell_now(*given, **how)) or left[-1]
    runner.step({"x": 1, "y": 3}, new={"y": [2]}, zeroed=[2])
    runner.step({"x": 1}, finished=["y"], more={"x": [3]}, zeroed=[3])
    assert left == [[], []]
    assert silent(runner)


@pytest.fixture
def code(request, as_on_a_gpu):
    """Plain code, or what a GPU runs, over CPU tensors."""
    if request.param == "kernels":
        as_on_a_gpu()


@pytest.mark.parametrize(
    ("seed", "steps", "code"),
    [*((seed, 150, "plain code") for seed in range(6)), (5, 25, "kernels")],
    indirect=["code"],
)
def test_steps_that_go_on_with_more_blocks_do_what_steps_begun_anew_do(seed, steps, code):
    """Blocks of all groups are handed out and given up in steps that go on as the last one did."""
    settings = {"KVCANARY_VERIFY_AFTER": "0", "KVCANARY_VERIFY_FRACTION": "1/5"}
    runners = [HybridRunner(align=4, frees=True, **settings) for _ in range(2)]
    loads = [Load(runner, seed, calm=0.8) for runner in runners]
    runners[1].guard.books.tell_now = lambda events, into_step: events
    runners[1].guard._forwards.go_on = lambda batch: False
    went_on = goes_on(runners[0])
    with_blocks = 0
    for number in range(steps):
        went_on.clear()
        for load in loads:
            torch.manual_seed(number)
            step = load.step()
            load.run(step, load.rng.random() < 0.9) if step is not None else None
        with_blocks += bool(step is not None and any(went_on) and any(step["more"].values()))
    assert with_blocks > steps / 50
    assert all(map(silent, runners))
    sessions = [(runner.guard.session, runner.guard.states.session) for runner in runners]
    for one, other in zip(*sessions, strict=True):
        for name, pool in one.pools.items():
            assert torch.equal(pool.space.block[:-1], other.pools[name].space.block[:-1]), name
            assert torch.equal(pool.digests, other.pools[name].digests), name
        assert one.stats() == other.stats()


def test_a_flip_in_a_state_of_the_prefix_cache_is_told_when_a_request_takes_it_up():
    runner = HybridRunner(align=4)
    runner.read(runner.step({"x": 8}, new={"x": [1, 2]}))
    runner.read(runner.step({"x": 1}, more={"x": [3]}))
    flipped = runner.states["x"][0][1]
    runner.read(runner.step({"y": 1}, new={"y": [4]}, finished=["x"]))
    (kept,) = runner.cached
    assert kept.blocks[0] == flipped
    flip(runner.state_layers["m0"][1], flipped)
    verdict = runner.read(runner.step({"y": 1, "z": 2}, new={"z": [1, 2, 5]}, taken_up={"z": kept}))
    (told,) = violations(runner)
    assert (told.check, told.layer, told.half, told.request) == ("content", "m0", "state", "z")
    assert told.slot == runner.state_blocks("z")[0]  # where the request has its copy
    assert verdict.requests == {"z"}


def test_a_block_of_the_prefix_cache_that_another_request_has_rewritten_is_not_taken_for_what_it_was():
    runner = HybridRunner(align=4)
    states = runner.guard.states
    runner.read(runner.step({"x": 4}, new={"x": [1]}))
    runner.read(runner.step({"y": 1}, new={"y": [2]}, finished=["x"]))
    assert states._cached
    blocks = runner.cached[0].blocks
    runner.evict()
    runner.free = [*blocks, *(block for block in runner.free if block not in blocks)]
    states._content = False  # z has no turn
    runner.read(runner.step({"z": 4}, new={"z": [1]}))
    runner.read(runner.step({"y": 1}, finished=["z"]))
    assert runner.cached[-1].blocks == blocks
    runner.read(runner.step({"w": 2}, new={"w": [1, 3]}, taken_up={"w": runner.cached.pop()}))
    assert silent(runner)


def test_a_wrong_block_table_in_the_step_that_takes_a_prefix_from_the_cache():
    runner = HybridRunner(align=4)
    runner.read(runner.step({"x": 4}, new={"x": [1]}))
    runner.read(runner.step({"y": 1}, new={"y": [2]}, finished=["x"]))
    prepare = runner._prepare

    def wrong(*given):
        prepared = prepare(*given)
        runner.block_tables.input_block_tables[2][0, 1] += 1
        return prepared

    runner._prepare = wrong
    runner.read(runner.step({"z": 2}, new={"z": [1, 3]}, taken_up={"z": runner.cached.pop()}))
    block = runner.state_blocks("z")[1]
    found = [(v.check, v.why, v.layer, v.request, v.stored, v.found) for v in violations(runner)]
    assert found == [("index", "NOT_THE_PLANNED_SLOT", "m1", "z", block, block + 1)]


@pytest.mark.parametrize("align", [0, 4])
def test_states_of_two_requests_that_are_exchanged(align):
    runner = HybridRunner(align=align)
    runner.read(runner.step({"x": 2, "y": 2}, new={"x": [1], "y": [5]}))
    for state in runner.state_layers["m0"]:
        pair = [runner.state_blocks("x")[0], runner.state_blocks("y")[0]]
        state[pair] = state[pair[::-1]]
    runner.read(runner.step({"x": 1, "y": 1}))
    found = {(v.check, v.layer, v.half, v.request) for v in violations(runner)}
    assert found == {("content", "m0", half, request) for half in ("conv", "state") for request in "xy"}


@pytest.mark.parametrize("graph", [False, True])
def test_block_tables_of_two_requests_that_are_swapped_in_the_worker(graph):
    runner = HybridRunner()
    runner.read(runner.step({"x": 2, "y": 2}, new={"x": [1], "y": [5]}))
    prepare = runner._prepare

    def swapped(tokens, wrong):
        prepared = prepare(tokens, wrong)
        table = runner.block_tables.input_block_tables[2]
        table[[0, 1]] = table[[1, 0]]
        return prepared

    runner._prepare = swapped
    verdict = runner.read(runner.step({"x": 1, "y": 1}, **({"wrong": 1} if graph else {})))
    x, y = runner.state_blocks("x")[1], runner.state_blocks("y")[1]
    found = {(v.check, v.why, v.layer, v.request, v.stored, v.found) for v in violations(runner)}
    assert found == {
        ("index", "NOT_THE_PLANNED_SLOT", "m1", "x", x, y),
        ("index", "NOT_THE_PLANNED_SLOT", "m1", "y", y, x),
    }
    assert verdict.damaged == {2: {x, y}}


def test_a_block_that_another_request_is_given_too():
    runner = HybridRunner()
    runner.read(runner.step({"x": 2}, new={"x": [1]}))
    grow = runner._grow

    def twice(request, *given):
        if request == "x":
            return grow(request, *given)
        grow(request, *given)
        runner.states["y"][0][:] = runner.states["x"][0]
        return [list(group) for group in runner.states["y"]]

    runner._grow = twice
    verdict = runner.read(runner.step({"x": 1, "y": 2}, new={"y": [5]}))
    (shared,) = runner.states["x"][0]
    (told,) = violations(runner)
    where = told.check, told.why, told.pool, told.slot, told.request
    assert where == ("owner", "OVERWRITE", "group1", shared, "y")
    assert told.found == runner.guard.states.session.ids.hash("x")
    assert verdict.damaged == {1: {shared}}  # so both are concerned


@pytest.mark.parametrize("graph", [False, True])
def test_a_block_that_is_freed_while_its_request_runs(graph):
    runner, given = HybridRunner(), {"wrong": 1} if graph else {}
    runner.read(runner.step({"x": 2, "y": 2}, new={"x": [1], "y": [5]}, **given))
    runner.read(runner.step({"x": 1, "y": 1}, **given))
    (freed,) = runner.states["x"][1]
    runner.read(runner.step({"x": 1, "y": 1}, events=[("freed", [], [freed], "x")], **given))
    (told,) = violations(runner)
    assert (told.check, told.why, told.slot, told.request) == ("owner", "WRITE_AFTER_FREE", freed, "x")


def test_a_change_of_a_state_that_nobody_reads_again_is_not_told():
    """A state that was given up is rewritten by who has its block next."""
    runner = HybridRunner()
    runner.read(runner.step({"x": 2, "y": 2}, new={"x": [1], "y": [5]}))
    blocks = runner.state_blocks("x")
    flip(runner.state_layers["m0"][0], blocks[0])
    runner.read(runner.step({"y": 1}, finished=["x"]))
    flip(runner.state_layers["m0"][1], blocks[0])
    runner.free = [*blocks, *(block for block in runner.free if block not in blocks)]
    for _ in range(3):
        new = {} if "z" in runner.pages else {"new": {"z": [2]}, "more": {"y": [6]}}
        runner.read(runner.step({"y": 1, "z": 1}, **new))
    assert runner.state_blocks("z") == blocks
    assert silent(runner)


def test_the_state_of_a_request_that_has_ended_is_forgotten_where_nothing_else_is_new():
    runner = HybridRunner()
    runner.read(runner.step({"x": 2, "y": 2}, new={"x": [1], "y": [5]}))
    runner.read(runner.step({"y": 1}))
    assert "x" in runner.guard.states._last_turn
    runner._freed = lambda request: []  # its blocks were given up before
    runner.read(runner.step({"y": 1}, finished=["x"]))
    assert {*runner.guard.states._left, *runner.guard.states._last_turn} == {"y"}
    assert "x" not in runner.guard._rows._requests


def test_under_a_budget_requests_have_their_turn(monkeypatch):
    from kvcanary_fx.adapters.vllm.v2 import states, turns

    monkeypatch.setattr(states, "time", SimpleNamespace(perf_counter=lambda: 0.0))  # the host takes nothing
    runner, clock = HybridRunner(KVCANARY_BUDGET="1%"), iter(range(1000))
    assert "0.5 %" in runner.guard.session.pace.describe()[0]  # the other half
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: next(clock) / 64))
    chosen = runner.guard.states.turns = turns.Turns(runner.guard.states.turns.budget, 1, price=0.01 / 64)
    assert chosen.budget == 0.005
    runner.read(runner.step({"x": 2, "y": 2, "z": 2}, new={"x": [1, 2], "y": [5, 6], "z": [7, 8]}))
    stats, turn = runner.guard.states.session.stats, []
    for _ in range(6):  # half of what a request's states take is paid in each
        before, told = stats().recorded, len(violations(runner))
        runner.read(runner.step({"x": 1, "y": 1, "z": 1}))
        assert len(violations(runner)) - told == bool(turn and turn[-1])  # of what the last step fingerprinted
        turn.append((stats().recorded - before) // 4)
        for request in "xyz":  # before the next step reads it
            flip(runner.state_layers["m0"][1], runner.state_blocks(request)[0])
    assert turn == [1, 0] * 3
    assert [v.request for v in violations(runner)] == ["x", "y", "z"]


@pytest.mark.parametrize("step", [0.003, 0.02])
@pytest.mark.parametrize("launches", [50e-6, 400e-6])
def test_rounds_of_turns_keep_to_their_budget_and_half_of_it_is_for_comparing(monkeypatch, step, launches):
    from kvcanary_fx.adapters.vllm.v2 import turns

    now = [0.0]
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    price, requests, compared, rounds, due = 20e-6, 64, 0, 0, 0
    chosen = turns.Turns(0.005, 1, price, round=100e-6)
    for number in range(20_000):
        now[0] += step
        if due:
            chosen.took(launches / 2)  # the step behind compares
        due = chosen.due(requests)
        if due:
            chosen.took(launches / 2)
        if number == 1_000:
            compared = rounds = 0
            began = now[0]
        compared, rounds = compared + due, rounds + bool(due)
    budget, host, device = 0.005 * (now[0] - began), rounds * launches, compared * price
    assert 0.9 * budget < host + device < 1.01 * budget
    assert device > 0.4 * budget or compared == rounds * requests


def test_a_round_that_was_interrupted_does_not_end_the_turns(monkeypatch):
    from kvcanary_fx.adapters.vllm.v2 import turns

    now = [0.0]
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    chosen, steps = turns.Turns(0.005, 1, 20e-6, round=100e-6), []
    for number in range(400):
        now[0] += 0.003
        if chosen.due(64):
            chosen.took(0.02 if len(steps) == 1 else 100e-6)
            steps.append(number)
    assert max(later - sooner for sooner, later in itertools.pairwise([*steps, 400])) <= 60


def test_what_a_model_that_raised_left_is_not_fingerprinted():
    runner = HybridRunner()
    runner.read(runner.step({"x": 2}, new={"x": [1]}))
    model = runner._model
    runner._model = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        runner.step({"x": 1})
    runner._model = model
    before = runner.guard.states.session.stats().recorded
    runner.warm_up_replay(2)
    assert runner.guard.states.session.stats().recorded == before


def test_dummy_forwards_leave_all_as_it_is():
    runner = HybridRunner()
    runner.read(runner.step({"x": 2}, new={"x": [1]}))
    stats = runner.guard.states.session.stats()
    runner.warm_up_replay(2)
    assert runner.guard.states.session.stats() == stats
    block = runner.state_blocks("x")[0]
    flip(runner.state_layers["m0"][0], block)
    runner.read(runner.step({"x": 1}))
    assert [(v.check, v.slot) for v in violations(runner)] == [("content", block)]


def test_the_engine_ends_before_the_tokens_of_a_step_that_read_a_changed_state():
    from kvcanary_fx import KVCacheViolation

    runner = HybridRunner(mode="raise")
    runner.read(runner.step({"x": 2}, new={"x": [1]}))
    flip(runner.state_layers["m1"][1], runner.state_blocks("x")[1])
    runner.step({"x": 1})
    with pytest.raises(KVCacheViolation, match="m1"):
        runner.read()


def test_ranks_whose_tokens_nobody_reads_end_with_the_next_step():
    from kvcanary_fx import KVCacheViolation

    runner = HybridRunner(mode="raise")
    runner.step({"x": 2}, new={"x": [1]})
    flip(runner.state_layers["m1"][1], runner.state_blocks("x")[1])
    runner.step({"x": 1})
    with pytest.raises(KVCacheViolation, match="m1"):
        runner.step({"x": 1})


def test_memory_that_is_given_back_is_not_compared():
    runner = HybridRunner()
    runner.read(runner.step({"x": 2}, new={"x": [1]}))
    runner.guard.forget_stored()
    for state in runner.state_layers["m0"]:
        state.zero_()
    runner.read(runner.step({"x": 1}, zeroed=()))
    assert violations(runner) == []


@pytest.mark.parametrize("checks", ["content", "index,owner"])
def test_checks_that_are_off(checks):
    runner = HybridRunner(KVCANARY_CHECKS=checks)
    runner.read(runner.step({"x": 2, "y": 2}, new={"x": [1], "y": [5]}))
    (freed,) = runner.states["x"][1]
    flip(runner.state_layers["m0"][0], runner.state_blocks("y")[0])
    runner.read(runner.step({"x": 1, "y": 1}, events=[("freed", [], [freed], "x")]))
    found = {(v.check, v.request) for v in violations(runner)}
    assert found == ({("content", "y")} if checks == "content" else {("owner", "x")})


def test_a_state_that_stays_silent_is_not_guarded(monkeypatch):
    from kvcanary_fx.adapters.vllm.v2.state_checks import StateChecks
    from kvcanary_fx.errors import SelfTestError

    monkeypatch.setattr(StateChecks, "compare", lambda self: None)
    with pytest.raises(SelfTestError, match="state conv of m0"):
        HybridRunner()
    monkeypatch.undo()
    runner = HybridRunner()
    assert not any(state.any() for layer in runner.state_layers.values() for state in layer)


def test_a_runner_with_states_gets_a_guard_and_a_connector_of_its_own(monkeypatch, caplog):
    from kvcanary_fx.adapters.vllm.settings import from_env
    from kvcanary_fx.adapters.vllm.v2 import hooks
    from kvcanary_fx.adapters.vllm.v2.connector import Bracket
    from kvcanary_fx.adapters.vllm.v2.hybrids import BracketOfHybrid, GuardOfHybridV2

    runner, unguarded = HybridRunner(), {}
    runner.dcp_size, runner.pcp_manager, runner.ubatch_runner = 1, None, None
    monkeypatch.setattr(hooks, "groups_with_drafts", lambda runner, *_: [runner.group])
    monkeypatch.setattr(hooks.state_groups, "state_groups", lambda *_: runner.state_groups)
    monkeypatch.setattr(hooks.state_groups, "layers_of_states", lambda *_: frozenset(LAYERS))
    with caplog.at_level("INFO"):
        made = hooks._guard(runner, runner.settings, False, unguarded)
    assert (type(made), type(runner.kv_connector)) == (GuardOfHybridV2, BracketOfHybrid)
    assert [set(session.pools) for session in made.sessions] == [{"group0"}, {"group1", "group2"}]
    line = "guarded beside them: states, group1, group2, 4 halves, each request in each step"
    assert [r for r in caplog.messages if r.endswith(line)]
    monkeypatch.setattr(hooks, "prove_states", lambda *_: 1 / 0)  # attention is guarded without them
    assert type(hooks._guard(runner, runner.settings, False, unguarded)) is not GuardOfHybridV2
    assert type(runner.kv_connector) is Bracket
    assert unguarded == dict.fromkeys(("group1", "group2"), "MambaSpec: division by zero")
    with pytest.raises(ZeroDivisionError):
        hooks._guard(runner, from_env({"KVCANARY_MODE": "raise"}), False, unguarded)
    monkeypatch.setattr(hooks.state_groups, "state_groups", lambda *_: [])
    assert type(hooks._guard(runner, runner.settings, False, unguarded)) is not GuardOfHybridV2
    assert type(runner.kv_connector) is Bracket
    monkeypatch.setattr(hooks, "groups_with_drafts", lambda runner, *_: [])
    monkeypatch.setattr(hooks.state_groups, "state_groups", lambda *_: runner.state_groups)
    with pytest.raises(Exception, match="no KV cache group of this model can be guarded"):
        hooks._guard(runner, runner.settings, False, unguarded)
    assert unguarded == dict.fromkeys(("group1", "group2"), "MambaSpec: states are guarded beside attention alone")

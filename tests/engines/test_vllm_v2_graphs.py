"""Steps of Model Runner V2 in graphs that have all checks in them, with a runner that is made up.

Which of them go on as the last one did, and what a replay that is no step leaves alone.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from v2_runner import PAGE, PAGES, Runner, Sizes, goes_on

from kvcanary_fx.adapters.vllm.v2.take_in import Landing
from kvcanary_fx.engine import kept_calls  # noqa: F401  which a session imports when it has calls to send
from kvcanary_fx.kernels.slots.events import Along

#: With these, graphs have the checks before the model in them.
IN_GRAPHS = {"KVCANARY_VERIFY_AFTER": "0"}


@pytest.fixture
def claimed(request, monkeypatch, as_on_a_gpu):
    """With plain code, and with what a GPU runs, over CPU tensors; in how many steps calls of the allocator went along
    with the step: those of plain code never do."""
    steps, send = [], Landing.send

    def noted(self, *given, calls=Along.NONE, **how):
        steps.append(calls)
        send(self, *given, calls=calls, **how)

    monkeypatch.setattr(Landing, "send", noted)
    if request.param == KERNELS:
        as_on_a_gpu()
    yield steps
    assert any(steps) == (request.param == KERNELS)


KERNELS = "a GPU's kernels"
both = pytest.mark.parametrize("claimed", ["plain code", KERNELS], indirect=True)


def test_steps_that_differ_in_their_tokens_alone_go_on_as_the_last_did(monkeypatch):
    runner = Runner(**IN_GRAPHS)
    begun, begin = [], type(runner.guard._forwards).begin

    def noted(self, batch, *args):
        begun.append(batch.req_ids)
        return begin(self, batch, *args)

    monkeypatch.setattr(type(runner.guard._forwards), "begin", noted)

    went_on = goes_on(runner)

    def replayed(tokens, **given):
        """Whether the step began anew, or went on with the last one's, and its violations."""
        first = (list(dict(given.get("new", ())).get(next(iter(tokens)), ())) or runner.pages[next(iter(tokens))])[0]
        begun.clear()
        went_on.clear()  # of this step
        runner.step(tokens, wrong=first, **given)
        return len(begun), any(went_on), runner.guard.read()

    anew, again = (1, False, None), (0, True, None)
    runner.step({"x": 2, "y": 2}, new={"x": [1, 4], "y": [2]})
    assert replayed({"x": 1, "y": 1}) == anew
    assert replayed({"x": 1, "y": 1}) == again
    runner.step({"x": 1, "y": 1}, more={"y": [5]})  # no graph
    assert replayed({"x": 1, "y": 1}) == anew
    assert replayed({"x": 1, "y": 1}) == again
    assert replayed({"y": 1, "x": 1}) == anew  # another order
    assert replayed({"y": 1, "x": 1}, more={"x": [6], "y": [7]}) == again  # new pages
    assert replayed({"y": 1}) == anew  # one alone
    assert replayed({"y": 1}, finished=["x"]) == again  # nothing of its own is new
    assert replayed({"y": 1}) == again
    assert replayed({"y": 1, "z": 2}, new={"z": [1]}, more={"y": [8]}) == anew
    stats = runner.guard.session.stats()
    assert (stats.violations, stats.engine_steps, runner.guard.session.uncovered) == (0, 12, [])
    assert stats.recorded == 4 * (4 + 7 * 2 + 3 * 1 + 3)


def test_steps_that_go_on_are_measured_when_that_is_due():
    runner = Runner(KVCANARY_BUDGET="1%")
    runner.step({"x": 3}, new={"x": list(range(1, 8))})
    measured, measure = [], runner.guard._layers._measure
    runner.guard._layers._measure = lambda stored: measured.append(stored) or measure(stored)
    for _ in range(24):
        assert runner.read(runner.step({"x": 1}, wrong=1)) is None
    assert measured == sorted(measured)
    assert 1 < len(measured) <= 24
    assert runner.guard.session.stats().engine_steps == 25


def test_the_layers_of_a_draft_are_checked_also_behind_steps_without_drafts():
    runner = Runner(drafts=1, **IN_GRAPHS)
    runner.step({"x": 3}, new={"x": list(range(1, 8))})
    for _ in range(4):
        assert runner.read(runner.step({"x": 1}, wrong=1)) is None
    stats = runner.guard.session.stats()
    assert (stats.recorded, runner.guard.session.uncovered) == ((4 + 2) * (3 + 4), [])


@pytest.mark.parametrize("read", [True, False])
def test_in_mode_raise_steps_in_graphs_are_looked_at_before_the_next(read):
    from kvcanary_fx import KVCacheViolation

    runner = Runner("raise", **IN_GRAPHS)
    runner.step({"x": 3}, new={"x": [1, 4]})
    for _ in range(2):
        runner.read(runner.step({"x": 1}, wrong=1))
    runner.layers["a"][1][1, 2, 1, 3] += 1
    runner.step({"x": 1}, wrong=1)
    with pytest.raises(KVCacheViolation, match="request x, position 2"):
        runner.guard.read() if read else runner.step({"x": 1}, wrong=1)


def test_violations_of_steps_in_graphs_whose_tokens_nobody_reads_are_told():
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 3}, new={"x": list(range(1, 8))})
    for _ in range(2):
        runner.read(runner.step({"x": 1}, wrong=1))
    runner.layers["a"][1][1, 2, 1, 3] += 1
    for _ in range(20):
        runner.step({"x": 1}, wrong=1)
    (found,) = runner.guard.session.known_violations()
    assert (found.check, found.position, found.step) == ("content", 2, 4)


def test_replays_of_graphs_that_are_no_step_or_are_checked_before_leave_the_next_ones_right():
    """A graph with checks in it takes in a batch in each replay: it is told of those that have none."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 5}, new={"x": [1, 2]})
    steps = [
        dict(tokens={"x": 1}, wrong=1),
        dict(tokens={"x": 1}, wrong=1),
        # the prefix of a new request is compared with its tokens: nothing of that is in a graph
        dict(tokens={"y": 1, "x": 1}, new={"y": [1, 3, 5]}, found={"y": 4}, more={"x": [4]}, wrong=1,
             events=[("touched", [1], "y"), ("taken", [3, 5], ["y"], [2], 0), ("taken", [4], ["x"], [1], 0)]),
        dict(tokens={"y": 1, "x": 1}, wrong=1),
        dict(tokens={"y": 1, "x": 1}),  # no graph
        dict(tokens={"y": 1, "x": 1}, wrong=1),
    ]  # fmt: skip
    for number, step in enumerate(steps):
        assert runner.read(runner.step(**step)) is None, number
        for tokens in range(1, 3):
            runner.warm_up_replay(tokens)
    stats = runner.guard.session.stats()
    assert (stats.violations, stats.engine_steps, runner.guard.session.uncovered) == (0, 7, [])
    assert stats.recorded == 4 * (5 + 2 + 4 * 2)
    runner.layers["b"][0][1, 2] += 1  # position 2 of both
    runner.read(runner.step({"y": 1, "x": 1}, wrong=1))
    assert {(v.check, v.slot, v.layer, v.half) for v in runner.guard.session.violations()} == {("content", 6, "b", "K")}


def test_a_graph_whose_attention_gets_other_tables_is_checked_before_it():
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 3}, new={"x": [1, 2]})
    tables = runner.block_tables.input_block_tables[0].clone()
    metadata = runner._metadata
    runner._metadata = lambda batch: (
        metadata(batch) | {"a": SimpleNamespace(block_table=tables, seq_lens=batch.seq_lens)}
    )
    tables[0, :2] = torch.tensor([1, 2])
    for _ in range(2):
        assert runner.read(runner.step({"x": 1}, wrong=1)) is None
    tables[0, 1] = 6
    runner.read(runner.step({"x": 1}, wrong=1))
    assert [(v.check, v.position) for v in runner.guard.session.violations()] == [("index", 4), ("index", 5)]
    assert runner.guard.session.stats().recorded == 4 * 6


def test_a_step_behind_one_of_other_requests_outside_of_a_graph_does_not_go_on():
    """The device was told of those meanwhile."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 2, "y": 1, "z": 2}, new={"x": [1, 4], "y": [2, 5], "z": [3, 6]})
    for _ in range(2):
        assert runner.read(runner.step({"x": 1, "y": 1}, wrong=1)) is None
    assert runner.read(runner.step({"x": 1, "z": 1})) is None
    for _ in range(2):
        assert runner.read(runner.step({"x": 1, "y": 1}, wrong=1)) is None
    assert runner.guard.session.stats().recorded == 4 * (5 + 5 * 2)


def test_a_step_behind_a_warm_up_or_a_message_without_a_forward_does_not_go_on():
    """Graphs replayed for nobody write the step's inputs, and blocks taken up are noted where a forward begins."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 5}, new={"x": [1, 2]})
    runner.step({"x": 1}, more={"x": [3]}, wrong=1)
    went_on = goes_on(runner)
    for between in (
        lambda: None,
        lambda: runner.warm_up_replay(1),
        lambda: None,
        lambda: runner.tell("touched", [1], "y"),
    ):
        between()
        assert runner.read(runner.step({"x": 1}, wrong=1)) is None
    assert [went for went in went_on if went] == [True, True]
    assert not runner.guard.books.pending


@both
def test_requests_that_fill_a_page_go_on_and_their_pages_are_theirs(claimed):
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 3, "y": 2}, new={"x": [1], "y": [2]})
    for _ in range(2):
        runner.step({"x": 1, "y": 1}, more={"x": [4]} if _ else {}, wrong=1)
    went_on = goes_on(runner)
    runner.step({"x": 1, "y": 1}, more={"y": [5]}, wrong=1)
    for _ in range(2):
        assert runner.read(runner.step({"x": 1, "y": 1}, wrong=1)) is None
    assert went_on == [True] * 3
    stats = runner.guard.session.stats()
    assert (stats.violations, stats.recorded, runner.guard.session.uncovered) == (0, 4 * (5 + 5 * 2), [])
    runner.layers["b"][1][5, 1] += 1  # position 5 of y, in the page that it got
    runner.read(runner.step({"x": 1, "y": 1}, more={"x": [6]}, wrong=1))
    (found,) = runner.guard.session.violations()
    assert (found.check, found.request, found.position, found.layer) == ("content", "y", 5, "b")
    assert went_on == [True] * 4


@both
def test_steps_of_a_rank_whose_outputs_are_dropped_go_on_until_there_is_something_to_tell(claimed, monkeypatch):
    """The others wait for it in each layer.  Seen: none of its steps went on, and two GPUs took 5 % longer."""
    from kvcanary_fx.adapters.vllm.v2.outputs import News

    runner, told = Runner(**IN_GRAPHS), []
    reactions = runner.guard.reactions
    reactions.ranks, reactions.elsewhere = SimpleNamespace(reads=False, tell=told.append), True
    runner.guard.follows_samples = True
    runner.guard._news.patience = -1
    runner.step({"x": 3}, new={"x": [1]})
    runner.step({"x": 1}, more={"x": [4, 5]}, wrong=1)
    went_on = goes_on(runner)
    for _ in range(2):
        runner.step({"x": 1}, wrong=1)
    assert went_on == [True] * 2
    runner.layers["b"][1][1, 1] += 1
    runner.step({"x": 1}, wrong=1)
    assert went_on == [True] * 3
    assert len(told) == 1, "before the tokens of this step have arrived"
    runner.step({"x": 1}, wrong=1)
    assert (went_on, len(told)) == ([True] * 4, 1)
    runner.layers["b"][1][1, 2] += 1
    with monkeypatch.context() as patched:
        patched.setattr(News, "unread", lambda *_, **__: False)
        runner.step({"x": 1}, wrong=1)
    assert len(told) == 1, "the host was too far ahead of the device to hear of it"
    runner.step({"x": 1}, wrong=1)
    assert went_on == [True] * 5 + [False], "it is told before anything goes on"
    assert len(told) == 2
    (found, _) = runner.guard.session.violations()
    assert (found.check, found.request, found.layer, found.position) == ("content", "x", "b", 1)


def test_steps_of_a_run_are_counted_and_the_device_has_their_numbers():
    """Only one in 16 of them is said anything of; a violation tells the step in which it was found."""
    runner = Runner(KVCANARY_VERIFY_AFTER="0", sizes=Sizes(pages=40, length=120))
    runner.step({"x": 3}, new={"x": list(range(1, 30))})
    asked, forwards = [], runner.guard._forwards
    go_on, stored = forwards.go_on, forwards._steps
    forwards.go_on = lambda batch: asked.append(runner.guard.session.begun) or go_on(batch)
    for _ in range(40):
        assert runner.read(runner.step({"x": 1}, wrong=1)) is None
    assert len(asked) <= 5, "most are not asked about"
    stats = runner.guard.session.stats()
    assert (stats.engine_steps, stats.violations, stats.recorded) == (41, 0, 4 * 43)
    assert (runner.guard.session.begun, runner.guard.session.steps) == (41, 41)
    forwards.interrupted()
    assert stored._stored == 43
    assert stored._landing.next == int(stored._landing.turn[0])
    runner.step({"x": 1}, wrong=1)
    for _ in range(3):
        runner.step({"x": 1}, wrong=1)
    runner.layers["b"][1][2, 1] += 1
    runner.read(runner.step({"x": 1}, wrong=1))
    assert [(v.check, v.position, v.step) for v in runner.guard.session.violations()] == [("content", 5, 46)]


def test_steps_of_a_run_are_calls_that_the_pace_has_let_through():
    runner = Runner(KVCANARY_BUDGET="1%", sizes=Sizes(pages=40, length=120))
    runner.step({"x": 3}, new={"x": list(range(1, 30))})
    passing, forwards = runner.guard.session.pace.passing, runner.guard._forwards
    for _ in range(80):
        assert runner.read(runner.step({"x": 1}, wrong=1)) is None
        if forwards.run.left > 1:
            break
    left, passed = passing.left, forwards.run.left
    assert left >= passed > 1
    for _ in range(passed):
        assert runner.read(runner.step({"x": 1}, wrong=1)) is None
    assert (passing.left, forwards.run.left) == (left, 0)
    forwards.interrupted()
    assert passing.left == left - passed


@pytest.mark.parametrize("budget", ["1%", "none"])
def test_a_run_ends_where_something_is_new(budget):
    """A page, another request, another graph, a step outside of one: each is looked at, and nothing is told falsely."""
    runner = Runner(KVCANARY_BUDGET=budget, KVCANARY_VERIFY_AFTER="0", sizes=Sizes(pages=40, length=120))
    runner.step({"x": 3, "y": 2}, new={"x": list(range(1, 9)), "y": list(range(11, 19))})
    both_of_them = {"x": 1, "y": 1}
    between = [
        lambda: runner.step(both_of_them, more={"x": [31]}, wrong=1),
        lambda: runner.step(both_of_them, more={"y": [32]}),  # no graph
        lambda: runner.warm_up_replay(2),
        lambda: runner.step({"x": 1}, wrong=1),
        lambda: runner.step({"y": 1, "x": 1}, wrong=11),  # another order
        lambda: runner.step({"z": 3, **both_of_them}, new={"z": [21]}),
        lambda: runner.step(both_of_them, finished=["z"], wrong=1),
    ]
    for something in between:
        for _ in range(3):
            assert runner.read(runner.step(both_of_them, wrong=1)) is None
        something()
        assert runner.read() is None
    assert runner.guard.session.uncovered == []
    before = runner.guard.session.stats().engine_steps
    runner.layers["a"][1][11, 1] += 1
    runner.read(runner.step(both_of_them, wrong=1))
    told = {(v.check, v.request, v.position, v.step) for v in runner.guard.session.violations()}
    assert told <= {("content", "y", 1, before + 1)}
    assert told or budget == "1%", "a share is compared in each step"


def test_what_requests_get_goes_with_the_steps_own_entry(as_on_a_gpu, monkeypatch):
    """Also pages that the prefix cache gives up; what is odd about them, or many of them, does not."""
    as_on_a_gpu()
    runner, said, send = Runner(**IN_GRAPHS), [], Landing.send
    noted = lambda self, *given, calls=0, **how: said.append(calls) or send(self, *given, calls=calls, **how)  # noqa: E731
    monkeypatch.setattr(Landing, "send", noted)
    runner.step({"x": 3, "y": 4}, new={"x": [1], "y": [2]})
    runner.step({"x": 1}, finished=["y"], cached=True, wrong=1)
    runner.step({"x": 1}, more={"x": [4]}, wrong=1)
    said.clear()
    for page in (5, 2):  # a new one, and one that the cache has
        runner.step({"x": 1}, more={"x": [page]}, wrong=1)
        assert said.pop() == Along.HANDED_OUT
        assert runner.guard.books.group[page] == 0
        assert runner.guard.session.pool.live_slots == PAGE * 4
    assert runner.guard.books.idle == set()
    events = [("taken", [6], ["x"], [1], 0)]
    runner.read(runner.step({"x": 1}, more={"x": [7]}, events=events, wrong=1))  # the scheduler gives it another one
    assert said.pop() != Along.HANDED_OUT
    assert runner.guard.session.violations() == []  # nothing is written there yet
    for _ in range(12):
        runner.read(runner.step({"x": 1}, wrong=1))
    assert "owner" in {v.check for v in runner.guard.session.violations()}


@both
@pytest.mark.parametrize("cached", [False, True], ids=["free", "cached"])
def test_pages_handed_out_in_a_step_that_does_not_go_on_are_told_before_it(cached, claimed):
    """It has no graph, say, or never comes to its model; the device hears of its pages as in any other step."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 3, "y": 4}, new={"x": [1], "y": [2]})
    runner.step({"x": 1}, finished=["y"], cached=cached, wrong=1)
    runner.step({"x": 1}, more={"x": [4]}, wrong=1)
    assert runner.read(runner.step({"x": 1}, more={"x": [2]})) is None  # no graph
    for _ in range(4):
        assert runner.read(runner.step({"x": 1}, wrong=1)) is None
    prepare, fails = runner._prepare, lambda *_: (_ for _ in ()).throw(ValueError("out of memory"))
    for page in (5, 6):
        runner._prepare = fails
        with pytest.raises(ValueError, match="out of memory"):
            runner.step({"x": 1}, more={"x": [page]}, wrong=1)
        runner._prepare = prepare
        for _ in range(4 * (page == 5)):
            assert runner.read(runner.step({"x": 1}, wrong=1)) is None
    runner.step({"x": 1}, more={"x": [7]}, wrong=1)
    for _ in range(3):
        assert runner.read(runner.step({"x": 1}, wrong=1)) is None
    assert runner.guard.session.violations() == []
    owners = runner.guard.session.pool.space.owners.view(-1)[: PAGE * PAGES].view(-1, PAGE)[:, 0]
    x = runner.guard.session.ids.hash("x")
    assert [page for page in range(PAGES) if int(owners[page]) == x] == [1, 2, 4, 5, 6, 7]


@both
def test_a_step_that_goes_on_with_another_requests_page_tells_so(claimed):
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 3, "y": 2}, new={"x": [1], "y": [2]})
    for _ in range(2):
        runner.step({"x": 1, "y": 1}, more={"x": [4]} if _ else {}, wrong=1)
    went_on = goes_on(runner)
    runner.read(runner.step({"x": 1, "y": 1}, more={"y": [4]}, events=[], wrong=1))  # the page is x's
    assert went_on == [True]
    assert {(v.check, v.why) for v in runner.guard.session.violations()} >= {("owner", "OVERWRITE")}


@both
@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_a_block_that_the_prefix_cache_gives_up_is_a_page_to_go_on_with(damaged, claimed):
    """Its bytes are compared first, and it is the cache's no more."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 3, "y": 4}, new={"x": [1], "y": [2]})
    runner.step({"x": 1}, finished=["y"], cached=True, wrong=1)
    assert runner.guard.books.idle == {2}
    for _ in range(2):
        runner.step({"x": 1}, more={} if _ else {"x": [4]}, wrong=1)
    went_on = goes_on(runner)
    for _ in range(2):
        runner.step({"x": 1}, wrong=1)
    runner.layers["b"][0][2, 1] += damaged
    runner.read(runner.step({"x": 1}, more={"x": [2]}, wrong=1))
    assert went_on == [True, True, True]
    assert runner.guard.books.idle == set()
    told = [(v.check, v.phase, v.layer, v.position) for v in runner.guard.session.violations()]
    assert told == [("content", "life", "b", 1)] * damaged


@both
@pytest.mark.parametrize("damaged", [False, True])
def test_a_page_that_the_runner_clears_is_compared_before_in_a_step_that_goes_on(damaged, claimed):
    """As a hybrid's runner does with each page that is handed out: the device is told of it before that."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 3, "y": 4}, new={"x": [1], "y": [2, 5]})
    runner.step({"x": 1}, finished=["y"], cached=True, wrong=1)
    for number in range(2):
        runner.step({"x": 1}, more={} if number else {"x": [4]}, wrong=1)
    runner.step({"x": 1}, more={"x": [5]}, wrong=1)
    went_on = goes_on(runner)
    runner.step({"x": 1}, wrong=1)
    runner.layers["b"][0][2, 1] += damaged
    runner.read(runner.step({"x": 1}, more={"x": [2]}, zeroed=[2], wrong=1))
    assert went_on == [True, True]
    told = [(v.check, v.phase, v.layer, v.position) for v in runner.guard.session.violations()]
    assert told == [("content", "life", "b", 1)] * damaged


@both
@pytest.mark.parametrize("damaged", [False, True])
def test_a_page_that_a_connector_fills_is_compared_before_that(damaged, claimed):
    """vLLM's OffloadingConnector loads into a page that was given up in the same step, before the model: each such page
    was a false alarm."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 3, "y": 4}, new={"x": [1], "y": [2]})
    for number in range(2):
        runner.step({"x": 1}, more={} if number else {"x": [4]}, wrong=1)
    runner.layers["b"][0][2, 1] += damaged

    def load(*_):
        for halves in runner.layers.values():
            for half in halves:
                half[2] = 7.0

    runner.connector.pre_forward = load
    events = [("freed", [], [2], "y"), ("taken", [2, 5], ["z"], [2], 0), ("filled_elsewhere", [2], "z", [0], 4)]
    runner.read(runner.step({"x": 1, "z": 2}, new={"z": [2, 5]}, found={"z": 4}, finished=["y"], events=events))
    del runner.connector.pre_forward
    runner.read(runner.step({"x": 1, "z": 1}, wrong=1))
    told = [(v.check, v.phase, v.layer, v.position, v.request) for v in runner.guard.session.violations()]
    assert told == [("content", "life", "b", 1, "y")] * damaged


LOADED = [("taken", [2, 5], ["z"], [2], 0), ("filled_elsewhere", [2], "z", [0], 4)]


def fill(runner, page=2):
    for number, halves in enumerate(runner.layers.values()):
        for half in halves:
            half[page] = number + torch.arange(half[page].numel()).reshape(half[page].shape)


@both
@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_what_a_connector_has_loaded_is_guarded_from_its_first_forward_on(damaged, waits, claimed):
    """Before that forward, in whatever step, the page is filled; behind it a flip is told, with who is in the slot."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 3}, new={"x": [1]}, events=[("taken", [1], ["x"], [1], 0), *(LOADED if waits else ())])
    for number in range(2):
        runner.step({"x": 1}, more={} if number else {"x": [4]}, wrong=1)
    fill(runner)
    given = dict(new={"z": [2, 5]}, found={"z": 4}, events=[] if waits else LOADED)
    runner.read(runner.step({"x": 1, "z": 2}, **given))
    assert runner.guard.session.pools["group0"].adopted == 4
    runner.layers["b"][0][2, 1] += damaged
    runner.read(runner.step({"x": 1, "z": 1}, wrong=1))
    told = [(v.check, v.layer, v.slot, v.position, v.request) for v in runner.guard.session.violations()]
    assert told == [("content", "b", 2 * PAGE + 1, 1, "z")] * damaged
    assert not runner.guard.books.loads.of


def test_what_a_connector_has_loaded_for_other_tokens_is_told_when_it_is_read():
    """The prefix cache has the page after that, and gives it to a request with other tokens."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 3}, new={"x": [1]})
    fill(runner)
    runner.read(runner.step({"z": 2}, new={"z": [2, 5]}, found={"z": 4}, events=LOADED))
    runner.tell("freed", [2], [5], "z")
    events = [("touched", [2], "w"), ("taken", [5], ["w"], [1], 0)]
    given = dict(new={"w": [2, 5]}, found={"w": 4}, prompts={"w": [30, 31, 32, 33, 7, 8]})
    runner.read(runner.step({"w": 2}, finished=["z"], events=events, **given))
    told = {(v.check, v.slot, v.position, v.request) for v in runner.guard.session.violations()}
    assert told == {("token", 2 * PAGE + place, place, "w") for place in range(4)}


@both
@pytest.mark.parametrize("why", ["ended", "preempted", "other pages"])
def test_a_load_that_its_request_no_longer_waits_for_is_not_taken_for_what_was_written(why, claimed):
    """The page is another request's by then."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 3}, new={"x": [1]}, events=[("taken", [1], ["x"], [1], 0), *LOADED])
    gone = [("freed", [], [2, 5], "z")]
    if why == "other pages":
        runner.step({"x": 1}, more={"x": [2]}, events=[*gone, ("taken", [2], ["x"], [1], 0)], wrong=1)
        runner.step({"x": 1, "z": 6}, new={"z": [6, 7]}, events=[("taken", [6, 7], ["z"], [2], 0)])
    else:
        runner.step({"x": 1}, more={"x": [2]}, events=[*gone, ("taken", [2], ["x"], [1], 0)], lost={why: ["z"]})
        runner.step({"x": 1, "z": 2}, new={"z": [2, 5]}, found={"z": 4}, events=[("taken", [5], ["z"], [1], 0)])
    assert not runner.guard.books.loads.of
    assert runner.guard.session.pools["group0"].adopted == 0


@both
@pytest.mark.parametrize("damaged", [False, True])
def test_the_copy_of_a_page_in_which_a_prefix_ends_is_compared_with_what_was_copied(damaged, claimed):
    """As with ``--prefix-match-unit``: the request's own reference was taken for what vLLM adds for it."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 3}, new={"x": [1]})
    for number in range(2):
        runner.step({"x": 1}, more={} if number else {"x": [4]}, wrong=1)
    runner.layers["b"][0][1, 1] += damaged
    events = [("touched", [1], "z"), ("taken", [5], ["z"], [1], 0), ("copied", 1, 5, "z"), ("freed", [], [1], None)]
    given = dict(new={"z": [5]}, found={"z": 2}, events=events, copies=[(1, 5)])
    runner.read(runner.step({"z": 2}, **given))
    runner.read(runner.step({"z": 1}, more={"z": [6]}, wrong=5))
    told = [(v.check, v.layer, v.slot, v.position, v.request) for v in runner.guard.session.violations()]
    assert told == [("content", "b", 5 * PAGE + 1, 1, "z")] * damaged


def test_a_step_that_the_scheduler_says_more_of_does_not_go_on():
    """Also where nothing happened to blocks: a request that has ended gave back its row."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 2, "y": 2}, new={"x": [1, 4], "y": [2]})
    for _ in range(2):
        runner.step({"x": 1}, wrong=1)
    went_on = goes_on(runner)
    runner.step({"x": 1}, wrong=1)
    assert went_on == [True]
    runner.step({"x": 1}, wrong=1, events=[], finished=["x"])
    assert went_on.count(True) == 1


@both
def test_of_a_request_that_left_the_batch_before_it_ended_the_device_is_told_once(claimed):
    """The scheduler says that it has ended a step or two after its last one; another takes its row, or its id."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 2, "y": 2}, new={"x": [1, 4], "y": [2]})
    told, landing = [], runner.guard._forwards._steps._landing
    requests = landing.requests
    landing.requests = lambda *fields: told.append(fields[0]) or requests(*fields)
    for _ in range(2):
        runner.step({"x": 1}, wrong=1)
    assert told == [[0]]
    runner.step({"x": 1}, finished=["y"], wrong=1)
    assert told == [[0]]
    runner.step({"x": 1, "y": 2}, new={"y": [3]})
    runner.step({"x": 1, "y": 1}, wrong=1)
    assert told[1:] == [[0, 1]] * 2
    runner.step({"x": 1, "y": 1}, finished=["y"], new={"y": [5]}, wrong=1)
    assert told[3:] == [[0, 1]]
    assert runner.guard.session.violations() == []
    assert runner.guard._rows.tables[0][1, 0] == 5


@both
@pytest.mark.parametrize("cached", [False, True], ids=["free", "cached"])
@pytest.mark.parametrize("first", [False, True], ids=["behind", "before"])
def test_a_step_in_which_a_request_has_ended_goes_on_and_its_pages_are_given_up(first, cached, claimed):
    """What it wrote is compared once more where it is free; what a cache keeps is compared when that gives it up."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 3, "y": 4, "z": 4}, new={"x": [1], "y": [2, 5], "z": [3]})
    runner.step({"x": 1}, finished=["z"], cached=cached, wrong=1)
    for _ in range(2):
        runner.step({"x": 1}, more={} if _ else {"x": [4]}, wrong=1)
    went_on, pool = goes_on(runner), runner.guard.session.pools["group0"]
    live = pool.live_slots
    runner.step({"x": 1}, wrong=1)
    runner.layers["b"][0][2, 1] += 1
    taken, freed = ("taken", [6], ["x"], [1], 0), ("freed", *(([2], [5]) if cached else ([], [2, 5])), "y")
    runner.read(
        runner.step(
            {"x": 1}, finished=["y"], more={"x": [6]}, events=[freed, taken] if first else [taken, freed], wrong=1
        )
    )
    assert went_on == [True, True]
    assert runner.guard.books.idle == ({2, 3} if cached else set())
    assert pool.live_slots == live + PAGE * (1 - 1 - (not cached))
    lost = [("content", "life", "b", 1)]
    told = [(v.check, v.phase, v.layer, v.position) for v in runner.guard.session.violations()]
    assert told == ([] if cached else lost)
    runner.read(runner.step({"x": 1}, more={"x": [2, 5]}, wrong=1))
    assert went_on == [True] * 3
    assert [(v.check, v.phase, v.layer, v.position) for v in runner.guard.session.violations()] == lost
    assert "y" not in runner.guard._rows._requests
    assert runner.guard.session.uncovered == []


@both
def test_a_page_of_a_request_that_has_ended_is_no_others_in_a_step_that_goes_on(claimed):
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 3, "y": 4, "z": 4}, new={"x": [1], "y": [2], "z": [3]})
    runner.step({"x": 1}, finished=["z"], wrong=1)
    for _ in range(2):
        runner.step({"x": 1}, more={} if _ else {"x": [4]}, wrong=1)
    went_on = goes_on(runner)
    runner.step({"x": 1}, wrong=1)
    runner.read(runner.step({"x": 1}, finished=["y"], more={"x": [5]}, wrong=1))
    assert runner.guard.session.violations() == []
    runner.pages["x"][1] = 2  # free by now
    runner.read(runner.step({"x": 1}, wrong=1))
    assert went_on == [True] * 3
    assert runner.guard.session.violations()


class RandomLoad:
    """Steps of an engine drawn at random: requests come and go, get pages, change their order, and are damaged."""

    def __init__(self, seed):
        self.rng, self.free, self.began = random.Random(seed), list(range(1, PAGES)), 0
        self.cached = seed % 2 == 1  # with a prefix cache: free pages keep what is in them
        self.pages, self.lengths = {}, {}
        self.ended = []  # requests that the runner is to be told of

    def step(self):
        """What :meth:`Runner.step` is given."""
        rng, new, more = self.rng, {}, {}
        if len(self.lengths) > 1 and (rng.random() < 0.08 or not self.free):
            self.ended.append(rng.choice(list(self.lengths)))
            self.lengths.pop(self.ended[-1])
        if rng.random() < 0.1:
            rng.shuffle(order := list(self.lengths))
            self.lengths = {request: self.lengths[request] for request in order}
        tokens = {r: 1 for r, n in self.lengths.items() if n < 28 and rng.random() < 0.97}
        rows = {int(request[1:]) % 4 for request in (*self.lengths, *self.ended)}  # as the runner gives them
        if (not tokens or rng.random() < 0.12) and self.began % 4 not in rows and self.free:
            name = f"r{self.began}"
            self.began += 1
            tokens[name] = rng.randint(1, 3)
            self.pages[name], self.lengths[name] = [self.free.pop(0)], 0
            new[name] = list(self.pages[name])
        for request in list(tokens):
            needed = self.lengths[request] + tokens[request] > PAGE * len(self.pages[request])
            if request not in new and self.free and (needed or rng.random() < 0.03):
                more[request] = [self.free.pop(0)]
                self.pages[request] += more[request]
            elif needed:
                tokens.pop(request)
        for request, count in tokens.items():
            self.lengths[request] += count
        finished = []
        if tokens:  # else no step is made
            finished, self.ended = self.ended, []
            self.free += [page for request in finished for page in self.pages.pop(request)]
        return dict(tokens=tokens, new=new, more=more, finished=finished, cached=self.cached)

    def flip(self):
        """A slot that holds a token of some request."""
        request = self.rng.choice([r for r, n in self.lengths.items() if n])
        place = self.rng.randrange(self.lengths[request])
        return self.pages[request][place // PAGE], place % PAGE


@pytest.mark.parametrize(
    ("seed", "claimed"),
    [*((seed, "plain code") for seed in range(12)), (8, KERNELS), (9, KERNELS), (11, KERNELS)],
    indirect=["claimed"],
)
def test_random_steps_that_go_on_do_what_steps_begun_anew_do(seed, claimed):
    runners = [Runner(**IN_GRAPHS), Runner(**IN_GRAPHS)]
    went_on = goes_on(runners[0])
    runners[1].guard._forwards.go_on = lambda batch: False
    runners[1].guard._forwards.hand_out = lambda *given: False
    runners[1].guard.books.tell_now = lambda events, into_step: events
    load, found = RandomLoad(seed), [[], []]
    for number in range(60):
        step = load.step()
        graph = load.rng.random() < 0.85 and len(step["tokens"]) > 0
        warm_up = load.rng.choice([0] * 8 + [1, 2])
        flipped = load.flip() if load.rng.random() < 0.06 and any(load.lengths.values()) else None
        for runner, told in zip(runners, found, strict=True):
            torch.manual_seed(number)
            if step["tokens"]:
                first = next(iter(step["tokens"]))
                table = (*runner.pages.get(first, ()), *dict(step["new"]).get(first, ()))
                runner.read(runner.step(**step, wrong=table[0] if graph else None))
            if warm_up:
                runner.warm_up_replay(warm_up)
            if flipped:
                runner.layers["a"][0][flipped] += 1
            told += [(v.check, v.why, v.slot, v.request, v.position, v.step) for v in runner.guard.session.violations()]
    assert found[0] == found[1]
    assert {check for check, *_ in found[0]} <= {"content"}
    assert any(went_on)
    sessions = [runner.guard.session for runner in runners]
    spaces = [session.pools["group0"].space for session in sessions]
    for name in ("tokens", "positions", "chain", "owners", "flags"):
        assert torch.equal(*(getattr(space, name)[:-1] for space in spaces)), name
    assert torch.equal(*(session.pools["group0"].digests for session in sessions))
    assert sessions[0].stats() == sessions[1].stats()
    assert sessions[0].pools["group0"].live_slots == sessions[1].pools["group0"].live_slots
    assert sessions[0].uncovered == sessions[1].uncovered == []


def test_a_step_waits_for_another_thread_that_reads_violations():
    """Which may send what is queued: the step does not go on beside it."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 3}, new={"x": [1, 4]})
    for _ in range(2):
        runner.step({"x": 1}, wrong=1)
    reading, done = runner.guard._counts.busy(), []
    reading.acquire()
    step = threading.Thread(target=lambda: done.append(runner.step({"x": 1}, wrong=1)))
    step.start()
    step.join(0.3)
    assert not done
    reading.release()
    step.join(10)
    assert len(done) == 1
    assert runner.guard.session.stats().engine_steps == 4


@pytest.mark.parametrize("layer", "ab")
def test_a_flip_is_reported_in_a_step_that_goes_on_as_the_last_did(layer):
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 3}, new={"x": [1, 4]})
    for _ in range(2):
        assert runner.read(runner.step({"x": 1}, wrong=1)) is None
    runner.layers[layer][1].view(torch.int32)[1, 2, 1, 3] ^= 1 << 5
    runner.read(runner.step({"x": 1}, wrong=1))
    (violation,) = runner.guard.session.violations()
    assert (violation.check, violation.layer, violation.half, violation.slot, violation.step) == (
        "content", layer, "V", 6, 4,
    )  # fmt: skip


def test_a_replay_outside_of_a_step_does_not_go_on_with_the_last_one():
    """Of dummy requests, say, behind a step that differed from the one before in its tokens alone."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 2}, new={"x": [1, 2, 3]})
    for _ in range(4):
        runner.read(runner.step({"x": 1}, wrong=1))
    steps = runner.guard.session.stats().engine_steps
    batch, _ = runner._prepare({"x": 1}, 1)
    runner.kv_connector.pre_forward(None, batch, runner._metadata(batch))
    runner._replay(batch, torch.zeros(0, dtype=torch.int64))
    runner.kv_connector.finish_forward()
    assert runner.guard.session.stats().engine_steps == steps == 5
    went_on = goes_on(runner)
    runner.layers["a"][0][1, 2, 1, 3] += 1
    runner.read(runner.step({"x": 1}, wrong=1))
    assert went_on == [False], "the launch of the dummy requests is none to go on from"
    assert [(v.check, v.layer, v.step) for v in runner.guard.session.violations()] == [("content", "a", 6)]


def test_a_step_with_more_stored_than_its_share_is_for_is_looked_at():
    runner = Runner(KVCANARY_BUDGET="1%")
    runner.step({"x": 3}, new={"x": list(range(1, 10))})
    pace, looked_at = runner.guard.session.pace, []
    begin = pace.begin
    pace.begin = lambda key, *args: looked_at.append(args[-1]) or begin(key, *args)
    for _ in range(24):
        runner.read(runner.step({"x": 1}, wrong=1))
        if pace.passing.left > 2:
            break
    looked_at.clear()
    runner.read(runner.step({"x": 1}, wrong=1))
    assert looked_at == []
    runner.guard._forwards.interrupted()  # those that may come without a look were counted before
    runner.read(runner.step({"x": 1}, wrong=1))
    pace.passing.most = pace.passing.least
    looked_at.clear()
    runner.read(runner.step({"x": 1}, wrong=1))
    assert len(looked_at) == 1


def test_the_lab_of_the_host_says_what_each_kind_of_step_takes():
    """``tests/benchmarks/vllm_host.py``, tiny: which steps go on, and that layers run from Python in prompts alone."""
    script = Path(__file__).resolve().parents[1] / "benchmarks/vllm_host.py"
    tiny = ["--requests", "2", "--layers", "3", "--prompt", "40", "--rounds", "8"]
    done = subprocess.run([sys.executable, script, *tiny], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "|" in line]
    found = {kind: cells for kind, *cells in rows[2:]}
    assert {"prompt", "behind", "left", "told", "fills", "goes on"} == set(found)
    assert [kind for kind, cells in found.items() if cells[3]] == ["prompt"]
    assert all(float(cells[-1]) > 0 for cells in found.values())


@pytest.mark.parametrize("raises", [False, True])
def test_a_step_that_goes_on_and_is_measured_ends_behind_the_model(raises, monkeypatch):
    """The time of the model is no time of ours; a step in which it raises says nothing."""
    from kvcanary_fx.runtime.pace import Sample

    runner = Runner(KVCANARY_BUDGET="1%")
    runner.step({"x": 3}, new={"x": list(range(1, 8))})
    replay, told, went_on = runner._replay, [], goes_on(runner)
    for name in ("model_runs", "model_ran", "end"):
        note = getattr(Sample, name)
        monkeypatch.setattr(Sample, name, lambda self, *a, _n=name, _o=note, **k: told.append((self, _n)) or _o(self))

    def model(*args):
        told.append((None, "model"))
        if raises and isinstance(went_on[-1], Sample):
            raise RuntimeError("out of memory")
        replay(*args)

    runner._replay = model
    measured = []
    for _ in range(24):
        told.clear()
        try:
            assert runner.read(runner.step({"x": 1}, wrong=1)) is None
        except RuntimeError:
            runner.guard.end_step()
        if went_on and isinstance(went_on[-1], Sample):
            names = [name for _, name in told]
            measured.append(names)
            assert went_on[-1].ended == (not raises)
    assert measured, "none was measured"
    ended = ["model_ran", "end", "model_runs"]  # the end says that nothing behind it is ours
    assert {*map(tuple, measured)} == {("model_runs", "model", *(() if raises else ended))}

"""The guard of Model Runner V2, with a runner that has its fields and no GPU: what it gives the session, and when.

With vLLM itself: ``vllm_v2_run.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

PAGE, PAGES, HEADS, DIM = 4, 16, 2, 8


@contextlib.contextmanager
def step_of(guard, scheduled):
    """What the hook around ``execute_model`` does."""
    guard.begin_step(scheduled)
    try:
        yield
    finally:
        guard.end_step()


class Connector:
    """The runner's own: it notes what reaches it."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args: self.calls.append(name)


class Runner:
    """Requests, tables and inputs as Model Runner V2 keeps them; :meth:`step` runs a model that only writes."""

    def __init__(self, mode="log", drafts=0, **settings):
        from vllm.config import CompilationMode

        from kvcanary_fx.adapters.vllm.pools import Group
        from kvcanary_fx.adapters.vllm.settings import from_env
        from kvcanary_fx.adapters.vllm.v2.connector import Bracket
        from kvcanary_fx.adapters.vllm.v2.guard import GuardV2

        self.max_num_reqs, self.max_num_tokens, self.max_model_len = 4, 16, 32
        self.is_encoder_decoder = False
        self.num_speculative_steps, self.device, self.adaptive_verification = drafts, torch.device("cpu"), None
        from vllm.v1.core.sched.scheduler import Scheduler

        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: Scheduler),
            compilation_config=SimpleNamespace(mode=CompilationMode.NONE),
        )
        spec = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=PAGE), layer_names=[])
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[spec])
        self.req_states = SimpleNamespace(num_computed_tokens=SimpleNamespace(gpu=torch.zeros(4, dtype=torch.int32)))
        numbers = {"seq_lens": 4, "query_start_loc": 5, "input_ids": 16, "positions": 16}
        buffers = {name: torch.zeros(size, dtype=torch.int32) for name, size in numbers.items()}
        self.input_buffers = SimpleNamespace(**buffers)
        table = torch.zeros(4, 9, dtype=torch.int32)
        self.block_tables = SimpleNamespace(
            input_block_tables=[table], slot_mappings=torch.full((1, 16), -1, dtype=torch.int64)
        )
        halves = [torch.zeros(PAGES, PAGE, HEADS, DIM) for _ in range(6)]
        self.layers = {"a": (halves[0], halves[1]), "b": (halves[2], halves[3])}
        self.draft = {"draft": (halves[4], halves[5])} if drafts else {}
        group = Group(0, PAGE, PAGE, None, self.layers | self.draft, False, drafted=frozenset(self.draft))
        environment = {"KVCANARY_MODE": mode, **settings}
        self.settings, self.group = from_env(environment), group
        self.guard = GuardV2(self, self.settings, False, [group])
        self.connector = Connector()
        self.kv_connector = Bracket(self.connector, self, self.guard)
        self.row: dict[str, int] = {}
        self.pages: dict[str, list[int]] = {}

    def step(
        self,
        tokens: dict[str, int],
        new=(),
        more=(),
        finished=(),
        events=None,
        wrong=None,
        rejected=None,
        stray=None,
        stacks=(),
        zeroed=(),
        found=None,
        images=None,
    ) -> Any:
        """One step: ``new`` and ``more`` give requests pages, ``tokens`` says how many each computes.

        Args:
            rejected: how many of a request's tokens the target rejects; None: no drafts are verified.
            stray: a slot that is overwritten by a guess.
            stacks: the scheduler's, of each event.
            zeroed: pages that the runner clears before its batch is prepared.
            found: how many tokens of a new request the prefix cache has.
            images: the features of a new request.
        """
        from kvcanary_fx.adapters.vllm.journal import ATTRIBUTE, Message

        new, more, found, images = dict(new), dict(more), found or {}, images or {}
        if events is None:
            events = [("taken", pages, request, 0) for request, pages in {**new, **more}.items()]
            events += [("freed", [(page, False) for page in self.pages[r]], r) for r in finished]
        for request, pages in new.items():
            self.row[request], self.pages[request] = len(self.row) % 4, list(pages)
            self.req_states.num_computed_tokens.gpu[self.row[request]] = found.get(request, 0)
        for request, pages in more.items():
            self.pages[request] += pages
        scheduled = SimpleNamespace(
            finished_req_ids=set(finished),
            preempted_req_ids=None,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=r,
                    block_ids=[p],
                    num_computed_tokens=found.get(r, 0),
                    prefill_token_ids=list(range(3, 3 + found.get(r, 0) + tokens[r])),
                    mm_features=images.get(r, []),
                )
                for r, p in new.items()
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r for r in tokens if r not in new],
                new_block_ids=[[more[r]] if r in more else None for r in tokens if r not in new],
                resumed_req_ids=set(),
                num_computed_tokens=[self._stored(r) for r in tokens if r not in new],
            ),
            num_scheduled_tokens=tokens,
            kv_cache_block_copies=None,
            new_block_ids_to_zero=list(zeroed),
        )
        setattr(scheduled, ATTRIBUTE, Message(events, stacks=list(stacks)))
        with step_of(self.guard, scheduled):
            for half in (half for halves in self.layers.values() for half in halves):
                half[list(zeroed)] = 0
            batch, slots = self._prepare(tokens, wrong)
            batch.num_draft_tokens = 0 if rejected is None else len(slots)
            self.kv_connector.pre_forward(scheduled, batch, self._metadata(batch) if wrong is not None else None)
            self._replay(batch, slots) if wrong is not None else self._model(slots)
            self.kv_connector.finish_forward()
        gone = {request: (rejected or {}).get(request, 0) for request in tokens}
        self.guard.drafting.verified(self.input_buffers.query_start_loc, torch.tensor(list(gone.values())))
        for request, count in tokens.items():
            self.req_states.num_computed_tokens.gpu[self.row[request]] += count - gone[request]
        if self.draft:
            self._propose(slots, tokens, stray)
        return self.guard.flags()

    def _propose(self, slots, tokens, stray):
        from vllm.config import CUDAGraphMode

        from kvcanary_fx.adapters.vllm.v2 import hooks

        token = hooks._SAMPLING.set(self.guard)
        hooks._prefill(lambda *_: self._model(slots, self.draft), None, 0, 0, None, None, None, CUDAGraphMode.NONE)
        hooks._SAMPLING.reset(token)
        for guess in range(1, self.num_speculative_steps):
            places = [(self.pages[r], self._stored(r) + guess - 1) for r in tokens]
            guessed = [pages[p // PAGE] * PAGE + p % PAGE for pages, p in places if p // PAGE < len(pages)]
            self._model(torch.tensor(guessed if stray is None else [stray], dtype=torch.int64), self.draft)

    def _stored(self, request):
        return int(self.req_states.num_computed_tokens.gpu[self.row[request]])

    def _prepare(self, tokens, wrong):
        where = {r: range(self._stored(r), self._stored(r) + n) for r, n in tokens.items()}
        slots = [self.pages[r][p // PAGE] * PAGE + p % PAGE for r, places in where.items() for p in places]
        positions = torch.tensor([p for places in where.values() for p in places])
        for number, request in enumerate(tokens):
            self.block_tables.input_block_tables[0][number, : len(self.pages[request])] = torch.tensor(
                self.pages[request]
            )
        if wrong is not None:
            self.block_tables.input_block_tables[0][0, 0] = wrong
        self.block_tables.slot_mappings[0, : len(slots)] = torch.tensor(slots)
        buffers, ends = self.input_buffers, np.cumsum(list(tokens.values()))
        buffers.query_start_loc[: len(tokens) + 1] = torch.tensor([0, *ends])
        buffers.input_ids[: len(slots)], buffers.positions[: len(slots)] = positions + 3, positions
        buffers.seq_lens[: len(tokens)] = torch.tensor([places.stop for places in where.values()])
        index = [self.row[r] for r in tokens]
        batch = SimpleNamespace(
            req_ids=list(tokens),
            num_reqs=len(tokens),
            num_tokens=len(slots),
            num_tokens_after_padding=len(slots),
            num_draft_tokens=0,
            num_scheduled_tokens=np.array(list(tokens.values())),
            num_computed_tokens_np=np.array([places.start for places in where.values()]),
            idx_mapping=torch.tensor(index),
            idx_mapping_np=np.array(index),
            input_ids=buffers.input_ids[: len(slots)],
            positions=positions,
            seq_lens=buffers.seq_lens[: len(tokens)],
        )
        return batch, torch.tensor(slots)

    def _metadata(self, batch):
        """What a graph that is replayed whole is given."""
        self._captured(batch.num_tokens_after_padding)
        table = self.block_tables.input_block_tables[0]
        return {"a": SimpleNamespace(block_table=table, seq_lens=batch.seq_lens)}

    def _captured(self, tokens):
        self.guard.layers_in_graphs[tokens] = len(self.layers)
        if self.guard._forwards.for_graph(tokens) is not None:
            self.guard.checked_in_graphs.add(tokens)

    def _replay(self, batch, slots):
        """What is captured in such a graph: the checks before the model, if they can be, the layers, and the flags."""
        from kvcanary_fx.kernels.context import forward_context

        before = self.guard._forwards.for_graph(batch.num_tokens_after_padding)
        if before is None:
            self._model(slots)
            return
        before.inside()
        with forward_context(before.context(len(slots))):
            self._model(slots)
        self.guard._flags.copy()

    def tell(self, *event):
        """A message of the scheduler for which no model runs."""
        from kvcanary_fx.adapters.vllm.journal import ATTRIBUTE, Message

        cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
        empty = dict.fromkeys(
            ("finished_req_ids", "preempted_req_ids", "scheduled_new_reqs", "num_scheduled_tokens"), ()
        )
        scheduled = SimpleNamespace(**empty, scheduled_cached_reqs=cached, kv_cache_block_copies=None)
        setattr(scheduled, ATTRIBUTE, Message([event]))
        with step_of(self.guard, scheduled):
            pass

    def warm_up_replay(self, tokens):
        """A graph is replayed for requests that are made up."""
        batch, scheduled = SimpleNamespace(num_tokens_after_padding=tokens, num_tokens=tokens), object()
        self._captured(tokens)
        self.kv_connector.set_disabled(True)
        self.kv_connector.pre_forward(scheduled, batch, {})
        self._replay(batch, torch.zeros(0, dtype=torch.int64))
        self.kv_connector.finish_forward()
        self.kv_connector.set_disabled(False)

    def _model(self, slots, layers=None):
        from kvcanary_fx.adapters.vllm import ops

        for layer, halves in (self.layers if layers is None else layers).items():
            written = [torch.randn(len(slots), HEADS, DIM) for _ in halves]
            for half, rows in zip(halves, written, strict=True):
                half.view(-1, HEADS, DIM)[slots] = rows
            output = torch.zeros(1)
            ops.verify(output, layer)
            ops.record(output, *written, layer)


#: With these, graphs have the checks before the model in them.
IN_GRAPHS = {"KVCANARY_VERIFY_AFTER": "0"}


@pytest.fixture
def runner():
    return Runner()


def run(runner):
    """Two requests: a prompt each, decode, one more page, another request after the first has ended."""
    runner.step({"x": 3, "y": 5}, new={"x": [1], "y": [2, 3]})
    runner.step({"y": 1, "x": 1})  # the order of a batch changes
    runner.step({"x": 1, "y": 1}, more={"x": [4]})
    runner.step({"y": 1}, finished=["x"])
    runner.step({"z": 2, "y": 1}, new={"z": [1]}, more={"y": [5]})
    return runner.step({"z": 1, "y": 1})


def test_steps_of_a_runner_that_reorders_its_batch_are_silent(runner):
    flags = run(runner)
    assert runner.guard.read(flags) is None
    stats = runner.guard.session.stats()
    assert (stats.violations, stats.engine_steps, runner.guard.session.uncovered) == (0, 6, [])
    assert stats.recorded == 4 * (8 + 2 + 2 + 1 + 3 + 2)
    assert runner.connector.calls == ["pre_forward", "finish_forward"] * 6


def test_steps_that_differ_in_their_tokens_alone_go_on_as_the_last_did(monkeypatch):
    runner = Runner(**IN_GRAPHS)
    begun, begin = [], type(runner.guard._forwards).begin

    def noted(self, batch, *args):
        begun.append(batch.req_ids)
        return begin(self, batch, *args)

    monkeypatch.setattr(type(runner.guard._forwards), "begin", noted)

    went_on, go_on = [], runner.guard._forwards.go_on
    runner.guard._forwards.go_on = lambda batch: went_on.append(go_on(batch)) or went_on[-1]

    def replayed(tokens, **given):
        """Whether the step began anew, or went on with the last one's, and its violations."""
        first = (list(dict(given.get("new", ())).get(next(iter(tokens)), ())) or runner.pages[next(iter(tokens))])[0]
        begun.clear()
        went_on.clear()
        flags = runner.step(tokens, wrong=first, **given)
        return len(begun), any(went_on), runner.guard.read(flags)

    anew, again = (1, False, None), (0, True, None)
    runner.step({"x": 2, "y": 2}, new={"x": [1, 4], "y": [2]})
    assert replayed({"x": 1, "y": 1}) == anew
    assert replayed({"x": 1, "y": 1}) == again
    runner.step({"x": 1, "y": 1}, more={"y": [5]})  # no graph
    assert replayed({"x": 1, "y": 1}) == anew
    assert replayed({"x": 1, "y": 1}) == again
    assert replayed({"y": 1, "x": 1}) == anew  # another order
    assert replayed({"y": 1, "x": 1}, more={"x": [6], "y": [7]}) == anew
    assert replayed({"y": 1}) == anew  # one alone
    assert replayed({"y": 1}, finished=["x"]) == anew  # its row may be another's
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
        assert runner.guard.read(runner.step({"x": 1}, wrong=1)) is None
    assert measured == sorted(measured)
    assert 1 < len(measured) <= 24
    assert runner.guard.session.stats().engine_steps == 25


def test_the_layers_of_a_draft_are_checked_also_behind_steps_without_drafts():
    runner = Runner(drafts=1, **IN_GRAPHS)
    runner.step({"x": 3}, new={"x": list(range(1, 8))})
    for _ in range(4):
        assert runner.guard.read(runner.step({"x": 1}, wrong=1)) is None
    stats = runner.guard.session.stats()
    assert (stats.recorded, runner.guard.session.uncovered) == ((4 + 2) * (3 + 4), [])


@pytest.mark.parametrize("read", [True, False])
def test_in_mode_raise_steps_in_graphs_are_looked_at_before_the_next(read):
    from kvcanary_fx import KVCacheViolation

    runner = Runner("raise", **IN_GRAPHS)
    runner.step({"x": 3}, new={"x": [1, 4]})
    for _ in range(2):
        runner.guard.read(runner.step({"x": 1}, wrong=1))
    runner.layers["a"][1][1, 2, 1, 3] += 1
    flags = runner.step({"x": 1}, wrong=1)
    with pytest.raises(KVCacheViolation, match="request x, position 2"):
        runner.guard.read(flags) if read else runner.step({"x": 1}, wrong=1)


def test_violations_of_steps_in_graphs_whose_tokens_nobody_reads_are_told():
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 3}, new={"x": list(range(1, 8))})
    for _ in range(2):
        runner.guard.read(runner.step({"x": 1}, wrong=1))
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
             events=[("touched", [1], "y"), ("taken", [3, 5], "y", 0), ("taken", [4], "x", 0)]),
        dict(tokens={"y": 1, "x": 1}, wrong=1),
        dict(tokens={"y": 1, "x": 1}),  # no graph
        dict(tokens={"y": 1, "x": 1}, wrong=1),
    ]  # fmt: skip
    for number, step in enumerate(steps):
        assert runner.guard.read(runner.step(**step)) is None, number
        for tokens in range(1, 3):
            runner.warm_up_replay(tokens)
    stats = runner.guard.session.stats()
    assert (stats.violations, stats.engine_steps, runner.guard.session.uncovered) == (0, 7, [])
    assert stats.recorded == 4 * (5 + 2 + 4 * 2)
    runner.layers["b"][0][1, 2] += 1  # position 2 of both
    runner.guard.read(runner.step({"y": 1, "x": 1}, wrong=1))
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
        assert runner.guard.read(runner.step({"x": 1}, wrong=1)) is None
    tables[0, 1] = 6
    runner.guard.read(runner.step({"x": 1}, wrong=1))
    assert [(v.check, v.position) for v in runner.guard.session.violations()] == [("index", 4), ("index", 5)]
    assert runner.guard.session.stats().recorded == 4 * 6


def test_a_step_behind_one_of_other_requests_outside_of_a_graph_does_not_go_on():
    """The device was told of those meanwhile."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 2, "y": 1, "z": 2}, new={"x": [1, 4], "y": [2, 5], "z": [3, 6]})
    for _ in range(2):
        assert runner.guard.read(runner.step({"x": 1, "y": 1}, wrong=1)) is None
    assert runner.guard.read(runner.step({"x": 1, "z": 1})) is None
    for _ in range(2):
        assert runner.guard.read(runner.step({"x": 1, "y": 1}, wrong=1)) is None
    assert runner.guard.session.stats().recorded == 4 * (5 + 5 * 2)


def test_a_step_behind_a_warm_up_or_a_message_without_a_forward_does_not_go_on():
    """Graphs replayed for nobody write the step's inputs, and blocks taken up are noted where a forward begins."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 5}, new={"x": [1, 2]})
    runner.step({"x": 1}, more={"x": [3]}, wrong=1)
    went_on, go_on = [], runner.guard._forwards.go_on
    runner.guard._forwards.go_on = lambda batch: went_on.append(go_on(batch)) or went_on[-1]
    for between in (
        lambda: None,
        lambda: runner.warm_up_replay(1),
        lambda: None,
        lambda: runner.tell("touched", [1], "y"),
    ):
        between()
        assert runner.guard.read(runner.step({"x": 1}, wrong=1)) is None
    assert [went for went in went_on if went] == [True, True]
    assert not runner.guard.books.pending


@pytest.mark.parametrize(
    "what", [dict(more={"x": [6]}), dict(finished=["y"]), dict(zeroed=[7])], ids=lambda what: next(iter(what))
)
def test_a_step_that_the_scheduler_says_more_of_does_not_go_on(what):
    """Also where nothing happened to blocks."""
    runner = Runner(**IN_GRAPHS)
    runner.step({"x": 2, "y": 2}, new={"x": [1, 4], "y": [2]})
    for _ in range(2):
        runner.step({"x": 1}, wrong=1)
    went_on, go_on = [], runner.guard._forwards.go_on
    runner.guard._forwards.go_on = lambda batch: went_on.append(go_on(batch)) or went_on[-1]
    runner.step({"x": 1}, wrong=1)
    assert went_on == [True]
    runner.step({"x": 1}, wrong=1, events=[], **what)
    assert went_on == [True]


class RandomLoad:
    """Steps of an engine drawn at random: requests come and go, get pages, change their order, and are damaged."""

    def __init__(self, seed):
        self.rng, self.free, self.began = random.Random(seed), list(range(1, PAGES)), 0
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
        return dict(tokens=tokens, new=new, more=more, finished=finished)

    def flip(self):
        """A slot that holds a token of some request."""
        request = self.rng.choice([r for r, n in self.lengths.items() if n])
        place = self.rng.randrange(self.lengths[request])
        return self.pages[request][place // PAGE], place % PAGE


@pytest.mark.parametrize("seed", range(12))
def test_random_steps_that_go_on_do_what_steps_begun_anew_do(seed):
    runners, went_on = [Runner(**IN_GRAPHS), Runner(**IN_GRAPHS)], []
    go_on = runners[0].guard._forwards.go_on
    runners[0].guard._forwards.go_on = lambda batch: went_on.append(go_on(batch)) or went_on[-1]
    runners[1].guard._forwards.go_on = lambda batch: False
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
                runner.guard.read(runner.step(**step, wrong=table[0] if graph else None))
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
        assert runner.guard.read(runner.step({"x": 1}, wrong=1)) is None
    runner.layers[layer][1].view(torch.int32)[1, 2, 1, 3] ^= 1 << 5
    runner.guard.read(runner.step({"x": 1}, wrong=1))
    (violation,) = runner.guard.session.violations()
    assert (violation.check, violation.layer, violation.half, violation.slot, violation.step) == (
        "content", layer, "V", 6, 4,
    )  # fmt: skip


def image(name, offset=1, length=2):
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))


def takes_up(runner, of):
    """A request with an image takes up the first page of one with the image of a cat; what is told of it."""
    runner.step({"x": 5}, new={"x": [1, 2]}, images={"x": [image("cat")]})
    runner.step({"x": 1})
    events = [("touched", [1], "y"), ("taken", [3], "y", 0)]
    runner.step({"y": 2}, new={"y": [1, 3]}, found={"y": 4}, images={"y": of}, events=events)
    runner.step({"y": 1, "x": 1})
    return {(v.check, v.position, v.request) for v in runner.guard.session.violations()}


def test_a_prefix_with_the_same_image_is_silent(runner):
    assert takes_up(runner, [image("cat")]) == set()
    stored = runner.guard.session.pool.space.tokens[[4, 5, 6, 7]].tolist()
    assert (stored[0], stored[3]) == (3, 6)
    assert stored[2] == stored[1] + 1 > 1 << 30


@pytest.mark.parametrize("of", [[], [image("dog")], [image("cat", offset=2)]], ids=["none", "another", "elsewhere"])
def test_a_prefix_with_another_image_is_told_where_it_is(runner, of):
    told = takes_up(runner, of)
    assert told
    assert {(check, request) for check, _, request in told} == {("token", "y")}
    assert {position for _, position, _ in told} <= {1, 2, 3}


def test_a_prompt_cut_within_its_image_goes_on_in_it(runner):
    runner.step({"x": 2}, new={"x": [1]}, images={"x": [image("cat")]})
    runner.step({"x": 2})
    stored = runner.guard.session.pool.space.tokens[[4, 5, 6, 7]].tolist()
    assert stored[2] == stored[1] + 1 > 1 << 30
    assert stored[3] == 6
    runner.step({"y": 1}, new={"y": [2]}, finished=["x"])
    assert not runner.guard._forwards.images._of
    assert runner.guard.session.violations() == []


def test_the_graph_of_the_model_copies_the_counters_where_it_is_replayed(monkeypatch):
    """So that nothing of ours is launched behind it; else a step does."""
    from kvcanary_fx.adapters.vllm.v2 import guard as module
    from kvcanary_fx.adapters.vllm.v2.outputs import Flags
    from kvcanary_fx.engine import layers

    copies = []
    monkeypatch.setattr(Flags, "copy", lambda self: copies.append(self))
    runner = Runner(KVCANARY_BUDGET="1%")
    runner.step({"x": 1}, new={"x": [1]})
    assert len(copies) == 1
    runner.step({"x": 1}, wrong=1)  # the table that it has: a graph is replayed, with a copy in it
    assert len(copies) == 2
    monkeypatch.setattr(module, "capturing", lambda: True)
    monkeypatch.setattr(layers, "capturing", lambda: True)
    with runner.guard.capturing(), runner.guard.dummy_forward(2, whole=True):
        runner._model(torch.zeros(2, dtype=torch.int64))
    assert len(copies) == 3
    assert runner.guard.layers_in_graphs[2] == len(runner.layers)


def test_what_was_released_is_compared_before_the_runner_clears_it(runner, monkeypatch):
    """Of a hybrid, the runner clears the blocks that were just handed out, on the GPU before our step begins there."""
    runner.step({"x": 3, "y": 5}, new={"x": [1], "y": [2, 3]})
    session, seen = runner.guard.session, []
    flush = session.flush
    monkeypatch.setattr(session, "flush", lambda: (seen.append(bool(runner.layers["a"][0][1].any())), flush()))
    runner.step({"y": 1}, finished=["x"])
    assert seen == []  # nothing is sent early where nothing is cleared
    runner.step({"z": 2, "y": 1}, new={"z": [1]}, zeroed=[1])
    assert seen == [True]
    assert runner.guard.read(runner.step({"z": 1, "y": 1})) is None


def test_a_flip_is_reported_when_its_steps_tokens_are_read(runner):
    run(runner)
    runner.layers["b"][1][2, 1, 0, 3] += 1  # position 1 of y
    runner.guard.read(runner.step({"y": 1}))
    (found,) = runner.guard.session.known_violations()
    assert (found.check, found.layer, found.half, found.request, found.position) == ("content", "b", "V", "y", 1)


def test_in_mode_raise_the_tokens_of_the_step_do_not_arrive():
    from kvcanary_fx import KVCacheViolation

    runner = Runner("raise")
    runner.guard.read(run(runner))
    runner.layers["a"][0][2, 0, 0, 0] += 1
    flags = runner.step({"y": 1})
    with pytest.raises(KVCacheViolation, match="request y, position 0"):
        runner.guard.read(flags)


def test_in_mode_raise_a_rank_whose_outputs_nobody_reads_ends_at_its_next_step():
    from kvcanary_fx import KVCacheViolation

    runner = Runner("raise")
    runner.guard.read(run(runner))
    runner.layers["a"][0][2, 0, 0, 0] += 1
    runner.step({"y": 1})
    with pytest.raises(KVCacheViolation, match="request y, position 0"):
        runner.step({"y": 1})


def test_requests_that_read_damage_are_named_to_the_scheduler():
    runner = Runner(KVCANARY_VLLM_ON_VIOLATION="abort")
    runner.guard.read(run(runner))
    runner.layers["a"][0][2, 0, 0, 0] += 1
    verdict = runner.guard.read(runner.step({"y": 1}))
    assert (verdict.outcome, verdict.blocks()) == ("abort", {2})
    assert runner.guard.read(runner.step({"y": 1})) is None


def test_the_table_that_attention_gets_is_compared_with_the_schedulers(runner):
    run(runner)
    runner.guard.read(runner.step({"y": 1}, wrong=2))
    assert runner.guard.session.known_violations() == []
    runner.guard.read(runner.step({"y": 1}, wrong=6))
    found = runner.guard.session.known_violations()
    assert [(v.check, v.request, v.position) for v in found] == [("index", "y", place) for place in range(PAGE)]
    assert runner.guard.session.uncovered == []


def test_a_page_that_is_given_away_too_early_is_reported(runner):
    runner.step({"x": 3}, new={"x": [1]})
    freed = [("freed", [(1, False)], "x"), ("taken", [1], "y", 0)]
    flags = runner.step({"x": 1, "y": 2}, new={"y": [1]}, events=freed)
    runner.guard.read(flags)
    found = runner.guard.session.known_violations()
    assert "owner" in {v.check for v in found}
    told = "written in step 1 by request x, released in step 1 by request x, allocated in step 1 to request y"
    assert any(told in v.history for v in found if v.history)


def test_a_report_names_the_line_of_the_scheduler_that_freed_a_page():
    runner = Runner(KVCANARY_STACKS="10")
    runner.step({"x": 3}, new={"x": [1]})
    freed = [("freed", [(1, False)], "x"), ("taken", [1], "y", 0)]
    stacks = [(f"vllm/v1/core/sched/scheduler.py:{line} in schedule", "core.py:5 in step") for line in (7, 9)]
    runner.guard.read(runner.step({"x": 1, "y": 2}, new={"y": [1]}, events=freed, stacks=stacks))
    told = "released in step 1 by request x at vllm/v1/core/sched/scheduler.py:7 in schedule, allocated in step 1 to "
    found = runner.guard.session.known_violations()
    assert any(f"{told}request y at vllm/v1/core/sched/scheduler.py:9" in v.history for v in found if v.history)


def test_what_the_scheduler_reports_is_queued_while_no_other_thread_reads_violations(runner, monkeypatch):
    """The thread that reads a step's tokens sends the queue before it reads what failed."""
    seen = []
    for name in ("apply", "settle", "after_forward"):
        method = getattr(runner.guard.books, name)

        def noted(*args, name=name, method=method):
            seen.append((name, runner.guard._counts._lock.locked()))
            return method(*args)

        monkeypatch.setattr(runner.guard.books, name, noted)
    runner.step({"x": 3}, new={"x": [1]})
    assert seen == [("apply", True), ("settle", True), ("after_forward", True)]


def test_hooks_begin_a_step_end_it_and_give_its_output_what_was_found(runner, monkeypatch):
    from kvcanary_fx.adapters.vllm import registry
    from kvcanary_fx.adapters.vllm.journal import ATTRIBUTE, Message
    from kvcanary_fx.adapters.vllm.v2 import hooks

    class Output:
        def get_output(self):
            return SimpleNamespace()

    def raises(*_):
        seen.append(runner.guard.scheduled)
        raise ValueError("out of memory")

    monkeypatch.setattr(hooks, "AsyncOutput", Output)
    seen = []
    execute = hooks._execute_model(lambda runner, scheduled, *_, **__: seen.append(runner.guard.scheduled))
    sample, read = hooks._sample_tokens(lambda runner: Output()), hooks._get_output(Output.get_output)
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
    scheduled = SimpleNamespace(
        finished_req_ids=set(), preempted_req_ids=None, scheduled_new_reqs=[], scheduled_cached_reqs=cached,
        kv_cache_block_copies=None, num_scheduled_tokens={},
    )  # fmt: skip
    setattr(scheduled, ATTRIBUTE, Message())
    execute(runner, scheduled)
    assert seen.pop() is None, "nobody guards this runner yet"
    registry.add(runner, runner.guard)
    execute(runner, scheduled, None, True)
    assert seen.pop() is None, "a dummy run is no step"
    for run in (execute, hooks._execute_model(raises)):
        with contextlib.suppress(ValueError):
            run(runner, scheduled)
        assert seen.pop() is scheduled
        assert runner.guard.scheduled is None
    output = sample(runner)
    assert not hasattr(read(output), ATTRIBUTE)
    runner.guard.reactions.verdict = "damaged"
    assert getattr(read(output), ATTRIBUTE) == "damaged"


def test_dummy_forwards_look_at_nothing(runner):
    run(runner)
    runner.kv_connector.set_disabled(True)
    with step_of(runner.guard, SimpleNamespace(num_scheduled_tokens={}, finished_req_ids=set())):
        runner._model(torch.tensor([9]))
    runner.kv_connector.set_disabled(False)
    assert runner.guard.session.violations() == []
    assert runner.connector.calls[-2:] == ["set_disabled"] * 2


def test_a_layer_that_no_check_saw_is_told(runner):
    del runner.layers["b"]
    runner.step({"x": 3}, new={"x": [1]})
    assert any("only 1 of 2 layers" in why for why in runner.guard.session.uncovered)


def test_the_parts_that_the_steps_benchmark_times_are_there(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import vllm_steps

    for part in vllm_steps.OURS:
        module, _, name = part.partition(":")
        assert callable(operator.attrgetter(name)(importlib.import_module(f"kvcanary_fx.{module}"))), part


def test_our_ops_split_the_graph_wherever_it_comes_from(monkeypatch):
    """A graph from vLLM's cache is split by the configuration, and is not handed to us."""
    from vllm.config import CompilationConfig, VllmConfig
    from vllm.platforms.cpu import CpuPlatform

    from kvcanary_fx.adapters.vllm import ops, plugin

    plugin.register()
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(lambda cls, config: None))
    config = VllmConfig(compilation_config=CompilationConfig(mode=3)).compilation_config
    assert [op for op in ops.OPS if op not in config.splitting_ops] == []


def test_a_model_that_raises_leaves_a_session_that_goes_on(runner, monkeypatch):
    runner.step({"x": 3}, new={"x": [1]})
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_model", lambda *_: (_ for _ in ()).throw(ValueError("out of memory")))
        with pytest.raises(ValueError, match="out of memory"):
            runner.step({"x": 1})
    runner.step({"y": 3}, new={"y": [2]})
    assert runner.guard.session._stepping.running is None


def test_layers_of_a_group_that_is_not_guarded_raise_nothing_and_stand_for_no_others(runner):
    runner.layers["elsewhere"] = tuple(torch.zeros_like(half) for half in runner.layers["a"])
    runner.step({"x": 3}, new={"x": [1]})
    assert runner.guard.session.uncovered == []
    runner.layers.pop("b")
    runner.step({"x": 1})
    assert "only 1 of 2 layers were checked" in runner.guard.session.uncovered[0]


def test_a_guard_is_made_once_every_half_of_the_cache_has_proved_to_be_compared(runner, monkeypatch):
    from kvcanary_fx import SelfTestError
    from kvcanary_fx.adapters.vllm import proof
    from kvcanary_fx.adapters.vllm.v2 import hooks

    runner.dcp_size, runner.pcp_manager, runner.ubatch_runner = 1, None, None
    monkeypatch.setattr(hooks, "groups_with_drafts", lambda runner, why, unguarded: [runner.group])
    assert hooks._guard(runner, runner.settings, False, {}).groups == [runner.group]
    assert not any(half.any() for halves in runner.layers.values() for half in halves)  # nothing is left of it
    monkeypatch.setattr(proof, "record_layer", lambda *_: None)
    with pytest.raises(SelfTestError, match="a changed byte in half K of a"):
        hooks._guard(runner, runner.settings, False, {})


def test_layers_of_a_draft_are_named_with_the_reason_and_are_not_the_targets(caplog):
    from kvcanary_fx.adapters.vllm import pools
    from kvcanary_fx.adapters.vllm.v2 import drafts

    speculator = SimpleNamespace(method="dflash", draft_attn_layer_names={"draft.0"})
    runner, unguarded = SimpleNamespace(speculator=speculator), {}
    runner.compilation_config = SimpleNamespace(static_forward_context={"draft.0": None})
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["draft.0"])])
    assert pools.draft_layers(runner) == {"draft.0"}
    assert pools.groups_with_drafts(runner, drafts.why_unguarded(speculator), unguarded) == []
    assert unguarded == {"draft": "drafts of dflash are not supported by this adapter"}
    assert "kvcanary.unguarded draft layers (draft.0, ...): drafts of dflash" in caplog.text


@pytest.fixture
def drafting():
    return Runner(drafts=2)


def run_drafting(runner):
    """A prompt that is checked launch by launch, and steps with drafts, of which none, some and all are rejected."""
    runner.step({"x": 14}, new={"x": [1, 2, 3, 4, 5]}, rejected={})
    runner.step({"x": 3, "y": 10}, new={"y": [6, 7, 8, 9, 10]}, rejected={"x": 2})  # launch by launch, too
    runner.step({"y": 3, "x": 1}, rejected={"y": 1})
    runner.step({"x": 3, "y": 3}, rejected={"x": 1, "y": 2})
    return runner.step({"y": 3}, rejected={"y": 0}, finished=["x"])  # x leaves guesses in its pages


def test_rejected_drafts_are_silent_in_the_target_and_in_the_draft(drafting):
    assert drafting.guard.read(run_drafting(drafting)) is None
    stats = drafting.guard.session.stats()
    assert (stats.violations, drafting.guard.session.uncovered) == (0, [])
    assert stats.recorded == 6 * (14 + 13 + 4 + 6 + 3)


@pytest.mark.parametrize("beside", [{}, {"z": 10}], ids=["kept", "launch by launch"])
def test_rejected_draft_that_the_runner_counts_is_reported(drafting, beside):
    drafting.guard.read(run_drafting(drafting))
    drafting.step({"y": 3, **beside}, new={"z": [11, 12, 13]} if beside else (), rejected={"y": 2})
    stored = drafting._stored("y")
    drafting.req_states.num_computed_tokens.gpu[drafting.row["y"]] += 1
    drafting.guard.read(drafting.step({"y": 1}))
    found = drafting.guard.session.known_violations()
    told = {(v.check, v.why, v.request, v.position) for v in found}
    assert told == {("token", "REJECTED_TOKEN", "y", stored), ("poison", "NEVER_WRITTEN", "y", stored)}
    assert {v.layer for v in found if v.check == "poison"} == {"draft"}  # a guess is there


def test_flip_in_a_layer_of_a_draft_is_reported_before_the_next_proposal(drafting):
    drafting.guard.read(run_drafting(drafting))
    drafting.draft["draft"][0][6, 1, 0, 3] += 1  # position 1 of y
    drafting.guard.read(drafting.step({"y": 1}))
    (found,) = drafting.guard.session.known_violations()
    assert (found.check, found.layer, found.half, found.request, found.position) == ("content", "draft", "K", "y", 1)


def test_guess_that_overwrites_a_token_is_reported(drafting):
    drafting.guard.read(run_drafting(drafting))
    drafting.guard.read(drafting.step({"y": 3}, rejected={}, stray=6 * PAGE + 2))
    assert drafting.guard.session.known_violations() == []
    drafting.guard.read(drafting.step({"y": 1}))
    found = {(v.check, v.layer, v.request, v.position) for v in drafting.guard.session.known_violations()}
    assert found == {("content", "draft", "y", 2)}


def test_layer_of_a_draft_that_no_check_saw_is_told(drafting, monkeypatch):
    monkeypatch.setattr(drafting, "_model", lambda slots, layers=None: Runner._model(drafting, slots, layers and {}))
    drafting.step({"x": 3}, new={"x": [1]})
    assert drafting.guard.session.uncovered == ["only 0 of 1 layers of a draft were checked"]


def test_tokens_of_the_target_in_the_batch_of_a_draft_model():
    from kvcanary_fx.adapters.vllm.v2.drafts import rows_of_the_target

    batch = SimpleNamespace(num_tokens=6, num_reqs=3, query_start_loc=torch.tensor([0, 2, 3, 6, 6], dtype=torch.int32))
    assert rows_of_the_target(batch).tolist() == [0, 1, 3, 5, 6, 7]

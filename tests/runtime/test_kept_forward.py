"""An engine whose batches are on the device: its checks before and after the model are captured once."""

from __future__ import annotations

import contextlib

import pytest
import torch

from kvcanary_fx import KVPool, install_canary
from kvcanary_fx.engine import kept_forward
from kvcanary_fx.engine.kept_forward import Reads
from kvcanary_fx.engine.layers import LayerChecks
from kvcanary_fx.errors import SessionStateError
from kvcanary_fx.kernels.context import forward_context
from kvcanary_fx.kernels.layer_ops import record_layer, verify_layer

LAYERS, PAGES, SIZE, HEADS, DIM, ROOM = 2, 16, 4, 2, 8, 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = [f"layers.{i}" for i in range(LAYERS)]


class Engine:
    """Requests of one row each; steps of few tokens have checks that are kept, if ``kept``, or in the model's graph, of
    which its code takes the place."""

    def __init__(self, kept=True, in_graph=False, **settings):
        shape = PAGES, SIZE, HEADS, DIM
        self.kv = [tuple(torch.zeros(shape, device=DEVICE) for _ in "kv") for _ in range(LAYERS)]
        self.table = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32, device=DEVICE)
        self.given = self.table.clone()  # what attention gets
        pool = KVPool(
            self.kv, self.table, layer_names=NAMES, paged=True, table_page_size=SIZE, reserved=tuple(range(SIZE)),
            allocations=False,
        )  # fmt: skip
        settings = {"mode": "log", "budget": None, "health_every": 0} | settings
        self.session = install_canary(pool, max_requests=2, max_tokens=ROOM, **settings)
        self.checks = LayerChecks(self.session)
        self.checks.reserve(2, ROOM)
        self.step_fields = {
            name: torch.zeros(ROOM, dtype=torch.int64, device=DEVICE)
            for name in ("request_rows", "prefix_lens", "extend_lens", "input_ids", "slots", "owners", "positions")
        }
        self.counts, self.live, self.lengths = (torch.zeros(n, dtype=torch.int64, device=DEVICE) for n in (3, 3, 2))
        reads = [Reads(self.session.pool, self.given, self.lengths, SIZE)]
        self.kept = self.checks.keep(2, 4, self._take_in(), reads, live=self.live) if kept else None
        self.in_graph = in_graph
        torch.full((ROOM,), -1, device=DEVICE)  # in memory that something gave back, if it did
        self.session.mark_ready()
        self.stored, self.slip, self.wrong = [0, 0], 0.0, 0

    def _take_in(self):
        order = torch.arange(ROOM, device=DEVICE)  # which nothing else holds

        def take_in():
            """What a graph of the engine does at each replay."""
            self.live.copy_(self.counts)
            if DEVICE == "cpu" and self.counts[0] < 0:
                return
            for name, source in self.step_fields.items():
                out = self.session.inputs.buffer(name)
                out.copy_(source[order[: len(out)]])
            self.session.inputs.counts.copy_(self.counts)
            self.checks.clock().copy_(self.counts[2:] << 32)

        return take_in

    def step(self, counts):
        places = [(r, self.stored[r] + i) for r, n in enumerate(counts) for i in range(n)]
        table = self.table.tolist()
        slots = torch.tensor([table[r][p // SIZE] * SIZE + p % SIZE for r, p in places], device=DEVICE)
        rows = [r for r, n in enumerate(counts) if n]
        batch = dict(
            input_ids=[p for _, p in places], slots=slots, request_rows=rows,
            prefix_lens=[self.stored[r] for r in rows], extend_lens=[counts[r] for r in rows],
            request_ids=[f"r{r}" for r in rows], positions=[p for _, p in places],
        )  # fmt: skip
        with self._around(batch, len(rows), len(places)):
            self._model(slots, [float(p) for _, p in places])
        for r, n in enumerate(counts):
            self.stored[r] += n

    def _around(self, batch, requests, tokens):
        if self.kept is None or tokens > self.kept.tokens:
            around = contextlib.ExitStack()
            around.enter_context(self.session.step(batch))
            around.enter_context(self.session.forward())
            around.enter_context(self.checks.publish())
            return around
        batch |= {"owners": self.session.ids.hashes(batch["request_ids"])}
        for name, buffer in self.step_fields.items():
            values = torch.as_tensor(batch[name])
            buffer[: len(values)] = values
        self.given[:requests] = self.table[batch["request_rows"]] + self.wrong
        self.lengths[:requests] = torch.tensor(batch["prefix_lens"]) + torch.tensor(batch["extend_lens"])

        def send(step):
            self.counts.copy_(torch.tensor([requests, tokens, step]))

        return self.checks.kept(self.kept, send, requests, tokens, in_graph=self.in_graph)

    def replay_of_no_forward(self):
        """Of a graph with checks in it, as a server's warm-up makes them."""
        self.counts.fill_(-1)
        self.kept.inside()

    def _model(self, slots, positions):
        if self.in_graph:
            self.kept.inside()
            with forward_context(self.kept.context(len(slots))):  # which a graph has from its capture
                self._run_layers(slots, positions)
            return
        self._run_layers(slots, positions)

    def _run_layers(self, slots, positions):
        rows = (
            torch.zeros(len(slots), HEADS, DIM, device=DEVICE) + torch.tensor(positions, device=DEVICE)[:, None, None]
        )
        for i, (name, halves) in enumerate(zip(NAMES, self.kv, strict=True)):
            verify_layer(rows.device, name)
            for half, slip in zip(halves, (0.0, self.slip), strict=True):
                half.view(-1, HEADS, DIM)[slots] = rows + i + slip
            record_layer(rows + i, rows + i, rows.device, name)


def found(engine):
    return [(v.check, v.layer, v.half, v.request, v.position) for v in engine.session.violations()]


def test_steps_whose_checks_are_kept_do_what_the_others_do():
    kept, anew = Engine(), Engine(kept=False)
    for engine in (kept, anew):
        for counts in ([3, 5], [1, 1], [0, 2], [3, 1], [4, 3], [1, 0]):
            engine.step(counts)
        assert found(engine) == []
    spaces = [engine.session.pool.space for engine in (kept, anew)]
    for name in ("tokens", "positions", "chain", "owners", "flags"):
        assert torch.equal(*(getattr(space, name)[:-1] for space in spaces)), name  # the last is of no slot
    assert torch.equal(*(engine.session.pool.digests for engine in (kept, anew)))
    stats = [engine.session.stats() for engine in (kept, anew)]
    for name in ("recorded", "checked", "engine_steps", "slots_checked"):
        assert len({getattr(each, name) for each in stats}) == 1, name


@pytest.mark.parametrize("counts", [[1, 1], [4, 4]], ids=["kept", "anew"])
def test_a_flip_is_found_in_the_next_step_with_its_number(counts):
    engine = Engine()
    engine.step([3, 2])
    engine.step([1, 1])
    engine.kv[1][0][5, 1] += 1
    engine.step(counts)
    (violation,) = engine.session.violations()
    assert (violation.check, violation.layer, violation.half, violation.request, violation.position) == (
        "content", "layers.1", "K", "r1", 1,
    )  # fmt: skip
    assert violation.step == 3


def test_a_wrong_write_is_found_in_its_step():
    engine = Engine()
    engine.step([3, 2])
    engine.slip = 1.0
    engine.step([1, 0])
    assert found(engine) == [("operand", name, "V", "r0", 3) for name in NAMES]


def test_the_table_that_attention_gets_is_compared():
    engine = Engine()
    engine.step([3, 2])
    engine.wrong = 4
    engine.step([1, 0])
    assert {(check, request) for check, _, _, request, _ in found(engine)} == {("index", "r0")}


def test_a_smaller_step_launched_anew_reads_nothing_that_a_kept_one_left():
    engine = Engine()
    engine.step([2, 2])
    engine.kept, kept = None, engine.kept
    engine.step([1, 0])
    used = {name: engine.session.inputs.buffer(name) for name in ("owners", "real_slots_0")}
    assert used["owners"][1:].tolist() == [0]
    assert set(used["real_slots_0"][1:].tolist()) == {-1}
    engine.kept = kept
    engine.step([1, 1])
    assert found(engine) == []


def test_who_is_in_the_written_slots_is_known_before_the_model_has_run():
    """So that nothing but the model's own graph is launched behind it."""
    engine, seen = Engine(), []
    model = engine._model

    def watched(slots, positions):
        seen.append(engine.session.pool.space.positions[slots].tolist())
        model(slots, positions)

    engine._model = watched
    engine.step([2, 1])
    engine.step([1, 0])
    assert seen == [[0, 1, 0], [2]]
    assert found(engine) == []


def test_checks_after_the_model_cannot_be_in_its_graph():
    engine = Engine(verify_after=True)
    kept = engine.checks.keep(2, 4, engine._take_in(), live=engine.live)
    with pytest.raises(SessionStateError, match="cannot be in its graph"):
        engine.checks.kept(kept, lambda step: None, 0, 0, in_graph=True)


@pytest.mark.skipif(DEVICE == "cuda", reason="test_checks_in_graph.py has graphs")
def test_checks_in_the_graph_of_a_model_do_what_the_others_do():
    inside, anew = Engine(in_graph=True, verify_after=False), Engine(kept=False, verify_after=False)
    for counts in ([2, 2], [1, 1], [0, 2], [3, 1], [1, 0]):
        for engine in (inside, anew):
            engine.step(counts)
        inside.replay_of_no_forward()
    assert found(inside) == found(anew) == []
    spaces = [engine.session.pool.space for engine in (inside, anew)]
    for name in ("tokens", "positions", "chain", "owners", "flags"):
        assert torch.equal(*(getattr(space, name)[: len(space.tokens) - 1] for space in spaces)), name
    assert torch.equal(*(engine.session.pool.digests for engine in (inside, anew)))
    assert inside.session.stats() == anew.session.stats()
    for engine in (inside, anew):
        engine.kv[1][0].view(-1, HEADS, DIM)[SIZE + 2] += 1  # position 2 of r0
        engine.step([1, 1])
    assert found(inside) == found(anew) == [("content", "layers.1", "K", "r0", 2)]


def test_checks_behind_the_model_are_in_no_graph_of_it():
    engine = Engine(verify_after=True)
    assert engine.kept.inside is None
    with pytest.raises(SessionStateError, match=r"do without captured\(before=\)"):
        engine.checks._fork(engine.kept)


def test_a_step_whose_checks_no_graph_can_have_is_refused():
    """It would run without them."""
    engine = Engine(verify_after=False)
    kept = engine.checks.keep(2, 4, engine._take_in())
    with pytest.raises(SessionStateError, match="had no live="):
        engine.checks.kept(kept, lambda step: None, 0, 0, in_graph=True)


def test_a_model_that_raises_leaves_a_session_that_goes_on():
    engine = Engine()
    engine.step([3, 2])
    with pytest.raises(ZeroDivisionError), engine.checks.kept(engine.kept, lambda step: None, 0, 0):
        raise ZeroDivisionError
    engine.step([1, 1])
    with engine.session.step(), pytest.raises(SessionStateError, match=r"step\(\) inside step\(\)"):
        engine.step([1, 1])


@pytest.mark.skipif(DEVICE == "cuda", reason="says what would be forked where there are no streams")
def test_inline_nothing_is_forked(monkeypatch):
    """A graph with a branch has streams of its own, and in a process with many streams each kernel takes longer."""
    monkeypatch.setattr(kept_forward, "can_fork", lambda device: True)
    streams = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.append(device))
    Engine(placement="inline")
    assert streams == []
    with pytest.raises(RuntimeError, match="Stream"):
        Engine(placement="side")
    assert streams == [torch.device("cpu")]

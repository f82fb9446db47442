"""A model that is one CUDA graph, with all checks in it: those before it run beside it, and records wait for them."""

from __future__ import annotations

import ctypes
import functools
from graphlib import TopologicalSorter

import pytest
import torch

from kvcanary_fx import KVPool, install_canary
from kvcanary_fx.engine.kept_forward import Reads
from kvcanary_fx.engine.layers import LayerChecks
from kvcanary_fx.kernels.layer_ops import record_layer, verify_layer

pytestmark = pytest.mark.gpu

LAYERS, PAGES, SIZE, HEADS, DIM, ROOM = 3, 64, 4, 2, 8, 4
NAMES = [f"layers.{i}" for i in range(LAYERS)]

#: Layers of a model that waits for short checks after its first layer.
MANY = 16

#: Cycles of the device before the checks, so that the model would be over before they begin.
LONG = 2_000_000

FIELDS = ("request_rows", "prefix_lens", "extend_lens", "input_ids", "slots", "owners", "positions")


class Engine:
    """Two requests, a token each in a step; its inputs are on the device, and nothing waits for that."""

    def __init__(self, hold, cycles=LONG, model=0, layers=LAYERS, first=None, says=range(0), **settings):
        """
        Args:
            first: cycles of what is launched before the checks, which then looks at what the model is about to write;
                None: nothing is.
            says: the layers that say when they write.
        """
        self.kv = [tuple(torch.zeros(PAGES, SIZE, HEADS, DIM, device="cuda") for _ in "kv") for _ in range(layers)]
        self.names = [f"layers.{i}" for i in range(layers)]
        self.table = torch.arange(1, 61, dtype=torch.int32, device="cuda").view(2, 30)
        pool = KVPool(
            self.kv, self.table, layer_names=self.names, paged=True, table_page_size=SIZE, reserved=tuple(range(SIZE)),
            allocations=False,
        )  # fmt: skip
        settings = {"mode": "log", "budget": None, "health_every": 0} | settings
        self.session = install_canary(pool, max_requests=2, max_tokens=ROOM, **settings)
        self.checks, self.hold, self.cycles, self.model = LayerChecks(self.session), hold, cycles, model
        self.first, self.says, self.seen = first, says, torch.zeros(2, HEADS, DIM, device="cuda")
        self.given = {n: torch.zeros(ROOM, dtype=torch.int64, device="cuda") for n in FIELDS}
        self.counts, self.live, self.lengths = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (3, 3, 2))
        self.slip = torch.zeros((), device="cuda")
        self.checks.reserve(2, ROOM)
        reads = [Reads(self.session.pool, self.table, self.lengths, SIZE)]
        first = None if first is None else self._look
        self.kept = self.checks.keep(2, 2, self._take_in, reads, live=self.live, first=first)
        self.session.mark_ready()
        self._capture()
        self.stored = 0

    def _take_in(self):
        torch.cuda._sleep(self.cycles)
        for name, source in self.given.items():
            out = self.session.inputs.buffer(name)
            out.copy_(torch.where(self.counts[0] < 0, out, source[: len(out)]))
        self.live.copy_(self.counts)
        counts, clock = self.session.inputs.counts, self.checks.clock()
        counts.copy_(torch.where(self.counts[0] < 0, counts, self.counts))
        clock.copy_(torch.where(self.counts[0] < 0, clock, self.counts[2:] << 32))

    def _look(self):
        torch.cuda._sleep(self.first)
        self.seen.copy_(self.kv[0][0].view(-1, HEADS, DIM)[self.given["slots"][:2]])

    def _model(self):
        torch.cuda._sleep(self.model)
        slots, rows = self.given["slots"], torch.zeros(ROOM, HEADS, DIM, device="cuda")
        rows = rows + self.given["positions"][:, None, None]
        for i, (name, halves) in enumerate(zip(self.names, self.kv, strict=True)):
            if i in self.says:
                self.checks.about_to_write()
            for half, slip in zip(halves, (torch.zeros_like(self.slip), self.slip), strict=True):
                half.view(-1, HEADS, DIM)[slots] = rows + i + slip
            verify_layer(rows.device, name)
            record_layer(rows + i, rows + i, rows.device, name)
        for _ in range(4 * LAYERS):  # after the last attention, in memory that nobody needs any more
            torch.full_like(rows, 9.0)

    def _capture(self):
        self.checks.reserve(2, ROOM)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), self.checks.captured(2, ROOM, hold=self.hold):
            self._model()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self.graph), self.checks.captured(2, ROOM, hold=self.hold, before=self.kept):
            self._model()
        self.without = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.without), self.checks.captured(2, ROOM, hold=self.hold):
            self._model()

    def replay_of_no_forward(self):
        self.checks.reserve(2, ROOM)  # its layers record nothing
        self.counts.fill_(-1)
        self.graph.replay()

    def step(self, in_graph=True):
        place, owners = self.stored, self.session.ids.hashes(["a", "b"])
        slots = [(1 + place // SIZE + 30 * row) * SIZE + place % SIZE for row in (0, 1)]
        values = dict(
            request_rows=[0, 1], prefix_lens=[place] * 2, extend_lens=[1, 1], input_ids=[place] * 2, slots=slots,
            owners=owners, positions=[place] * 2,
        )  # fmt: skip
        for name, value in values.items():
            self.given[name][:2].copy_(torch.tensor(value).pin_memory(), non_blocking=True)
        self.lengths.fill_(place + 1)

        def send(step):
            self.counts.copy_(torch.tensor([2, 2, step]).pin_memory(), non_blocking=True)

        with self.checks.kept(self.kept, send, 2, 2, in_graph=in_graph):
            (self.graph if in_graph else self.without).replay()
        self.stored += 1


def found(engine):
    return [(v.check, v.layer, v.half, v.request, v.position, v.step) for v in engine.session.violations()]


@pytest.mark.parametrize(
    ("hold", "settings"),
    [(True, {}), (False, {}), (True, dict(layers=MANY, budget="1%"))],
    ids=["held", "each", "joined early"],
)
def test_the_records_of_a_graph_wait_for_the_checks_beside_it(hold, settings):
    """The checks take longer than the model: records that did not wait would be of the step before."""
    beside, inline = Engine(hold, **settings), Engine(hold, placement="inline", **settings)
    for engine in (beside, inline):
        for number in range(40):
            engine.step(in_graph=number % 5 != 3)
            if number % 7 == 2:
                engine.replay_of_no_forward()
        assert found(engine) == []
    spaces = [engine.session.pool.space for engine in (beside, inline)]
    for name in ("tokens", "positions", "chain", "owners", "flags"):
        assert torch.equal(*(getattr(space, name)[:-1] for space in spaces)), name
    assert torch.equal(*(engine.session.pool.digests for engine in (beside, inline)))
    assert beside.session.stats().recorded == inline.session.stats().recorded == 40 * 2 * 2 * len(beside.names)


def quickest(run):
    """Milliseconds on the device, the least of a few times: another process may have its turn there meanwhile."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in "ba")
        before.record()
        run()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after))
    return min(times)


def test_the_model_does_not_wait_for_the_checks():
    """Both take as long: beside each other about half of what they take one after the other."""
    engine, times = Engine(hold=True, cycles=10 * LONG, model=10 * LONG), {}
    engine.step()
    for in_graph in (True, False):
        times[in_graph] = quickest(functools.partial(engine.step, in_graph))
    assert times[True] < 0.75 * times[False]


@pytest.mark.parametrize("says", [range(0), range(1, LAYERS), range(LAYERS)], ids=["nothing", "too few", "all"])
@pytest.mark.parametrize("hold", [True, False])
def test_what_comes_first_sees_what_the_model_is_about_to_write(says, hold):
    """It takes longer than the model: a write that did not wait would be seen."""
    engine = Engine(hold, cycles=0, first=10 * LONG, says=says)
    for number in range(6):
        last = engine.kv[0][0].view(-1, HEADS, DIM)[0] + number + 1  # what no step writes
        slots = [(1 + number // SIZE + 30 * row) * SIZE + number % SIZE for row in (0, 1)]
        engine.kv[0][0].view(-1, HEADS, DIM)[slots] = last
        engine.step()
        assert torch.equal(engine.seen, torch.stack([last, last]))
    assert found(engine) == []


def test_what_comes_first_is_beside_the_model_if_all_layers_say_when_they_write():
    """Both take as long: beside each other about half of what they take one after the other."""
    times = {}
    for says in (range(1, LAYERS), range(LAYERS)):
        engine = Engine(True, cycles=0, model=10 * LONG, first=10 * LONG, says=says)
        engine.step()
        times[len(says)] = quickest(engine.step)
    assert times[LAYERS] < 0.75 * times[LAYERS - 1]


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("half", [0, 1])
def test_a_flip_is_found_in_the_next_step_beside_the_model(layer, half):
    engine = Engine(hold=True)
    for _ in range(6):
        engine.step()
    engine.kv[layer][half][32, 1] += 1  # position 5 of b
    engine.step()
    assert found(engine) == [("content", NAMES[layer], "KV"[half], "b", 5, 7)]


def test_a_wrong_write_is_found_in_its_step_beside_the_model():
    engine = Engine(hold=True)
    for _ in range(3):
        engine.step()
    engine.slip.fill_(1.0)
    engine.step()
    assert sorted(found(engine)) == [("operand", name, "V", request, 3, 4) for name in NAMES for request in "ab"]


def test_a_model_that_raises_before_its_replay_leaves_a_session_that_goes_on():
    engine = Engine(hold=True)
    engine.step()
    with pytest.raises(ZeroDivisionError), engine.checks.kept(engine.kept, lambda step: None, 0, 0, in_graph=True):
        raise ZeroDivisionError
    for _ in range(3):
        engine.step()
    assert {check for check, *_ in found(engine)} == set()


def edges_of(graph):
    """Of a captured graph that was kept, as the driver knows them: pairs of nodes."""
    driver, raw, n = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver.cuGraphGetEdges(raw, None, None, ctypes.byref(n)) == 0
    ends = [(ctypes.c_void_p * n.value)() for _ in range(2)]
    assert driver.cuGraphGetEdges(raw, *ends, ctypes.byref(n)) == 0
    return list(zip(*ends, strict=True))


def longest_way_around(graph):
    """The largest part of a graph's longest way that one edge goes around: a branch that is open beside it."""
    edges = edges_of(graph)
    before = {second: [] for _, second in edges} | {first: [] for first, _ in edges}
    for first, second in edges:
        before[second].append(first)
    depth = dict.fromkeys(before, 0)
    for node in TopologicalSorter(before).static_order():
        depth[node] = max((depth[other] + 1 for other in before[node]), default=0)
    assert len(depth) > 3 * MANY
    return max(depth[second] - depth[first] for first, second in edges) / max(depth.values())


@pytest.mark.parametrize(("budget", "early"), [("1%", True), (None, False)])
def test_short_checks_are_no_branch_beside_all_of_the_model(budget, early):
    """Each kernel takes longer as long as there is a branch; checks of all bytes take longer than a layer."""
    engine = Engine(hold=True, cycles=0, layers=MANY, budget=budget)
    assert (longest_way_around(engine.graph) < 0.5) == early


@pytest.mark.parametrize("budget", ["1%", None])
def test_inline_a_graph_has_no_branch(budget):
    """Each graph with one has streams of its own, and in a process with many streams each kernel takes longer."""
    engine = Engine(hold=True, cycles=0, layers=MANY, budget=budget, placement="inline")
    firsts, seconds = zip(*edges_of(engine.graph), strict=True)
    assert len(set(firsts)) == len(firsts)
    assert len(set(seconds)) == len(seconds)

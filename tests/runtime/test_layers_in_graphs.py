"""An engine whose graphs have the model only: captured once with the checks of the layers, replayed in any forward."""

from __future__ import annotations

import pytest
import torch

from kvcanary_fx import KVPool, install_canary
from kvcanary_fx.engine.layers import LayerChecks
from kvcanary_fx.kernels.context import has_forward_context
from kvcanary_fx.kernels.layer_ops import record_layer, verify_layer

pytestmark = pytest.mark.gpu

LAYERS, PAGES, SIZE, HEADS, DIM, ROOM = 3, 16, 4, 2, 8, 8


class Engine:
    """A graph for up to ``ROOM`` tokens; every token's K and V are its position, the layer and the half."""

    publishes = False  # what is held while the graph is replayed

    def __init__(self, placement, hold=False, limit=None):
        self.kv = [tuple(torch.zeros(PAGES, SIZE, HEADS, DIM, device="cuda") for _ in "kv") for _ in range(LAYERS)]
        self.table = torch.zeros(4, 4, dtype=torch.int32, device="cuda")
        self.table[:2] = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], device="cuda")
        self.names = [f"layers.{i}" for i in range(LAYERS)]
        pool = KVPool(
            self.kv, self.table, layer_names=self.names, paged=True, table_page_size=SIZE, reserved=tuple(range(SIZE)),
            allocations=False,
        )  # fmt: skip
        self.session = install_canary(
            pool, mode="log", budget=None, placement=placement, max_requests=4, max_tokens=ROOM, health_every=0
        )
        self.checks, self.hold = LayerChecks(self.session), hold
        if limit is not None:
            self.checks.held._limit = limit
        self.session.mark_ready()
        self.slots = torch.zeros(ROOM, dtype=torch.int64, device="cuda")  # padding goes to the reserved page
        self.positions = torch.zeros(ROOM, device="cuda")
        self.slip = torch.zeros((), device="cuda")
        self.stored = [0, 0]
        self._capture()

    def model(self):
        for i, (name, halves) in enumerate(zip(self.names, self.kv, strict=True)):
            rows = self.positions[:, None, None] + torch.zeros(ROOM, HEADS, DIM, device="cuda")
            key, value = rows + i, torch.stack([rows, rows, rows + i + 0.5], 1)[:, 2]
            halves[0].view(-1, HEADS, DIM)[self.slots] = key
            halves[1].view(-1, HEADS, DIM)[self.slots] = value + self.slip
            verify_layer(rows.device, name)
            record_layer(key, value, rows.device, name)

    def _capture(self):
        self.checks.reserve(4, ROOM)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), self.checks.captured(4, ROOM, hold=self.hold):
            self.model()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph), self.checks.captured(4, ROOM, hold=self.hold):
            self.model()

    def replay(self):
        self.graph.replay()

    def step(self, counts, guarded=True):
        """``counts`` tokens of each request, and padding."""
        places = [(r, self.stored[r] + i) for r, n in enumerate(counts) for i in range(n)]
        table = self.table.tolist()
        slots = [table[r][p // SIZE] * SIZE + p % SIZE for r, p in places]
        self.slots.zero_()
        self.slots[: len(slots)] = torch.tensor(slots, device="cuda")
        self.positions[: len(slots)] = torch.tensor([float(p) for _, p in places], device="cuda")
        rows = [r for r, n in enumerate(counts) if n]
        batch = dict(
            input_ids=[p for _, p in places], slots=slots, request_rows=rows,
            prefix_lens=[self.stored[r] for r in rows], extend_lens=[counts[r] for r in rows],
            request_ids=[f"r{r}" for r in rows],
        )  # fmt: skip
        if not guarded:
            self.checks.reserve(4, ROOM)
            self.replay()
            return
        with self.session.step(batch), self.session.forward(), self.checks.publish(self.publishes):
            self.replay()
        for r, n in enumerate(counts):
            self.stored[r] += n


class Seen:
    """Memory of a CUDA graph, which nothing keeps from being used again."""

    def __init__(self, tensor):
        strides = [tensor.element_size() * s for s in tensor.stride()]
        self.__cuda_array_interface__ = dict(
            shape=tuple(tensor.shape), strides=tuple(strides), typestr="<f4", data=(tensor.data_ptr(), False), version=3
        )

    def tensor(self):
        return torch.as_tensor(self, device="cuda")


class Pieces(Engine):
    """Each layer is a graph of its own, in memory that all share, and its checks run from Python."""

    @property
    def publishes(self):
        return self.hold

    def _layer(self, i):
        halves = self.kv[i]
        rows = self.positions[:, None, None] + torch.zeros(ROOM, HEADS, DIM, device="cuda")
        key, value = rows + i, torch.stack([rows, rows, rows + i + 0.5], 1)[:, 2]
        halves[0].view(-1, HEADS, DIM)[self.slots] = key
        halves[1].view(-1, HEADS, DIM)[self.slots] = value + self.slip
        return key, value

    def _capture(self):
        self.checks.reserve(4, ROOM)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for i in range(LAYERS):
                self._layer(i)
        stream.synchronize()
        pool, self.pieces = torch.cuda.graph_pool_handle(), []
        with self.checks.captured(4, ROOM, beside=False, hold=self.hold):
            for i, name in enumerate(self.names):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    key, value = self._layer(i)
                record_layer(key, value, key.device, name)
                self.pieces.append((graph, name, Seen(key), Seen(value)))
                del key, value

    def replay(self):
        for graph, name, key, value in self.pieces:
            graph.replay()
            if has_forward_context():
                record_layer(key.tensor(), value.tensor(), self.slots.device, name)


LAYOUTS = {
    "side": lambda: Engine("side"),
    "inline": lambda: Engine("inline"),
    "held": lambda: Engine("side", hold=True),
    "held, a layer at a time": lambda: Engine("side", hold=True, limit=0),
    "pieces": lambda: Pieces("side"),
    "pieces, held": lambda: Pieces("side", hold=True),
    "pieces, two layers held": lambda: Pieces("side", hold=True, limit=5000),
}


@pytest.fixture(params=LAYOUTS)
def engine(request):
    return LAYOUTS[request.param]()


def test_pieces_overwrite_each_others_operands_unless_they_are_held():
    """Else the checks of held operands would prove nothing."""
    addresses = [{key.tensor().data_ptr() for _, _, key, _ in Pieces("side", hold).pieces} for hold in (False, True)]
    assert len(addresses[0]) < LAYERS == len(addresses[1])


def test_held_layers_are_recorded_in_one_launch_of_the_graph():
    from torch.profiler import ProfilerActivity, profile

    engine = LAYOUTS["held"]()
    engine.step([3, 5])
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        engine.step([1, 1])
        torch.cuda.synchronize()
    names = [event.key for event in seen.key_averages() for _ in range(event.count) if event.key.startswith("record_")]
    assert names == ["record_pool_kernel"]


def test_one_graph_serves_batches_of_every_size(engine):
    for counts in ([3, 5], [1, 0], [0, 2], [1, 1], [4, 4]):
        engine.step(counts)
    assert engine.session.violations() == []
    assert engine.session.stats().recorded == 2 * LAYERS * (8 + 1 + 2 + 2 + 8)


def test_what_a_replay_wrote_wrongly_is_found_in_that_step(engine):
    engine.step([3, 5])
    engine.slip.fill_(1.0)
    engine.step([1, 0])
    found = engine.session.violations()
    assert {(v.check, v.layer, v.half, v.request, v.position) for v in found} == {
        ("operand", name, "V", "r0", 3) for name in engine.names
    }


def test_a_flip_between_two_replays_is_found(engine):
    engine.step([3, 5])
    engine.kv[2][0][5, 1] += 1
    engine.step([1, 1])
    (found,) = engine.session.violations()
    assert (found.check, found.layer, found.half, found.request, found.position) == (
        "content",
        "layers.2",
        "K",
        "r1",
        1,
    )


def test_a_replay_for_nobody_is_silent(engine):
    engine.step([3, 5])
    engine.slip.fill_(1.0)
    engine.step([0, 0], guarded=False)
    assert engine.session.violations() == []

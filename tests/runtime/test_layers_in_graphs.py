"""An engine whose graphs have the model only: captured once with the checks of the layers, replayed in any forward."""

from __future__ import annotations

import pytest
import torch

from kvcanary_fx import KVPool, install_canary
from kvcanary_fx.engine.layers import LayerChecks
from kvcanary_fx.kernels.layer_ops import record_layer, verify_layer

pytestmark = pytest.mark.gpu

LAYERS, PAGES, SIZE, HEADS, DIM, ROOM = 3, 16, 4, 2, 8, 8


class Engine:
    """A graph for up to ``ROOM`` tokens; every token's K and V are its position, the layer and the half."""

    def __init__(self, placement):
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
        self.checks = LayerChecks(self.session)
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
        with torch.cuda.stream(stream), self.checks.captured(4, ROOM):
            self.model()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph), self.checks.captured(4, ROOM):
            self.model()

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
            self.graph.replay()
            return
        with self.session.step(batch), self.session.forward(), self.checks.publish():
            self.graph.replay()
        for r, n in enumerate(counts):
            self.stored[r] += n


@pytest.fixture(params=["side", "inline"])
def engine(request):
    return Engine(request.param)


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

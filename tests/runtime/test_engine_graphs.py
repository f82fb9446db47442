"""Every kind of CUDA graph around an engine's opaque attention, with the checks inline and beside the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opaque_engine import DIM, HEADS, METADATA, Model
from torch._dynamo.utils import counters
from torch.fx.passes.split_module import split_module

import kvcanary_fx
from kvcanary_fx import Batch, KVPool, SessionStateError
from kvcanary_fx.kernels.buffers import Gate
from kvcanary_fx.kernels.ring import Word

pytestmark = pytest.mark.gpu

LAYERS, SLOTS, WIDTH = 3, 64, 16
PLACEMENTS = pytest.mark.parametrize("placement", ["side", "inline"])


class Engine:
    """Requests A, B, ... of one token a step, in fixed tensors, and beside them the same model unprotected.

    Slot 0 takes padding.  Request r has row r + 1 of the table and the slots from 1 + r * WIDTH.
    """

    def __init__(self, requests: int, inner: Any = "inductor", options: dict[str, Any] | None = None, **settings: Any):
        names = [f"layers.{i}" for i in range(LAYERS)]
        self.kv, self.plain_kv = (
            [tuple(torch.zeros(SLOTS, HEADS, DIM, device="cuda") for _ in range(2)) for _ in range(LAYERS)]
            for _ in range(2)
        )
        self.pools = [dict(zip(names, kv, strict=True)) for kv in (self.kv, self.plain_kv)]
        self.table = torch.zeros(requests + 1, WIDTH, dtype=torch.int32, device="cuda")
        self.session = kvcanary_fx.install_canary(
            KVPool(self.kv, self.table, layer_names=names),
            inner=inner, mode="log", max_requests=requests, max_tokens=requests, **settings,
        )  # fmt: skip
        model = Model(LAYERS, hoisted=False).cuda()
        plain = "eager" if inner == "eager" else "inductor" if isinstance(inner, str) else inner
        given = dict(dynamic=False) | ({} if options is None else {"options": options})
        self.guarded = torch.compile(model, backend=self.session.backend, **given)
        self.plain = torch.compile(model, backend=plain, dynamic=False)
        self.x = torch.zeros(requests, HEADS * DIM, device="cuda")
        METADATA.slots = torch.zeros(requests, dtype=torch.int64, device="cuda")
        METADATA.reads = torch.zeros(SLOTS, dtype=torch.int64, device="cuda")
        METADATA.redirect = {}
        self.requests, self.stored = requests, 0

    def run(self, guarded: bool = True, n: int | None = None) -> torch.Tensor:
        """One call of the model over the fixed tensors, or over the first ``n`` of them."""
        METADATA.pools = self.pools[0 if guarded else 1]
        whole, n = METADATA.slots, n or self.requests
        METADATA.slots = whole[:n]
        try:
            with torch.no_grad():
                return (self.guarded if guarded else self.plain)(self.x[:n])
        finally:
            METADATA.slots = whole

    def slot(self, request: int) -> int:
        return 1 + request * WIDTH + self.stored

    def batch(self, n: int) -> Batch:
        """The next token of the first ``n`` requests."""
        slots = [self.slot(r) for r in range(n)]
        ids = [f"request {r}" for r in range(n)]
        return Batch([self.stored] * n, slots, list(range(1, n + 1)), [self.stored] * n, [1] * n, request_ids=ids)

    def warm_up(self, sizes: list[int] | None = None) -> None:
        """Compile, and let the shadow be made; nothing of it counts."""
        for n in sizes or [self.requests]:
            self.session.pool.allocate([self.slot(r) for r in range(n)])
            for _ in range(3):
                with self.session.step(self.batch(n)), self.session.forward():
                    self.run(n=n)
            self.session.pool.release([self.slot(r) for r in range(n)])
        self.session.inputs.freeze()
        torch.cuda.synchronize()

    def ready(self) -> None:
        """Forget the warm-up, in the pools too: padding is attended to."""
        for tensor in (t for kv in (self.kv, self.plain_kv) for pair in kv for t in pair):
            tensor.zero_()
        self.session.mark_ready()

    def step(self, replay: Callable[[], Any], n: int | None = None) -> Any:
        """One step of ``n`` requests through ``replay``; the rest of a captured batch is padding."""
        n = n or self.requests
        batch = self.batch(n)
        for r in range(n):
            self.session.pool.allocate([self.slot(r)], owner=f"request {r}")
            self.table[r + 1, self.stored] = self.slot(r)
        self.x.normal_(generator=torch.Generator("cuda").manual_seed(self.stored))
        METADATA.slots.zero_()[:n] = torch.tensor(batch.slots, device="cuda")
        reads = self.table[1 : n + 1, : self.stored + 1].flatten().long()
        METADATA.reads.zero_()[: reads.numel()] = reads
        with self.session.step(batch), self.session.forward():
            out = replay()
        torch.cuda.synchronize()
        self.stored += 1
        return out

    def expected(self) -> torch.Tensor:
        """What the unprotected model makes of the step's inputs, over KV of its own."""
        return self.run(guarded=False)

    def flip(self, layer: int, half: int, slot: int) -> None:
        self.kv[layer][half].view(torch.int32)[slot, 1, 2] ^= 1 << 9

    def told(self) -> list[tuple[Any, ...]]:
        """What was reported since the last call."""
        found = self.session.violations()
        news, self.seen = found[getattr(self, "seen", 0) :], len(found)
        return [(v.check, v.layer, v.half, v.slot, v.position, v.request) for v in news]


def captured(run: Callable[[], Any], **how: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **how):
        out = run()
    return graph, out


def steps_counted(engine: Engine) -> int:
    return sum(int(g[Gate.STEP]) for b in engine.session.bindings for g in b.gates.values())


def check_flips(engine: Engine, step: Callable[[], Any]) -> None:
    """A flip between two replays is found in each layer and half, at its request and position."""
    for layer in range(LAYERS):
        for half in range(2):
            engine.flip(layer, half, slot=1 + 2)
            step()
            assert engine.told() == [("content", f"layers.{layer}", "KV"[half], 3, 2, "request 0")]


@PLACEMENTS
@pytest.mark.parametrize("partition", [False, True], ids=["one partition", "graph_partition"])
def test_cudagraph_trees(placement, partition):
    counters.clear()
    options = {"triton.cudagraphs": True, "graph_partition": partition}
    engine = Engine(2, options=options, placement=placement)

    def replay() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return engine.run().clone()

    engine.warm_up()
    engine.ready()
    begun = steps_counted(engine)
    for n in range(5):
        got = engine.step(replay)
        assert torch.equal(got, engine.expected())
        assert steps_counted(engine) == begun + n + 1
    assert engine.told() == []
    check_flips(engine, lambda: engine.step(replay))
    assert counters["inductor"]["cudagraph_skips"] == 0
    engine.session.health.check()


@PLACEMENTS
def test_captured_checks_follow_the_share_that_a_budget_sets(placement, monkeypatch):
    engine = Engine(2, placement=placement, budget="10%")
    engine.warm_up()
    with engine.session.step(engine.batch(2)), engine.session.forward():
        graph, _ = captured(engine.run)
    engine.ready()
    monkeypatch.setattr(engine.session.pace, "begin", lambda *_, **__: None)  # from here on nothing else sets the word
    (control,) = engine.session.controls.by_device.values()
    for _ in range(3):
        engine.step(graph.replay)
    control.words[Word.EVERY] = 4
    engine.flip(1, 0, slot=1 + 2)
    steps, told = 0, []
    while not told:
        engine.step(graph.replay)
        steps, told = steps + 1, engine.told()
        assert steps <= 4
    control.words[Word.EVERY] = 1
    check_flips(engine, lambda: engine.step(graph.replay))


@PLACEMENTS
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_manual_capture_replayed_on_another_stream(placement, inner):
    engine = Engine(2, inner=inner, placement=placement)
    engine.warm_up()
    with engine.session.step(engine.batch(2)), engine.session.forward():
        graph, out = captured(engine.run)
    engine.ready()
    other = torch.cuda.Stream()

    def replay() -> None:
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            graph.replay()
        torch.cuda.current_stream().wait_stream(other)

    begun = steps_counted(engine)
    for n in range(5):
        engine.step(replay)
        assert torch.equal(out, engine.expected())
        assert steps_counted(engine) == begun + n + 1
    assert engine.told() == []
    check_flips(engine, lambda: engine.step(replay))


@PLACEMENTS
def test_decode_padded_up_to_the_captured_size(placement):
    engine = Engine(3, placement=placement)
    engine.warm_up()
    with engine.session.step(engine.batch(3)), engine.session.forward():
        graph, _ = captured(engine.run)
    engine.ready()
    for n in (3, 3, 2, 2):
        engine.step(graph.replay, n)
    assert engine.told() == []
    check_flips(engine, lambda: engine.step(graph.replay, 1))


@PLACEMENTS
def test_batch_sizes_share_one_memory_pool(placement):
    engine = Engine(3, placement=placement)
    engine.warm_up([1, 2, 3])
    pool, graphs = None, {}
    for n in (3, 2, 1):
        with engine.session.step(engine.batch(n)), engine.session.forward():
            graphs[n], _ = captured(lambda: engine.run(n=n), pool=pool)  # noqa: B023
        pool = graphs[n].pool()
    engine.ready()
    for n in (3, 3, 2, 2):
        engine.step(graphs[n].replay, n)
    assert engine.told() == []
    check_flips(engine, lambda: engine.step(graphs[1].replay, 1))


class Loop:
    """Three forwards of one token a request, each planned on the device from the one before, as a draft's are."""

    def __init__(self, placement: str):
        self.engine = Engine(3, inner="eager", placement=placement)
        table, session = self.engine.table, self.engine.session
        self.rows = torch.arange(1, 4, device="cuda")
        self.first = 1 + WIDTH * torch.arange(3, device="cuda")
        table[1:] = self.first.unsqueeze(1) + torch.arange(WIDTH, device="cuda")
        self.stored, self.real = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (1, 2))
        self.engine.warm_up()
        names = [f"request {r}" for r in range(3)]
        self.owners = session.owners(names)
        for row, name in enumerate(names, 1):
            session.pool.allocate(table[row], owner=name)
        self.set(0, 3)
        with session.step():
            self.run()
        with session.step():
            self.graph, _ = captured(self.run)
        self.engine.ready()

    def set(self, stored: int, requests: int) -> None:
        self.stored.fill_(stored)
        self.real.fill_(requests)

    def run(self) -> None:
        for index in range(3):
            position = self.stored + torch.full_like(self.rows, index)
            slots = torch.where(self.rows <= self.real[0], self.first + position, 0)
            METADATA.slots = slots
            batch = Batch(
                position, slots, self.rows, position, request_ids=self.owners, positions=position,
                real_counts=self.real,
            )  # fmt: skip
            with self.engine.session.forward(index, batch):
                self.engine.run()

    def replay(self, stored: int, requests: int) -> list[tuple[Any, ...]]:
        self.set(stored, requests)
        with self.engine.session.step():
            self.graph.replay()
        torch.cuda.synchronize()
        return self.engine.told()


@PLACEMENTS
def test_a_loop_of_forwards_in_one_graph_is_replayed_for_fewer_requests(placement):
    loop = Loop(placement)
    session = loop.engine.session
    assert loop.replay(0, 3) == []
    assert session.stats().slots_checked == 3 * (0 + 1 + 2)
    assert loop.replay(3, 2) == []
    assert session.stats().slots_checked == 9 + 2 * (3 + 4 + 5)
    loop.engine.flip(1, 0, slot=1 + WIDTH + 4)
    assert loop.replay(6, 2) == [("content", "layers.1", "K", 1 + WIDTH + 4, 4, "request 1")]
    assert session.violations()[-1].forward == 0
    assert loop.replay(3, 3) == []  # the third request goes on where it stopped
    with session.step(loop.engine.batch(1)):  # what a replay left in the buffers is padding again
        assert session.inputs.counts.tolist()[:2] == [1, 1]
        assert session.inputs.view(padded_bs=3).prefix_lens.tolist()[1:] == [0, 0]


class CapturedPieces:
    """A backend that cuts at attention, as vLLM's does, and captures each piece between when told to.

    Our ops look up the forward at run time, so they stay with attention, outside of the pieces.
    """

    def __init__(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.capturing = False

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        number, parts, eager, inside = 0, {}, set(), False
        for node in gm.graph.nodes:
            apart = str(node.target).split(".")[0] in ("kvcanary", "opaque_engine")
            if node.op == "call_function" and apart != inside:
                number, inside = number + 1, apart
            if inside:
                eager.add(f"submod_{number}")
            parts[node] = number
        cut = split_module(gm, None, lambda node: parts[node], keep_original_order=True)
        for name, piece in list(cut.named_children()):
            if name not in eager:
                setattr(cut, name, _Piece(piece, self))
        return cut


class _Piece(torch.nn.Module):
    def __init__(self, piece: torch.fx.GraphModule, owner: CapturedPieces):
        super().__init__()
        self.piece, self.owner, self.graph, self.args, self.out = piece, owner, None, (), None

    def forward(self, *args: Any) -> Any:
        if self.graph is None and self.owner.capturing:
            self.args = args
            self.graph, self.out = captured(lambda: self.piece(*args))
            self.owner.graphs.append(self.graph)
        if self.graph is None:
            return self.piece(*args)
        for mine, given in zip(self.args, args, strict=True):
            if isinstance(mine, torch.Tensor) and mine.data_ptr() != given.data_ptr():
                mine.copy_(given)
        self.graph.replay()
        return self.out


@PLACEMENTS
def test_piecewise_capture_with_attention_between_the_pieces(placement):
    pieces = CapturedPieces()
    engine = Engine(2, inner=pieces, placement=placement)
    engine.warm_up()
    pieces.capturing = True
    with engine.session.step(engine.batch(2)), engine.session.forward():
        engine.run()
    assert len(pieces.graphs) == LAYERS + 1
    engine.ready()
    plain = Model(LAYERS, hoisted=False).cuda()
    for _ in range(4):
        got = engine.step(engine.run)
        METADATA.pools = engine.pools[1]
        with torch.no_grad():
            assert torch.equal(got, plain(engine.x))
    assert engine.told() == []
    check_flips(engine, lambda: engine.step(engine.run))


@PLACEMENTS
def test_ops_allocate_nothing_in_a_capture(placement):
    engine = Engine(2, inner="eager", placement=placement)
    engine.warm_up()
    engine.run(guarded=False)
    torch.cuda.synchronize()

    def allocations(guarded: bool) -> int:
        with engine.session.step(engine.batch(2)), engine.session.forward():
            started = torch.cuda.memory_stats()["allocation.all.allocated"]
            captured(lambda: engine.run(guarded=guarded))
            ended = torch.cuda.memory_stats()["allocation.all.allocated"]
        return ended - started

    allocations(False)  # the first capture of a process allocates what matrix products work in
    assert allocations(True) == allocations(False)


def test_capture_without_a_forward_is_refused():
    engine = Engine(2)
    engine.warm_up()
    with pytest.raises(SessionStateError, match=r"captured outside session.forward\(\): its checks would look at"):
        captured(engine.run)


@PLACEMENTS
def test_an_exception_between_two_ops_leaves_the_session_usable(placement):
    engine = Engine(2, inner="eager", placement=placement)
    engine.warm_up()
    engine.ready()
    for _ in range(3):
        engine.step(engine.run)
    pools, engine.pools = engine.pools, [{}, {}]
    with pytest.raises(KeyError, match=r"layers\.0"):
        engine.step(engine.run)
    engine.pools = pools
    for r in range(2):
        engine.session.pool.release([engine.slot(r)], owner=f"request {r}")
    engine.step(engine.run)
    assert engine.told() == []
    check_flips(engine, lambda: engine.step(engine.run))

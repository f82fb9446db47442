"""Models on another GPU than the current one, and models with layers on two devices: guarded on each.

What needs two GPUs is skipped with fewer; a CPU beside one GPU, and one CPU twice, go through the same code.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opaque_engine import DIM as WIDTH
from opaque_engine import HEADS as OPAQUE_HEADS
from opaque_engine import METADATA
from opaque_engine import Layer as OpaqueLayer
from toys import VOCAB, Decoder, Rig, new_caches

import kvcanary_fx
from kvcanary_fx import Batch, CanaryBackend, CanaryConfig, EngineError, KVPool
from kvcanary_fx.engine import batch as engine_plan
from kvcanary_fx.engine import kv_pool as pool_layout
from kvcanary_fx.kernels.buffers import Count, Gate
from kvcanary_fx.kernels.slots.space import RequestPlan

LAYERS, SLOTS = 4, 16

DEVICES = pytest.mark.parametrize(
    "devices",
    [
        pytest.param(("cuda:0", "cuda:1"), marks=pytest.mark.gpu),
        pytest.param(("cpu", "cuda:0"), marks=pytest.mark.gpu),
        ("cpu", "cpu"),
    ],
    ids=" and ".join,
)

INNER = pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def _enough_gpus(request):
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    two = "cuda:1" in params.get("devices", ()) or "second_gpu" in request.node.name
    if two and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def flip(tensor: torch.Tensor) -> None:
    """Change one element's bits, unseen by PyTorch's version counter."""
    tensor.data.view(torch.int32).reshape(-1)[0] ^= 1 << 9


# ---- on another GPU than the current one


@pytest.mark.gpu
@INNER
def test_on_the_second_gpu_while_the_first_is_current(inner):
    assert torch.cuda.current_device() == 0
    rig = Rig.build(3, device="cuda:1", inner=inner, mode="log")
    for tokens in (5, 1, 1, 1):
        rig.step(tokens)
    assert rig.found() == []
    for layer in range(3):
        for half in range(2):
            rig.flip(layer, half, row=1, position=3)
            rig.step()
            assert rig.found()[-1] == ("content", f"layers.{layer}", "KV"[half], 1, 3)
    assert len(rig.found()) == 6
    assert {d for b in rig.session.bindings for d in b.gates} == {torch.device("cuda:1")}
    rig.session.stats()
    assert rig.session.uncovered == []
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_captured_on_the_second_gpu_and_replayed_while_the_first_is_current():
    rig = Rig.build(2, device="cuda:1", inner="eager", mode="log", compile_options={"dynamic": False})
    rig.step(5)
    ids = torch.zeros(2, 1, dtype=torch.int64, device="cuda:1")
    index, positions = torch.full((1,), 5, device="cuda:1"), torch.full((2, 1), 5, device="cuda:1")

    def run() -> torch.Tensor:
        with torch.no_grad():
            return rig.guarded(ids, positions, index, rig.caches)

    def replay(place: int) -> None:
        index.fill_(place), positions.fill_(place)
        graph.replay()
        torch.cuda.synchronize("cuda:1")

    with torch.cuda.device(1):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # by itself torch.cuda.graph makes one stream for all captures to come, here on the second GPU: those on the
        # first would be empty
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            run()
    for place in (6, 7):
        replay(place)
    assert rig.found() == []
    rig.flip(1, 0, row=0, position=2)
    replay(8)  # the same place again would look like a cropped sequence, whose slots may have changed
    assert [f[1:] for f in rig.found()] == [("layers.1", "K", 0, 2)]


# ---- layers on two devices, nothing set up


class Pipeline(torch.nn.Module):
    """The decoder of `toys.py` with each half of its layers, and of their caches, on a device."""

    def __init__(self, devices: tuple[str, str]):
        super().__init__()
        self.decoder = Decoder(LAYERS).eval().to(devices[0])
        self.places = [devices[2 * i // LAYERS] for i in range(LAYERS)]
        for layer, place in zip(self.decoder.layers, self.places, strict=True):
            layer.to(place)

    def forward(self, input_ids, position_ids, index, caches):
        model, home = self.decoder, input_ids.device
        x = F.embedding(input_ids, model.embed) + F.embedding(position_ids, model.places)
        mask = torch.arange(caches[0][0].shape[2], device=home) <= index.unsqueeze(1)
        for layer, cache, place in zip(model.layers, caches, self.places, strict=True):
            x = layer(x.to(place), cache, index.to(place), mask.to(place))
        return F.linear(x[:, -1].to(home), model.head)


class Split:
    """A pipeline guarded, and the same one unguarded over caches of its own."""

    def __init__(self, devices: tuple[str, str], inner: str):
        self.devices, self.length = devices, 0
        self.model = Pipeline(devices)
        backend = CanaryBackend(CanaryConfig(inner=inner, mode="log"))
        self.session = backend.session
        self.guarded = torch.compile(self.model, backend=backend)
        self.caches, self.plain_caches = ([new_caches(1, device=p)[0] for p in self.model.places] for _ in range(2))
        self.tokens: list[int] = []

    @torch.no_grad()
    def step(self, tokens: int = 1) -> None:
        """One forward of both, which must agree; the position input stays on the first device."""
        index = torch.arange(self.length, self.length + tokens, device=self.devices[0])
        ids = torch.randint(0, VOCAB, (2, tokens)).to(self.devices[0])
        positions = index.expand(2, tokens)
        got = self.guarded(ids, positions, index, self.caches)
        assert torch.allclose(got, self.model(ids, positions, index, self.plain_caches), atol=1e-4)
        self.tokens += ids[1].tolist()
        self.length += tokens


@DEVICES
@INNER
def test_layers_on_two_devices_are_guarded_on_each(devices, inner):
    rig = Split(devices, inner)
    for tokens in (5, 1, 1, 1):
        rig.step(tokens)
    assert rig.session.violations() == []
    told = 0
    for layer in range(LAYERS):
        for half in range(2):
            flip(rig.caches[layer][half][1, 0, 3])
            rig.step()
            (v,) = rig.session.violations()[told:]
            told += 1
            assert (v.check, v.layer, v.half) == ("content", f"decoder.layers.{layer}", "KV"[half])
            assert (v.row, v.index) == (1, 3)
            # tokens and positions are known on each device, though the model takes them on one
            assert (v.position, v.token) == (3, rig.tokens[3])
    assert rig.session.uncovered == []


@DEVICES
def test_the_counters_of_each_device_move(devices):
    rig = Split(devices, "eager")
    for tokens in (5, 1, 1):
        rig.step(tokens)
    bindings = [b for b in rig.session.bindings if b.plan.guarded]
    assert {d for b in bindings for d in b.gates} == {torch.device(d) for d in devices}
    for binding in bindings:
        assert len({int(gate[Gate.STEP]) for gate in binding.gates.values()}) == 1
    recorded: dict[str, int] = {}
    for binding in bindings:
        for counters in binding.counters:
            place = str(counters.device)
            recorded[place] = recorded.get(place, 0) + int(counters[Count.RECORDED])
    each = 7 * 2 * LAYERS  # tokens of two rows, in half of the layers, K and V
    assert recorded == (dict.fromkeys(devices, each) if len(set(devices)) == 2 else {devices[0]: 2 * each})


# ---- an engine's pools on two devices


class OpaquePipeline(torch.nn.Module):
    """Layers with opaque attention, half of them on each device."""

    def __init__(self, places: list[str]):
        super().__init__()
        torch.manual_seed(0)
        self.places = places
        self.layers = torch.nn.ModuleList(OpaqueLayer(f"layers.{i}", False).to(p) for i, p in enumerate(places))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, place in zip(self.layers, self.places, strict=True):
            x = layer(x.to(place))
        return x


class Engine:
    """One request, A, in a pool on each device; both pools number their slots alike."""

    def __init__(self, devices: tuple[str, str], inner: str, placement: str):
        places = [devices[2 * i // LAYERS] for i in range(LAYERS)]
        self.kv = [tuple(torch.zeros(SLOTS, OPAQUE_HEADS, WIDTH, device=p) for _ in range(2)) for p in places]
        names = [f"layers.{i}" for i in range(LAYERS)]
        METADATA.pools, METADATA.redirect = dict(zip(names, self.kv, strict=True)), {}
        half = LAYERS // 2
        self.tables = [torch.zeros(3, 12, dtype=torch.int32, device=d) for d in devices]
        parts: list[Any] = [slice(0, half), slice(half, LAYERS)]
        pools = [
            KVPool(self.kv[part], table, name=name, layer_names=names[part])
            for name, part, table in zip(("first", "second"), parts, self.tables, strict=True)
        ]
        self.session = kvcanary_fx.install_canary(*pools, inner=inner, mode="log", placement=placement)
        self.session.mark_ready()
        self.model = OpaquePipeline(places)
        self.guarded = torch.compile(self.model, backend=self.session.backend, dynamic=True)
        self.x_place, self.stored = devices[0], 0

    def step(self, slots: list[int]) -> None:
        start, end = self.stored, self.stored + len(slots)
        for pool, table in zip(self.session.pools.values(), self.tables, strict=True):
            pool.allocate(slots, owner="A")
            table[1, start:end] = torch.tensor(slots, dtype=torch.int32)
        METADATA.slots, METADATA.reads = torch.tensor(slots), self.tables[0][1, :end].long().cpu()
        batch = Batch(list(range(start, end)), slots, [1], [start], [len(slots)], request_ids=["A"])
        x = torch.randn(len(slots), OPAQUE_HEADS * WIDTH).to(self.x_place)
        with self.session.step(batch), self.session.forward(), torch.no_grad():
            self.guarded(x)
        self.stored = end


@DEVICES
@INNER
@pytest.mark.parametrize("placement", ["side", "inline"])
def test_an_engines_pools_on_two_devices(devices, inner, placement):
    rig = Engine(devices, inner, placement)
    for slots in ([3, 4, 5], [6], [7]):
        rig.step(slots)
    assert rig.session.violations() == []
    stats = rig.session.stats()
    assert (stats.recorded, stats.checked) == (5 * 2 * LAYERS, (3 + 4) * 2 * LAYERS)
    assert stats.slots_checked == 2 * (3 + 4)
    rig.session.health.check()
    for told, layer in enumerate(range(LAYERS)):
        flip(rig.kv[layer][layer % 2][4])
        rig.step([8 + layer])
        v = rig.session.violations()[-1]
        assert (v.check, v.layer, v.half, v.slot, v.position, v.request, v.pool) == (
            "content", f"layers.{layer}", "KV"[layer % 2], 4, 1, "A", ("first", "second")[2 * layer // LAYERS],
        )  # fmt: skip
        assert len(rig.session.violations()) == told + 1
    rig.tables[1][1, 2] = 15  # a stale page table, on the second device alone
    rig.step([12])
    assert {(v.pool, v.slot) for v in rig.session.violations()[LAYERS:]} >= {("second", 15)}
    assert {v.pool for v in rig.session.violations()[LAYERS:]} == {"second"}
    assert rig.session.uncovered == []


def plan(device: str) -> RequestPlan:
    def one(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, dtype=torch.int64, device=device)

    made = RequestPlan(
        counts=one(3), rows=one(1), prefix_lens=one(1), extend_lens=one(1), tokens=one(1), slots=one(1), positions=None,
        owners=one(1), namespaces=None, table=one(2, 4), columns=4, ends=one(1), real_slots=one(1),
    )  # fmt: skip
    return dataclasses.replace(made, reads=made)


def test_a_plan_goes_where_its_pool_is_with_all_that_kernels_follow():
    here, there = plan("cpu"), torch.device("meta")
    assert here.to(torch.device("cpu")) is here
    moved = here.to(there)
    for one in (moved, moved.reads):
        tensors = [v for v in vars(one).values() if isinstance(v, torch.Tensor)]
        assert len(tensors) == 8
        assert {v.device for v in tensors} == {there}
        assert (one.ends, one.real_slots) == (None, None)
    assert here.slots.device.type == "cpu"


def test_a_capture_over_two_devices_is_refused(monkeypatch):
    monkeypatch.setattr(engine_plan, "capturing", lambda: True)
    monkeypatch.setattr(KVPool, "device", torch.device("meta"))  # which no pool may really be on
    kv = torch.zeros(4, 2, 4)
    pool = KVPool([(kv, kv.clone())], torch.zeros(2, 4, dtype=torch.int32))
    with pytest.raises(EngineError, match="is on meta and the step inputs are not: a CUDA graph cannot be captured"):
        engine_plan._there(pool, plan("cpu"))


def test_a_pool_with_layers_on_two_devices_is_refused(monkeypatch):
    monkeypatch.setattr(pool_layout, "wrong_argument", lambda pool: None)  # meta stands for a second device here
    kv = [tuple(torch.zeros(4, 2, 4, device=d) for _ in range(2)) for d in ("cpu", "meta")]
    with pytest.raises(EngineError, match="has tensors on cpu, meta: the layers of each device are a pool of their"):
        KVPool(kv, torch.zeros(2, 4, dtype=torch.int32))

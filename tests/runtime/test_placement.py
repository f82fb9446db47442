"""Three ways to the checks of a layer, beside the model and in its stream: silent when clean, and a flip is found.

The ops around opaque attention in a graph of ours, calls of an engine around attention, and ops of an engine's own, as
vLLM's graphs have them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kvcanary_fx
from kvcanary_fx import Batch, KVPool
from kvcanary_fx.engine.layers import EagerLayers, LayerChecks
from kvcanary_fx.kernels.layer_ops import record_layer, verify_layer

pytestmark = pytest.mark.gpu

LAYERS, REQUESTS, WIDTH, HEADS, DIM = 4, 3, 32, 2, 64
SLOTS, HIDDEN = 1 + REQUESTS * WIDTH, HEADS * DIM
PLACEMENTS = pytest.mark.parametrize("placement", ["side", "inline"])
WAYS = pytest.mark.parametrize("way", ["ops of a graph", "calls of an engine", "ops of an engine"])


class Model:
    """Layers of one product into K and V, in memory of the step's own, and attention to the request's slots."""

    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        self.kv = [tuple(torch.zeros(SLOTS, HEADS, DIM, device="cuda") for _ in "kv") for _ in range(LAYERS)]
        self.weights = [torch.randn(HIDDEN, 2 * HIDDEN, device="cuda", generator=generator) / 16 for _ in range(LAYERS)]
        self.slots = torch.zeros(REQUESTS, dtype=torch.int64, device="cuda")
        self.verify: Callable[[str], None] = lambda layer: None
        self.record: Callable[..., None] = lambda layer, key, value: None

    def attention(self, layer: str, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.verify(layer)
        k, v = self.kv[int(layer.split(".")[1])]
        k[self.slots], v[self.slots] = key, value
        owned = v[1:].view(REQUESTS, WIDTH, HIDDEN)
        attended = owned.mean(1)
        self.record(layer, key, value)
        return attended

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for number, weight in enumerate(self.weights):
            key, value = (x @ weight).view(-1, 2, HEADS, DIM).unbind(1)
            x = torch.tanh(x + self.attention(f"layers.{number}", key, value))
            del key, value  # what the next layer computes may lie where they were
        return x


MODEL: list[Model] = []


def _attend(key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, layer_name: str) -> None:
    output.copy_(MODEL[0].attention(layer_name, key, value))


_LIBRARY = torch.library.Library("kvcanary_placement", "FRAGMENT")
_LIBRARY.define("attention(Tensor key, Tensor value, Tensor(a!) output, str layer_name) -> ()")
_LIBRARY.impl("attention", _attend, "CUDA")
torch.library.register_fake("kvcanary_placement::attention", lambda *_: None, lib=_LIBRARY)
kvcanary_fx.register_attention_op("kvcanary_placement::attention")


class InGraph(torch.nn.Module):
    """The same model, with attention as one opaque op."""

    def __init__(self, model: Model):
        super().__init__()
        self.weights = model.weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, weight in enumerate(self.weights):
            key, value = (x @ weight).view(-1, 2, HEADS, DIM).unbind(1)
            output = torch.empty_like(x)
            torch.ops.kvcanary_placement.attention(key, value, output, f"layers.{number}")
            x = torch.tanh(x + output)
        return x


class Rig:
    """A session over the model, whose layers are guarded in one of the three ways."""

    def __init__(self, way: str, placement: str, **settings: Any):
        self.model = model = Model()
        self.table = torch.zeros(REQUESTS + 1, WIDTH, dtype=torch.int32, device="cuda")
        self.table[1:] = 1 + torch.arange(SLOTS - 1, device="cuda").view(REQUESTS, WIDTH)
        names = [f"layers.{i}" for i in range(LAYERS)]
        self.session = session = kvcanary_fx.install_canary(
            KVPool(model.kv, self.table, layer_names=names),
            mode="log", placement=placement, inner="eager", max_requests=REQUESTS, max_tokens=REQUESTS, **settings,
        )  # fmt: skip
        self.checks: LayerChecks | None = None
        self.run: Callable[[torch.Tensor], torch.Tensor] = model
        if way == "ops of a graph":
            MODEL[:] = [model]
            torch._dynamo.reset()
            self.run = torch.compile(InGraph(model), backend=session.backend, dynamic=False)
        elif way == "calls of an engine":
            layers = EagerLayers(session)
            model.verify, model.record = layers.verify, layers.record
        else:
            self.checks = LayerChecks(session)
            model.verify = lambda layer: verify_layer(self.x.device, layer)
            model.record = lambda layer, key, value: record_layer(key, value, self.x.device, layer)
        self.x = torch.zeros(REQUESTS, HIDDEN, device="cuda")
        self.stored, self.told = 0, 0
        for _ in range(2):  # compiles; nothing of it counts
            with self.forward():
                self.run(self.x)
        session.inputs.freeze()
        for tensor in (t for layer in model.kv for t in layer):
            tensor.zero_()
        session.mark_ready()
        for row in range(REQUESTS):
            session.pool.allocate(self.table[row + 1], owner=f"request {row}")

    def batch(self) -> Batch:
        slots = self.table[1:, self.stored].to(torch.int64)
        self.model.slots.copy_(slots)
        each = [self.stored] * REQUESTS
        ids = [f"request {r}" for r in range(REQUESTS)]
        return Batch(each, slots, list(range(1, REQUESTS + 1)), each, [1] * REQUESTS, request_ids=ids)

    @contextlib.contextmanager
    def forward(self, inside: Callable[[], Any] = contextlib.nullcontext) -> Iterator[None]:
        """A step with one forward, which begins within ``inside()``."""
        with self.session.step(self.batch()), torch.no_grad(), inside(), self.session.forward(), self.published():
            yield

    def published(self) -> contextlib.AbstractContextManager[None]:
        return self.checks.publish() if self.checks is not None else contextlib.nullcontext()

    def step(self) -> torch.Tensor:
        with self.forward():
            out = self.run(self.x)
        self.stored += 1
        return out

    def capture(self) -> torch.cuda.CUDAGraph:
        """A forward in a graph, with its checks, its beginning and its end."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with self.forward(lambda: torch.cuda.graph(graph)):
            self.run(self.x)
        self.session.mark_ready()
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        with self.session.step(self.batch()):
            graph.replay()
        self.stored += 1

    def found(self) -> list[tuple[Any, ...]]:
        every = self.session.violations()
        news, self.told = every[self.told :], len(every)
        return [(v.check, v.layer, v.half, v.slot, v.position, v.request) for v in news]


def check(rig: Rig, step: Callable[[], Any]) -> None:
    """Clean steps are silent and all of them counted; then a flip in each half of the first, third and last layer."""
    before = rig.session.stats()
    for number in range(4):
        rig.x.normal_(generator=torch.Generator("cuda").manual_seed(number))
        step()
    assert rig.found() == []
    rig.session.health.check()
    assert rig.session.uncovered == []
    stats = rig.session.stats()
    assert stats.recorded - before.recorded == 4 * REQUESTS * 2 * LAYERS
    assert stats.checked - before.checked == (0 + 1 + 2 + 3) * REQUESTS * 2 * LAYERS
    for layer in (0, 2, LAYERS - 1):
        for half in range(2):
            slot = int(rig.table[2, 1])
            rig.model.kv[layer][half].view(torch.int32)[slot, 1, 5] ^= 1 << 20
            step()
            assert rig.found() == [("content", f"layers.{layer}", "KV"[half], slot, 1, "request 1")]
    step()
    assert rig.found() == []


@PLACEMENTS
@WAYS
def test_called_from_python(way, placement):
    rig = Rig(way, placement)
    check(rig, rig.step)


@PLACEMENTS
@WAYS
def test_captured_whole(way, placement):
    rig = Rig(way, placement)
    graph = rig.capture()
    check(rig, lambda: rig.replay(graph))


@PLACEMENTS
@WAYS
def test_captured_within_a_forward_that_goes_on(way, placement):
    """The graph is replayed in forwards of its own, whose checks of identity run around it."""
    rig = Rig(way, placement)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    step, forward = rig.session.step(rig.batch()), rig.session.forward()
    with step, torch.no_grad(), forward, torch.cuda.graph(graph), rig.published():
        rig.run(rig.x)
    rig.session.mark_ready()

    def replay() -> None:
        with rig.session.step(rig.batch()), rig.session.forward():
            graph.replay()
        rig.stored += 1

    check(rig, replay)


@PLACEMENTS
@WAYS
def test_a_write_that_goes_elsewhere_is_found_in_its_own_step(way, placement):
    rig = Rig(way, placement)
    for _ in range(2):
        rig.step()
    attention = rig.model.attention

    def strays(layer: str, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        planned = rig.model.slots
        if layer == "layers.1":
            rig.model.slots = planned + 5
        attended = attention(layer, key, value)
        rig.model.slots = planned
        return attended

    rig.model.attention = strays  # type: ignore[method-assign]
    rig.x.normal_()
    rig.step()
    assert {(check, layer, half) for check, layer, half, *_ in rig.found()} == {
        ("operand", "layers.1", "K"),
        ("operand", "layers.1", "V"),
    }


@PLACEMENTS
def test_a_long_model_in_a_graph_reads_k_and_v_before_their_memory_is_used_again(placement):
    """Each layer's K and V are freed behind it, and the next layer's lie there: many replays, all silent."""
    rig = Rig("calls of an engine", placement, verify_fraction="1/4")
    graph = rig.capture()
    for number in range(WIDTH):
        rig.x.normal_(generator=torch.Generator("cuda").manual_seed(number))
        rig.replay(graph)
    assert rig.found() == []

"""Checks beside the model, as far as a machine without a GPU shows them: the GPU's kernels interpreted, and a stream
that runs at once.  What streams do is in test_engine_graphs.py.
"""

from __future__ import annotations

import contextlib
import re
import weakref

import pytest
import test_in_flight
import test_opaque_attention
import torch
from gpu_on_cpu import use_gpu_kernels
from opaque_engine import DIM, HEADS, METADATA, Model
from test_engine_layers import Engine
from test_opaque_attention import LAYERS, Rig
from torch._inductor.utils import run_and_get_code
from toys import Rig as PlainRig

from kvcanary_fx.engine import forward as engine_forward
from kvcanary_fx.kernels import layer_ops, ops, side_stream
from kvcanary_fx.kernels.content import gpu_layer
from kvcanary_fx.kernels.slots import gpu as gpu_requests

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in for a missing GPU")


class AtOnce:
    """In the place of a stream: remembers what happened to it."""

    made: list[AtOnce] = []

    def __init__(self, device: torch.device):
        self.stream, self.held = None, []
        self.happened: list[str] = []
        self.made.append(self)

    def start(self) -> None:
        self.happened.append("fork")

    @contextlib.contextmanager
    def fork(self):
        self.start()
        yield

    def follow(self, other: AtOnce) -> None:
        self.happened.append("follow")

    def hold(self, *tensors: torch.Tensor) -> None:
        self.held += tensors

    def release(self) -> None:
        if self.held:
            self.join()
            self.held.clear()

    def join(self) -> None:
        self.happened.append("join")


@pytest.fixture
def beside(monkeypatch):
    AtOnce.made = []
    monkeypatch.setattr(side_stream, "can_fork", lambda device: True)
    monkeypatch.setattr(side_stream, "SideStream", AtOnce)
    use_gpu_kernels(monkeypatch.setattr)


def told(rig: Rig) -> list[tuple]:
    return [(v.check, v.layer, v.half, v.slot, v.request) for v in rig.session.violations()]


@pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("bits", [32, 64])
def test_a_legal_life_is_silent_and_every_fault_is_found(beside, inner, bits):
    rig = Rig(inner, digest_bits=bits)
    rig.step([3, 4, 5])
    rig.step([6], padding=2)
    assert told(rig) == []
    stats = rig.session.stats()
    assert (stats.recorded, stats.checked) == (4 * 2 * LAYERS, 3 * 2 * LAYERS)
    METADATA.redirect = {"layers.1": torch.tensor([9])}
    rig.kv[0][1].view(torch.int32)[4, 1, 2] ^= 1 << 9
    rig.step([7])
    assert told(rig) == [
        ("content", "layers.0", "V", 4, "A"),
        ("operand", "layers.1", "K", 7, "A"),
        ("operand", "layers.1", "V", 7, "A"),
    ]


def test_each_layer_forks_twice_and_the_graph_and_the_forward_join(beside):
    rig = Rig(layers=3)
    rig.step([3, 4, 5])
    stream, pools = AtOnce.made
    check = record = "fork"
    # the second layer is checked behind the first one's record, and its attention waits for both
    assert stream.happened == [check, record, check, "join", record, check, "join", record, "join", "join"]
    assert pools.happened == ["join"]  # the graph checks its layers one by one


def test_layers_that_are_checked_at_once_fork_twice_whatever_their_number(beside):
    rig = Rig(layers=4, verify_fraction="1/2", dynamic=False)
    rig.step([3, 4, 5])
    stream, pools = AtOnce.made
    check = record = "fork"
    assert stream.happened == [check, record, "join", "join"]
    assert pools.happened == ["join"]
    rig.kv[2][1].view(torch.int32)[4, 1, 2] ^= 1 << 9
    METADATA.redirect = {"layers.1": torch.tensor([9])}
    for slot in 6, 7:
        rig.step([slot])
        METADATA.redirect = {}
    assert sorted(told(rig)) == [
        ("content", "layers.2", "V", 4, "A"),
        ("operand", "layers.1", "K", 6, "A"),
        ("operand", "layers.1", "V", 6, "A"),
    ]
    assert rig.session.stats().recorded == 5 * 2 * 4
    rig.session.health.check()
    assert rig.session.uncovered == []


def test_a_model_of_many_layers_waits_early_for_the_check_of_all(beside):
    rig = Rig(layers=8, verify_fraction="1/2", dynamic=False)
    rig.step([3, 4, 5])
    stream, _ = AtOnce.made
    check = record = "fork"
    assert stream.happened == [check, "join", record, "join", "join"]
    assert told(rig) == []
    assert rig.session.stats().recorded == 3 * 2 * 8


@pytest.mark.slow
def test_inductor_leaves_the_end_of_the_model_between_the_record_of_all_layers_and_the_wait(beside, monkeypatch):
    monkeypatch.setattr(test_opaque_attention, "Model", WithMlp)
    rig = Rig("inductor", layers=2, verify_fraction="1/2", dynamic=False)
    _, (code,) = run_and_get_code(rig.step, [3, 4, 5])
    called = re.findall(r"torch\.ops\.\w+\.(\w+)\.default\(|extern_kernels\.(addmm|mm)\(", code)
    order = [canary or "product" for canary, product in called]
    layer = ["product", "attention", "product", "product"]
    ours = ["begin", "product", "verify_layers_at", *layer[1:], *layer[:2], "record_layers_at", *layer[2:], "join"]
    assert order == ours


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_checks_around_writes_run_beside_a_model_that_is_captured(beside, inner, monkeypatch):
    rig = PlainRig.build(3, mode="log", inner=inner)
    rig.step(5)
    rig.step()
    stream = AtOnce.made[-1]  # of the decode's graph
    assert set(stream.happened) == {"join"}  # launched one by one, they stay in the model's stream
    stream.happened.clear()
    monkeypatch.setattr(ops, "capturing", lambda device: True)
    rig.step()
    check = record = name = "fork"
    first, later = [check, "join", name, record, check], ["join", record, check]
    assert stream.happened == [*first, *later, "join", record, "join"]
    assert rig.session.violations() == []
    rig.flip(layer=1, half=1, row=1, position=2)
    rig.step()
    found = [(v.check, v.layer, v.half, v.row, v.position) for v in rig.session.violations()]
    assert found == [("content", "layers.1", "V", 1, 2)]
    assert rig.session.uncovered == []


@pytest.mark.slow
def test_inductor_lets_the_model_wait_for_checks_in_front_of_a_write(beside):
    rig = PlainRig.build(3, mode="log", inner="inductor")
    rig.step(5)
    _, (code,) = run_and_get_code(rig.step)
    called = re.findall(r"torch\.ops\.kvcanary\.(\w+)\.default\(|extern_kernels\.(addmm|mm|bmm)\(", code)
    order = [canary or "product" for canary, product in called]
    first = order.index("verify_halves", order.index("record_halves"))
    layer = ["record_halves", "verify_halves", "product", "product", "join"]
    assert order[first - 1 : first + 9] == [*layer, *layer]


class WithMlp(Model):
    """Layers with something wide behind them: what is held meanwhile adds to the most memory that is in use."""

    def __init__(self, *args):
        super().__init__(*args)
        size = HEADS * DIM
        self.wide = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(size, 64 * size), torch.nn.ReLU(), torch.nn.Linear(64 * size, size))
            for _ in self.layers
        )

    def forward(self, x):
        for layer, wide in zip(self.layers, self.wide, strict=True):
            x = wide(layer(x))
        return x


@pytest.mark.slow
def test_inductor_leaves_the_products_between_a_layers_check_and_the_wait_for_it(beside, monkeypatch):
    """The wait goes right in front of attention: nearer to the check, the model would wait for each check it starts."""
    monkeypatch.setattr(test_opaque_attention, "Model", WithMlp)
    rig = Rig("inductor", layers=3)
    _, (code,) = run_and_get_code(rig.step, [3, 4, 5])
    called = re.findall(r"torch\.ops\.\w+\.(\w+)\.default\(|extern_kernels\.(addmm|mm)\(", code)
    order = [canary or "product" for canary, product in called]
    between = ["product", "product", "product", "join_at", "attention", "record_at", "verify_at"]
    first = order.index("attention")
    assert order[first : first + 3 + 7 + 6] == ["attention", "record_at", "verify_at", *between, *between[:-1]]


def test_without_the_content_check_a_layer_forks_once(beside):
    rig = Rig(layers=3, checks=("operand", "poison", "bounds"))
    rig.step([3, 4, 5])
    stream, _ = AtOnce.made
    assert stream.happened == ["fork", "join", "fork", "join", "fork", "join", "join"]
    rig.session.health.check()
    assert rig.session.uncovered == []


@pytest.mark.parametrize("captured", [False, True])
def test_who_is_in_the_slots_is_stored_once_before_the_layers_record(beside, captured, monkeypatch):
    rig, order = Rig(), []
    for name, module in (("walk", gpu_requests), ("_store", gpu_requests), ("record", gpu_layer.LayerRecord)):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=original, n=name, **kw: order.append(n) or f(*a, **kw))
    monkeypatch.setattr(engine_forward, "capturing", lambda: captured)
    rig.step([3, 4, 5])
    assert order == ["walk", "_store", *["record"] * LAYERS]
    rig.step([6])
    rig.session.pool.space.tokens[4] += 1  # of position 1
    rig.step([7])
    assert {(v.check, v.slot, v.request) for v in rig.session.violations()} == {("chain", 4, "A")}


def test_inline_has_no_stream(beside):
    rig, engine = Rig(placement="inline"), Engine(placement="inline")
    rig.step([3])
    engine.step(3)
    assert AtOnce.made == []
    assert told(rig) == []


def test_an_engines_layers_are_checked_at_once_beside_the_model_and_recorded_in_its_stream(beside):
    """K and V may be memory of a graph, whose next replay writes there."""
    engine = Engine()
    for _ in range(2):
        engine.step()
    layers, pools = AtOnce.made
    assert layers.happened == ["join", "join"]  # the forwards' ends
    assert pools.happened == ["fork", "join"] * 2


def test_in_a_forward_that_is_captured_whole_an_engines_layers_are_recorded_beside_the_model(beside, monkeypatch):
    engine = Engine()
    monkeypatch.setattr(engine_forward, "capturing", lambda: True)
    engine.step(3)
    layers, pools = AtOnce.made
    checks, record = ["fork"], ["fork", "fork"]  # of identity before the model; of received slots, and of K and V
    # the second layer's attention waits for what reads the first one's K and V
    assert layers.happened == [*checks, *record, "join", *record, "join"]
    assert pools.happened == ["fork", "follow", "join"]  # what is read is listed beside the model


def test_what_a_forward_writes_itself_is_checked_before_the_model(beside):
    """A request reads what another one writes in this forward: beside the model, the write would be in a race."""
    rig = test_in_flight.Rig()
    pools = AtOnce.made[1]
    rig.run([5, 6, 7, 8, 9], [3, 4, 5, 6, 7], [0, 3], [4, 1], in_flight=True)
    assert pools.happened == ["join"]
    rig.run([], [], [4, 4], [0, 0])
    assert pools.happened == ["join", "fork", "join"]


def test_k_and_v_live_until_the_model_waits_for_what_reads_them(beside, monkeypatch):
    """What attention is given is read beside the model, after it: a graph that frees by last use must not free it."""
    given, alive, record = [], [], layer_ops.record_layer

    def spy_record(key, value, device, layer):
        given[:] = [weakref.ref(key), weakref.ref(value)]
        record(key, value, device, layer)

    monkeypatch.setattr(layer_ops, "record_layer", spy_record)
    monkeypatch.setattr(AtOnce, "join", lambda self: alive.append([tensor() is not None for tensor in given]))
    Rig(layers=3).step([3])
    assert alive[:3] == [[True, True]] * 3
    assert alive[3:] == [[False, False]] * 2  # the forward's own

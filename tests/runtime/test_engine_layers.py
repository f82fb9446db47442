"""Layers that run in no graph: an engine calls the checks around them itself."""

from __future__ import annotations

import contextlib

import pytest
import torch

import kvcanary_fx
from kvcanary_fx import Batch, KVPool
from kvcanary_fx.engine.layers import EagerLayers
from kvcanary_fx.errors import SessionStateError

SLOTS, HEADS, DIM = 16, 2, 4


class Engine:
    """Two layers of one request, written without a graph."""

    def __init__(self, device="cpu", mode="log", ready=True, **settings):
        self.kv = [tuple(torch.zeros(SLOTS, HEADS, DIM, device=device) for _ in "kv") for _ in range(2)]
        self.table = torch.zeros(2, 8, dtype=torch.int32, device=device)
        self.table[1] = torch.arange(3, 11)
        pool = KVPool(self.kv, self.table, layer_names=["first", "second"])
        self.session = kvcanary_fx.install_canary(pool, mode=mode, **settings)
        self.layers = EagerLayers(self.session)
        if ready:
            self.session.mark_ready()
        self.session.pool.allocate(range(3, 11), owner="request")
        self.stored = 0

    def step(self, tokens=1, between=None, received=None, written=None):
        """Append tokens; ``received`` and ``written`` are slots that the layers get, and that they write."""
        slots = self.table[1, self.stored : self.stored + tokens].to(torch.int64)
        batch = Batch(range(tokens), slots, [1], [self.stored], [tokens], request_ids=["request"])
        with self.session.step(batch), self.session.forward():
            for number, name in enumerate(("first", "second")):
                self.layers.verify(name)
                given = torch.randn(2, tokens, HEADS, DIM, device=slots.device)
                for pool, rows in zip(self.kv[number], given, strict=True):
                    pool[slots if written is None else written] = rows
                self.layers.record(name, *given, slots if received is None else received)
        self.stored += tokens

    def told(self):
        return [(v.check, v.layer, v.half, v.slot, v.step) for v in self.session.violations()]


@pytest.fixture
def engine(device):
    return Engine(device)


def test_clean_steps_are_silent_and_counted(engine):
    for tokens in (3, 1, 1):
        engine.step(tokens)
    assert engine.told() == []
    stats = engine.session.stats()
    assert (stats.recorded, stats.checked) == (4 * 5, 4 * (3 + 4))
    assert "guarded around each call of their own: first, second" in engine.session.summary()


@pytest.mark.parametrize(("layer", "half"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_flipped_bit(engine, layer, half):
    engine.step(3)
    engine.kv[layer][half][4].view(torch.int32)[1, 2] ^= 1
    engine.step()
    assert engine.told() == [("content", ["first", "second"][layer], "KV"[half], 4, 2)]


def test_slots_that_are_not_the_planned_ones(engine):
    engine.step(3)
    wrong = torch.tensor([7], device=engine.table.device)
    engine.step(received=wrong)
    assert {(check, layer) for check, layer, *_ in engine.told()} == {("index", "first"), ("index", "second")}


def test_a_write_that_lands_elsewhere(engine):
    engine.step(3)
    engine.step(written=torch.tensor([9], device=engine.table.device))
    assert {check for check, *_ in engine.told()} == {"operand"}
    assert len(engine.told()) == 4


def test_places_of_states_before_a_layer_writes(device):
    """A slot stands for a request there, so a write gets one for each, however many tokens it has."""
    table = torch.tensor([[0], [4], [6]], dtype=torch.int32, device=device)
    pool = KVPool([(torch.zeros(SLOTS, DIM, device=device),)], table, layer_names=["mamba"], state=True)
    session = kvcanary_fx.install_canary(pool, mode="log")
    layers = EagerLayers(session)
    session.mark_ready()
    session.pool.allocate([4], owner="A")
    session.pool.allocate([6], owner="B")

    def step(prefix, extend, received):
        batch = Batch(range(sum(extend)), [0] * sum(extend), [1, 2], prefix, extend, request_ids=["A", "B"])
        with session.step(batch), session.forward():
            layers.check_received("mamba", torch.tensor(received, device=device))
            layers.record("mamba")
        return [(v.check, v.why, v.layer, v.request, v.stored, v.found) for v in session.violations()]

    assert step([0, 0], [2, 3], [4, 6]) == []
    assert step([2, 3], [1, 1], [4, 6]) == []
    wrong = [("index", "NOT_THE_PLANNED_SLOT", "mamba", *rest) for rest in (("A", 4, 6), ("B", 6, 4))]
    assert step([3, 4], [1, 2], [6, 4]) == wrong
    with pytest.raises(kvcanary_fx.UnknownLayerError, match="third"), session.step(), session.forward():
        layers.check_received("third", torch.tensor([4], device=device))


@pytest.mark.parametrize("holding", [True, False])
@pytest.mark.parametrize("wrong", [None, 0, 1])
def test_layers_that_are_recorded_at_once_when_the_model_has_run(engine, holding, wrong):
    """As if each had been recorded behind its write: what it was given is compared with what is stored."""
    slots = engine.table[1, :3].to(torch.int64)
    given = [torch.randn(2, 3, HEADS, DIM, device=slots.device) for _ in engine.kv]
    batch = Batch(range(3), slots, [1], [0], [3], request_ids=["request"])
    for _ in range(2):  # the second time they are known
        held = engine.layers.holding() if holding else contextlib.nullcontext()
        with engine.session.step(batch), engine.session.forward(), held:
            for pools, rows in zip(engine.kv, given, strict=True):
                for pool, written in zip(pools, rows, strict=True):
                    pool[slots] = written
            if wrong is not None:
                engine.kv[wrong][1][slots[2]] += 1  # V
            keys, values = zip(*given, strict=True)
            engine.layers.record_all(("first", "second"), keys, values)
    stats = engine.session.stats()
    assert stats.recorded == 2 * 4 * 3
    told = {(v.check, v.layer, v.half, v.position) for v in engine.session.violations()}
    assert told == (set() if wrong is None else {("operand", ("first", "second")[wrong], "V", 2)})


def test_without_a_forward_there_is_nothing_to_check_against(engine):
    assert not engine.layers.running
    engine.layers.verify("first")
    engine.layers.record("first")
    assert engine.told() == []


def written(engine, given=lambda rows: rows, received=lambda slots: slots, wrong=0, one_by_one=True):
    """A prompt of two tokens in both layers, K and V given as ``given`` makes them; all that is stored may be wrong."""
    slots = engine.table[1, 3:5].to(torch.int64)
    batch = Batch([1, 2], slots, [1], [0], [2], request_ids=["request"])
    engine.table[1, :2] = engine.table[1, 3:5]
    rows = torch.randn(2, 2, 2, HEADS, DIM, device=slots.device)
    held = contextlib.nullcontext() if one_by_one else engine.layers.holding()
    with engine.session.step(batch), engine.session.forward(), held:
        for halves, stored in zip(engine.kv, rows, strict=True):
            for pool, half in zip(halves, stored, strict=True):
                pool[slots] = half + wrong
        keys, values = ([given(layer[half]) for layer in rows] for half in (0, 1))
        if not one_by_one:
            engine.layers.record_all(("first", "second"), keys, values)
            return
        for name, key, value in zip(("first", "second"), keys, values, strict=True):
            engine.layers.record(name, key, value, received(slots))


def operand_lines(engine):
    return [line.strip() for line in engine.session.summary().split("\n")[1:] if "operand" in line]


@pytest.mark.parametrize("one_by_one", [True, False], ids=["one by one", "at once"])
@pytest.mark.parametrize(
    ("given", "why"),
    [
        (lambda rows: None, "None"),
        (lambda rows: rows.double(), "torch.float64 where the cache is torch.float32"),
        (lambda rows: rows[..., :2].bfloat16(), "torch.bfloat16 where the cache is torch.float32"),
    ],
    ids=["None", "float64", "packed"],
)
def test_the_summary_says_that_no_operand_was_compared(engine, given, why, one_by_one):
    for _ in range(3):  # the second time, layers that come at once are known
        written(engine, given, wrong=1, one_by_one=one_by_one)
    assert engine.told() == []
    lost = "what a write stored is not compared with what it was given"
    assert operand_lines(engine) == [f"off operand: of 12 K and V given to EagerLayers.record 12 were {why}: {lost}"]
    assert "operand" not in engine.session.summary().split("\n")[0]
    written(engine, one_by_one=one_by_one)
    told = f"in part operand: of 16 K and V given to EagerLayers.record 12 were {why}: {lost}"
    assert operand_lines(engine) == [told]


@pytest.mark.parametrize("one_by_one", [True, False], ids=["one by one", "at once"])
@pytest.mark.parametrize(
    "given",
    [
        lambda rows: rows,
        lambda rows: rows.reshape(2, -1),
        lambda rows: torch.cat((rows, rows)),
        lambda rows: rows[None],
    ],
    ids=["as stored", "flat", "padded", "a batch of one"],
)
def test_operands_that_are_compared(engine, given, one_by_one):
    for _ in range(2):
        written(engine, given, one_by_one=one_by_one)
    assert (engine.told(), operand_lines(engine)) == ([], [])
    assert "operand" in engine.session.summary().split("\n")[0]
    written(engine, given, wrong=1, one_by_one=one_by_one)
    assert {check for check, *_ in engine.told()} == {"operand"}


def test_the_warm_up_does_not_count(device):
    engine = Engine(device, ready=False)
    written(engine, lambda rows: None)
    engine.session.mark_ready()
    assert operand_lines(engine) == []


@pytest.mark.parametrize("one_by_one", [True, False], ids=["one by one", "at once"])
@pytest.mark.parametrize(
    ("given", "what"),
    [
        (lambda rows: rows[1:], r"key as \[1, 2, 4\]"),
        (lambda rows: rows[..., :2], r"key as \[2, 2, 2\]"),
        (lambda rows: rows.sum(), r"key as \[\]"),
    ],
    ids=["fewer rows than tokens", "half a row", "a number"],
)
def test_operands_of_a_wrong_shape(engine, given, what, one_by_one):
    with pytest.raises(kvcanary_fx.EngineError, match=what + r".*\[2, 4\] for each of the forward's 2 tokens"):
        written(engine, given, one_by_one=one_by_one)


def test_operands_that_are_no_tensors(engine):
    with pytest.raises(kvcanary_fx.EngineError, match="key as a list"):
        written(engine, lambda rows: rows.tolist())


@pytest.mark.parametrize(
    ("received", "what"), [(torch.Tensor.float, "torch.float32"), (torch.Tensor.tolist, "a list, not a tensor")]
)
def test_received_slots_that_are_no_integers(engine, received, what):
    with pytest.raises(kvcanary_fx.EngineError, match=f"slots that a layer's write received are integers.*{what}"):
        written(engine, received=received)
    with (
        pytest.raises(kvcanary_fx.EngineError, match=what),
        engine.session.step(),
        engine.session.forward(),
    ):
        engine.layers.check_received("first", received(engine.table[1, :1]))


def decode_without_forward(engine):
    """A step of one token whose author forgot ``session.forward()``."""
    slots = engine.table[1, :1].to(torch.int64)
    given = torch.randn(2, 1, HEADS, DIM, device=slots.device)
    batch = Batch([1], slots, [1], [0], [1], request_ids=["request"])
    with engine.session.step(batch):
        engine.layers.verify("first")
        for pool, rows in zip(engine.kv[0], given, strict=True):
            pool[slots] = rows
        engine.layers.record("first", *given, slots)


def test_a_step_without_forward_is_reported_once(engine, caplog):
    for _ in range(3):
        decode_without_forward(engine)
    assert [r.getMessage() for r in caplog.records if "outside session.forward()" in r.getMessage()] == [
        f"kvcanary.coverage {engine.session.uncovered[0]}"
    ]
    assert "coverage lost: the model ran outside session.forward()" in engine.session.summary()
    engine.step()
    assert engine.told() == []


@pytest.mark.parametrize("call", ["verify", "record", "record_all", "check_received", "begin"])
def test_in_raise_a_step_without_forward_is_an_error(device, call):
    engine = Engine(device, mode="raise")
    slots = engine.table[1, :1].to(torch.int64)
    arguments = {
        "begin": (),
        "verify": ("first",),
        "record": ("first",),
        "record_all": (("first", "second"), [None, None], [None, None]),
        "check_received": ("first", slots),
    }[call]
    batch = Batch([1], slots, [1], [0], [1], request_ids=["request"])
    with pytest.raises(SessionStateError, match=r"outside session\.forward"), engine.session.step(batch):
        getattr(engine.layers, call)(*arguments)
    getattr(engine.layers, call)(*arguments)  # a rank that is idle runs the model outside of steps


def test_a_warm_up_may_run_without_forward(device):
    engine = Engine(device, mode="raise", ready=False)
    decode_without_forward(engine)
    engine.session.mark_ready()
    with pytest.raises(SessionStateError):
        decode_without_forward(engine)


def test_a_layer_that_no_pool_has(engine):
    with pytest.raises(kvcanary_fx.UnknownLayerError, match="third"):
        engine.layers.verify("third")
    with pytest.raises(kvcanary_fx.UnknownLayerError, match="third"):
        engine.layers.record("third")
    with pytest.raises(kvcanary_fx.UnknownLayerError, match="third"):
        engine.layers.record_all(("first", "third"), [None, None], [None, None])


def test_many_reserved_slots_are_shown_by_their_ends():
    kv = [(torch.zeros(SLOTS, HEADS, DIM), torch.zeros(SLOTS, HEADS, DIM))]
    table = torch.zeros(2, 8, dtype=torch.int32)
    assert "reserved 0 to 7" in KVPool(kv, table, reserved=tuple(range(8))).describe()
    assert "reserved [0, 5]" in KVPool(kv, table, reserved=(0, 5)).describe()

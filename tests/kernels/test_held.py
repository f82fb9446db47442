"""Layers that are recorded in one launch when the model has run, as each would be after its attention."""

from __future__ import annotations

import contextlib
import gc
import operator
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
from gpu_on_cpu import use_gpu_kernels

from kvcanary_fx import KVPool, install_canary
from kvcanary_fx.engine.layers import LayerChecks
from kvcanary_fx.kernels.content import triton_layer
from kvcanary_fx.kernels.context import current_context
from kvcanary_fx.kernels.deferred import Deferred
from kvcanary_fx.kernels.held import Held, limit_on
from kvcanary_fx.kernels.layer_ops import record_layer
from kvcanary_fx.kernels.ops import held_kernels_for

#: A seed whose engine has so many.
FIVE_LAYERS = 5

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Scene:
    """An engine of a random shape, whose steps are drawn anew for each seed."""

    def __init__(self, seed: int, hold: bool, defer: bool = False, strangers: bool = False):
        """
        Args:
            defer: layers note what they wrote.
            strangers: so do layers of no pool.
        """
        rng = self._rng = random.Random(seed)
        self._hold, self._defer, self._strangers, self._layers = hold, defer, strangers, rng.choice([1, 2, 5])
        self._heads, self._dim = rng.choice([1, 2]), rng.choice([4, 8, 24])
        dtype = self._dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
        self._slots, odd = 64, rng.random() < 0.3
        shape = 2, self._slots, self._heads, self._dim
        pools = [torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(self._layers)]
        if odd:  # one layer lies in memory in another way
            pools[-1] = pools[-1].transpose(2, 3).contiguous().transpose(2, 3)
        self._kv = [(pool[0], pool[1]) for pool in pools]
        self._names = [f"layers.{i}" for i in range(self._layers)]
        self._table = torch.arange(self._slots, dtype=torch.int32, device=DEVICE).view(1, -1)
        bits = rng.choice([32, 64])
        pool = KVPool(self._kv, self._table, layer_names=self._names, reserved=(0, 1, 2))
        self.session = install_canary(pool, mode="log", digest_bits=bits, health_every=0)
        self.checks = LayerChecks(self.session)
        self.session.mark_ready()
        self.session.pool.allocate(list(range(3, self._slots)), owner="A")
        self._stored, self._draws = 0, torch.Generator().manual_seed(seed)

    def run(self) -> None:
        for _ in range(4):
            self._step(self._rng.choice([0, 1, 3, 12]))

    def _rows(self, tokens: int, packed: bool) -> torch.Tensor:
        """K or V, of its own or as a part of a product."""
        wide = torch.randn(tokens + 2, 3 if packed else 1, self._heads, self._dim, generator=self._draws)
        return wide.to(DEVICE, self._dtype)[:, -1]

    def _step(self, tokens: int) -> None:
        rng, first = self._rng, 3 + self._stored
        slots = torch.arange(first, first + tokens, device=DEVICE)
        if tokens and rng.random() < 0.3:
            slots[0] = 1  # reserved: padding
        packed, lacking = rng.random() < 0.5, rng.choice([None, None, "value", "both"])
        wrong = rng.random() < 0.4
        batch = dict(
            input_ids=range(tokens), slots=slots, request_rows=[0], prefix_lens=[3], extend_lens=[tokens],
            request_ids=["A"],
        )  # fmt: skip
        deferred, taken = None, set()
        with self.session.step(batch), self.session.forward(), self.checks.publish(self._hold):
            for name, (k, v) in zip(self._names, self._kv, strict=True):
                key, value = self._rows(tokens, False), self._rows(tokens, packed)
                k[slots], v[slots] = key[:tokens], value[:tokens]
                if tokens > 1 and wrong:
                    v[slots[-1]] = 1
                    k[slots[1], 0, 0] = float("nan")
                given = {None: (key, value), "value": (key, None), "both": (None, None)}[lacking]
                if not self._defer:
                    record_layer(*given, DEVICE, name)
                elif deferred is None:
                    deferred = Deferred(current_context(), str, taken, (name, *given))
                else:
                    deferred.written += [(name, *given), *([("a layer of no pool", *given)] * self._strangers)]
                    if len(deferred.written) >= deferred.room:
                        deferred.take_in()
        assert deferred is None or taken == set(self._names)
        self._stored += tokens

    def state(self) -> list[torch.Tensor]:
        """All that records write."""
        pool = self.session.pool
        tensors = [pool.digests, *pool.content.counters, *(half.buffers.rows for half in pool.content.halves)]
        return [t.cpu() for t in (*tensors, *self.checks.gates.values())]

    def told(self) -> list[str]:
        return sorted(v.line() for v in self.session.violations())


@pytest.fixture(params=["plain", "interpreted"] if DEVICE.type == "cpu" else ["compiled"])
def kernels(request, monkeypatch):
    if request.param == "interpreted":
        use_gpu_kernels(monkeypatch.setattr)


def in_all_ways(seed):
    scenes = [Scene(seed, False), Scene(seed, True)]
    scenes += [Scene(seed, True, defer=True, strangers=strangers) for strangers in (False, True)]
    for scene in scenes:
        scene.run()
    return scenes


@pytest.mark.parametrize("seed", range(4))
def test_what_is_held_is_recorded_as_each_layer_would_be(kernels, seed):
    each, *together = in_all_ways(seed)
    for scene in together:
        assert all(torch.equal(a, b) for a, b in zip(each.state(), scene.state(), strict=True))
        assert each.told() == scene.told()


def test_layers_that_come_again_are_taken_in_at_once_and_others_one_by_one(monkeypatch):
    at_once, take_all = [], Held.take_all

    def noted(held, records, *given):
        done = take_all(held, records, *given)
        if records is None:
            assert not done  # layers that are not alike
        else:
            at_once.append((len(records), done))
        return done

    monkeypatch.setattr(Held, "take_all", noted)
    Scene(FIVE_LAYERS, True, defer=True).run()
    steps = len(at_once)
    assert (FIVE_LAYERS, True) in at_once
    assert all(done for _, done in at_once)
    Scene(FIVE_LAYERS, True, defer=True, strangers=True).run()
    assert not [n for n, _ in at_once[steps:] if n > 1]


def test_the_seeds_reach_violations_and_layers_that_do_not_go_into_one_launch(monkeypatch):
    use_gpu_kernels(monkeypatch.setattr)
    launched = []
    for name in ("record_kernel", "record_pool_kernel"):
        kernel = getattr(triton_layer, name)
        monkeypatch.setattr(triton_layer, name, Watched(kernel, name, launched))
    scenes = [Scene(seed, True) for seed in range(4)]  # the first of the ways in which layers are held
    for scene in scenes:
        scene.run()
    told = [scene.told() for scene in scenes]
    assert any(told)
    assert set(launched) == {"record_kernel", "record_pool_kernel"}
    assert {check for lines in told for line in lines for check in ("operand", "poison") if check in line} == {
        "operand",
        "poison",
    }


class Watched:
    """A kernel whose launches are noted."""

    def __init__(self, kernel, name, launched):
        self.fn, self._kernel, self._name, self._launched = kernel.fn, kernel, name, launched

    def __getitem__(self, grid):
        self._launched.append(self._name)
        return self._kernel[grid]


def calls_of(monkeypatch):
    """How many layers each call records, of all later ones."""
    kind, counts = held_kernels_for(DEVICE).HeldRecords, []
    record = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, plan, held: counts.append(len(held)) or record(self, plan, held))
    return counts


def test_no_more_than_the_limit_is_held(monkeypatch):
    counts = calls_of(monkeypatch)
    each, held, noted = Scene(FIVE_LAYERS, False), Scene(FIVE_LAYERS, True), Scene(FIVE_LAYERS, True, defer=True)
    held.checks.held._limit = noted.checks.held._limit = -1
    for run in (each, held, noted):
        run.run()
    assert set(counts) == {1}
    for scene in (held, noted):
        assert all(torch.equal(a, b) for a, b in zip(each.state(), scene.state(), strict=True))


def test_a_product_that_k_and_v_are_parts_of_is_counted_once():
    records, wide = [], torch.zeros(4, 24)
    held = Held({7: lambda plan, written: records.append(len(written))}, limit=3 * wide.nbytes)
    layers = [SimpleNamespace(space=SimpleNamespace(space_id=7)) for _ in range(5)]
    rooms = []
    for layer in layers:
        held.take(layer, "plan", wide[:, 8:16], wide[:, 16:])
        rooms.append(held.room)
    assert records == [4]  # the one that was too much
    assert rooms == [2, 1, 1, 3, 2]


class Layers:
    """Layers whose K have so many bytes, a pool for each size.

    Attributes:
        recorded: behind which layer each call recorded, and how many.
    """

    def __init__(self, sizes, limit):
        self._sizes, self._now = sizes, 0
        self.recorded = []
        self.held = Held(dict.fromkeys(sizes, self._record), limit)

    def _record(self, plan, written):
        self.recorded.append((self._now, len(written)))

    def run(self, notes):
        """A forward; what it recorded."""
        self.recorded.clear()
        plans = {n: SimpleNamespace(real_slots=torch.zeros(1)) for n in self._sizes}
        records = [SimpleNamespace(space=SimpleNamespace(space_id=n), writes=True, gate=None) for n in self._sizes]
        named = {str(at): record for at, record in enumerate(records)}
        deferred = None
        for at, (record, n) in enumerate(zip(records, self._sizes, strict=True)):
            self._now = at
            key = torch.zeros(n, dtype=torch.uint8)
            if not notes:
                self.held.take(record, plans[n], key, None)
                continue
            if deferred is None:
                context = SimpleNamespace(held=self.held, requests=plans, layers=named)
                deferred = Deferred(context, str, set(), (str(at), key, None))
                continue
            deferred.written.append((str(at), key, None))
            if len(deferred.written) == deferred.room:
                deferred.take_in()
        self.held.flush()
        return list(self.recorded)


@pytest.mark.parametrize("sizes", [[24] * 9, [8, 24] * 5, [24, 8, 8, 24, 24, 8]], ids=["alike", "in turn", "mixed"])
@pytest.mark.parametrize("limit", [-1, 70, 96, 200, 1000])
def test_layers_that_are_noted_are_recorded_where_layers_that_are_taken_would_be(sizes, limit):
    """Else the next piece of a graph that was captured could overwrite K and V that are still to be read."""
    layers = Layers(sizes, limit)
    captured = layers.run(notes=False)
    assert layers.run(notes=True) == captured


@pytest.mark.parametrize("limit", [70, 1000])
def test_layers_that_are_noted_in_several_places_are_all_recorded(limit):
    """Seen: of a vLLM in eager mode only the last layer was."""
    layers = Layers([8] * 6, limit)
    plans, record = {8: SimpleNamespace(real_slots=torch.zeros(1))}, SimpleNamespace
    named = {str(at): record(space=record(space_id=8), writes=True, gate=None) for at in range(6)}
    taken: set[str] = set()
    for name in named:
        context = SimpleNamespace(held=layers.held, requests=plans, layers=named)
        Deferred(context, str, taken, (name, torch.zeros(8, dtype=torch.uint8), None))
    layers.held.flush()
    assert sum(count for _, count in layers.recorded) == 6
    assert taken == set(named)


def test_a_large_gpu_holds_more(monkeypatch):
    cpu, gpu, has = torch.device("cpu"), torch.device("cuda", 0), []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=has[-1]))
    assert limit_on(cpu) == 128 << 20
    for memory, limit in ((16 << 30, 128 << 20), (80 << 30, (80 << 30) // 160)):
        has.append(memory)
        assert limit_on(gpu) == limit


def test_layers_of_two_pools_in_turn_are_recorded_in_a_call_each(monkeypatch):
    counts = calls_of(monkeypatch)
    names = [f"layers.{i}" for i in range(6)]
    kv = [tuple(torch.zeros(32, 1, 8, device=DEVICE) for _ in "kv") for _ in names]
    table = torch.arange(32, dtype=torch.int32, device=DEVICE).view(1, -1)
    session = install_canary(
        KVPool(kv[::2], table, name="full", layer_names=names[::2]),
        KVPool(kv[1::2], table, name="window", layer_names=names[1::2], window=16, slots_from="slots_window"),
        mode="log",
        health_every=0,
    )
    checks = LayerChecks(session)
    session.mark_ready()
    slots = torch.arange(1, 4, device=DEVICE)
    batch = dict(
        input_ids=range(3), slots=slots, slots_window=slots, request_rows=[0], prefix_lens=[1], extend_lens=[3]
    )
    with session.step(batch), session.forward(), checks.publish(hold=True):
        for name, (k, v) in zip(names, kv, strict=True):
            rows = torch.ones(3, 1, 8, device=DEVICE)
            k[slots], v[slots] = rows, rows
            record_layer(rows, rows, DEVICE, name)
    assert counts == [3, 3]
    assert all(pool.digests[:, 0, 1:4].all() for pool in session.pools.values())


def test_forwards_that_run_other_layers_or_in_another_order_are_recorded_as_they_wrote(kernels):
    one, all_at_once = Scene(FIVE_LAYERS, False), Scene(FIVE_LAYERS, True)
    for scene in (one, all_at_once):
        draws = torch.Generator().manual_seed(0)
        for stored, layers in enumerate(([0, 1, 2, 3], [0, 1, 2, 3], [3, 2, 1, 0], [1, 2], [0, 1, 2, 3])):
            batch = dict(
                input_ids=[1], slots=[3 + stored], request_rows=[0], prefix_lens=[3 + stored], extend_lens=[1],
                request_ids=["A"],
            )  # fmt: skip
            with scene.session.step(batch), scene.session.forward(), scene.checks.publish(scene._hold):
                for layer in layers:
                    key, value = torch.randn(2, 1, scene._heads, scene._dim, generator=draws).to(DEVICE, scene._dtype)
                    scene._kv[layer][0][3 + stored], scene._kv[layer][1][3 + stored] = key[0], value[0]
                    record_layer(key, value, DEVICE, scene._names[layer])
    assert all(torch.equal(a, b) for a, b in zip(one.state(), all_at_once.state(), strict=True))
    assert not [line for line in all_at_once.told() if "check=operand" in line]
    assert one.told() == all_at_once.told()


def test_a_layer_whose_k_or_v_lies_in_memory_in_another_way_than_before_is_recorded_as_it_is(kernels):
    """Neither the first nor the last, of which more is asked."""
    one, all_at_once = Scene(FIVE_LAYERS, False), Scene(FIVE_LAYERS, True)
    for scene in (one, all_at_once):
        draws = torch.Generator().manual_seed(0)
        for stored, other in enumerate((None, "key", "value")):
            first = 3 + 2 * stored
            batch = dict(
                input_ids=[1, 2], slots=[first, first + 1], request_rows=[0], prefix_lens=[first], extend_lens=[2],
                request_ids=["A"],
            )  # fmt: skip
            with scene.session.step(batch), scene.session.forward(), scene.checks.publish(scene._hold):
                for number, (name, halves) in enumerate(zip(scene._names, scene._kv, strict=True)):
                    wide = torch.randn(2, 3, 2, scene._heads, scene._dim, generator=draws).to(DEVICE, scene._dtype)
                    key, value = (
                        wide[:, 2, at] if number == 2 and other == half else wide[:, 2, at].contiguous()
                        for at, half in enumerate(("key", "value"))
                    )
                    halves[0][first : first + 2], halves[1][first : first + 2] = key, value
                    record_layer(key, value, DEVICE, name)
    assert all(torch.equal(a, b) for a, b in zip(one.state(), all_at_once.state(), strict=True))
    assert one.told() == all_at_once.told()
    assert not [line for line in all_at_once.told() if "check=operand" in line]


def test_a_layer_that_writes_twice_is_recorded_as_it_wrote_last():
    scene = Scene(FIVE_LAYERS, True)
    batch = dict(input_ids=[1], slots=[3], request_rows=[0], prefix_lens=[3], extend_lens=[1], request_ids=["A"])
    shape = 1, scene._heads, scene._dim
    with scene.session.step(batch), scene.session.forward(), scene.checks.publish(hold=True):
        for number in (1, 2):
            for name, halves in zip(scene._names, scene._kv, strict=True):
                rows = torch.full(shape, float(number), dtype=scene._dtype, device=DEVICE)
                for half in halves:
                    half[3:4] = rows
                record_layer(rows, rows, DEVICE, name)
    assert not [line for line in scene.told() if "check=operand" in line]


def test_a_forward_that_raises_records_nothing_later():
    scene = Scene(1, True)
    batch = dict(input_ids=[1], slots=[3], request_rows=[0], prefix_lens=[3], extend_lens=[1], request_ids=["A"])
    one = torch.ones(1, scene._heads, scene._dim, dtype=scene._dtype, device=DEVICE)
    step, forward, held = scene.session.step(batch), scene.session.forward(), scene.checks.publish(hold=True)
    with pytest.raises(KeyboardInterrupt), step, forward, held:
        record_layer(one, one, DEVICE, "layers.0")
        Deferred(current_context(), str, set(), ("layers.0", one, one))
        raise KeyboardInterrupt
    scene.checks.held.flush()
    assert not scene.session.pool.digests.any()


@pytest.mark.parametrize("noted", [False, True], ids=["taken", "noted"])
def test_k_and_v_that_are_kept_are_freed_by_who_kept_them_or_by_the_next_forward(noted):
    scene = Scene(1, True, defer=noted)
    held = scene.checks.held
    scene._rng = SimpleNamespace(random=lambda: 1, choice=operator.itemgetter(0))  # K and V are given
    for frees in (held.let_go, lambda: scene._step(1)):
        held.keeps = True
        scene._step(1)
        (kept,) = [weakref.ref(key) for _, written in held._kept for key in written.keys]
        gc.collect()
        assert kept() is not None
        frees()
        gc.collect()
        assert kept() is None
    assert not held._kept  # nobody asked for it again


class Side:
    """In the place of a stream beside the model's: notes what is launched in it, and what it keeps."""

    def __init__(self):
        self.inside, self.kept = False, []

    @contextlib.contextmanager
    def fork(self):
        self.inside = True
        yield
        self.inside = False

    def hold(self, *tensors):
        self.kept += tensors


def held_by(records, limit=1 << 20, ready=lambda: None):
    """What holds for two layers of one pool; ``records`` notes where each launch was, and of which layers."""
    layers = [SimpleNamespace(space=SimpleNamespace(space_id=7)) for _ in range(2)]
    side = Side()
    held = Held({7: lambda plan, written: records.append((side.inside, len(written)))}, limit, ready)
    rows = [torch.zeros(4, 8) for _ in range(4)]

    def layer(number):
        held.take(layers[number], "plan", rows[2 * number], rows[2 * number + 1])

    return held, side, layer, rows


def test_what_is_held_is_recorded_beside_what_the_model_does_after_its_last_attention():
    records = []
    held, side, layer, rows = held_by(records)
    held.begin(2, side)
    layer(0)
    assert records == []
    layer(1)
    assert records == [(True, 2)]
    assert set(map(id, side.kept)) == set(map(id, rows)), "their memory is not the model's until it has joined"
    held.flush()
    assert records == [(True, 2)], "nothing is left"


def test_a_layer_more_than_was_known_is_recorded_at_the_end():
    records = []
    held, side, layer, _ = held_by(records)
    held.begin(1, side)
    layer(0)
    layer(1)
    held.flush()
    assert records == [(True, 1), (False, 1)]
    assert held.taken == 2


def test_nothing_is_beside_a_forward_that_is_not_captured_as_a_whole():
    records = []
    held, side, layer, _ = held_by(records)
    held.begin(2, side)
    held.begin()  # that one is over
    layer(0)
    layer(1)
    held.flush()
    assert records == [(False, 2)]
    assert side.kept == []


def test_the_model_waits_early_for_what_its_records_need():
    records, waited = [], []
    held, side, layer, _ = held_by(records, ready=lambda: waited.append((side.inside, held.taken)))
    held.begin(2, side, meets_at=1)
    layer(0)
    assert waited == [(False, 1)], "in the model's stream"
    layer(1)
    assert waited == [(False, 1), (True, 2)]
    held.begin()
    layer(0)
    assert waited == [(False, 1), (True, 2)], "that forward is over"

"""Engines whose attention is one opaque op: every layer is guarded by its name, whole or split at attention."""

from __future__ import annotations

import pytest
import torch
from opaque_engine import DIM, HEADS, METADATA, Model
from torch.fx.passes.split_module import split_module

import kvcanary_fx
from kvcanary_fx import Batch, KVPool
from kvcanary_fx.errors import UnknownLayerError

LAYERS, SLOTS = 2, 16


def split_at_attention(gm, example_inputs):
    """What engines do: pieces around attention, each compiled by itself; attention and our ops run eagerly."""
    piece, parts, inside = 0, {}, False
    for node in gm.graph.nodes:
        opaque = node.op == "call_function" and ("attention" in str(node.target) or "_at" in str(node.target))
        if opaque != inside:
            piece, inside = piece + 1, opaque
        parts[node] = piece
    return split_module(gm, None, lambda node: parts[node], keep_original_order=True)


class Rig:
    """A session over the opaque model, and one request, A; with ``shared``, the layers have one K and one V."""

    def __init__(self, inner="eager", hoisted=False, layers=LAYERS, shared=False, ready=True, dynamic=True, **settings):
        self.kv = [tuple(torch.zeros(SLOTS, HEADS, DIM) for _ in range(2)) for _ in range(layers)]
        if shared:
            self.kv = self.kv[:1] * layers
        self.table = torch.zeros(3, 8, dtype=torch.int32)
        names = [f"layers.{i}" for i in range(layers)]
        METADATA.pools = dict(zip(names, self.kv, strict=True))
        METADATA.redirect = {}
        self.session = kvcanary_fx.install_canary(
            KVPool(self.kv, self.table, layer_names=names), inner=inner, mode="log", **settings
        )
        if ready:
            self.session.mark_ready()
        self.plain = Model(layers, hoisted)
        self.model = torch.compile(self.plain, backend=self.session.backend, dynamic=dynamic)
        self.stored = 0

    def share_a_prefix(self, in_flight):
        """B computes three tokens, and C reads them in the same forward; what is told of slots never written."""
        text, slots = [5, 6, 7, 8], [3, 4, 5, 6]
        self.step([8])
        self.session.pool.allocate([3, 4, 5])
        self.session.pool.allocate([6], owner="C")
        self.table[1:3, :4] = torch.tensor(slots, dtype=torch.int32)
        METADATA.slots = METADATA.reads = torch.tensor(slots)
        batch = Batch(
            text, slots, [1, 2], [0, 3], [3, 1], request_ids=["B", "C"], history=[text] * 2, history_lens=[3, 4],
            in_flight=in_flight,
        )  # fmt: skip
        with self.session.step(batch), self.session.forward(), torch.no_grad():
            self.model(torch.randn(4, HEADS * DIM))
        return {(v.why, v.slot) for v in self.session.violations()}

    def step(self, slots, padding=0):
        self.session.pool.allocate(slots, owner="A")
        start, end = self.stored, self.stored + len(slots)
        self.table[1, start:end] = torch.tensor(slots, dtype=torch.int32)
        METADATA.slots, METADATA.reads = torch.tensor(slots + [0] * padding), self.table[1, :end].long()
        batch = Batch(list(range(start, end)), slots, [1], [start], [len(slots)], request_ids=["A"])
        x = torch.randn(len(slots) + padding, HEADS * DIM, generator=torch.Generator().manual_seed(start))
        with self.session.step(batch), self.session.forward(), torch.no_grad():
            out = self.model(x)
        self.stored = end
        return x, out


@pytest.fixture(params=["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow), "split"])
def inner(request):
    return split_at_attention if request.param == "split" else request.param


BUILDS = pytest.mark.parametrize("hoisted", [False, True], ids=["name is a constant", "name is an input"])


@BUILDS
def test_same_result_no_violation_and_every_layer_recorded(inner, hoisted):
    rig = Rig(inner, hoisted)
    for slots in ([3, 4, 5], [6], [7]):
        x, out = rig.step(slots)
        with torch.no_grad():
            assert torch.allclose(rig.plain(x), out, atol=1e-5)
    assert rig.session.violations() == []
    stats = rig.session.stats()
    assert (stats.recorded, stats.checked) == (5 * 2 * LAYERS, (3 + 4) * 2 * LAYERS)
    rig.session.health.check()
    assert rig.session.uncovered == []


@BUILDS
@pytest.mark.parametrize(("layer", "half"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_flipped_bit_is_found_in_the_next_step(inner, hoisted, layer, half):
    rig = Rig(inner, hoisted)
    rig.step([3, 4, 5])
    rig.kv[layer][half].view(torch.int32)[4, 1, 2] ^= 1 << 9
    rig.step([6])
    (v,) = rig.session.violations()
    assert (v.check, v.layer, v.half, v.slot, v.position, v.request) == (
        "content", f"layers.{layer}", "KV"[half], 4, 1, "A",
    )  # fmt: skip


@pytest.mark.parametrize("padding", [0, 2])
def test_write_that_goes_elsewhere_is_found_in_its_own_step(inner, padding):
    rig = Rig(inner)
    rig.step([3, 4, 5], padding)
    assert rig.session.violations() == []
    METADATA.redirect = {"layers.1": torch.tensor([9] + [0] * padding)}
    rig.step([6], padding)
    assert [(v.check, v.phase, v.layer, v.half, v.slot, v.request, v.position) for v in rig.session.violations()] == [
        ("operand", "post", "layers.1", "K", 6, "A", 3),
        ("operand", "post", "layers.1", "V", 6, "A", 3),
    ]


def test_a_layer_that_reads_what_another_one_writes():
    """Its ops have nothing to fingerprint, and are counted all the same."""
    rig = Rig(shared=True)
    kv = rig.kv[0]
    for slots in ([3, 4, 5], [6]):
        METADATA.redirect = {"layers.1": torch.zeros(len(slots), dtype=torch.int64)}  # for padding
        rig.step(slots)
    assert rig.session.violations() == []
    assert rig.session.stats().recorded == 4 * 2
    rig.session.check()
    assert rig.session.uncovered == []
    kv[1].view(torch.int32)[4, 1, 2] ^= 1 << 9
    METADATA.redirect = {"layers.1": torch.zeros(1, dtype=torch.int64)}
    rig.step([7])
    assert [(v.check, v.half, v.slot) for v in rig.session.violations()] == [("content", "V", 4)]


@pytest.mark.parametrize(("in_flight", "told"), [(True, []), (False, [3, 4, 5])])
def test_a_prefix_that_another_request_writes_in_the_same_forward(in_flight, told):
    assert Rig().share_a_prefix(in_flight) == {("NEVER_WRITTEN", slot) for slot in told}


def test_a_warm_up_before_the_engine_is_ready_checks_nothing_and_counts_all():
    rig = Rig(ready=False)
    METADATA.slots = METADATA.reads = torch.tensor([3, 4])
    with torch.no_grad():
        rig.model(torch.randn(2, HEADS * DIM))
    rig.session.mark_ready()
    rig.step([5])
    assert rig.session.violations() == []
    assert rig.session.stats().recorded == 2 * LAYERS
    rig.session.check()
    assert rig.session.uncovered == []


def test_layer_that_no_pool_has_is_named():
    rig = Rig()
    object.__setattr__(rig.session.pool.declared, "layer_names", ["layers.0", "other"])
    rig.plain.layers[1].name = "elsewhere"
    METADATA.pools["elsewhere"] = rig.kv[1]
    with pytest.raises(
        UnknownLayerError, match=r"'elsewhere', and no KVPool has it. The layers are: layers.0, layers.1"
    ):
        rig.step([3])


def test_summary_lists_the_attention_ops():
    rig = Rig()
    rig.step([3])
    assert "guarded  opaque_engine::attention of layer layers.1" in rig.session.summary()


def test_pass_run_twice_inserts_nothing_new():
    from kvcanary_fx.passes.pipeline import passes, run_passes

    graphs = []

    def capture(gm, example_inputs):
        ordered = passes(pools_in=lambda _: 0)
        once, plan = run_passes(gm, example_inputs, ordered)
        twice, _ = run_passes(once, [*example_inputs, torch.zeros(1, dtype=torch.int32)], ordered)
        graphs.append((once.code, twice.code, plan.ops))
        return gm

    METADATA.pools = {"layers.0": (torch.zeros(4, HEADS, DIM), torch.zeros(4, HEADS, DIM))}
    METADATA.slots = METADATA.reads = torch.tensor([1])
    torch.compile(Model(1, False), backend=capture)(torch.randn(1, HEADS * DIM))
    ((once, twice, ops),) = graphs
    assert once == twice
    assert ops == 3

"""Engines whose layers are checked at once: what is found under a share of the bytes, and when."""

from __future__ import annotations

import pytest
import test_opaque_attention
import torch
from opaque_engine import DIM, HEADS, METADATA
from test_opaque_attention import LAYERS

from kvcanary_fx.errors import UnknownLayerError

EVERY = 4


class Rig(test_opaque_attention.Rig):
    """A graph for each number of tokens, and a share of the bytes in each step."""

    def __init__(self, inner="eager", **settings):
        super().__init__(inner, dynamic=False, verify_fraction=f"1/{EVERY}", **settings)

    @property
    def at_once(self):
        return [plan.layers_at_once for plan in self.session.plans]


INNER = pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])


@INNER
def test_same_result_no_violation_and_every_layer_recorded(inner):
    rig = Rig(inner)
    for slots in ([3, 4, 5], [6], [7]):
        x, out = rig.step(slots)
        with torch.no_grad():
            assert torch.allclose(rig.plain(x), out, atol=1e-5)
    assert rig.at_once == [LAYERS, LAYERS]
    assert rig.session.violations() == []
    assert rig.session.stats().recorded == 5 * 2 * LAYERS
    rig.session.health.check()
    assert rig.session.uncovered == []


@INNER
@pytest.mark.parametrize(("layer", "half"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_flipped_bit_is_found_within_the_steps_of_the_share(inner, layer, half):
    rig = Rig(inner)
    rig.step([3, 4, 5])
    rig.step([6])
    rig.kv[layer][half].view(torch.int32)[4, 1, 2] ^= 1 << 9
    for slot in range(7, 7 + EVERY):
        rig.step([slot])
    (v,) = rig.session.violations()
    assert (v.check, v.phase, v.layer, v.half, v.slot, v.position, v.request) == (
        "content", "pre", f"layers.{layer}", "KV"[half], 4, 1, "A",
    )  # fmt: skip


@INNER
def test_a_write_that_goes_elsewhere_is_found_in_its_own_step(inner):
    rig = Rig(inner)
    rig.step([3, 4, 5], padding=2)
    METADATA.redirect = {"layers.1": torch.tensor([9])}
    rig.step([6])
    assert [(v.check, v.phase, v.layer, v.half, v.slot, v.request, v.position) for v in rig.session.violations()] == [
        ("operand", "post", "layers.1", "K", 6, "A", 3),
        ("operand", "post", "layers.1", "V", 6, "A", 3),
    ]


def test_a_layer_that_reads_what_another_one_writes():
    """Its half is compared once, and its ops are counted."""
    checked = {}
    for shared in True, False:
        rig = Rig(shared=shared)
        for slots in ([3, 4, 5], [6], [7], [8], [9]):
            if shared:
                METADATA.redirect = {"layers.1": torch.zeros(len(slots), dtype=torch.int64)}  # for padding
            rig.step(slots)
        assert rig.session.violations() == []
        checked[shared] = rig.session.stats().checked
        assert rig.session.stats().recorded == 7 * 2 * (1 if shared else LAYERS)
        rig.session.health.check()
        assert rig.session.uncovered == []
    assert 0 < LAYERS * checked[True] == checked[False]


@pytest.mark.parametrize(("in_flight", "told"), [(True, []), (False, [3, 4, 5])])
def test_a_prefix_that_another_request_writes_in_the_same_forward(in_flight, told):
    assert Rig().share_a_prefix(in_flight) == {("NEVER_WRITTEN", slot) for slot in told}


def test_a_warm_up_before_the_engine_is_ready_checks_nothing_and_counts_all():
    rig = Rig(ready=False)
    METADATA.slots = METADATA.reads = torch.tensor([1, 2])
    with torch.no_grad():
        rig.model(torch.randn(2, HEADS * DIM))
    assert rig.at_once == [LAYERS]
    rig.session.mark_ready()
    rig.step([3, 4])
    assert rig.session.violations() == []
    assert rig.session.stats().recorded == 2 * 2 * LAYERS
    rig.session.health.check()
    assert rig.session.uncovered == []


def test_a_layer_that_no_pool_has_is_named():
    rig = Rig(layers=3)
    rig.plain.layers[2].name = "layers.7"
    METADATA.pools["layers.7"] = METADATA.pools["layers.2"]
    with pytest.raises(UnknownLayerError, match=r"layers\.7"):
        rig.step([3, 4])


def test_where_all_bytes_are_compared_each_layer_keeps_its_checks():
    rig = test_opaque_attention.Rig(dynamic=False)
    rig.step([3, 4, 5])
    assert [plan.layers_at_once for plan in rig.session.plans] == [0]

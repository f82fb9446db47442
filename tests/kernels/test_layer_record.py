"""A layer's launches are bound at the first call, and again only where K and V lie in memory in another way."""

from __future__ import annotations

import inspect

import pytest
import test_opaque_attention
import torch
from gpu_on_cpu import use_gpu_kernels

from kvcanary_fx import KVPool, install_canary
from kvcanary_fx.engine.layers import EagerLayers
from kvcanary_fx.kernels.content import gpu_layer, gpu_pool, triton_layer
from kvcanary_fx.kernels.slots import triton_writes

SLOTS, HEADS, DIM, LAYERS = 32, 2, 8, 3


class Compiled:
    """In the place of a kernel that Triton has compiled: remembers with which arguments it was launched."""

    def __init__(self, kernel: Compiles):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*words, stream=None):
            self.kernel.launched.append(dict(zip(self.kernel.names, words, strict=True)))

        return launch


class Compiles:
    """In the place of a kernel: what was compiled, by its first arguments, and what was launched after that."""

    def __init__(self, kernel):
        self.fn, self.names = kernel.fn, list(inspect.signature(kernel.fn).parameters)
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def compile_(*given, num_warps, maxnreg=None):
            self.compiled.append(dict(zip(self.names, given, strict=True)))
            return Compiled(self)

        return compile_


class Rig:
    """An engine that calls the checks of its layers, with a GPU's code and launches that only leave a trace."""

    def __init__(self, monkeypatch):
        use_gpu_kernels(monkeypatch.setattr)
        self.record, self.received, self.pool = (
            Compiles(kernel)
            for kernel in (triton_layer.record_kernel, triton_writes.received_kernel, gpu_pool.verify_pool_kernel)
        )
        monkeypatch.setattr(triton_layer, "record_kernel", self.record)
        monkeypatch.setattr(triton_writes, "received_kernel", self.received)
        monkeypatch.setattr(gpu_pool, "verify_pool_kernel", self.pool)
        kv = [tuple(torch.zeros(SLOTS, HEADS, DIM) for _ in "kv") for _ in range(LAYERS)]
        self.table = torch.arange(SLOTS, dtype=torch.int32).view(2, -1)
        self.names = [f"layers.{i}" for i in range(LAYERS)]
        self.session = install_canary(KVPool(kv, self.table, layer_names=self.names), mode="log", health_every=0)
        self.layers = EagerLayers(self.session)
        self.session.mark_ready()
        self.stored = 1

    def step(self, tokens, key, value, slots=None):
        planned = self.table[0, self.stored : self.stored + tokens].to(torch.int64)
        self.session.pool.allocate(planned)
        batch = dict(
            input_ids=range(tokens), slots=planned, request_rows=[0], prefix_lens=[self.stored], extend_lens=[tokens]
        )
        with self.session.step(batch), self.session.forward():
            (self.plan,) = self.session._stepping.running.plans.values()
            for name in self.names:
                self.layers.verify(name)
                self.layers.record(name, key, value, slots)
        self.stored += tokens


@pytest.fixture
def rig(monkeypatch):
    return Rig(monkeypatch)


def test_a_forward_launches_one_check_a_pool_and_one_record_a_layer(rig):
    key, value = torch.randn(2, 4, HEADS, DIM)
    rig.step(2, key, value)
    assert [len(k.compiled) for k in (rig.pool, rig.record, rig.received)] == [1, LAYERS, 0]
    assert [len(k.launched) for k in (rig.pool, rig.record, rig.received)] == [0, 0, 0]
    for _ in range(3):
        rig.step(2, key, value)
    assert [len(k.compiled) for k in (rig.pool, rig.record, rig.received)] == [1, LAYERS, 0]
    assert [len(k.launched) for k in (rig.pool, rig.record, rig.received)] == [3, 3 * LAYERS, 0]


def test_the_check_of_a_layer_in_a_graph_is_bound_once_and_finds_a_flip_in_a_later_step(monkeypatch):
    use_gpu_kernels(monkeypatch.setattr)
    bound, bind = [], gpu_layer.bind_verify
    monkeypatch.setattr(gpu_layer, "bind_verify", lambda *given: bound.append(given) or bind(*given))
    rig = test_opaque_attention.Rig()
    rig.step([3, 4])
    rig.step([5, 6])
    assert rig.session.violations() == []
    rig.kv[1][1].view(torch.int32)[4, 1, 2] ^= 1 << 9
    rig.step([7, 8])
    told = [(v.check, v.layer, v.half, v.slot, v.step) for v in rig.session.violations()]
    assert told == [("content", "layers.1", "V", 4, 3)]
    assert len(bound) == test_opaque_attention.LAYERS


def test_the_slots_that_layers_received_are_compared_in_a_launch_each_bound_once_for_a_plan_that_comes_again(rig):
    key, value = torch.randn(2, 2, HEADS, DIM)
    for _ in range(2):
        rig.step(2, key, value, torch.tensor([1, 2]))
    assert (len(rig.received.compiled), len(rig.received.launched)) == (1, 2 * LAYERS - 1)
    sources = [words["source"] for words in rig.received.launched[: LAYERS - 1]]
    assert sources == [half.info.id for half in rig.session.pool.content.halves[2::2]]


def test_a_launch_again_has_the_addresses_of_its_own_call(rig):
    rig.step(2, *torch.randn(2, 2, HEADS, DIM))
    key, value = torch.randn(2, 5, HEADS, DIM)
    rig.step(3, key, value)
    words, real = rig.record.launched[0], rig.plan.real_slots
    assert (words["value_base"], words["other_value_base"]) == (key.data_ptr(), value.data_ptr())
    assert (words["slot_ptr"], words["n"]) == (real.data_ptr(), 3)


def test_a_prompt_is_recorded_in_larger_tiles_than_the_step_before_it(rig, monkeypatch):
    monkeypatch.setattr(gpu_layer, "FEW_SLOTS", 2)
    for tokens in (2, 3):
        rig.step(tokens, *torch.randn(2, 4, HEADS, DIM))
    tiles = [made["BLOCK"] for made in rig.record.compiled]
    assert tiles == [gpu_layer.FEW.slots] * LAYERS + [gpu_layer.MANY.slots] * LAYERS


@pytest.mark.parametrize(
    "form", ["a slice of Q, K and V", "K rotated", "heads first", "no K and V", "another type", "not aligned", "only V"]
)
def test_k_and_v_that_lie_otherwise_are_bound_anew(rig, form):
    rig.step(2, *torch.randn(2, 2, HEADS, DIM))
    given = {
        "a slice of Q, K and V": torch.randn(2, 3, HEADS, DIM)[:, 1:].unbind(1),
        "K rotated": (torch.randn(2, HEADS, DIM), torch.randn(2, 3, HEADS, DIM)[:, 2]),
        "heads first": torch.randn(2, HEADS, 2, DIM).transpose(1, 2).unbind(0),
        "no K and V": (None, None),
        "another type": torch.randn(2, 2, HEADS, DIM).half().unbind(0),
        "not aligned": torch.randn(2 * 2 * HEADS * DIM + 1)[1:].view(2, 2, HEADS, DIM).unbind(0),
        "only V": (None, torch.randn(2, HEADS, DIM)),
    }[form]
    before = len(rig.record.compiled)
    rig.step(2, *given)
    launches = 2 if form == "only V" else 1  # K and V share a launch where they are alike
    assert len(rig.record.compiled) - before == launches * LAYERS
    assert rig.record.launched == []
    compared = [made["OPERAND"] for made in rig.record.compiled[before : before + launches]]
    expected = {"no K and V": [False], "another type": [False], "only V": [False, True]}
    assert compared == expected.get(form, [True])
    rig.step(2, *given)
    assert len(rig.record.launched) == launches * LAYERS
    rig.step(2, *torch.randn(2, 2, HEADS, DIM))  # as before that
    assert len(rig.record.launched) == (launches + 1) * LAYERS


def test_each_half_is_compared_with_its_own_operand_where_k_was_rotated(monkeypatch):
    """K is then a tensor of its own, and V a part of the product that both were."""
    use_gpu_kernels(monkeypatch.setattr)
    kv = [(torch.zeros(8, HEADS, DIM), torch.zeros(8, HEADS, DIM))]
    table = torch.arange(8, dtype=torch.int32).view(1, -1)
    session = install_canary(KVPool(kv, table, layer_names=["layer"]), mode="log", health_every=0)
    layers = EagerLayers(session)
    session.mark_ready()
    session.pool.allocate(range(1, 7))
    key, value = torch.randn(3, HEADS, DIM), torch.randn(3, 3, HEADS, DIM)[:, 2]
    for first, stored in ((1, value), (4, value.flip(0))):
        slots = torch.arange(first, first + 3)
        batch = dict(input_ids=range(3), slots=slots, request_rows=[0], prefix_lens=[first], extend_lens=[3])
        with session.step(batch), session.forward():
            layers.verify("layer")
            kv[0][0][slots], kv[0][1][slots] = key, stored
            layers.record("layer", key, value)
    assert {(v.check, v.half, v.slot) for v in session.violations() if v.check == "operand"} == {
        ("operand", "V", 4),
        ("operand", "V", 6),
    }


def test_the_stride_of_a_single_row_is_that_of_the_next_ones(rig):
    """K and V out of one product: of a single row, torch says any stride."""
    wide = torch.randn(4, 3, HEADS, DIM)
    rig.step(1, wide[:, 1], wide[:, 2])
    rig.step(3, wide[:, 1], wide[:, 2])
    assert len(rig.record.launched) == LAYERS
    assert {made["token_stride"] for made in rig.record.compiled} == {3 * HEADS * DIM}


def test_rows_that_are_not_where_k_and_v_are_bind_in_each_call(rig):
    for _ in range(2):
        rig.step(2, *torch.randn(2, 1, 2 * HEADS * DIM))  # the first axis does not count tokens
        rig.step(2, *torch.randn(2, 2, DIM // 2, 2 * HEADS).mT)  # no view has the pool's rows
    assert len(rig.record.compiled) == 4 * LAYERS
    assert rig.record.launched == []


def test_other_stamps_are_taken_where_they_are(rig):
    """The memory of stamps is made anew where a larger cache joins the session."""
    key, value = torch.randn(2, 2, HEADS, DIM)
    rig.step(2, key, value)
    control = rig.session.pool.space.control
    control.stamps = control.stamps.clone()
    rig.step(2, key, value)
    assert rig.record.compiled[-1]["stamp_ptr"] is control.stamps
    assert rig.record.launched == []
    rig.step(2, key, value)
    assert len(rig.record.launched) == LAYERS


def test_ways_in_which_k_and_v_lie_are_forgotten_if_they_are_many(rig, monkeypatch):
    monkeypatch.setattr(gpu_layer, "MOST_FORMS", 2)
    for n in (2, 3, 4, 2):  # heads first: the stride from head to head goes with the number of tokens
        rig.step(n, *torch.randn(2, HEADS, n, DIM).transpose(1, 2).unbind(0))
    assert len(rig.record.compiled) == 4 * LAYERS

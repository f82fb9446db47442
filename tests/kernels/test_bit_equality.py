"""The kernels equal the reference bit for bit, on random pools, layouts, dtypes and steps.

The number of scenes per device comes from CANARY_TEST_SEEDS (default 300).
"""

from __future__ import annotations

import dataclasses
import os
from types import ModuleType

import pytest
import torch
from scenes import ALL_CHECKS, play, random_scene, random_step, to_device

from kvcanary_fx.kernels import buffers, cpu, gpu, reference, triton_kernels, triton_records
from kvcanary_fx.kernels.buffers import Count, Gate, HalfBuffers, Ring, RowState, Word
from kvcanary_fx.kernels.layout import SlotLayout
from kvcanary_fx.kernels.slot_space import SlotSpace

SEEDS = int(os.environ.get("CANARY_TEST_SEEDS", "300"))
BLOCKS = 10


def _compare(kernels: ModuleType, seed: int, device: str = "cpu", steps: int = 3) -> None:
    scene = random_scene(seed)
    expected, got = scene.clone(), scene.clone().to(device)
    for number in range(steps):
        step = random_step(scene)
        play(reference, expected, step)
        play(kernels, got, to_device(step, device))
        want, have = expected.state(), got.state()
        for name in want:
            assert have[name] == want[name], f"seed {seed}, step {number}, {name}, {scene.site.layout}"
        a, b = (t.cpu().clone(memory_format=torch.contiguous_format) for t in (expected.view, got.view))
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"seed {seed}: a check wrote to the pool"


def _seeds(block: int) -> range:
    return range(block * SEEDS // BLOCKS, (block + 1) * SEEDS // BLOCKS)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_cpu_equals_reference_on_random_plans(block):
    for seed in _seeds(block):
        _compare(cpu, seed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in for a missing GPU")
@pytest.mark.parametrize("block", range(BLOCKS))
def test_interpreted_triton_equals_reference_on_random_plans(block):
    for seed in _seeds(block):
        _compare(gpu, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("block", range(BLOCKS))
def test_gpu_equals_reference_on_random_plans(block):
    for seed in _seeds(block):
        _compare(gpu, seed, "cuda")


def test_constants_of_the_kernels_are_those_of_the_buffers():
    pairs = {
        "_HEAD": Word.HEAD,
        "_DRAINED": Word.DRAINED,
        "_STEP": Word.STEP,
        "_BOXED": Word.BOXED,
        "_FORWARD": Word.FORWARD,
        "_GATE_STEP": Gate.STEP,
        "_LENIENT_NEXT": Gate.LENIENT_NEXT,
        "_LENIENT_NOW": Gate.LENIENT_NOW,
        "_GATE_OPS": Gate.OPS,
        "_VERIFY_RUNS": Count.VERIFY_RUNS,
        "_RECORD_RUNS": Count.RECORD_RUNS,
        "_CHECKED": Count.CHECKED,
        "_RECORDED": Count.RECORDED,
        "_ADOPTED": Count.ADOPTED,
        "_ROW_NEXT": RowState.NEXT,
        "_ROW_ORIGIN": RowState.ORIGIN,
        "_ROW_COLUMNS": len(RowState),
        "_RING_COLUMNS": len(Ring),
        "_CONTENT_BIT": buffers.Check.CONTENT,
        "_POISON_BIT": buffers.Check.POISON,
    }
    for name, value in pairs.items():
        assert getattr(triton_kernels, name).value == int(value), name
    assert triton_records._OPERAND_BIT.value == buffers.Check.OPERAND


#: Each implementation with the device it runs on here; the interpreter runs the GPU kernels on the CPU.
IMPLEMENTATIONS = [(cpu, "cpu"), (gpu, "cuda" if torch.cuda.is_available() else "cpu")]


@pytest.mark.parametrize(("kernels", "device"), IMPLEMENTATIONS)
def test_empty_batch_changes_nothing_but_the_run_counter(kernels, device):
    scene = random_scene(1).to(device)
    before = scene.state()
    none = torch.zeros(0, dtype=torch.int64, device=device)
    values = torch.zeros(0, *scene.site.layout.row_shape, dtype=scene.site.layout.dtype, device=device)
    kernels.check_plan(scene.site, none, none, 0, 0)
    kernels.record(scene.site, scene.view, none, values, 0)
    after = scene.state()
    assert after.pop("counters")[Count.RECORD_RUNS] == before.pop("counters")[Count.RECORD_RUNS] + 1
    assert after == before


@pytest.mark.gpu
@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
@pytest.mark.parametrize("planes", [1, 2])
def test_programs_that_take_many_turns_digest_as_the_cpu_does(few, planes, monkeypatch):
    """Scenes are small: there each program has one turn."""
    slots = 50_000
    view = torch.randn(slots, 3, 40, device="cuda").bfloat16()
    layout = SlotLayout(tuple(view.shape), (0,), view.dtype)
    control = buffers.Control.allocate(64, view.device)
    control.stamps = torch.full((2, slots), -1, device="cuda")
    gate, counters = (torch.zeros(len(kind), dtype=torch.int64, device="cuda") for kind in (Gate, Count))
    half = HalfBuffers.allocate(layout, planes, view.device)
    space = SlotSpace.allocate(slots, view.device, control, 5, ALL_CHECKS)
    site = buffers.Site(layout, half, control, gate, counters, 1, 3, 5, ALL_CHECKS, space=space)
    order = torch.randperm(slots, device="cuda")
    if few:
        monkeypatch.setattr(gpu, "FEW_SLOTS", slots)
    taken = torch.zeros(slots, planes, dtype=torch.int32, device="cuda")
    gpu.digest_operands([site], [view[order]], order, [taken])
    expected = cpu.digest_rows(layout, view, torch.arange(slots, device="cuda"), (3, 5), planes)
    assert torch.equal(taken.t(), expected[:, order])
    for given in ({"values": view[order]}, {"values": None, "value_digests": taken}, {"values": None}):
        half.digest.zero_()
        gpu.record(site, view, order, write_id=0, **given)
        assert torch.equal(half.digest, expected)
    space.listed.copy_(order)
    space.listed_count.fill_(slots)
    gpu.verify(site, view, None)
    assert counters[Count.CHECKED] == slots
    assert control.words[Word.HEAD] == 0


@pytest.mark.parametrize("alike", [True, False], ids=["one launch", "two launches"])
@pytest.mark.parametrize("planes", [1, 2])
def test_operands_of_two_halves_keep_apart(alike, planes):
    device = IMPLEMENTATIONS[1][1]
    layout = SlotLayout((9, 2, 8), (0,), torch.float32)
    control = buffers.Control.allocate(4, torch.device(device))
    gate, counters = (torch.zeros(len(kind), dtype=torch.int64, device=device) for kind in (Gate, Count))
    halves = [HalfBuffers.allocate(layout, planes, torch.device(device)) for _ in range(2)]
    seeds = [(3, 5), (7, 11)]
    sites = [
        buffers.Site(layout, half, control, gate, counters, i, *seeds[i], ALL_CHECKS) for i, half in enumerate(halves)
    ]
    packed = torch.randn(5, 2, 2, 8, device=device)
    values = [packed[:, 0], packed[:, 1] if alike else packed[:, 1].clone()]
    slots = torch.tensor([4, -1, 0, 2, 8], device=device)
    taken = torch.full((5, 2 * planes + 1), 7, dtype=torch.int32, device=device)
    outs = [taken[:, i * planes : (i + 1) * planes] for i in range(2)]
    gpu.digest_operands(sites, values, slots, outs)
    for value, seed, out in zip(values, seeds, outs, strict=True):
        expected = cpu.digest_rows(layout, value, torch.arange(5, device=device), seed, planes).t()
        assert torch.equal(out[slots >= 0], expected[slots >= 0])
    assert (taken[:, -1] == 7).all()
    assert (taken[slots < 0] == 7).all()


@pytest.mark.parametrize(("kernels", "device"), IMPLEMENTATIONS)
def test_a_full_ring_keeps_the_count_and_as_many_rows_as_it_can(kernels, device):
    scene = random_scene(3, capacity=2).to(device)
    scene.site = dataclasses.replace(scene.site, checks=ALL_CHECKS)
    slots = torch.tensor([-1, -1, -1, -1, -1], device=device)
    raw = torch.tensor([100, 101, 102, 103, 104], device=device)
    kernels.check_plan(scene.site, slots, raw, 0, 0)
    assert int(scene.site.control.words[Word.HEAD]) == 5
    kept = scene.site.control.ring[:2, Ring.STORED].tolist()
    assert len(set(kept)) == 2
    assert set(kept) <= set(raw.tolist())


def test_shadow_of_an_8b_gqa_slot_fits_the_budget():
    slots, layers = 1024, 32
    layout = SlotLayout((slots, 8, 128), (0,), torch.bfloat16)
    half = HalfBuffers.allocate(layout, planes=1, device=torch.device("cpu"))
    shadow = 2 * layers * (half.digest.nbytes + half.rows.nbytes) + 16 * slots
    assert shadow <= 0.0025 * 2 * layers * slots * layout.row_bytes

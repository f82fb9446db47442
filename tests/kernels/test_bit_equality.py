"""The kernels equal the reference bit for bit, on random pools, layouts, dtypes and steps.

The number of scenes per device comes from CANARY_TEST_SEEDS (default 150).
"""

from __future__ import annotations

import dataclasses
import os
from types import ModuleType

import pytest
import torch
from scenes import ALL_CHECKS, FLOAT_DTYPES, play, random_scene, random_step, to_device

from kvcanary_fx.kernels import buffers, words
from kvcanary_fx.kernels.buffers import Count, Gate, HalfBuffers
from kvcanary_fx.kernels.checks import REASONS, Check, Phase
from kvcanary_fx.kernels.content import (
    cpu,
    gpu,
)
from kvcanary_fx.kernels.content import (
    gpu_layer as gpu_halves,
)
from kvcanary_fx.kernels.content import (
    naive as reference,
)
from kvcanary_fx.kernels.content.digest import MASK32, as_int32, coefficient, mixed
from kvcanary_fx.kernels.ring import UNKNOWN, Control, Ring, Word
from kvcanary_fx.kernels.slots.space import Column, SlotSpace
from kvcanary_fx.kernels.writes.layout import SlotLayout

SEEDS = int(os.environ.get("CANARY_TEST_SEEDS", "150"))
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


def test_words_of_the_kernels_are_those_of_the_table_and_the_buffers():
    for why, row in REASONS.items():
        assert divmod(getattr(words, f"REASON_{why.name}").value, words.REASONS_BELOW.value) == (row.check, why)
    assert words.RING_FOUND.value == Ring.FOUND
    assert words.WIDE_OWNER.value * 2 == Column.OWNER
    for name in ("WHY_OVERWRITTEN", "RING_", "HEAD"):
        with pytest.raises(AttributeError, match=name):
            getattr(words, name)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

#: Each implementation with the device it runs on here; the interpreter runs the GPU kernels on the CPU.
IMPLEMENTATIONS = [(cpu, "cpu"), (gpu, DEVICE)]


def test_cpu_reads_rows_that_lie_apart_as_words():
    """Seven elements of two bytes from row to row: no row but the first begins at a word."""
    layout = SlotLayout((3, 6), (0,), torch.bfloat16)
    rows = torch.randn(3, 7).bfloat16()[:, :6]
    assert torch.equal(cpu.rows_as_words(rows, layout), rows.contiguous().view(torch.int32))


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
        monkeypatch.setattr(gpu_halves, "FEW_SLOTS", slots)
    expected = cpu.digest_rows(layout, view, torch.arange(slots, device="cuda"), (3, 5), planes)
    for values in (view[order], None):
        half.digest.zero_()
        gpu.record(site, view, order, values, 0)
        assert torch.equal(half.digest, expected)
    space.listed.copy_(order)
    space.listed_count.fill_(slots)
    gpu.verify(site, view, None)
    assert counters[Count.CHECKED] == slots
    assert control.words[Word.HEAD] == 0


def of_no_weight(first: int, a: list[int], b: list[int]) -> list[int]:
    """Two words, the first as given, that leave the first plane of a digest as two zeros do."""
    u = -mixed(first, a[0], b[0]) * pow(b[1], -1, 1 << 32) & MASK32
    u = (u ^ u >> 15 ^ u >> 30) * pow(a[1], -1, 1 << 32) & MASK32
    return [first, as_int32(u ^ u >> 16)]


@pytest.mark.parametrize(("kernels", "device"), IMPLEMENTATIONS, ids=["cpu", "interpreted or gpu"])
def test_a_filled_slot_that_looks_empty_in_one_plane_of_two_is_adopted(kernels, device):
    layout = SlotLayout((3, 2), (0,), torch.int32)
    half = HalfBuffers.allocate(layout, 2, torch.device(device))
    half.baseline = torch.zeros(3, dtype=torch.int32, device=device)
    gate, counters = (torch.zeros(len(kind), dtype=torch.int64, device=device) for kind in (Gate, Count))
    control = buffers.Control.allocate(4, torch.device(device))
    site = buffers.Site(layout, half, control, gate, counters, 1, 3, 5, ALL_CHECKS)
    words_of = [[coefficient(i, stream) for i in range(2)] for stream in range(2)]
    view = torch.tensor([[0, 0], of_no_weight(77, *words_of), [0, 1]], dtype=torch.int32, device=device)
    kernels.snapshot(site, view)
    assert half.digest[0, :2].tolist() == [0, 3]
    assert [bool(slot.any()) for slot in half.digest.T] == [False, True, True]
    assert counters[Count.ADOPTED] == 2


def test_interpreted_triton_puts_the_first_index_outside_into_the_black_box():
    """It is what is left where a device-side assert ends the context; a later one must not replace it."""
    device = IMPLEMENTATIONS[1][1]
    scene = random_scene(3).to(device)
    scene.site = dataclasses.replace(scene.site, checks=ALL_CHECKS)
    control = scene.site.control
    control.blackbox = Control.black_box(pinned=device == "cuda")
    control.words[Word.STEP], control.words[Word.FORWARD] = 7, 3 << 32 | 1
    for raw in ([0, 100], [101, 102]):
        given = torch.tensor(raw, device=device)
        slots = torch.where(given == 0, 0, -1)
        gpu.check_plan(scene.site, slots, given, 0, Phase.PRE)
    if device == "cuda":
        torch.cuda.synchronize()
    columns = [Ring.STEP, Ring.HALF, Ring.CHECK, Ring.SLOT, Ring.STORED, Ring.FOUND, -1]
    assert control.blackbox[columns].tolist() == [7, scene.site.half_id, Check.BOUNDS, -1, 100, -1, 1]
    # which of the engine's forwards it was is known, and where the token is in its request is not
    assert control.blackbox[[Ring.FORWARD, Ring.POSITION]].tolist() == [3 << 32 | 1, UNKNOWN]


@pytest.mark.parametrize("form", ["alike", "of other strides", "of another width", "alone"])
@pytest.mark.parametrize("planes", [1, 2])
def test_the_halves_of_a_layer_are_recorded_and_verified_as_each_alone(form, planes):
    """K and V in one launch, where they are alike; of three the last goes alone."""
    told = []
    for kernels, device in IMPLEMENTATIONS[:2]:
        torch.manual_seed(3)
        scene = LayerScene(form, planes, torch.device(device))
        slots = torch.tensor([4, -1, 0, 2, 8], device=device)
        scene.write(slots)
        kernels.record_halves(scene.sites, scene.views, slots, scene.values, 0, ops=2)
        for view in scene.views:
            view.view(torch.int32)[2, 0, 1] ^= 1 << 7
        scene.space.listed[:3] = torch.tensor([4, 2, 8], device=device)
        scene.space.listed_count.fill_(3)
        scene.space.reads[[4, 2, 8]] = scene.space.clock
        kernels.verify_halves(scene.sites, scene.views, ops=1)
        told.append(scene.state())
    assert told[0] == told[1]
    assert int(scene.gate[Gate.OPS]) == 3
    checks = [(row[Ring.HALF], row[Ring.CHECK], row[Ring.SLOT]) for row in told[0]["ring"]]
    wrong = [(half, Check.OPERAND, 8) for half in range(len(scene.sites))]
    assert checks == sorted(wrong + [(half, Check.CONTENT, 2) for half in range(len(scene.sites))])


def spied_launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The numbers of the halves of each launch from here on, which stays away."""
    launched, split = [], gpu_halves.in_launches

    def spy(parts: list) -> list:
        launched.extend((a.site.half_id, b.site.half_id) for a, b in split(parts))
        return []

    monkeypatch.setattr(gpu_halves, "in_launches", spy)
    return launched


def test_halves_share_a_launch_if_they_differ_in_nothing_but_where_they_lie(monkeypatch):
    launched = spied_launches(monkeypatch)
    scene = LayerScene("alike", 1, torch.device("cpu"))

    def pairs(**changed: object) -> list[tuple[int, int]]:
        launched.clear()
        second = dataclasses.replace(scene.sites[1], **changed)
        gpu_halves.verify_halves([scene.sites[0], second], scene.views[:2])
        return list(launched)

    assert pairs() == [(0, 1)]
    alone = [(0, 0), (1, 1)]
    other = LayerScene("alike", 1, torch.device("cpu"))
    assert pairs(checks=Check.CONTENT) == alone
    assert pairs(space=other.space) == alone
    assert pairs(control=other.control) == alone
    assert pairs(gate=other.gate) == alone
    assert pairs(layout=dataclasses.replace(scene.sites[1].layout, dtype=torch.int32)) == alone


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((0, 1), [(0, 1)]),
        ((None, None), [(0, 1)]),
        ((0, None), [(0, 0), (1, 1)]),
        ((None, 1), [(0, 0), (1, 1)]),
        ((0, "transposed"), [(0, 0), (1, 1)]),
    ],
)
def test_halves_share_a_launch_if_what_they_were_given_is_alike(given, expected, monkeypatch):
    launched = spied_launches(monkeypatch)
    scene = LayerScene("alike", 1, torch.device("cpu"))
    of = {None: None, 0: scene.values[0], 1: scene.values[1], "transposed": scene.values[1].mT.contiguous().mT}
    slots = torch.tensor([4, -1, 0, 2, 8])
    gpu_halves.record_halves(scene.sites[:2], scene.views[:2], slots, [of[name] for name in given], 0)
    assert launched == expected


class LayerScene:
    """Halves of one layer in one pool, and what a forward writes to them: one value arrives otherwise."""

    def __init__(self, form: str, planes: int, device: torch.device):
        count = {"alone": 1, "alike": 3}.get(form, 2)
        self.control = buffers.Control.allocate(64, device)
        self.control.stamps = torch.full((2, 9), -1, device=device)
        self.gate = torch.zeros(len(Gate), dtype=torch.int64, device=device)
        self.space = SlotSpace.allocate(9, device, self.control, 5, ALL_CHECKS)
        packed = torch.zeros(9, count, 2, 16, device=device)
        self.views = [packed[:, i, :, : 8 * (1 + (form == "of another width" and i == 1))] for i in range(count)]
        if form == "of other strides":
            self.views[1] = self.views[1].clone()
        layouts = [SlotLayout(tuple(view.shape), (0,), view.dtype) for view in self.views]
        self.counters = torch.zeros(count, len(Count), dtype=torch.int64, device=device)
        self.sites = [
            buffers.Site(
                layout, HalfBuffers.allocate(layout, planes, device), self.control, self.gate, self.counters[i], i,
                3 + 4 * i, 5 + 6 * i, ALL_CHECKS, space=self.space,
            )
            for i, layout in enumerate(layouts)
        ]  # fmt: skip
        self.values = [torch.randn(5, *layout.row_shape).to(device) for layout in layouts]

    def write(self, slots: torch.Tensor) -> None:
        for view, value in zip(self.views, self.values, strict=True):
            view[slots[slots >= 0]] = value[slots >= 0]
            view[8] += 1

    def state(self) -> dict[str, list]:
        columns = [Ring.HALF, Ring.CHECK, Ring.SLOT, Ring.STORED, Ring.FOUND]
        ring = self.control.ring[: int(self.control.words[Word.HEAD])][:, columns].tolist()
        rows = [{Ring(c): row[i] for i, c in enumerate(columns)} for row in ring]
        return {
            "ring": sorted(rows, key=lambda row: (row[Ring.HALF], row[Ring.CHECK])),
            "digests": [site.half.digest.tolist() for site in self.sites],
            "counters": self.counters.tolist(),
        }


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


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
def test_of_slots_recorded_together_those_are_reported_that_hold_a_nan_or_are_unlike_their_operand(
    dtype, few, monkeypatch
):
    """A program looks at several slots at once, and at all elements of a word."""
    if not few:
        monkeypatch.setattr(gpu_halves, "FEW_SLOTS", 0)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    view = torch.ones(20, 2, 9, device=DEVICE).to(dtype)
    layout = SlotLayout(tuple(view.shape), (0,), dtype)
    control = buffers.Control.allocate(64, view.device)
    control.stamps = torch.full((2, 20), -1, device=DEVICE)
    gate, counters = (torch.zeros(len(kind), dtype=torch.int64, device=DEVICE) for kind in (Gate, Count))
    checks = Check.OPERAND | Check.POISON
    half = HalfBuffers.allocate(layout, 1, view.device)
    site = buffers.Site(layout, half, control, gate, counters, 1, 3, 5, checks)
    nan = torch.full((1,), torch.nan).to(dtype).view(bits).item()
    view.view(bits)[7, 1, 6] = view.view(bits)[11, 0, 0] = nan
    values = view.clone()
    values[13, 1, 8] = -1
    gpu.record(site, view, torch.arange(20, device=DEVICE), values, 0)
    ring = control.ring[: int(control.words[Word.HEAD])].tolist()
    assert {(row[Ring.CHECK], row[Ring.SLOT]) for row in ring} == {
        (Check.POISON, 7),
        (Check.POISON, 11),
        (Check.OPERAND, 13),
    }
    assert len(ring) == 3
    word = {row[Ring.SLOT]: row[Ring.DETAIL] for row in ring if row[Ring.CHECK] == Check.POISON}
    assert word == {7: (15 * dtype.itemsize) // 4 + (dtype.itemsize == 8), 11: int(dtype.itemsize == 8)}


def test_shadow_of_an_8b_gqa_slot_fits_the_budget():
    slots, layers = 1024, 32
    layout = SlotLayout((slots, 8, 128), (0,), torch.bfloat16)
    half = HalfBuffers.allocate(layout, planes=1, device=torch.device("cpu"))
    shadow = 2 * layers * (half.digest.nbytes + half.rows.nbytes) + 16 * slots
    assert shadow <= 0.0025 * 2 * layers * slots * layout.row_bytes

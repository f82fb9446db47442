"""The launches around a write of few tokens leave what the steps one after the other leave: for a half, and for two."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import random
from types import ModuleType
from typing import Any

import pytest
import torch
from scenes import ALL_CHECKS, Scene, fill, random_scene, row_of

from kvcanary_fx.kernels import ops
from kvcanary_fx.kernels.bound_launch import BoundLaunch
from kvcanary_fx.kernels.buffers import Count, Gate, HalfBuffers, IdentityBuffers, RowState, Site
from kvcanary_fx.kernels.checks import Check
from kvcanary_fx.kernels.content import cpu, gpu, gpu_write, triton_half, triton_layer, triton_write
from kvcanary_fx.kernels.context import ForwardContext, forward_context
from kvcanary_fx.kernels.ring import UNKNOWN, Control, Ring, Word
from kvcanary_fx.kernels.writes import triton_resolve
from kvcanary_fx.kernels.writes.layout import SlotLayout
from kvcanary_fx.kernels.writes.plan import Select, Selector, WritePlan

SEEDS = int(os.environ.get("CANARY_TEST_SEEDS", "5"))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclasses.dataclass
class Write:
    """A write of a graph: its plan, and for one step its indices and operand."""

    plan: WritePlan
    index: list[torch.Tensor]
    extent: list[int]
    values: list[torch.Tensor]
    positions: torch.Tensor | None
    tokens: torch.Tensor | None  # of a write of one token a row


def random_write(rng: random.Random, scene: Scene, halves: int) -> Write:
    """A write that goes to a few slots, some of them twice or outside."""
    layout, index, extent = scene.site.layout, [], []

    def drawn(size: int) -> torch.Tensor:
        numbers = rng.choices(range(-1 if rng.random() < 0.2 else 0, size + (rng.random() < 0.2)), k=rng.randint(1, 3))
        return torch.tensor(numbers, dtype=rng.choice([torch.int64, torch.int32]))

    flat = not layout.has_rows and rng.random() < 0.5
    selectors = []
    if flat:
        index.append(drawn(layout.slots))
        selectors.append(Selector(Select.FLAT))
        shape = [index[0].numel(), *layout.row_shape]
    else:
        shape = list(layout.shape)
        for axis in layout.slot_axes:
            size = layout.shape[axis]
            last = axis == layout.slot_axes[-1]
            kind = rng.choice([Select.TENSOR, Select.TENSOR, Select.RANGE]) if last else Select.ALL
            if kind is Select.TENSOR:
                selectors.append(Selector(kind, len(index)))
                index.append(drawn(size))
                shape[axis] = index[-1].numel()
            elif kind is Select.RANGE:
                start = rng.randrange(size)
                selectors.append(Selector(kind, len(extent)))
                extent += [start, min(size, start + rng.randint(1, 2))]
                shape[axis] = extent[-1] - start
            else:
                selectors.append(Selector(kind))
    plan = WritePlan(tuple(selectors), 3, True, rng.random() < 0.3, rng.random() < 0.5, rng.random() < 0.5)
    values = [fill(rng, tuple(shape), layout.dtype) for _ in range(halves)]
    if layout.dtype.is_floating_point and rng.random() < 0.3:
        values[0].view(-1)[rng.randrange(values[0].numel())] = float("nan")
    positions = None
    if layout.has_rows and rng.random() < 0.7:
        tokens = shape[layout.slot_axes[-1]]
        positions = torch.randint(0, 50, (rng.choice([1, layout.rows]), tokens))
    decodes = layout.has_rows and values[0].numel() and shape[layout.slot_axes[-1]] == 1
    tokens = torch.randint(0, 99, (layout.rows, 1), dtype=torch.int64) if decodes else None
    return Write(plan, index, extent, values, positions, tokens)


class Noted:
    """Kernels, and whether they took a write in one launch."""

    def __init__(
        self, kernels: ModuleType, names: tuple[str, ...] = ("verify_write", "record_write", "identify_write")
    ):
        self._kernels, self._names, self.taken = kernels, names, list[bool]()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._kernels, name)
        if name not in self._names:
            return function

        def noted(*given: Any) -> bool:
            self.taken.append(function(*given))
            return self.taken[-1]

        return noted


def write_rows(scene: Scene, write: Write, index: list[torch.Tensor], value: torch.Tensor, wrong: bool) -> None:
    """What the model writes to one half, or zeros."""
    layout = scene.site.layout
    resolved = write.plan.resolve(layout, index, write.extent, value.device)
    rows = write.plan.rows(layout, value, resolved)
    for slot, row in zip(resolved.slots.tolist(), rows, strict=True):
        if slot >= 0:
            row_of(layout, scene.view, slot).copy_(torch.zeros_like(row) if wrong else row)


class Layer:
    """Halves that are alike, in one graph."""

    def __init__(self, scene: Scene, halves: int):
        self.scenes = [scene]
        for i in range(1, halves):
            other = scene.clone()
            site = dataclasses.replace(
                other.site, control=scene.site.control, gate=scene.site.gate, half_id=200 + i, seed1=i, launches={}
            )
            self.scenes.append(dataclasses.replace(other, site=site))

    def clone(self) -> Layer:
        cloned = copy.copy(self)
        cloned.scenes = [scene.clone() for scene in self.scenes]
        lead = cloned.scenes[0].site
        for scene in cloned.scenes:
            scene.site = dataclasses.replace(scene.site, control=lead.control, gate=lead.gate, launches={})
        return cloned

    def to(self, device: torch.device) -> Layer:
        moved = self.clone()
        moved.scenes = [scene.to(device) for scene in moved.scenes]
        lead = moved.scenes[0].site
        for scene in moved.scenes:
            scene.site = dataclasses.replace(scene.site, control=lead.control, gate=lead.gate)
        return moved

    def step(self, write: Write, stray: random.Random) -> list[bool]:
        """One step of the graph: something is overwritten, the halves are checked, written and recorded.

        Returns:
            whether one launch did it, before the write and after it.
        """
        site = self.scenes[0].site
        if site.layout.slots and stray.random() < 0.5:
            for scene in self.scenes:
                row_of(site.layout, scene.view, stray.randrange(site.layout.slots)).zero_()
        site.gate[Gate.LENIENT_NEXT] = int(stray.random() < 0.2)
        site.control.words[Word.EVERY] = 1 << stray.randrange(3)
        plans = tuple(dataclasses.replace(write.plan, write_id=3 + i) for i in range(len(self.scenes)))
        context = ForwardContext(tuple(s.site for s in self.scenes), plans, {0: self.scenes[0].identity}, {}, {})
        numbers = list(range(len(self.scenes)))
        views = [s.view for s in self.scenes]
        device = views[0].device
        index, values = [t.to(device) for t in write.index], [v.to(device) for v in write.values]
        positions = None if write.positions is None else write.positions.to(device)
        kernels = Noted(ops.kernels_for(device))
        with forward_context(context), pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "kernels_for", lambda device: kernels)
            kernels.begin(site.control.words, site.gate)
            ops._verify_before_write(views, index, write.extent, numbers, numbers)
            if write.tokens is not None:
                ops._identify(write.tokens.to(device), positions, index, write.extent, site.gate, 0, 0)
            for scene, value in zip(self.scenes, values, strict=True):
                write_rows(scene, write, index, value, stray.random() < 0.2)
            given = [None if stray.random() < 0.1 else v for v in values]
            ops._record_written(views, given, index, write.extent, positions, numbers, numbers)
        return kernels.taken

    def states(self) -> list[dict[str, object]]:
        return [scene.state() for scene in self.scenes]


@pytest.mark.parametrize("most", [256, 0], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("halves", [1, 2])
def test_launches_around_a_write_equal_its_steps(halves, most, monkeypatch):
    launches = []
    monkeypatch.setattr(gpu_write, "MOST_TOKENS", most)
    for seed in range(SEEDS):
        scene = random_scene(seed)
        if scene.site.space is not None:
            continue
        if seed % 2:
            scene.site.half.baseline = None
        expected = Layer(scene, halves)
        got, rng = expected.to(DEVICE), random.Random(seed)
        for number in range(2):
            write = random_write(rng, scene, halves)
            monkeypatch.setattr(ops, "kernels_for", lambda device: cpu)
            expected.step(write, random.Random(f"{seed} {number}"))
            monkeypatch.setattr(ops, "kernels_for", lambda device: gpu)
            launches += got.step(write, random.Random(f"{seed} {number}"))
            for want, have in zip(expected.states(), got.states(), strict=True):
                for name in want:
                    assert have[name] == want[name], f"seed {seed}, step {number}, {name}, {write}, {scene.site.layout}"
    assert launches.count(True) > SEEDS


def test_the_launch_before_a_write_puts_the_first_index_outside_into_the_black_box(monkeypatch):
    """It is what is left where a device-side assert ends the context."""
    monkeypatch.setattr(ops, "kernels_for", lambda device: gpu)
    layer = next(Layer(s, 2).to(DEVICE) for s in map(random_scene, range(99)) if not s.site.layout.has_rows)
    for scene in layer.scenes:
        scene.site = dataclasses.replace(scene.site, checks=ALL_CHECKS, space=None)
    site = layer.scenes[0].site
    site.control.blackbox = Control.black_box(pinned=DEVICE.type == "cuda")
    site.control.words[Word.FORWARD] = -1  # there is no engine
    outside = site.layout.slots + 9
    plan = WritePlan((Selector(Select.FLAT),), 3, True, False, False, False)
    value = torch.zeros(2, *site.layout.row_shape, dtype=site.layout.dtype)
    for raw in ([0, outside], [outside + 1, outside + 2]):
        write = Write(plan, [torch.tensor(raw)], [], [value, value], None, None)
        assert layer.step(write, random.Random(0))[0]
    columns = [Ring.HALF, Ring.CHECK, Ring.STORED, -1]
    assert site.control.blackbox[columns].tolist() == [site.half_id, Check.BOUNDS, outside, 1]
    assert site.control.blackbox[[Ring.FORWARD, Ring.POSITION]].tolist() == [-1, UNKNOWN]


class Decoding:
    """Two sequences in four slots each, whose tokens came one by one: two of the first, and three of the second.

    Args:
        kernels: those that look at the next token of each.
    """

    def __init__(self, kernels: ModuleType):
        self.kernels, layout = kernels, SlotLayout((2, 4, 8), (0, 1), torch.float32)
        control = Control.allocate(8, DEVICE)
        gate, counters = (torch.zeros(len(kind), dtype=torch.int64, device=DEVICE) for kind in (Gate, Count))
        half = HalfBuffers.allocate(layout, 1, DEVICE)
        self.site = Site(layout, half, control, gate, counters, 7, 1, 2, ALL_CHECKS)
        self.identity = IdentityBuffers.allocate(layout.slots, DEVICE)
        for row, (length, position) in enumerate([(2, 30), (3, 50)]):
            half.rows[row, RowState.NEXT], half.rows[row, RowState.LENGTH] = length, 1
            at = slice(4 * row, 4 * row + length)
            self.identity.positions[at] = torch.arange(position, position + length, dtype=torch.int32)
            self.identity.chain[at] = torch.arange(length) + 1000 * row
        self.columns = [2, 3]

    def told(self, positions: list[int] | None) -> list[list[int]]:
        """What is reported of the next token of each: its slot, the position expected, and the one found."""
        rows, columns = torch.tensor([[0], [1]]), torch.tensor([[c] for c in self.columns])
        given = None if positions is None else torch.tensor(positions, device=DEVICE).view(2, 1)
        plan = WritePlan((Selector(Select.TENSOR, 0), Selector(Select.TENSOR, 1)), 3)
        index, tokens = [rows.to(DEVICE), columns.to(DEVICE)], torch.tensor([[5], [6]], device=DEVICE)
        context = ForwardContext((self.site,), (plan,), {0: self.identity}, {}, {})
        with forward_context(context), pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "kernels_for", lambda device: self.kernels)
            ops._identify(tokens, given, index, [], self.site.gate, 0, 0)
        ring = self.site.control.ring[: int(self.site.control.words[Word.HEAD])].cpu()
        return sorted(ring[:, [Ring.SLOT, Ring.STORED, Ring.FOUND]].tolist())

    def left(self) -> list[list[int]]:
        """Who is in the slots, and how many ops ran."""
        who = (self.identity.tokens, self.identity.positions, self.identity.chain)
        return [*(of[:-1].tolist() for of in who), self.site.gate.tolist()]

    def lenient(self) -> None:
        self.site.gate[Gate.LENIENT_NOW] = 1

    def after_a_prompt(self) -> None:
        self.site.half.rows[1, RowState.LENGTH] = 3

    def after_nobody_knows_whom(self) -> None:
        self.identity.positions[6] = UNKNOWN

    def elsewhere(self) -> None:
        self.columns = [2, 2]

    def first(self) -> None:
        self.columns, self.site.half.rows[1, RowState.NEXT] = [2, 0], 0
        self.identity.positions[3] = 9  # of the other sequence

    def outside(self) -> None:
        self.columns = [2, 4]


@pytest.mark.parametrize(
    ("change", "positions", "told"),
    [
        (None, [32, 53], []),
        (None, [32, 54], [[7, 53, 54]]),
        (None, [33, 52], [[2, 32, 33], [7, 53, 52]]),
        (None, None, [[2, 32, 2], [7, 53, 3]]),
        *((change, [32, 54], []) for change in (
            Decoding.lenient, Decoding.after_a_prompt, Decoding.after_nobody_knows_whom, Decoding.elsewhere,
            Decoding.first, Decoding.outside,
        )),
    ],
)  # fmt: skip
def test_the_launch_of_a_decode_step_reports_positions_that_do_not_follow(change, positions, told):
    """As the steps do, and leaves the same chains; of what is only where nobody else can have written."""
    one, steps = (Decoding(kernels) for kernels in (gpu, cpu))
    for decoding in (one, steps):
        if change is not None:
            change(decoding)
        assert decoding.told(positions) == told
    assert one.left() == steps.left()


class Launched:
    """In the place of a kernel, and of what Triton compiles of it: remembers its arguments, tensors as addresses."""

    def __init__(self, kernel, log):
        self.fn, self._log, self._names = kernel.fn, log, list(inspect.signature(kernel.fn).parameters)

    def __getitem__(self, grid):
        def launch(*given, num_warps=None, stream=None, **named):
            words = dict(zip(self._names, given, strict=False)) | named
            addresses = {k: v.data_ptr() if isinstance(v, torch.Tensor) else v for k, v in words.items()}
            self._log.append((self.fn.__name__, grid, addresses, num_warps is None))
            return self

        return launch


@pytest.mark.parametrize("most", [256, 0], ids=["few tokens", "many tokens"])
def test_a_launch_that_is_made_again_has_the_addresses_of_its_own_call(most, monkeypatch):
    log = []
    for module in (triton_half, triton_layer, triton_write, triton_resolve):
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Launched(kernel, log))
    monkeypatch.setattr(gpu_write, "MOST_TOKENS", most)
    monkeypatch.setattr(ops, "kernels_for", lambda device: gpu)
    bound, launch = [], BoundLaunch.__call__
    monkeypatch.setattr(BoundLaunch, "__call__", lambda self, *given: (bound.append(self), launch(self, *given)))
    again, scratch = 0, {"slot_ptr", "raw_ptr", "first_ptr", "value_base", "other_value_base"} if most == 0 else set()
    for seed in range(24):
        scene = random_scene(seed)
        if scene.site.space is not None:
            continue
        layer, write = Layer(scene, 2), random_write(random.Random(seed), scene, 2)
        write.tokens = None if most == 0 else write.tokens  # the chain's torch code takes what kernels would have left
        layer.step(write, random.Random(seed))
        other = copy.deepcopy(write)
        log.clear()
        layer.step(other, random.Random(seed))
        repeated = log[:]
        again += len(repeated)
        for each in layer.scenes:
            each.site.launches.clear()
        log.clear()
        layer.step(other, random.Random(seed))
        for (name, grid, words, kept), (fresh, as_grid, expected, _) in zip(repeated, log, strict=True):
            assert (name, grid) == (fresh, as_grid)
            if not kept:  # of an operand that no view has as rows
                assert most, seed  # of many tokens the copy counts as the operand
                continue
            for argument in words.keys() - scratch:
                assert words[argument] == expected[argument], (seed, name, argument)
    assert len(bound) > again / 3

"""One check in front of the writes of all layers and one behind leave what a check around each layer's write leaves."""

from __future__ import annotations

import dataclasses
import random
import threading
from array import array

import pytest
import torch
from scenes import fill, random_scene, row_of
from test_write import DEVICE, SEEDS, Layer, Noted, Write, random_write, write_rows

from kvcanary_fx.kernels import ops
from kvcanary_fx.kernels.buffers import Count, Gate
from kvcanary_fx.kernels.content import cpu, gpu, gpu_write_layers
from kvcanary_fx.kernels.content.layer_tables import BEFORE, WORDS_OF_HALF, LayerTables
from kvcanary_fx.kernels.content.triton_pool import TABLE_COLUMNS
from kvcanary_fx.kernels.content.triton_write_layers import GIVEN_COLUMNS
from kvcanary_fx.kernels.context import ForwardContext, forward_context
from kvcanary_fx.kernels.ring import Word

LAYERS = 3


class Model:
    """Layers of K and V that one graph writes."""

    def __init__(self, seed: int, device: torch.device):
        made = [Layer(scene, 2) for scene in (random_scene(seed) for _ in range(LAYERS))]
        self.scenes = [scene for layer in made for scene in layer.to(device).scenes]
        lead = self.scenes[0].site
        control = lead.control
        for i, scene in enumerate(self.scenes):
            scene.site.half.baseline = None
            site = dataclasses.replace(scene.site, control=control, gate=lead.gate, half_id=300 + i, launches={})
            scene.site = dataclasses.replace(site, seed1=scene.site.seed1 + i)
        self.tables = LayerTables(device, len(self.scenes))

    def context(self, write: Write) -> ForwardContext:
        plans = tuple(dataclasses.replace(write.plan, write_id=3 + i) for i in range(len(self.scenes)))
        device = self.scenes[0].site.gate.device
        sites = tuple(s.site for s in self.scenes)
        return ForwardContext(sites, plans, {0: self.scenes[0].identity}, {}, {}, tables={device: self.tables})


@dataclasses.dataclass
class Step:
    """What the layers write: the same places in each, or places of their own.

    Attributes:
        index: by layer.
        values: by half.
    """

    write: Write
    index: list[list[torch.Tensor]]
    values: list[torch.Tensor]
    apart: bool


def random_step(rng: random.Random, model: Model) -> Step:
    write = random_write(rng, model.scenes[0], 2)
    apart = bool(write.index) and rng.random() < 0.5
    index = [write.index]
    for _ in range(1, LAYERS):
        other = [torch.tensor(rng.choices(t.tolist(), k=t.numel()), dtype=t.dtype) for t in write.index]
        index.append(other if apart else write.index)
    dtype, values = model.scenes[0].site.layout.dtype, []
    for i in range(2 * LAYERS):
        value = fill(rng, tuple(write.values[0].shape), dtype)
        if i % 2 and rng.random() < 0.5 and value.dim():  # V is a part of one product, K a tensor of its own
            value = torch.stack([value, value], dim=1 if value.dim() > 1 else 0).select(1 if value.dim() > 1 else 0, 0)
        values.append(value)
    return Step(write, index, values, apart)


def run(model: Model, step: Step, stray: random.Random, at_once: bool) -> None:
    """Something is overwritten, the layers are checked, written and recorded."""
    lead, write = model.scenes[0].site, step.write
    for scene in model.scenes:
        if scene.site.layout.slots and stray.random() < 0.3:
            row_of(scene.site.layout, scene.view, stray.randrange(scene.site.layout.slots)).zero_()
    lead.gate[Gate.LENIENT_NEXT] = int(stray.random() < 0.2)
    lead.control.words[Word.EVERY] = 1 << stray.randrange(3)
    device, numbers, views = lead.gate.device, list(range(len(model.scenes))), [s.view for s in model.scenes]
    index = [[t.to(device) for t in its] for its in step.index]
    values = [_moved(v, device) for v in step.values]
    positions = None if write.positions is None else write.positions.to(device)
    given = [None if stray.random() < 0.1 else v for v in values]
    wrong = [stray.random() < 0.2 for _ in values]
    shared = [torch.stack(parts) for parts in zip(*index, strict=True)] if step.apart else index[0]
    state = torch.zeros(1, device=device)
    with forward_context(model.context(write)):
        ops.kernels_for(device).begin(lead.control.words, lead.gate)
        if at_once:
            ops._verify_layers(views, shared, write.extent, step.apart, state, numbers, numbers)
        for layer, its in enumerate(index):
            halves = slice(2 * layer, 2 * layer + 2)
            if not at_once:
                ops._verify_before_write(views[halves], its, write.extent, numbers[halves], numbers[halves])
            for i in numbers[halves]:
                write_rows(model.scenes[i], write, its, values[i], wrong[i])
            if not at_once:
                pair = views[halves], given[halves], its, write.extent, positions, numbers[halves], numbers[halves]
                ops._record_written(*pair)
        if at_once:
            args = views, given, shared, write.extent, step.apart, positions, state, numbers, numbers
            ops._record_layers(*args)


def _moved(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On a device with the strides that it has."""
    return (
        value
        if device.type == "cpu"
        else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(value)
    )


#: What layers leave to each other within a step only.
PASSING = {"reached", "stamped"}


def states(model: Model) -> list[dict[str, object]]:
    return [{k: v for k, v in scene.state().items() if k not in PASSING} for scene in model.scenes]


@pytest.mark.parametrize(
    ("kernels", "at_once", "most"),
    [(cpu, True, 256), (gpu, True, 256), (gpu, True, 0), (gpu, False, 256)],
    ids=["plain code", "one launch", "many tokens", "a launch in each layer"],
)
def test_all_layers_at_once_leave_what_one_after_the_other_leave(kernels, at_once, most, monkeypatch):
    device = DEVICE if kernels is gpu else torch.device("cpu")
    monkeypatch.setattr(gpu_write_layers, "MOST_TOKENS", most)
    noted = Noted(kernels, ("verify_layers", "record_layers"))
    for seed in range(2 * SEEDS):
        if random_scene(seed).site.space is not None:
            continue
        expected, got, rng = Model(seed, torch.device("cpu")), Model(seed, device), random.Random(seed)
        for number in range(3):
            step = random_step(rng, expected)
            monkeypatch.setattr(ops, "kernels_for", lambda device: cpu)
            run(expected, step, random.Random(f"{seed} {number}"), at_once=False)
            monkeypatch.setattr(ops, "kernels_for", lambda device: noted)
            run(got, step, random.Random(f"{seed} {number}"), at_once)
            for i, (want, have) in enumerate(zip(states(expected), states(got), strict=True)):
                for name in want:
                    assert have[name] == want[name], f"seed {seed}, step {number}, half {i}, {name}, {step}"
    if kernels is gpu and at_once:
        assert any(noted.taken) == (most > 0)
        assert not most or noted.taken.count(True) > len(noted.taken) / 2


def test_counts_are_those_of_each_layer():
    """The session compares them with what the graph should have run."""
    model = Model(next(s for s in range(99) if random_scene(s).site.space is None), torch.device("cpu"))
    step = random_step(random.Random(1), model)
    run(model, step, random.Random(1), at_once=True)
    assert model.scenes[0].site.gate[Gate.OPS] == 1 + 2 * LAYERS
    counted = [scene.site.counters[[Count.VERIFY_RUNS, Count.RECORD_RUNS]].tolist() for scene in model.scenes]
    assert counted == [[1, 1]] * (2 * LAYERS)


def test_a_thread_is_told_of_its_own_caches():
    """Two may run a graph at a time, each over caches of its own."""
    tables, seen = LayerTables(DEVICE, 2), {}
    mine = tables.place(BEFORE, array("q", [1] * 20))

    def other():
        seen["without room"] = tables.place(BEFORE, array("q", [2] * 20))
        tables.make_room()
        seen["with room"] = tables.place(BEFORE, array("q", [2] * 20))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen["without room"] is None
    assert (mine[:20].tolist(), seen["with room"][:20].tolist()) == ([1] * 20, [2] * 20)


def test_words_of_a_half_are_the_columns_of_the_kernels():
    assert WORDS_OF_HALF == TABLE_COLUMNS + GIVEN_COLUMNS

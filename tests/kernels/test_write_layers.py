"""One check in front of the writes of all layers and one behind leave what a check around each layer's write leaves."""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
from array import array

import pytest
import torch
from scenes import fill, random_scene, row_of
from test_write import DEVICE, SEEDS, Layer, Noted, Write, random_write, write_rows

from kvcanary_fx.kernels import ops
from kvcanary_fx.kernels.buffers import Count, Gate, RowState
from kvcanary_fx.kernels.content import cpu, gpu, gpu_write, gpu_write_layers, layer_tables
from kvcanary_fx.kernels.content.layer_tables import BEFORE, WORDS_OF_HALF, LayerTables
from kvcanary_fx.kernels.content.triton_pool import TABLE_COLUMNS
from kvcanary_fx.kernels.content.triton_write_layers import GIVEN_COLUMNS
from kvcanary_fx.kernels.context import ForwardContext, forward_context
from kvcanary_fx.kernels.ring import BY_BUDGET, Word

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
    ("kernels", "at_once", "most", "piece"),
    [
        (cpu, True, 256, 1024),
        (gpu, True, 256, 1024),
        (gpu, True, 256, 2),
        (gpu, True, 0, 1024),
        (gpu, False, 256, 1024),
    ],
    ids=["plain code", "one launch", "long rows", "many tokens", "a launch in each layer"],
)
def test_all_layers_at_once_leave_what_one_after_the_other_leave(kernels, at_once, most, piece, monkeypatch):
    """``piece``: slots of a row that are looked at together; with few of them, rows are looked at one by one."""
    device = DEVICE if kernels is gpu else torch.device("cpu")
    monkeypatch.setattr(gpu_write_layers, "MOST_TOKENS", most)
    monkeypatch.setattr(gpu_write, "SCANNED", piece)
    monkeypatch.setattr(gpu_write_layers, "LOOKED_AT", 1 if piece < 16 else gpu_write_layers.LOOKED_AT)
    noted = Noted(kernels, ("verify_layers", "record_layers"))
    for seed in range(SEEDS + 1):
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


class Nothing(random.Random):
    """Nothing is overwritten, and one slot in four has its turn."""

    def random(self) -> float:
        return 0.9

    def randrange(self, *_: int) -> int:  # type: ignore[override]
        return 2


def _a_token_for_each_row() -> tuple[int, Step]:
    """The seed of a model whose budget says which slots have their turn, and a write of one position of all rows."""
    for seed, number in itertools.product(range(199), range(9)):
        site = random_scene(seed).site
        layout = site.layout
        if site.verify_every == BY_BUDGET and layout.has_rows and layout.rows > 1 and layout.positions > 2:
            step = random_step(random.Random(number), Model(seed, torch.device("cpu")))
            if step.write.extent and step.write.extent[1] - step.write.extent[0] == 1:
                return seed, step
    raise AssertionError("no seed has such a write")


def test_a_row_behind_those_that_are_looked_at_together_is_looked_at(monkeypatch):
    """The last row is new: its slots are taken in as they are when it is first written, whoever has a turn."""
    monkeypatch.setattr(gpu_write_layers, "LOOKED_AT", 1)
    seed, step = _a_token_for_each_row()
    expected, got = Model(seed, torch.device("cpu")), Model(seed, DEVICE)
    for position in range(3):
        if position == 2:
            for scene in (*expected.scenes, *got.scenes):
                layout, half = scene.site.layout, scene.site.half
                half.digest.view(-1, layout.rows, layout.positions)[:, -1] = 0
                half.rows[-1, RowState.NEXT] = 0
        step.write.extent[:] = position, position + 1
        monkeypatch.setattr(ops, "kernels_for", lambda device: cpu)
        run(expected, step, Nothing(), at_once=False)
        monkeypatch.setattr(ops, "kernels_for", lambda device: Noted(gpu, ("verify_layers", "record_layers")))
        run(got, step, Nothing(), at_once=True)
    assert [int(scene.site.counters[Count.ADOPTED]) for scene in expected.scenes] == [2] * len(expected.scenes)
    assert states(got) == states(expected)


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


def _captured(words: array, mode: str) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph that copies what it is told."""
    tables, out = LayerTables(DEVICE, 2), torch.zeros(len(words), dtype=torch.int64, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        out.copy_(tables.place(BEFORE, words)[: len(words)])
    out.tables = tables  # lives as long
    return graph, out


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_graph_is_told_while_it_is_captured_and_copies_nothing_from_the_host(mode):
    graph, out = _captured(array("q", range(1, 21)), mode)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    assert out.tolist() == list(range(1, 21))
    ran = [event.name for event in profile.events()]
    assert ran
    assert not [name for name in ran if "HtoD" in name]


@pytest.mark.gpu
def test_a_graph_copies_words_that_did_not_arrive_while_it_was_captured(monkeypatch):
    monkeypatch.setattr(layer_tables, "ARRIVES_WITHIN", -1.0)
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    graph, out = _captured(array("q", range(1, 21)), "global")
    graph.replay()
    assert out.tolist() == list(range(1, 21))


def test_words_of_a_half_are_the_columns_of_the_kernels():
    assert WORDS_OF_HALF == TABLE_COLUMNS + GIVEN_COLUMNS

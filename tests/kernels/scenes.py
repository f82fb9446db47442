"""Random scenes for kernel tests: a pool in some layout, a shadow, and steps that corrupt and write it."""

from __future__ import annotations

import copy
import dataclasses
import random
from types import ModuleType

import torch

from kvcanary_fx.kernels.buffers import NOT_WRITTEN, Count, Gate, HalfBuffers, IdentityBuffers, Site
from kvcanary_fx.kernels.checks import Check
from kvcanary_fx.kernels.ring import BY_BUDGET, Control, Word
from kvcanary_fx.kernels.slots.space import Flag, SlotSpace
from kvcanary_fx.kernels.writes.layout import FLOAT_DTYPES, POOL_DTYPES, SlotLayout
from kvcanary_fx.kernels.writes.plan import first_positions

ALL_CHECKS = Check.CONTENT | Check.OPERAND | Check.BOUNDS | Check.POISON | Check.CHAIN | Check.INDEX


@dataclasses.dataclass
class Scene:
    """A site, its pool view, and what a test needs to make steps."""

    site: Site
    view: torch.Tensor
    identity: IdentityBuffers
    rng: random.Random

    def clone(self) -> Scene:
        """The same scene with memory of its own, strides kept."""
        base = self.view._base if self.view._base is not None else self.view
        fresh = base.clone()
        view = fresh.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
        site = dataclasses.replace(
            self.site,
            half=HalfBuffers(
                *[_copy(t) for t in (self.site.half.digest, self.site.half.rows, self.site.half.baseline)]
            ),
            control=copy.deepcopy(self.site.control),
            gate=self.site.gate.clone(),
            counters=self.site.counters.clone(),
        )
        return Scene(site, view, copy.deepcopy(self.identity), random.Random(0))

    def to(self, device: torch.device | str) -> Scene:
        """The same scene on a device."""
        base = (self.view._base if self.view._base is not None else self.view).to(device)
        view = base.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
        half, control, identity = self.site.half, self.site.control, self.identity
        site = dataclasses.replace(
            self.site,
            half=HalfBuffers(half.digest.to(device), half.rows.to(device), _moved(half.baseline, device)),
            control=Control(control.words.to(device), control.ring.to(device), control.stamps.to(device)),
            gate=self.site.gate.to(device),
            counters=self.site.counters.to(device),
            space=self.site.space.to(device) if self.site.space is not None else None,
        )
        moved = IdentityBuffers(identity.tokens.to(device), identity.positions.to(device), identity.chain.to(device))
        return Scene(site, view, moved, self.rng)

    def state(self) -> dict[str, object]:
        """Everything the kernels may change, ring rows in a fixed order."""
        site = self.site
        kept = min(int(site.control.words[0]), site.control.capacity)
        return {
            "digest": site.half.digest.tolist(),
            "rows": site.half.rows.tolist(),
            "baseline": None if site.half.baseline is None else site.half.baseline.tolist(),
            "words": site.control.words.tolist(),
            "ring": sorted(site.control.ring[:kept].tolist()),
            "gate": site.gate.tolist(),
            "counters": site.counters.tolist(),
            "reached": (site.control.stamps[0] == site.control.stamps[0].max()).tolist(),
            "stamped": (site.control.stamps[1] == site.control.stamps[1].max()).tolist(),
            "tokens": self.identity.tokens[:-1].tolist(),
            "positions": self.identity.positions[:-1].tolist(),
            "chain": self.identity.chain[:-1].tolist(),
        }


def _moved(tensor: torch.Tensor | None, device: torch.device | str) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


#: Layouts that :func:`random_view` draws from.
VIEWS = (
    "bhsd", "shd", "paged", "halves", "interleaved", "bsd", "sd", "offset", "page_hnd", "bytes_584", "packed_page",
    "unaligned_rows",
)  # fmt: skip


def random_view(rng: random.Random, dtype: torch.dtype) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A pool view of some common or odd layout, filled with finite values, and its slot axes."""
    b, s, h, d = rng.randint(1, 3), rng.randint(1, 9), rng.randint(1, 3), rng.choice([1, 2, 3, 4, 5, 7, 8, 16, 33])
    kind = rng.choice(VIEWS)
    if kind == "bytes_584":  # DeepSeek-V4: rows that no 16 bytes divide, and a base that nothing aligns
        size, start = 584 // dtype.itemsize, rng.randint(0, 3)
        return fill(rng, (s * size + start,), dtype)[start:].view(s, size), (0,)
    if kind == "packed_page":  # the rows of a page first, their scales behind them
        size, scale, part = rng.choice([(576, 8), (7, 3), (5, 1)]) + (rng.randint(0, 1),)
        raw = fill(rng, (b, s * (size + scale)), dtype)
        width, begin = (scale, s * size) if part else (size, 0)
        return raw.as_strided((b, s, width), (raw.stride(0), width, 1), begin), (0, 1)
    if kind == "unaligned_rows":  # rows further apart than they are long, by an odd number of elements
        return fill(rng, (s * (d + 3) + 1,), dtype)[1:].view(s, d + 3)[:, :d], (0,)
    if kind == "bhsd":
        return fill(rng, (b, h, s, d), dtype), (0, 2)
    if kind == "shd":
        return fill(rng, (s, h, d), dtype), (0,)
    if kind == "paged":
        return fill(rng, (b, s, h, d), dtype), (0, 1)
    if kind == "halves":
        return fill(rng, (2, s, h, d), dtype)[rng.randint(0, 1)], (0,)
    if kind == "interleaved":
        return fill(rng, (s, 2, h, d), dtype)[:, rng.randint(0, 1)], (0,)
    if kind == "bsd":
        return fill(rng, (b, s, d), dtype), (0, 1)
    if kind == "sd":
        return fill(rng, (s, d), dtype), (0,)
    if kind == "offset":
        return fill(rng, (s * h * d + 3,), dtype)[3:].view(s, h, d), (0,)
    return fill(rng, (b, h, s, d), dtype).transpose(1, 2), (0, 1)


def fill(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random finite values."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    if dtype in FLOAT_DTYPES:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def random_scene(seed: int, capacity: int = 64, dtype: torch.dtype | None = None) -> Scene:
    """A scene with nothing recorded yet."""
    rng = random.Random(seed)
    drawn = rng.choice(POOL_DTYPES)
    dtype = drawn if dtype is None else dtype
    view, axes = random_view(rng, dtype)
    layout = SlotLayout(tuple(view.shape), axes, dtype, paged=len(axes) == 2 and rng.random() < 0.3)
    known = random.Random(seed)
    for slot in range(layout.slots):  # as a new cache is where nobody has written
        if known.random() < 0.2:
            row_of(layout, view, slot).zero_()
    half = HalfBuffers.allocate(layout, rng.choice([1, 2]), torch.device("cpu"))
    half.baseline = torch.zeros(layout.slots, dtype=torch.int32)
    control = Control.allocate(capacity, torch.device("cpu"))
    control.stamps = torch.full((2, layout.slots + rng.randint(0, 2)), -1, dtype=torch.int64)
    space = None
    if not layout.has_rows and rng.random() < 0.3:
        space = SlotSpace.allocate(layout.slots, torch.device("cpu"), control, 5, ALL_CHECKS)
        space.reads.copy_(torch.tensor([rng.randint(0, 1) for _ in range(layout.slots + 1)]))
        space.clock.fill_(1)
        read = space.reads[:-1].nonzero().flatten()
        space.listed[: read.numel()], space.listed_count[0] = read, read.numel()
        # of a slot without a digest it matters who named it, and whether this forward is to write it
        for slot in range(layout.slots):
            space.flags[slot] = int(space.flags[slot]) | known.choice([Flag.WRITTEN, Flag.WRITTEN | Flag.NAMELESS])
            space.owners[slot], space.positions[slot] = known.randint(0, 3), known.randint(0, 99)
            space.planned[slot] = known.randint(0, 9) - (int(space.epoch()) if known.random() < 0.5 else 0)
    site = Site(
        layout=layout,
        space=space,
        half=half,
        control=control,
        gate=torch.zeros(len(Gate), dtype=torch.int64),
        counters=torch.zeros(len(Count), dtype=torch.int64),
        half_id=rng.randint(0, 100),
        seed1=rng.randrange(2**32) * (known.random() < 0.9),
        seed2=rng.randrange(2**32),
        checks=ALL_CHECKS if rng.random() < 0.8 else Check(rng.randrange(64)),
        verify_every=rng.choice([1, BY_BUDGET, 2, 3]),
        lenient=rng.random() < 0.2,
    )
    return Scene(site, view, IdentityBuffers.allocate(layout.slots, torch.device("cpu")), rng)


@dataclasses.dataclass
class Step:
    """One step's inputs: who writes what where, and what goes wrong before it."""

    slots: torch.Tensor
    raw: torch.Tensor
    values: torch.Tensor
    written: torch.Tensor
    flips: list[tuple[int, int]]
    lenient_next: int
    first: torch.Tensor | None
    last_position: torch.Tensor | None
    moved: int | None
    opaque: bool
    coming: int | None
    planned: torch.Tensor | None
    use_values: bool
    tokens: torch.Tensor
    positions: torch.Tensor
    by_plan: bool
    every: int
    in_flight: bool


def random_step(scene: Scene) -> Step:
    """A legal or illegal step, drawn from the scene's random numbers."""
    rng, layout = scene.rng, scene.site.layout
    n = rng.choice([0, 1, 1, 2, 3, layout.slots])
    slots = torch.tensor([rng.randrange(-1, layout.slots) for _ in range(n)], dtype=torch.int64)
    if rng.random() < 0.6:
        slots = torch.tensor(rng.sample(range(layout.slots), min(n, layout.slots)), dtype=torch.int64)
    raw = slots.clone()
    if slots.numel() and rng.random() < 0.2:
        raw[0] = rng.choice([-1, layout.slots, layout.slots + 7])
    n = slots.numel()
    values = fill(rng, (n, *layout.row_shape), layout.dtype)
    if layout.dtype.is_floating_point and n and rng.random() < 0.2:
        values.view(-1)[rng.randrange(values.numel())] = float("nan")
    first = first_positions(layout, slots)
    if first is not None and rng.random() < 0.3:
        first = torch.full_like(first, NOT_WRITTEN)
    return Step(
        slots=slots,
        raw=raw,
        values=values,
        written=slots if rng.random() < 0.8 else (slots + 1).clamp(max=layout.slots - 1),
        flips=[(rng.randrange(layout.slots), rng.randrange(8)) for _ in range(rng.choice([0, 0, 1, 3]))],
        lenient_next=int(rng.random() < 0.2),
        first=first if rng.random() < 0.8 else None,
        last_position=torch.randint(0, 50, (layout.rows,)) if rng.random() < 0.3 else None,
        moved=rng.choice([None, None, None, 0, 1, 2]),
        opaque=rng.random() < 0.2,
        coming=rng.choice([None, 3, 3]),
        planned=torch.rand(layout.slots + 1) < 0.7 if rng.random() < 0.5 else None,
        use_values=rng.random() < 0.8,
        tokens=torch.tensor([[rng.randrange(100)] for _ in range(n)], dtype=torch.int64).reshape(n, 1),
        positions=torch.tensor([[rng.randrange(4)] for _ in range(n)], dtype=torch.int64).reshape(n, 1),
        by_plan=bool(raw.sum() % 2),
        every=1 << int(raw.sum() % 3),
        in_flight=bool(raw.sum() // 2 % 2),
    )


def to_device(step: Step, device: torch.device | str) -> Step:
    """A step with its tensors on a device."""
    moved = {k: v.to(device) for k, v in vars(step).items() if isinstance(v, torch.Tensor)}
    return dataclasses.replace(step, **moved)


def row_of(layout: SlotLayout, view: torch.Tensor, slot: int) -> torch.Tensor:
    """What a slot holds."""
    return layout.slots_first(view)[divmod(slot, layout.positions) if layout.two_axes else slot]


def write(scene: Scene, step: Step) -> None:
    """What the model's own write would do."""
    for slot, row in zip(step.written.tolist(), step.values, strict=True):
        if slot >= 0:
            row_of(scene.site.layout, scene.view, slot).copy_(row)


def play(kernels: ModuleType, scene: Scene, step: Step) -> None:
    """One step of a guarded graph, with ``kernels`` doing the checks.

    Kernels that can keep the digests of the operand do so in every second step, and lose the operand.
    """
    site, view = scene.site, scene.view
    for slot, bit in step.flips:
        row = row_of(site.layout, view, slot)
        flipped = row.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        flipped.view(-1)[0] ^= 1 << bit
        row.copy_(flipped.view(row.dtype).view(row.shape))
    site.gate[Gate.LENIENT_NEXT] = step.lenient_next
    site.control.words[Word.EVERY] = step.every  # what a budget leaves there between two steps
    kernels.begin(site.control.words, site.gate)
    if step.opaque:
        kernels.verify(site, view, None)
        kernels.snapshot(site, view)
        before, planned = view.clone(), step.planned if site.space is not None else None
        write(scene, step)
        kernels.record_changed(site, view, planned)
        if step.by_plan:  # a second write puts it back
            view.copy_(before)
            kernels.record_changed(site, view, planned)
        return
    kernels.check_plan(site, step.slots, step.raw, 3, 0)
    kernels.verify(site, view, step.first, 2, step.coming, in_flight=step.in_flight, own_rows=step.use_values)
    rows = (step.slots // site.layout.positions).tolist()
    if site.layout.has_rows and rows and len(set(rows)) == len(rows):  # a batch has one entry per row
        kernels.identify(site, scene.identity, step.slots.unsqueeze(1), step.tokens, step.positions)
    write(scene, step)
    values = step.values if step.use_values else None
    kernels.record(site, view, step.slots, values, 3, step.last_position, step.moved, ops=3, planned=step.by_plan)

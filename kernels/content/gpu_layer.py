"""Launches that take the K and the V of a layer at once, on a GPU: half as many launches in every layer.

A :class:`LayerRecord` has them bound: a call only checks whether K and V have the memory layout of an earlier call, and
launches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..bound_launch import BoundLaunch
from ..buffers import Site
from ..checks import Check
from ..slots.space import RequestPlan, SlotSpace
from ..writes.geometry import Geometry, geometry_of
from ..writes.layout import poison_mask
from . import layer
from . import triton_layer as records
from .launch_args import digest_args, other_args, row_args, site_args, strided_grid
from .triton_listed import verify_listed_kernel

#: Slots and words that a program of one warp checks at a time: of 90 combinations the fastest for 64 requests of 4,096
#: tokens on an H200 (136 us, the others up to 453 us).
LISTED_SLOTS = 8
LISTED_WORDS = 128

#: Registers of a thread of one-warp programs that read a whole pool: 16 programs fit on a processor then.  Left to
#: itself, the compiler took 154 for a ring row written in a loop, 12 fitted, and the check took 189 us (H200).
REGISTERS = 128


#: Share of the slots that the grid is made for where a word on the device says which: captured grids stay as they are.
USUAL_BY_BUDGET = 16


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one program does at a time: slots, words of a row, its warps, and the most registers of a thread."""

    slots: int
    words: int
    warps: int
    registers: int | None = None


#: For the slots that a forward writes, few of them and many: of 14 tiles the fastest for 64 slots of 2,048 bytes
#: (2.6 us, the others up to 5), and of nine for 262,144 (143 us, the others up to 214), on an H200.
FEW_SLOTS, FEW = 2048, Tile(1, 512, 4)
MANY = Tile(8, 128, 1, REGISTERS)


@dataclasses.dataclass(frozen=True)
class Part:
    """One half in a launch."""

    site: Site
    geometry: Geometry
    operand: Geometry | None = None

    def alike(self, other: Part) -> bool:
        """Whether one launch takes both."""
        a, b = self.site, other.site
        if a.layout != b.layout or a.checks != b.checks:
            return False
        if a.space is not b.space or a.control is not b.control or a.gate is not b.gate:
            return False
        if a.verify_every != b.verify_every or a.lenient != b.lenient:
            return False
        if (a.half.baseline is None) != (b.half.baseline is None):
            return False
        if (self.operand is None) != (other.operand is None):
            return False
        if self.operand is not None and other.operand is not None and not self.operand.rows_alike(other.operand):
            return False
        return self.geometry.alike(other.geometry)


def in_launches(parts: Sequence[Part]) -> Iterator[tuple[Part, Part]]:
    """Parts in pairs, where they are alike; a single one is paired with itself."""
    waiting = list(parts)
    while waiting:
        first = waiting.pop(0)
        yield first, waiting.pop(0) if waiting and first.alike(waiting[0]) else first


def verify_halves(sites: Sequence[Site], views: Sequence[torch.Tensor], ops: int = 0, in_flight: bool = False) -> None:
    """Content of the slots that the walk of this forward listed.  See :func:`.cpu.verify_halves`."""
    for launch, grid in bind_verify(sites, views, ops):
        launch.first(grid, (int(in_flight),), None)


def bind_verify(sites: Sequence[Site], views: Sequence[torch.Tensor], ops: int) -> list[_Bound]:
    """The launches of :func:`verify_halves`; the changing argument is whether the forward reads what it has yet to
    write."""
    parts = [Part(site, geometry_of(view, site.layout.slot_axes)) for site, view in zip(sites, views, strict=True)]
    made = []
    for a, b in in_launches(parts):
        space = a.site.space
        assert space is not None  # an engine's pool: others are scanned
        made.append(_verify(a, b, space, ops))
        ops = 0
    return made


#: A launch and its grid.
_Bound = tuple[BoundLaunch, tuple[int, int, int]]


def _verify(a: Part, b: Part, space: SlotSpace, ops: int) -> _Bound:
    due = most_listed(a.site, space)
    device = a.geometry.base.device
    arguments = dict(
        base=a.geometry.base,
        other_base=b.geometry.base,
        gate_ptr=a.site.gate,
        counters_ptr=a.site.counters,
        ops=ops,
        slot_stride0=a.geometry.slot_strides[0],
        slot_stride1=a.geometry.slot_strides[1],
        UNIT=a.geometry.unit,
        **list_args(space),
        **row_args(a.geometry),
        **digest_args(a.site, LISTED_SLOTS, LISTED_WORDS),
        **site_args(a.site),
        **other_args(b.site),
    )
    grid = (strided_grid(due, LISTED_SLOTS, device), 1 if a is b else 2, 1)
    return BoundLaunch(verify_listed_kernel, device, arguments, ("ahead",), warps=1, registers=REGISTERS), grid


def most_listed(site: Site, space: SlotSpace) -> int:
    """How many slots a grid is made for: the most that can be listed; under a budget, fewer programs loop over more
    slots."""
    return -(-site.layout.slots // (space.verify_every or USUAL_BY_BUDGET))


def list_args(space: SlotSpace) -> dict[str, Any]:
    """The arguments that a check of listed slots takes from their space."""
    return dict(
        listed_ptr=space.listed,
        count_ptr=space.listed_count,
        block_ptr=space.block,
        wide_ptr=space.block.view(torch.int64),
        planned_ptr=space.planned,
        clock_ptr=space.clock,
        NEVER=bool(space.checks & Check.POISON),
    )


def record_halves(
    sites: Sequence[Site],
    views: Sequence[torch.Tensor],
    slots: torch.Tensor,
    values: Sequence[torch.Tensor | None],
    write_id: int,
    ops: int = 0,
    planned: bool = False,
) -> None:
    """Fingerprint the slots just written.  See :func:`.cpu.record_halves`."""
    n, slots = slots.shape[0], slots.contiguous()
    parts = _record_parts(sites, views, values, n)
    for a, b in in_launches(parts):
        launch = _record(a, b, n, write_id, ops, planned)
        launch.first(record_grid(n, slots.device, 1 if a is b else 2), (*_operands(a, b), slots, n), None)
        ops = 0


def _record_parts(
    sites: Sequence[Site], views: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None], n: int
) -> list[Part]:
    parts = []
    for site, view, value in zip(sites, views, values, strict=True):
        compared = value is not None and n > 0 and bool(site.checks & Check.OPERAND)
        operand = geometry_of(value, (0,)) if compared and value is not None else None
        parts.append(Part(site, geometry_of(view, site.layout.slot_axes), operand))
    return parts


def _operands(a: Part, b: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the operands of two halves start; the halves themselves, if there are none."""
    return (a.operand or a.geometry).base, (b.operand or b.geometry).base


def record_grid(n: int, device: torch.device, halves: int) -> tuple[int, int, int]:
    return strided_grid(n, record_tile(n).slots, device), halves, 1


def _record(a: Part, b: Part, n: int, write_id: int, ops: int, planned: bool) -> BoundLaunch:
    """The launch for about ``n`` slots; the changing arguments are the operands, the slots, and how many."""
    arguments = record_args(a, b, n, write_id, ops, planned)
    changing = ("value_base", "other_value_base", "slot_ptr", "n")
    return record_launch(records.record_kernel, a.geometry.base.device, arguments, changing, n)


def record_launch(
    kernel: Any, device: torch.device, arguments: Mapping[str, Any], changing: Sequence[str], n: int
) -> BoundLaunch:
    """A launch of a kernel that records about ``n`` slots.

    With an operand beside each row a program of many slots has 228 registers, and 278 us for 262,144 slots (H200).
    """
    tile = record_tile(n)
    registers = None if arguments["OPERAND"] else tile.registers
    return BoundLaunch(kernel, device, arguments, changing, tile.warps, registers)


def record_tile(n: int) -> Tile:
    """What a program takes at a time of ``n`` slots."""
    return FEW if n <= FEW_SLOTS else MANY


def record_args(a: Part, b: Part, n: int, write_id: int, ops: int, planned: bool) -> dict[str, Any]:
    """Arguments of ``record_kernel`` for about ``n`` slots, all but the operands, the slots, and how many."""
    site, space, operand = a.site, a.site.space, a.operand or a.geometry
    mask, bits = poison_mask(site.layout.dtype) if site.checks & Check.POISON else (0, 1)
    tile = record_tile(n)
    return dict(
        base=a.geometry.base,
        other_base=b.geometry.base,
        gate_ptr=site.gate,
        ops=ops,
        counters_ptr=site.counters,
        stamp_ptr=site.control.stamps,
        stamp_count=site.control.stamps.shape[1],
        write_id=write_id,
        block_ptr=space.block if space is not None else site.half.rows,
        planned_ptr=space.planned if space is not None else site.control.words,
        clock_ptr=space.clock if space is not None else site.half.rows,
        slot_stride0=a.geometry.slot_strides[0],
        slot_stride1=a.geometry.slot_strides[1],
        token_stride=operand.slot_strides[1],
        other_token_stride=(b.operand or b.geometry).slot_strides[1],  # K is often a tensor, V a part of one
        OPERAND=a.operand is not None,
        HAS_SPACE=space is not None,
        PLANNED=planned and space is not None,
        UNIT=a.geometry.unit,
        OPERAND_UNIT=operand.unit,
        ELEMENT=site.layout.dtype.itemsize,
        POISON_MASK=mask,
        POISON_BITS=bits,
        **row_args(a.geometry),
        **{f"v_{k}": v for k, v in row_args(operand).items()},
        **digest_args(site, tile.slots, tile.words),
        **site_args(site),
        **other_args(b.site),
    )


@dataclasses.dataclass(frozen=True)
class _Form:
    """The launches of a record for one memory layout of K and V.

    Attributes:
        launches: each with how many halves it takes, and for the operand of each which of K and V it is, or None and
            an address that is not looked at.
    """

    launches: list[tuple[BoundLaunch, int, tuple[tuple[int | None, int], ...]]]


#: Memory layouts of K and V that a layer keeps launches for: their strides may depend on the batch size.
MOST_FORMS = 256


class LayerRecord(layer.LayerRecord):
    """One layer in one graph, with its launches."""

    def __init__(self, halves: Sequence[layer.LayerHalf]):
        super().__init__(halves)
        self._device, self._control = self.gate.device, halves[0].site.control
        self._stamps = self._control.stamps
        self._verify: list[_Bound] | None = None
        self._forms: dict[tuple[Any, ...], _Form] = {}

    def verify(self, in_flight: bool, stream: torch.cuda.Stream | None = None) -> None:
        if self._verify is None:
            self._verify = bind_verify([h.site for h in self.verified], [h.view for h in self.verified], 1)
        for launch, grid in self._verify:
            (launch if launch.ready else launch.first)(grid, (int(in_flight),), stream)

    def record(
        self,
        plan: RequestPlan,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        slots = plan.real_slots
        assert slots is not None
        n, at, operands = slots.shape[0], slots.data_ptr(), (key, value)
        seen: list[Any] = [n <= FEW_SLOTS, n == 0, plan.taken is None, at & 15]
        addresses = []
        for operand in operands:
            if operand is None:
                addresses.append(0)
                seen.append(None)
            else:
                address, shape = operand.data_ptr(), operand.shape
                addresses.append(address)
                seen += (operand.dtype, shape[1:], operand.stride(), shape[0] >= n, address & 15)
        form = self._forms.get(tuple(seen))
        if form is None or self._stamps is not self._control.stamps:
            self._first(tuple(seen), plan, operands, stream)
            return
        for launch, halves, sources in form.launches:
            where = [addresses[i] if i is not None else nowhere for i, nowhere in sources]
            launch(record_grid(n, self._device, halves), (*where, at, n), stream)

    def _first(
        self,
        seen: tuple[Any, ...],
        plan: RequestPlan,
        operands: tuple[torch.Tensor | None, torch.Tensor | None],
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Launch for K and V with a new memory layout."""
        if self._stamps is not self._control.stamps or len(self._forms) >= MOST_FORMS:
            self._forms, self._stamps = {}, self._control.stamps
        slots = plan.real_slots
        assert slots is not None
        n, written = slots.shape[0], self.written
        parts, in_place = _parts_of(self, plan, operands)
        place_of = {id(part): half.place for part, half in zip(parts, written, strict=True)}
        launches, ops, repeats = [], self.ops, in_place
        for a, b in in_launches(parts):
            launch, halves = _record(a, b, n, layer.WRITE, ops, False), 1 if a is b else 2
            bases = _operands(a, b)
            launch.first(record_grid(n, self._device, halves), (*bases, slots, n), stream)
            sources = [place_of[id(p)] if p.operand is not None else None for p in (a, b)]
            launches.append((launch, halves, tuple(zip(sources, (t.data_ptr() for t in bases), strict=True))))
            ops, repeats = 0, repeats and launch.ready
        if repeats:
            self._forms[seen] = _Form(launches)


def operand_parts(
    record: layer.LayerRecord, plan: RequestPlan, key: torch.Tensor | None, value: torch.Tensor | None
) -> list[Part] | None:
    """The halves that a layer writes, each with its operand; None if an operand is not where its rows are."""
    parts, in_place = _parts_of(record, plan, (key, value))
    return parts if in_place else None


def _parts_of(
    record: layer.LayerRecord, plan: RequestPlan, operands: tuple[torch.Tensor | None, torch.Tensor | None]
) -> tuple[list[Part], bool]:
    slots = plan.real_slots
    assert slots is not None
    written = record.written
    rows = [_rows_in_place(half, operands, plan) for half in written]
    sites, views = [h.site for h in written], [h.view for h in written]
    return _record_parts(sites, views, [r.rows for r in rows], slots.shape[0]), all(r.in_place for r in rows)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """An operand as rows, and whether these are where it starts, with its own stride from row to row."""

    rows: torch.Tensor | None
    in_place: bool


def _rows_in_place(
    half: layer.LayerHalf, operands: tuple[torch.Tensor | None, torch.Tensor | None], plan: RequestPlan
) -> _Rows:
    rows = layer.rows_of(half, operands, plan)
    if rows is None:
        return _Rows(None, True)
    operand = operands[half.place]
    assert operand is not None
    if rows.data_ptr() != operand.data_ptr() or operand.shape[0] < rows.shape[0]:
        return _Rows(rows, False)
    # for a single row, reshape() may return any stride to the next
    return _Rows(rows.as_strided(rows.shape, (operand.stride(0), *rows.stride()[1:])), True)

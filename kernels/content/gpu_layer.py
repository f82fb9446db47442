"""Launches that take the K and the V of a layer at once, on a GPU: half as many launches in every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from ..buffers import Site
from ..checks import Check
from ..slots.space import SlotSpace
from ..writes.geometry import Geometry, geometry_of, on_device
from ..writes.layout import poison_mask
from . import triton_layer as records
from .launch_args import digest_args, other_args, row_args, site_args, strided_grid
from .triton_listed import verify_listed_kernel

#: Slots and words that a program of one warp checks at a time: of 90 combinations the fastest for 64 requests of 4,096
#: tokens on an H200 (136 us, the others up to 453 us).
LISTED_SLOTS = 8
LISTED_WORDS = 128


#: Share of the slots that the grid is made for where a word on the device says which: captured grids stay as they are.
USUAL_BY_BUDGET = 16


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one program does at a time: slots, words of a row, by so many warps."""

    slots: int
    words: int
    warps: int


#: For the slots that a forward writes, few of them and many: of 14 tiles the fastest for 64 slots of 2,048 bytes
#: (2.6 us, the others up to 5) and for 262,144 (176 us, up to 350) on an H200.
FEW_SLOTS, FEW = 2048, Tile(1, 512, 4)
MANY = Tile(8, 64, 1)


@dataclasses.dataclass(frozen=True)
class _Part:
    """One half in a launch."""

    site: Site
    geometry: Geometry
    operand: Geometry | None = None

    def alike(self, other: _Part) -> bool:
        """Whether one launch takes both."""
        a, b = self.site, other.site
        if a.layout != b.layout or a.checks != b.checks:
            return False
        if a.space is not b.space or a.control is not b.control or a.gate is not b.gate:
            return False
        if (self.operand is None) != (other.operand is None):
            return False
        if self.operand is not None and other.operand is not None and not self.operand.alike(other.operand):
            return False
        return self.geometry.alike(other.geometry)


def _launches(parts: Sequence[_Part]) -> Iterator[tuple[_Part, _Part]]:
    """Parts two by two, where they are alike; one that goes alone stands with itself."""
    waiting = list(parts)
    while waiting:
        first = waiting.pop(0)
        yield first, waiting.pop(0) if waiting and first.alike(waiting[0]) else first


def verify_halves(sites: Sequence[Site], views: Sequence[torch.Tensor], ops: int = 0, in_flight: bool = False) -> None:
    """Content of the slots that the walk of this forward listed.  See :func:`.cpu.verify_halves`."""
    parts = [_Part(site, geometry_of(view, site.layout.slot_axes)) for site, view in zip(sites, views, strict=True)]
    for a, b in _launches(parts):
        space = a.site.space
        assert space is not None  # of an engine's pool: others are scanned
        _verify(a, b, space, ops, in_flight)
        ops = 0


def _verify(a: _Part, b: _Part, space: SlotSpace, ops: int, in_flight: bool = False) -> None:
    # no more than these can be listed, but the grid may be smaller; under a budget, fewer programs go through more
    due = -(-a.site.layout.slots // (space.verify_every or USUAL_BY_BUDGET))
    programs = strided_grid(due, LISTED_SLOTS, a.geometry.base.device)
    with on_device(a.geometry.base):
        verify_listed_kernel[(programs, 1 if a is b else 2)](
            a.geometry.base,
            b.geometry.base,
            a.site.gate,
            a.site.counters,
            listed_ptr=space.listed,
            count_ptr=space.listed_count,
            block_ptr=space.block,
            wide_ptr=space.block.view(torch.int64),
            planned_ptr=space.planned,
            clock_ptr=space.clock,
            ahead=int(in_flight),
            NEVER=bool(a.site.checks & Check.POISON),
            ops=ops,
            slot_stride0=a.geometry.slot_strides[0],
            slot_stride1=a.geometry.slot_strides[1],
            UNIT=a.geometry.unit,
            num_warps=1,
            **row_args(a.geometry),
            **digest_args(a.site, LISTED_SLOTS, LISTED_WORDS),
            **site_args(a.site),
            **other_args(b.site),
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
    parts = []
    for site, view, value in zip(sites, views, values, strict=True):
        compared = value is not None and slots.shape[0] > 0 and bool(site.checks & Check.OPERAND)
        operand = geometry_of(value, (0,)) if compared and value is not None else None
        parts.append(_Part(site, geometry_of(view, site.layout.slot_axes), operand))
    for a, b in _launches(parts):
        _record(a, b, slots, write_id, ops, planned)
        ops = 0


def _record(a: _Part, b: _Part, slots: torch.Tensor, write_id: int, ops: int, planned: bool = False) -> None:
    site, space, n = a.site, a.site.space, slots.shape[0]
    operand, other_operand = a.operand or a.geometry, b.operand or b.geometry
    mask, bits = poison_mask(site.layout.dtype) if site.checks & Check.POISON else (0, 1)
    tile = FEW if n <= FEW_SLOTS else MANY
    with on_device(a.geometry.base):
        records.record_kernel[(strided_grid(n, tile.slots, slots.device), 1 if a is b else 2)](
            a.geometry.base,
            operand.base,
            b.geometry.base,
            other_operand.base,
            slots.contiguous(),
            n,
            site.gate,
            ops,
            site.counters,
            stamp_ptr=site.control.stamps,
            stamp_count=site.control.stamps.shape[1],
            write_id=write_id,
            block_ptr=space.block if space is not None else site.half.rows,
            planned_ptr=space.planned if space is not None else site.control.words,
            clock_ptr=space.clock if space is not None else site.half.rows,
            slot_stride0=a.geometry.slot_strides[0],
            slot_stride1=a.geometry.slot_strides[1],
            token_stride=operand.slot_strides[1],
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
            num_warps=tile.warps,
        )

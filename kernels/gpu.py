"""The checks on a GPU: Triton kernels and their launches.  Bit-equal to :mod:`.reference`.

No launch depends on data: grids are fixed by shapes, lengths and steps are read from device memory, and
nothing waits for the device, so every function here may run while a CUDA graph is captured.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton

from . import triton_kernels as tk
from . import triton_records as records
from .buffers import NOT_WRITTEN, Check, Count, IdentityBuffers, Phase, Site
from .counting import count_op
from .digest import coefficients
from .geometry import Geometry, geometry_of, on_device
from .gpu_plans import first_positions as first_positions
from .gpu_plans import resolve as resolve
from .gpu_plans import update_rows
from .identity import identify_with
from .layout import poison_mask
from .slot_space import SlotSpace
from .triton_listed import verify_listed_kernel

#: Slots a program digests at a time, and words of a row it loads at once.
BLOCK_SLOTS = 8
MAX_BLOCK_WORDS = 256

#: The same for the check of listed slots, in programs of one warp, and how many of these each of a GPU's processors
#: gets: of 90 combinations the fastest for 64 requests of 4,096 tokens on an H200 (136 us, the others up to 453 us).
LISTED_SLOTS = 8
LISTED_WORDS = 128
PROGRAMS_PER_PROCESSOR = 16


def _row_args(geometry: Geometry) -> dict[str, int]:
    """A geometry as kernel arguments."""
    (_, n1, n2, n3), (d0, d1, d2, d3) = geometry.sizes, geometry.strides
    return dict(units=geometry.units, n1=n1, n2=n2, n3=n3, d0=d0, d1=d1, d2=d2, d3=d3)


def _common(site: Site) -> dict[str, Any]:
    """Kernel arguments that belong to the site."""
    return dict(
        words_ptr=site.control.words,
        ring_ptr=site.control.ring,
        capacity=site.control.capacity,
        rows_ptr=site.half.rows,
        half=site.half_id,
        positions=site.layout.positions,
        HAS_ROWS=site.layout.has_rows,
        TWO_AXES=site.layout.two_axes,
    )


def _digest_args(site: Site, slots: int = BLOCK_SLOTS, most_words: int = MAX_BLOCK_WORDS) -> dict[str, Any]:
    words = site.layout.words
    return dict(
        coef_ptr=coefficients(words, site.half.digest.device),
        digest_ptr=site.half.digest,
        slots_total=site.layout.slots,
        seed1=tk.as_signed(site.seed1),
        seed2=tk.as_signed(site.seed2),
        words_in_row=words,
        PLANES=site.half.digest.shape[0],
        BLOCK=slots,
        BLOCK_WORDS=min(most_words, triton.next_power_of_2(words)),
    )


def begin(control_words: torch.Tensor, gate: torch.Tensor) -> None:
    """Start one call of a guarded graph."""
    with on_device(gate):
        tk.begin_kernel[(1,)](control_words, gate)


def check_plan(site: Site, slots: torch.Tensor, raw: torch.Tensor, write_id: int, phase: Phase) -> None:
    """Bounds: indices outside the pool, and two tokens sent to one slot.  See :func:`.cpu.check_plan`."""
    n = slots.shape[0]
    if n == 0:
        return
    with on_device(slots):
        tk.plan_kernel[(triton.cdiv(n, 128),)](
            slots.contiguous(),
            raw.contiguous(),
            n,
            site.control.stamps,
            site.control.stamps.shape[1],
            site.space.block if site.space is not None else site.half.rows,
            write_id,
            site.control.blackbox if site.control.blackbox is not None else site.control.words,
            phase=int(phase),
            CHECK=int(Check.BOUNDS),
            REPORT=bool(site.checks & Check.BOUNDS),
            HAS_BOX=site.control.blackbox is not None,
            HAS_SPACE=site.space is not None,
            BLOCK=128,
            **_common(site),
        )


def _scan(site: Site, view: torch.Tensor, first: torch.Tensor | None, mode: int, ops: int = 0) -> None:
    """One pass over all slots of the half."""
    layout = site.layout
    if layout.slots == 0:
        count_op(site.gate, ops)
        return
    geometry = geometry_of(view, layout.slot_axes)
    mask, bits = poison_mask(layout.dtype) if site.checks & Check.POISON else (0, 1)
    has_first = first is not None and layout.has_rows
    baseline = site.half.baseline if site.half.baseline is not None else site.half.digest
    with on_device(view):
        tk.scan_kernel[(triton.cdiv(layout.slots, BLOCK_SLOTS),)](
            geometry.base,
            site.gate,
            site.counters,
            first if first is not None and has_first else site.half.rows,
            baseline,
            slot_stride0=geometry.slot_strides[0],
            slot_stride1=geometry.slot_strides[1],
            every=site.verify_every,
            ops=ops,
            LENIENT=site.lenient,
            CONTENT=bool(site.checks & Check.CONTENT),
            HAS_FIRST=has_first,
            NOT_WRITTEN=NOT_WRITTEN,
            MODE=mode,
            UNIT=geometry.unit,
            ELEMENT=layout.dtype.itemsize,
            POISON_MASK=mask,
            POISON_BITS=bits,
            **_row_args(geometry),
            **_digest_args(site),
            **_common(site),
        )


def verify(site: Site, view: torch.Tensor, first: torch.Tensor | None, ops: int = 0) -> None:
    """Content: compare every due slot with its digest.  See :func:`.cpu.verify`."""
    if site.space is None:
        _scan(site, view, first, tk.VERIFY, ops)
    else:
        _verify_listed(site, view, site.space, ops)


def _verify_listed(site: Site, view: torch.Tensor, space: SlotSpace, ops: int) -> None:
    """The slots that the walk of this forward listed; an engine says what else it writes, nothing is adopted."""
    if not site.checks & Check.CONTENT or not site.layout.slots:
        site.counters[Count.VERIFY_RUNS : Count.VERIFY_RUNS + 1].add_(1)
        count_op(site.gate, ops)
        return
    geometry = geometry_of(view, site.layout.slot_axes)
    with on_device(view):
        verify_listed_kernel[(_strided_grid(site.layout.slots, LISTED_SLOTS, view.device),)](
            geometry.base,
            site.gate,
            site.counters,
            listed_ptr=space.listed,
            count_ptr=space.listed_count,
            ops=ops,
            slot_stride0=geometry.slot_strides[0],
            slot_stride1=geometry.slot_strides[1],
            UNIT=geometry.unit,
            num_warps=1,
            **_row_args(geometry),
            **_digest_args(site, LISTED_SLOTS, LISTED_WORDS),
            **_common(site),
        )


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


def _record_tile(n: int) -> Tile:
    return FEW if n <= FEW_SLOTS else MANY


def _strided_grid(n: int, slots: int, device: torch.device) -> int:
    """Programs that share ``n`` slots, each taking so many at a time; at least one."""
    return max(1, min(-(-n // slots), _programs(device)))


@functools.cache
def _programs(device: torch.device) -> int:
    """Programs that keep a device busy; few in the interpreter, where they take turns."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_PROCESSOR


def adopt(site: Site, view: torch.Tensor, first: torch.Tensor) -> None:
    """Record, unverified, the slots below the coming write that nobody recorded."""
    _scan(site, view, first, tk.ADOPT)


def snapshot(site: Site, view: torch.Tensor) -> None:
    """Keep the digest of every slot: the "before" of a write we cannot read."""
    _scan(site, view, None, tk.SNAPSHOT)


def record_changed(site: Site, view: torch.Tensor) -> None:
    """Fingerprint the slots whose bytes differ from :func:`snapshot`."""
    _scan(site, view, None, tk.CHANGED)


def record(
    site: Site,
    view: torch.Tensor,
    slots: torch.Tensor,
    values: torch.Tensor | None,
    write_id: int,
    last_position: torch.Tensor | None = None,
    moved: int | None = None,
    value_digests: torch.Tensor | None = None,
    ops: int = 0,
) -> None:
    """Fingerprint the slots just written.  See :func:`.cpu.record`.

    Args:
        value_digests: int32 ``[n, planes]`` in the place of ``values``, see :func:`digest_operands`.
    """
    layout, n = site.layout, slots.shape[0]
    update_rows(layout, site.half.rows, slots, last_position, moved)
    geometry = geometry_of(view, layout.slot_axes)
    operand = geometry if values is None or n == 0 else geometry_of(values, (0,))
    mask, bits = poison_mask(layout.dtype) if site.checks & Check.POISON else (0, 1)
    compared = records.NO_OPERAND
    if site.checks & Check.OPERAND and value_digests is not None:
        compared = records.DIGESTS
    elif site.checks & Check.OPERAND and values is not None:
        compared = records.ROWS
    tile = _record_tile(n)
    with on_device(view):
        records.record_kernel[(_strided_grid(n, tile.slots, view.device),)](
            geometry.base,
            operand.base,
            value_digests if value_digests is not None else site.half.digest,
            slots.contiguous(),
            n,
            site.gate,
            ops,
            site.counters,
            site.control.stamps,
            site.control.stamps.shape[1],
            write_id,
            site.space.block if site.space is not None else site.half.rows,
            slot_stride0=geometry.slot_strides[0],
            slot_stride1=geometry.slot_strides[1],
            token_stride=operand.slot_strides[1],
            value_digest_stride=value_digests.stride(0) if value_digests is not None else 0,
            OPERAND=compared,
            HAS_SPACE=site.space is not None,
            UNIT=geometry.unit,
            OPERAND_UNIT=operand.unit,
            ELEMENT=layout.dtype.itemsize,
            POISON_MASK=mask,
            POISON_BITS=bits,
            **_row_args(geometry),
            **{f"v_{k}": v for k, v in _row_args(operand).items()},
            **_digest_args(site, tile.slots, tile.words),
            **_common(site),
            num_warps=tile.warps,
        )


def digest_operands(
    sites: Sequence[Site], values: Sequence[torch.Tensor], slots: torch.Tensor, outs: Sequence[torch.Tensor]
) -> None:
    """Keep the digests of what the halves of a layer are given to write: one launch for two halves of one shape.

    Args:
        values: ``[n, *row_shape]`` each, in the dtype of the half's pool.
        slots: int64 ``[n]``; what goes to -1 is skipped.
        outs: int32 ``[n, planes]`` each; planes lie side by side.
    """
    if slots.shape[0] == 0:
        return
    geometries = [geometry_of(v, (0,)) for v in values]
    pairs = len(sites) == 2 and geometries[0].alike(geometries[1]) and outs[0].stride() == outs[1].stride()
    for first in range(0, len(sites), 2 if pairs else 1):
        last = first + 1 if pairs else first
        _digest_pair(sites, geometries, slots, outs, (first, last))


def _digest_pair(
    sites: Sequence[Site],
    geometries: Sequence[Geometry],
    slots: torch.Tensor,
    outs: Sequence[torch.Tensor],
    pair: tuple[int, int],
) -> None:
    """One launch; a pair of twice the same number is one half."""
    (a, b), n = pair, slots.shape[0]
    tile = _record_tile(n)
    args = _digest_args(sites[a], tile.slots, tile.words)
    del args["digest_ptr"], args["slots_total"]
    with on_device(slots):
        records.operand_kernel[(_strided_grid(n, tile.slots, slots.device), 1 if a == b else 2)](
            geometries[a].base,
            geometries[b].base,
            slots.contiguous(),
            n,
            outs[a],
            outs[b],
            outs[a].stride(0),
            other_seed1=tk.as_signed(sites[b].seed1),
            other_seed2=tk.as_signed(sites[b].seed2),
            token_stride=geometries[a].slot_strides[1],
            UNIT=geometries[a].unit,
            **_row_args(geometries[a]),
            **args,
            num_warps=tile.warps,
        )


def identify(
    site: Site, identity: IdentityBuffers, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
) -> None:
    """Chain: does a decoded token's position follow its predecessor's?  See :mod:`.identity`."""
    identify_with(_report, site, identity, slots, tokens, positions)


def _report(
    site: Site,
    phase: Phase,
    check: Check,
    mask: torch.Tensor,
    slots: torch.Tensor,
    stored: torch.Tensor,
    found: torch.Tensor,
    detail: torch.Tensor,
) -> None:
    """Append a ring row for every ``mask``ed entry of the int64 vectors."""
    n = slots.shape[0]
    with on_device(slots):
        tk.report_kernel[(triton.cdiv(n, 128),)](
            mask.contiguous(),
            slots.contiguous(),
            stored.contiguous(),
            found.contiguous(),
            detail.contiguous(),
            n,
            phase=int(phase),
            check=int(check),
            BLOCK=128,
            **_common(site),
        )

"""Arguments that the launches of several Triton kernels share."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from ..buffers import NOT_WRITTEN, Site
from ..checks import Check, Phase
from ..ring import BY_BUDGET
from ..writes.geometry import Geometry
from ..writes.layout import poison_mask
from . import triton_half as tk
from .digest import coefficients

#: Slots a program digests at a time, and words of a row it loads at once.
BLOCK_SLOTS = 8
MAX_BLOCK_WORDS = 256

#: Tokens whose bounds a program checks.
PLAN_TOKENS = 128

PROGRAMS_PER_PROCESSOR = 16


def row_args(geometry: Geometry) -> dict[str, int]:
    """A geometry as kernel arguments."""
    (_, n1, n2, n3), (d0, d1, d2, d3) = geometry.sizes, geometry.strides
    return dict(units=geometry.units, n1=n1, n2=n2, n3=n3, d0=d0, d1=d1, d2=d2, d3=d3)


def site_args(site: Site) -> dict[str, Any]:
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


def digest_args(site: Site, slots: int = BLOCK_SLOTS, most_words: int = MAX_BLOCK_WORDS) -> dict[str, Any]:
    """Kernel arguments of a site's digests, and of a tile of slots and words."""
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


def plan_args(site: Site, n: int, write_id: int, phase: Phase) -> dict[str, Any]:
    """Arguments of ``plan_kernel``, all but the slots."""
    box = site.control.blackbox
    return dict(
        n=n,
        stamp_ptr=site.control.stamps,
        stamp_count=site.control.stamps.shape[1],
        block_ptr=site.space.block if site.space is not None else site.half.rows,
        write_id=write_id,
        box_ptr=box if box is not None else site.control.words,
        phase=int(phase),
        CHECK=int(Check.BOUNDS),
        REPORT=bool(site.checks & Check.BOUNDS),
        HAS_BOX=box is not None,
        HAS_SPACE=site.space is not None,
        BLOCK=PLAN_TOKENS,
        **site_args(site),
    )


def scan_args(
    site: Site, geometry: Geometry, mode: int, ops: int, coming: int | None, has_first: bool, own_rows: bool
) -> dict[str, Any]:
    """Arguments of ``scan_kernel``, all but where each row's write begins, and which slots an engine planned."""
    mask, bits = poison_mask(site.layout.dtype) if site.checks & Check.POISON else (0, 1)
    baseline = site.half.baseline
    return dict(
        base=geometry.base,
        gate_ptr=site.gate,
        counters_ptr=site.counters,
        baseline_ptr=baseline if baseline is not None else site.half.digest,
        stamp_ptr=site.control.stamps,
        slot_stride0=geometry.slot_strides[0],
        slot_stride1=geometry.slot_strides[1],
        every=site.verify_every,
        write_id=coming or 0,
        ops=ops,
        BY_BUDGET=site.verify_every == BY_BUDGET,
        COMING=coming is not None and site.verify_every != 1,
        KEEPS=baseline is not None and site.space is None,
        ADOPTS=site.space is None,
        INDEX=bool(site.checks & Check.INDEX),
        LENIENT=site.lenient,
        CONTENT=bool(site.checks & Check.CONTENT),
        HAS_FIRST=has_first,
        OWN_ROWS=has_first and own_rows,
        NOT_WRITTEN=NOT_WRITTEN,
        MODE=mode,
        UNIT=geometry.unit,
        ELEMENT=site.layout.dtype.itemsize,
        POISON_MASK=mask,
        POISON_BITS=bits,
        **row_args(geometry),
        **digest_args(site),
        **site_args(site),
    )


def other_args(site: Site) -> dict[str, Any]:
    """What differs between two halves of a layer: the arguments of the second."""
    return dict(
        other_counters_ptr=site.counters,
        other_digest_ptr=site.half.digest,
        other_rows_ptr=site.half.rows,
        other_seed1=tk.as_signed(site.seed1),
        other_seed2=tk.as_signed(site.seed2),
        other_half=site.half_id,
    )


def strided_grid(n: int, slots: int, device: torch.device) -> int:
    """Programs that share ``n`` slots, each with a block at a time; at least one."""
    return max(1, min(-(-n // slots), _programs(device)))


@functools.cache
def _programs(device: torch.device) -> int:
    """Programs that keep a device busy; few in the interpreter, where they take turns."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_PROCESSOR

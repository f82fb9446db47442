"""Arguments that the launches of several Triton kernels share."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from ..buffers import Site
from ..writes.geometry import Geometry
from . import triton_half as tk
from .digest import coefficients

#: Slots a program digests at a time, and words of a row it loads at once.
BLOCK_SLOTS = 8
MAX_BLOCK_WORDS = 256

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

"""What a graph only reads is checked by the slots of the graphs that write it.

A graph that only reads a cache, such as the rest of a layer behind a graph break, may divide it into other slots than
the graph that writes it, or not show the slots at all.  It needs no halves of its own: those that others record inside
what it reads are checked, each by its own shadow.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..kernels.buffers import HalfBuffers
from ..passes.graph_plan import SitePlan
from .pool_half import PoolHalf
from .registry import Storage

#: A half, its shadow and where it begins in the tensor that is read, in elements; its strides.
Seen = tuple[PoolHalf, HalfBuffers, int, tuple[int, ...]]


def seen_halves(storage: Storage, site: SitePlan, args: Sequence[Any], mine: Collection[int]) -> list[Seen]:
    """The halves that other graphs record in what a site reads.

    Args:
        args: of the graph.
        mine: ids of the halves that the graph writes itself, and checks there.
    """
    view = site.view(args)
    first, size = int(view.storage_offset()), view.element_size()
    read = [(first, first + _reach(view))]
    if site.reads is not None:
        read = [(first + low, first + high) for low, high in site.reads]
    seen: list[Seen] = []
    for half in storage.halves.values():
        place = half.place
        low, high = (n // size for n in place.span())
        written = half.kind != "read" and half.id not in mine and place.layout.dtype == view.dtype
        if written and any(low < b and a < high for a, b in read):
            seen.append((half, half.buffers, low - first, place.strides))
    return seen + _returned(storage, view)


def _returned(storage: Storage, view: torch.Tensor) -> list[Seen]:
    """The halves of a tensor that a graph returned."""
    seen = []
    for shadow in storage.shadows.values():
        place = shadow.half.place
        if place.layout.shape == tuple(view.shape) and place.layout.dtype == view.dtype:
            buffers = HalfBuffers(shadow.memory[0], shadow.memory[1], shadow.half.buffers.baseline)
            seen.append((shadow.half, buffers, 0, view.stride()))
    return seen


def _reach(view: torch.Tensor) -> int:
    return sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True)) + 1 if view.numel() else 0

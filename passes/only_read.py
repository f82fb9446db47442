"""Caches that a graph only reads: cross-attention after its first step, layers that share another graph's cache.

Before and after::

    attn = scaled_dot_product_attention(q, keys, values)

    watch = torch.ops.kvcanary.watch(keys, state, 4)
    watch_1 = torch.ops.kvcanary.watch(values, state, 5)
    attn = scaled_dot_product_attention(q, keys, values)

The graph has no write that says what a cache is.  Two things do: another graph of the session writes the same
memory, or the input is called the keys or values of a cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..kernels.layout import FLOAT_DTYPES, POOL_DTYPES
from .accesses import Accesses, extent_of
from .halves import Half, Region
from .names import half_named, source_name

#: From an example input to the slot axes of the half that it is, all of it, in the session's registry.
Recorded = Callable[[torch.Tensor], tuple[int, ...] | None]

_CACHE = re.compile(r"cache|past|kv", re.IGNORECASE)


def find_only_read(
    found: Accesses, given: Callable[[fx.Node], Any], recorded: Recorded, functional: Sequence[str]
) -> list[Half]:
    """The halves that a graph reads and does not write, in the order of their first read.

    Args:
        given: the example input of a placeholder.
        functional: names of caches that are rebuilt each step: the tensor at hand will not be seen again.
    """
    written = set(found.written_roots())
    halves = []
    for root in dict.fromkeys(a.root for a in found.accesses):
        if root in written or source_name(root) in functional:
            continue
        axes = _slot_axes(root, found.values[root], given(root), recorded)
        if axes is not None:
            halves.append(_half(root, axes, found))
    return halves


def _slot_axes(root: fx.Node, fake: torch.Tensor, given: Any, recorded: Recorded) -> tuple[int, ...] | None:
    """The slot axes of a cache; None for an input that is none.

    By name alone only ``[B, H, S, D]`` is taken: with other ranks nothing says which axis counts tokens.
    """
    if fake.dtype not in POOL_DTYPES or not isinstance(given, torch.Tensor) or isinstance(given, nn.Parameter):
        return None
    known = recorded(given)
    if known is not None:
        return known
    name = source_name(root)
    called = half_named(name.split(".")[-1]) is not None and _CACHE.search(name) is not None
    return (0, 2) if called and fake.dim() == 4 and fake.dtype in FLOAT_DTYPES else None


def _half(root: fx.Node, slot_axes: tuple[int, ...], found: Accesses) -> Half:
    view = found.values[root]
    return Half(
        root=root,
        region=Region(root),
        slot_axes=slot_axes,
        paged=False,
        shape=tuple(view.shape),
        dtype=view.dtype,
        extent=extent_of(view),
        readable=[],
        opaque=[],
        accesses=found.of(root),
        kind="read",
    )

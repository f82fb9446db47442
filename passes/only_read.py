"""Caches that a graph only reads: cross-attention after its first step, layers that share another graph's cache.

Before and after::

    attn = scaled_dot_product_attention(q, keys, values)

    watch = torch.ops.kvcanary.watch(keys, state, 4)
    watch_1 = torch.ops.kvcanary.watch(values, state, 5)
    attn = scaled_dot_product_attention(q, keys, values)

The graph has no write that shows what is a cache.  Two things do: another graph of the session records the same memory,
or attention reads it as K or V, and it is called a cache or kept somewhere.  What another graph records is checked by
that graph's slots.  Otherwise attention's read shows the slot axes; where it does not, the cache is named in
``plan.unguarded``.

A graph may also read more of a cache than it writes: V is written here, K was before the graph broke.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..kernels.writes.layout import FLOAT_DTYPES, POOL_DTYPES
from .accesses import Access, Accesses, Extent, extent_of
from .attention_reads import AttentionReads, SlotAxes
from .destinations import Region
from .dynamo_contract import is_kept_by_someone
from .halves import Half, Rejected
from .names import half_named, source_name
from .pool_names import PoolName, pool_name

#: Whether another graph of the session records bytes of an example input's storage.
Recorded = Callable[[torch.Tensor], bool]

#: Names of keys and values that were computed by the graph before, not kept.
_PASSING = re.compile(r"[qkv]|_*x?[qkv]_?\d*|query|key|value|.*(states|new|layer|stack).*", re.IGNORECASE)

_READ = "it is only read in this graph"

_CACHE = re.compile(r"cache|past|kv|pool|(^|[._])[kv]c($|[._\d\[])", re.IGNORECASE)


def find_only_read(
    found: Accesses,
    reads: AttentionReads,
    given: Callable[[fx.Node], Any],
    recorded: Recorded,
    functional: Sequence[str],
) -> tuple[list[Half], list[Rejected]]:
    """The halves that a graph reads and does not write, in the order of their first read; and what may be a cache,
    and is read in a way that does not show where its slots are.

    Args:
        reads: how the graph's attention reads its inputs.
        given: the example input of a placeholder.
        functional: names of caches that are rebuilt each step: this tensor will not be seen again.
    """
    written = set(found.written_roots())
    halves: list[Half] = []
    rejected: list[Rejected] = []
    for root in dict.fromkeys(a.root for a in found.accesses):
        if root in written or source_name(root) in functional or not _can_be(found.values[root], given(root)):
            continue
        made = _halves(root, found, reads)
        if recorded(given(root)):
            halves += made or [_unseen(root, found.of(root), found)]
        elif made and _is_called(root):
            halves += made
        else:
            why = _why_not(root, found.values[root], reads, shown=bool(made))
            rejected += [] if why is None else [Rejected(root, why)]
    return halves, rejected


def find_read_besides(
    found: Accesses, halves: Sequence[Half], given: Callable[[fx.Node], Any], recorded: Recorded
) -> list[Half]:
    """What a graph reads of the inputs that it writes, and writes nothing of, where another graph records them."""
    besides = []
    for root in dict.fromkeys(h.root for h in halves if h.output is None and h.kind != "read"):
        mine = [h for h in halves if h.root is root]
        reads = [a for a in found.of(root) if not a.writes]
        left = [a for a in reads if not any(_is_within(a.extent, h.extent) for h in mine)]
        if left and not _are_all(mine, left, root, found) and recorded(given(root)):
            besides.append(_unseen(root, left, found))
    return besides


def _is_within(read: Extent, half: Extent) -> bool:
    if read.low is None or read.high is None or half.low is None or half.high is None:
        return False
    return half.low <= read.low and read.high <= half.high


def _are_all(halves: Sequence[Half], left: Sequence[Access], root: fx.Node, found: Accesses) -> bool:
    """Whether some halves of an input, which are apart, are all of it, and it is all that is read: another input may
    share its storage."""
    whole, parts = found.values[root], sum(math.prod(h.shape) for h in halves)
    if str(whole.numel()) != str(parts):
        return False
    inputs = [n for n in root.graph.find_nodes(op="placeholder") if found.root_of(n) is root]
    return len(inputs) == 1 or all(_is_within(a.extent, extent_of(whole)) for a in left)


def _unseen(root: fx.Node, accesses: list[Access], found: Accesses) -> Half:
    """What is read of an input, without slots of its own: those of the graphs that record it are checked."""
    whole = found.values[root]
    first, extents = whole.storage_offset(), {a.extent for a in accesses}
    reads = None
    if isinstance(first, int) and all(e.low is not None and e.high is not None for e in extents):
        reads = tuple(sorted((e.low - first, e.high - first) for e in extents))  # type: ignore[operator]
    return Half(
        root=root,
        region=Region(root),
        slot_axes=(),
        paged=False,
        shape=tuple(whole.shape),
        dtype=whole.dtype,
        extent=extent_of(whole),
        readable=[],
        opaque=[],
        accesses=found.of(root),
        kind="read",
        layer=source_name(root),
        label="read",
        name=PoolName(source_name(root)),
        reads=reads,
    )


def _can_be(fake: torch.Tensor, given: Any) -> bool:
    return fake.dtype in POOL_DTYPES and isinstance(given, torch.Tensor) and not isinstance(given, nn.Parameter)


def _is_called(root: fx.Node) -> bool:
    """Whether an input that attention reads is a cache by its name, or by being kept in an object or a container: keys
    and values that another graph of the same forward has computed are none."""
    return is_kept_by_someone(root) or _CACHE.search(source_name(root)) is not None


def _why_not(root: fx.Node, fake: torch.Tensor, reads: AttentionReads, shown: bool) -> str | None:
    """Why an input that may be a cache is not guarded; None if it is not a cache."""
    name = source_name(root)
    if fake.dim() < 3 or fake.dtype not in FLOAT_DTYPES:
        return None
    if shown:
        return None if _PASSING.fullmatch(name) else f"{_READ}, and neither its name nor its place says that it is kept"
    called = half_named(name.split(".")[-1]) is not None and _CACHE.search(name) is not None
    if called or (_is_called(root) and reads.of(reads.source_of(root))):
        return f"{_READ}, in a way that does not show which of its axes counts tokens"
    return None


def _halves(root: fx.Node, found: Accesses, reads: AttentionReads) -> list[Half]:
    """The halves that attention reads of an input; none if one of them does not show its slot axes."""
    whole = reads.source_of(root)
    parts: list[tuple[Any, ...]] = []  # a slice cannot be hashed before Python 3.12
    for read in reads.of(whole):
        index: list[Any] = [slice(None)] * found.values[root].dim()
        picked = read.source.picked
        for axis, start, stop in read.source.ranges:
            if axis in picked and not reads.is_row_axis(whole, axis):
                index[axis] = start
            elif axis not in picked and axis not in read.tokens:
                index[axis] = slice(start, stop)
        part = tuple(index) if any(i != slice(None) for i in index) else ()
        parts += [] if part in parts else [part]
    halves = []
    for part in parts:
        axes = reads.slot_axes(reads.source_of(root, part))
        if axes is None:
            return []
        halves.append(_half(root, part, axes, found, reads))
    return halves if len(parts) == 1 or () not in parts else []


def _half(root: fx.Node, index: tuple[Any, ...], axes: SlotAxes, found: Accesses, reads: AttentionReads) -> Half:
    part = reads.source_of(root, index)
    view = Region(root, index).of(found.values[root])
    return Half(
        root=root,
        region=Region(root, index),
        slot_axes=axes.axes,
        paged=axes.paged,
        shape=tuple(view.shape),
        dtype=view.dtype,
        extent=extent_of(view),
        readable=[],
        opaque=[],
        accesses=found.of(root),
        name=pool_name(root, root, index, found, reads),
        kind="read",
        read_as=reads.half_of(part),
        attention=frozenset(r.attention for r in reads.of(part)),
    )

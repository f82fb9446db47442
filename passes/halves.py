"""From writes to halves: which views of a pool hold one layer's K or V, and how their slots are numbered."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..kernels.writes.layout import POOL_DTYPES
from ..kernels.writes.plan import Select, Selector, WritePlan
from .accesses import Access, Accesses, Extent, extent_of
from .attention_reads import AttentionReads, SlotAxes
from .axis_flow import Source
from .destinations import Destination, Region, destinations
from .graph_plan import Kind
from .loops import AMBIGUOUS, Loops, place
from .names import function_name, has_kv_name, module_path, source_name, state_named
from .pool_names import PoolName, pool_name
from .returned_caches import Returned
from .selection import At, Full, Indexed, Part, Selection, Span
from .states import ancestors, is_running_state, updated_axis
from .writes import IN_PLACE, KVWrite, chosen_axes, read_write

#: From an input and a view of it to the view's slot axes, if an engine declared it as a half.
DeclaredAxes = Callable[[Any, torch.Tensor], tuple[int, ...] | None]


@dataclasses.dataclass
class ReadableWrite:
    """A write with its place in the graph's op arguments.

    Attributes:
        index, extent: what the canary ops receive for this write: nodes, or ints in ``extent``.
        part: which part of the operand is this half's, where K and V are written at once; () for all of it.
        turned: the operand's axes in the half's order, where the write sees them in another; () if not.
        stays: it goes to all slots and leaves the tokens where they were, as under a mask: not a window that rolls.
    """

    write: KVWrite
    plan: WritePlan
    index: list[fx.Node]
    extent: list[Any]
    part: tuple[Any, ...] = ()
    turned: tuple[int, ...] = ()
    own_value: fx.Node | None = None  # the node made of that part, or in that order
    stays: bool = False

    @property
    def value(self) -> fx.Node | None:
        """The operand as it is compared with the half."""
        return self.own_value or self.write.value


@dataclasses.dataclass
class Half:
    """One guarded half: a region of a pool and the writes to it.

    ``read_as`` is ``"K"``, ``"V"`` or ``"KV"``, what the graph's attention reads it as, in the nodes ``attention``.
    """

    root: fx.Node
    region: Region
    slot_axes: tuple[int, ...]
    paged: bool
    shape: tuple[Any, ...]
    dtype: torch.dtype
    extent: Extent
    readable: list[ReadableWrite]
    opaque: list[KVWrite]
    accesses: list[Access]
    name: PoolName
    heads: int = 1  # rows that a sequence has, where the graph writes to a view that merges the two
    kind: Kind = "kv"
    layer: str = ""
    label: str = ""
    number: int | None = None  # of the layer
    output: int | None = None  # which output of the graph is this cache in the next call
    read_as: str | None = None
    attention: frozenset[fx.Node] = frozenset()
    reads: tuple[tuple[int, int], ...] | None = None  # of a half that is only read, see SitePlan
    part_of: fx.Node | None = None  # the tensor of all heads, where the graph writes them one by one

    @property
    def pool(self) -> str:
        return str(self.name)

    @property
    def first_access(self) -> Access:
        return self.accesses[0]

    @property
    def reads_old(self) -> bool:
        """Whether the graph can see bytes that were in the pool before this call."""
        first = next((r for r in self.readable if r.write.node is self.first_access.node), None)
        return first is None or not first.plan.covers_all or _depends_on_pool(first.write, self.root)

    @property
    def nodes_written(self) -> list[fx.Node]:
        return [r.write.node for r in self.readable] + [w.node for w in self.opaque]


def _depends_on_pool(write: KVWrite, root: fx.Node) -> bool:
    return write.value is None or root in ancestors(write.value)


@dataclasses.dataclass
class Rejected:
    """A written input that is not guarded, and why."""

    root: fx.Node
    why: str


class _Builder:
    """Collects the halves of one graph."""

    def __init__(self, found: Accesses, reads: AttentionReads, declared_axes: DeclaredAxes):
        self.found, self.reads, self.declared_axes = found, reads, declared_axes
        self.ambiguous: set[fx.Node] = set()  # inputs of which nobody can tell what an axis counts

    def halves_of(self, root: fx.Node, by_layer: bool) -> list[Half]:
        accesses = self.found.of(root)
        nodes = dict.fromkeys(a.node for a in accesses if a.writes)
        writes = [w for node in nodes for w in read_write(node, root, self.found)]
        return self.halves_from(root, writes, accesses, by_layer)

    def halves_from(
        self, root: fx.Node, writes: list[KVWrite], accesses: list[Access], by_layer: bool = False
    ) -> list[Half]:
        grouped: dict[Any, list[tuple[KVWrite, Destination]]] = {}
        loops = Loops(root, writes, self.found, self.reads)
        if loops.ambiguous:
            self.ambiguous.add(root)
        for write in writes:
            for to in destinations(write, self.found, self.reads, loops):
                layer = module_path(write.node) if by_layer else ""
                grouped.setdefault((layer, _key(to.region, self.found)), []).append((write, to))
        halves = [self._half(root, group, accesses) for group in grouped.values()]
        for half, group in zip(halves, grouped.values(), strict=True):
            half.part_of = loops.part_of([write for write, _ in group])
        return halves

    def _half(self, root: fx.Node, group: list[tuple[KVWrite, Destination]], accesses: list[Access]) -> Half:
        region = group[0][1].region
        view = region.of(self.found.values[region.node])
        part = self.reads.source_of(region.node, region.index)
        read_as = self.reads.half_of(part)
        state = not self.reads.of(part) and is_running_state(root, [write for write, _ in group], self.found)
        if state:
            slots = SlotAxes((0,), paged=False)
        else:
            slots = _slot_axes(group, view, self.reads.slot_axes(part), self.found)
        slots = self._declared(root, group, view, slots)
        half = Half(
            root=root,
            region=region,
            slot_axes=slots.axes,
            paged=slots.paged,
            shape=tuple(view.shape),
            dtype=view.dtype,
            extent=extent_of(view),
            readable=[],
            opaque=[],
            accesses=[],
            heads=1 if slots.paged or len(slots.axes) < 2 else _merged_heads(part, slots.axes[0], self.found),
            name=pool_name(root, region.node, region.index, self.found, self.reads),
            kind="state" if state else "kv",
            read_as=read_as,
            attention=frozenset(r.attention for r in self.reads.of(part)),
        )
        half.accesses = [a for a in accesses if a.extent.overlaps(half.extent)]
        self._divide(group, half)
        return half

    def _declared(
        self, root: fx.Node, group: list[tuple[KVWrite, Destination]], view: torch.Tensor, slots: SlotAxes
    ) -> SlotAxes:
        """The slot axes that an engine declares, where no index of a write shows them; else those that were found."""
        if any(write.flat is None and write.opaque is None for write, _ in group):
            return slots
        declared = self.declared_axes(root, view)
        if declared is None or len(declared) != len(slots.axes):
            return slots
        return dataclasses.replace(slots, axes=declared)

    def _divide(self, group: list[tuple[KVWrite, Destination]], half: Half) -> None:
        """Give a half its writes: those that show its slots, and the opaque ones."""
        for write, to in group:
            readable = None if to.selection is None else self._readable(write, to, half)
            if readable is None:
                write.opaque = write.opaque or "it selects along axes that hold one slot's bytes"
                half.opaque.append(write)
            else:
                half.readable.append(readable)
        for readable in half.readable:
            readable.stays = readable.plan.covers_all and self._stays(readable.write, half)

    def _readable(self, write: KVWrite, to: Destination, half: Half) -> ReadableWrite | None:
        """The write in terms of the half's slot axes; None if it selects along another axis."""
        selection = to.selection or []
        if any(not isinstance(p, Full) for a, p in enumerate(selection) if a not in half.slot_axes):
            return None
        index: list[fx.Node] = []
        extent: list[Any] = []
        if write.flat is not None:
            selectors = [Selector(Select.FLAT)]
            index.append(write.flat)
        else:
            selectors = [_selector(selection[a], a, write, index, extent) for a in half.slot_axes]
        plan = WritePlan(
            selectors=tuple(selectors),
            write_id=-1,  # numbered when the ops are inserted
            wraps=write.wraps,
            skips=write.flat is not None,
        )
        return ReadableWrite(write, plan, index, extent, to.part, to.turned)

    def _stays(self, write: KVWrite, half: Half) -> bool:
        """Whether a write of all slots leaves the tokens where they were."""
        if write.value is None:  # keys.mul_(1 - mask).add_(mask * new); what is added to zeros may have been rolled
            return function_name(write.node) in IN_PLACE and not any(r.write.fill for r in half.readable)
        part = self.reads.source_of(half.region.node, half.region.index)
        return part is not None and self.reads.stays_in(write.value, part, half.slot_axes)


def _selector(part: Part, axis: int, write: KVWrite, index: list[fx.Node], extent: list[Any]) -> Selector:
    if isinstance(part, Full):
        return Selector(Select.ALL)
    if isinstance(part, Indexed):
        index.append(part.tensor)
        grid = write.grid is not None and write.grid[0] == axis
        return Selector(Select.GRID if grid else Select.TENSOR, len(index) - 1)
    at = len(extent)
    if isinstance(part, Span):
        extent += [part.start, part.stop if part.length is None else Sum(part.start, part.length)]
        return Selector(Select.RANGE, at)
    extent.append(part.index)
    return Selector(Select.INT, at)


@dataclasses.dataclass(frozen=True)
class Sum:
    """``a + b`` of nodes or ints, made into a node only when the graph is edited."""

    a: Any
    b: Any


def _key(region: Region, found: Accesses) -> tuple[Any, ...]:
    """Identity of a region inside its storage; symbolic sizes compare by expression."""
    return place(region.of(found.values[region.node]))


def _slot_axes(
    group: list[tuple[KVWrite, Destination]], view: torch.Tensor, shown: SlotAxes | None, found: Accesses
) -> SlotAxes:
    """The axes that number slots: those the writes select along, and the sequences' axis before them.

    Args:
        shown: what the graph's attention says.
    """
    for write, _ in group:
        if write.opaque is not None and write.made is not None and shown is not None:
            return shown  # a returned cache's operands show less
        if write.slot_axes is not None:
            return SlotAxes(write.slot_axes, _is_paged(group))
    merged: Selection = [Full()] * view.dim()
    for _, to in group:
        merged = [m if isinstance(p, Full) else p for m, p in zip(merged, to.selection or merged, strict=True)]
    chosen = chosen_axes(merged, view.dim())
    if chosen is None:
        masked = next((w.masked_axes for w, _ in group if place(found.values[w.region]) == place(view)), None)
        guess = masked or _guess_axes([write for write, _ in group], view)
        return shown or SlotAxes(guess, masked is None and _is_paged(group))
    if shown is not None and not shown.paged and not isinstance(merged[shown.axes[-1]], Full):
        return SlotAxes(chosen, paged=True) if len(chosen) == 2 and chosen[:1] == shown.axes else shown
    behind = len(chosen) == 2 and _rows_behind_tokens(merged[chosen[0]], merged[chosen[1]])
    return SlotAxes(chosen, behind or (len(chosen) == 2 and _is_paged(group)))


def _rows_behind_tokens(first: Part, second: Part) -> bool:
    """Whether a loop over sequences writes to ``[S, B, H, D]``: slots are numbered as pages of a slot a sequence."""
    return isinstance(first, Indexed | Span) and isinstance(second, At) and isinstance(second.index, int)


def _merged_heads(part: Source | None, axis: int, found: Accesses) -> int:
    """How many heads an axis of sequences counts with each: ``keys.flatten(0, 1)`` of ``[B, H, S, D]``."""
    merged = sorted(part.axes[axis])[1:] if part is not None else []
    sizes = [found.values[part.input].shape[own] for own in merged] if part is not None else []
    return math.prod(size for size in sizes if isinstance(size, int))


def _is_paged(group: list[tuple[KVWrite, Destination]]) -> bool:
    """Whether the first of two slot axes numbers pages: a slot_mapping says so, or ``slot // page_size``, or there is
    nothing that shows slots."""
    for write, to in group:
        indexed = [p.tensor for p in to.selection or () if isinstance(p, Indexed)]
        by_page = ("floordiv", "floor_divide", "div", "__floordiv__")
        if write.flat is not None or (len(indexed) == 2 and function_name(indexed[0]) in by_page):
            return True
    return all(write.opaque is not None and write.slot_axes is None for write, _ in group)


def _guess_axes(writes: list[KVWrite], view: torch.Tensor) -> tuple[int, ...]:
    """The slot axes of a half that is only ever written whole, or by an op that hides where.

    The operand shows the axis that it is rolled, concatenated or updated along.  Otherwise: an engine's
    ``[slots, H, D]`` or ``[pages, page_size, H, D]`` for hidden writes, ``[B, H, S, D]`` for whole ones.
    """
    if any(write.opaque is not None for write in writes):
        return (0, 1) if view.dim() >= 4 else (0,)
    for write in writes:
        axis = None if write.value is None else updated_axis(write.value, view)
        if axis is not None and axis < view.dim() - 1:
            return (0, axis) if axis > 0 and view.dim() >= 3 else (axis,)
    return (0, view.dim() - 2) if view.dim() >= 3 else (0,)


def find_halves(
    found: Accesses,
    reads: AttentionReads,
    declared: Callable[[fx.Node], int] = lambda _: 0,
    declared_axes: DeclaredAxes = lambda _root, _view: None,
) -> tuple[list[Half], list[Rejected]]:
    """Every half that the graph writes, and every written input that is not a KV cache, with the reason.

    Args:
        reads: how the graph's attention reads its inputs.
        declared: how many pools an engine keeps in an input: such an input is a KV pool however it is used; with
            several, two layers that write the same bytes are not the same layer.
        declared_axes: the axes of a view of an input by which an engine numbers its slots.
    """
    builder = _Builder(found, reads, declared_axes)
    halves: list[Half] = []
    rejected: list[Rejected] = []
    for root in found.written_roots():
        why = _not_a_pool(root, found)
        if why is None:
            made = builder.halves_of(root, by_layer=declared(root) > 1)
            why = None if declared(root) else AMBIGUOUS if root in builder.ambiguous else _not_kv(made, root, found)
            if why is None:
                halves += made
        if why is not None:
            rejected.append(Rejected(root, why))
    halves.sort(key=lambda h: h.first_access.order)
    return halves, rejected


def halves_of_returned(returned: Sequence[Returned], found: Accesses, reads: AttentionReads) -> list[Half]:
    """The halves of caches that the graph returns updated."""
    builder = _Builder(found, reads, lambda _root, _view: None)
    halves = []
    for cache in returned:
        for half in builder.halves_from(cache.root, cache.writes, found.of(cache.root)):
            half.output = cache.output
            halves.append(half)
    return halves


def _not_a_pool(root: fx.Node, found: Accesses) -> str | None:
    """Why the input cannot be a KV pool by its type and shape; None if it can."""
    tensor = found.values[root]
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype.is_complex:
        return f"its elements are {dtype}: complex numbers are not compared. Kept as real ones (view_as_real), they are"
    if tensor.dtype not in POOL_DTYPES:
        return f"its elements are {dtype}: a counter, a mask or an index"
    if tensor.dim() < 2:
        return f"it has {tensor.dim()} axes; a pool has slots and rows"
    if any(isinstance(size, int) and size == 0 for size in tensor.shape):
        return "it has no elements: one of its sizes is 0"
    return None


def _not_kv(halves: list[Half], root: fx.Node, found: Accesses) -> str | None:
    """Why a written input is not a KV cache by the way it is used; None if it is one."""
    readable = [r.write for h in halves for r in h.readable]
    opaque = [w for h in halves for w in h.opaque]
    named = has_kv_name(source_name(root)) or state_named(source_name(root)) is not None
    named |= any(h.attention for h in halves)  # read by attention: needs no name
    named |= any(w.named for w in readable)
    if all(w.fill for w in readable + opaque):
        return "only constants are written to it: a mask or a buffer being cleared"
    if opaque:
        return None if named or readable else "an op that hides where it writes changed it, and its name is no cache's"
    if not any(_carries_kv(w, root, found) for w in readable if not w.fill):
        return "what is written to it comes from no floating-point input: a mask"
    written = {w.node for w in readable}
    reads = [a for a in found.of(root) if not a.writes and a.node not in written]
    if not reads and not named:
        return "nothing in the graph reads it: an output buffer"
    if found.values[root].dim() == 2 and not named:
        return "it has two axes and no name of a cache: a running state"
    return None


def _carries_kv(write: KVWrite, root: fx.Node, found: Accesses) -> bool:
    """Whether what is written is computed from floating-point inputs, or from the pool's own contents."""
    if write.value is None:
        return True
    for node in ancestors(write.value):
        if node is root and not any(isinstance(p, Indexed) for p in write.selection or ()):
            return True  # a rolling window: the new token is written into the rolled copy in place
        if node.op in ("placeholder", "get_attr") and node is not root:
            tensor = found.values.get(node)
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                return True
    return False

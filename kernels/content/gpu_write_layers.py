"""The checks around the writes of all layers of a graph, on a GPU: two launches before the first, one behind the last.

For few tokens, as in a decode step.  A launch of :mod:`.gpu_write` in each layer takes its latency there, or disturbs
what the model computes beside it: 7 % of a decode of 16 requests of 4,096 tokens, 32 layers (H200).
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import triton

from ..bound_launch import BoundLaunch, parameters_of
from ..buffers import Site
from ..slots.positions import ends_of_rows
from ..writes.geometry import geometry_of
from ..writes.gpu import TokenGrid
from ..writes.plan import WritePlan
from . import triton_write_layers as kernels
from .gpu_layer import FEW, MOST_FORMS, Part, Tile
from .gpu_pool import table_row
from .gpu_write import (
    MOST_TOKENS,
    VERIFY_WARPS,
    programs_of,
    record_args,
    tokens_of,
    verify_args,
    written_part,
)
from .kept_launches import seen
from .launch_args import strided_grid
from .layer_tables import BEFORE, BEHIND, WORDS_OF_HALF, LayerTables
from .triton_pool import TABLE_COLUMNS
from .triton_write_layers import GIVEN_COLUMNS

#: Halves of a layer.
HALVES = 2

#: What a program that compares slots whose turn it is takes at a time: of 13 tiles the fastest for 64 halves of 65,536
#: slots of 2,048 bytes in heads of 256 (2.2 ms, the others 2.4 to 5.7; H200).
TURNS = Tile(4, 256, 1)

#: Of the programs that keep a device busy, one in so many looks for slots that are due out of turn, in all halves
#: together.  Most find none: of 4, 16 and 32, with 64 halves of 16 rows of 4,096 slots 21.9, 15.9 and 17.1 us (H200).
LOOKED_BY = 16

#: Rows that they compare with all tokens at a time.
LOOKED_AT = 16


def verify_layers(
    sites: Sequence[Site],
    views: Sequence[torch.Tensor],
    plans: Sequence[WritePlan],
    index: Sequence[torch.Tensor],
    extent: Sequence[int],
    apart: bool,
    tables: LayerTables,
) -> bool:
    """What :func:`.gpu_write.verify_write` does for each layer in turn; whether this was done.

    Args:
        sites, views, plans: the halves of the layers, two of each.
        index: of each layer's write; if they are ``apart``, with a first axis of layers.
    """
    write_id, index_at = plans[-1].write_id, len(views)

    def made() -> list[_Launches] | None:
        groups = _groups(sites, views, None, plans, index, extent, apart)
        return [_before(group, write_id, ops, index_at) for group, ops in _counted(groups)] if groups else None

    tensors = (*views, *index)
    return _run(sites[0], (apart, *seen("verify layers", sites, tensors, extent)), BEFORE, tensors, made, tables)


def record_layers(
    sites: Sequence[Site],
    views: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor | None],
    plans: Sequence[WritePlan],
    index: Sequence[torch.Tensor],
    extent: Sequence[int],
    apart: bool,
    positions: torch.Tensor | None,
    tables: LayerTables,
) -> bool:
    """What :func:`.gpu_write.record_write` does for each layer in turn; whether this was done.

    Args:
        sites, views, plans, index: as for :func:`verify_layers`.
        positions: of all layers.
    """
    tensors = (*views, *index, *values, positions)
    index_at, values_at = len(views), len(views) + len(index)

    def made() -> list[_Launches] | None:
        groups = _groups(sites, views, values, plans, index, extent, apart)
        if groups is None:
            return None
        return [_behind(group, ops, tensors, index_at, values_at) for group, ops in _counted(groups)]

    return _run(sites[0], (apart, *seen("record layers", sites, tensors, extent)), BEHIND, tensors, made, tables)


def _counted(groups: Sequence[_Group]) -> Iterator[tuple[_Group, int]]:
    """Each with the ops that its launch counts: the first one those of all layers."""
    ops = sum(len(group.parts) for group in groups) // HALVES
    return zip(groups, [ops] + [0] * (len(groups) - 1), strict=True)


def _run(
    site: Site,
    form: tuple[Any, ...],
    which: int,
    tensors: Sequence[torch.Tensor | None],
    made: Callable[[], list[_Launches] | None],
    tables: LayerTables,
) -> bool:
    """Make the launches, those of an earlier call of this form if there was one; whether there are such, and room for
    what they are told.

    Args:
        site: which keeps them.
        which: see :meth:`.LayerTables.place`.
    """
    kept: _Kept | None = site.launches.get(form)
    if kept is None or kept.stamps is not site.control.stamps:
        launches = made()
        if launches is None:
            return False
        if len(site.launches) >= MOST_FORMS:
            site.launches.clear()
        kept = site.launches[form] = _Kept(launches, site.control.stamps)
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    told = array("q")
    for launch in kept.launches:
        told += launch.told(addresses)
    table, at = tables.place(which, told), 0
    if table is None:
        return False
    for launch in kept.launches:
        launch.run(table[at:], tensors, addresses)
        at += len(launch.views) * WORDS_OF_HALF
    return True


@dataclasses.dataclass(frozen=True)
class _Kept:
    """The launches for one form of a call's tensors, and the stamps that they were bound to."""

    launches: Sequence[_Launches]
    stamps: torch.Tensor


@dataclasses.dataclass(frozen=True)
class _Group:
    """Layers that one launch takes.

    Attributes:
        tokens: of the first one's write.
        plan: of their writes, but for the number.
        steps: from each index tensor's part for one layer to that for the next, in elements.
        parts, numbers: their halves, and which those are among the call's.
    """

    tokens: TokenGrid
    plan: WritePlan
    steps: Sequence[int]
    parts: list[Part] = dataclasses.field(default_factory=list)
    numbers: list[int] = dataclasses.field(default_factory=list)

    def takes(self, parts: Sequence[Part], plan: WritePlan) -> bool:
        return plan == self.plan and all(part.alike(self.parts[0]) for part in parts)


def _groups(
    sites: Sequence[Site],
    views: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor | None] | None,
    plans: Sequence[WritePlan],
    index: Sequence[torch.Tensor],
    extent: Sequence[int],
    apart: bool,
) -> list[_Group] | None:
    """All layers, by launch; None if one of them is not for these kernels."""
    steps = [tensor.stride(0) if apart else 0 for tensor in index]
    groups: list[_Group] = []
    for at in range(0, len(views), HALVES):
        numbers, plan = range(at, at + HALVES), dataclasses.replace(plans[at], write_id=0)
        of_layer = [tensor[at // HALVES] if apart else tensor for tensor in index]
        tokens = tokens_of([sites[i] for i in numbers], [plan], of_layer, extent)
        if tokens is None or tokens.n > MOST_TOKENS or any(sites[i].half.baseline is not None for i in numbers):
            return None
        if any(not _starts_with(found, of_layer[i]) for found, i in tokens.found.values()):
            return None
        parts = [_part(sites[i], views[i], values[i] if values is not None else None, plan, tokens) for i in numbers]
        if any(not _is_view(part, values[i]) for part, i in zip(parts, numbers, strict=True) if values is not None):
            return None
        group = next((known for known in groups if known.takes(parts, plan)), None)
        if group is None:
            if not parts[1].alike(parts[0]):
                return None
            group = _Group(tokens, plan, steps)
            groups.append(group)
        group.parts.extend(parts)
        group.numbers.extend(numbers)
    return groups


def _part(site: Site, view: torch.Tensor, value: torch.Tensor | None, plan: WritePlan, tokens: TokenGrid) -> Part:
    return (
        written_part(site, view, value, plan, tokens)
        if value is not None
        else Part(site, geometry_of(view, site.layout.slot_axes))
    )


def _starts_with(view: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a view starts where the tensor does, and is no copy of it."""
    return view.data_ptr() == whole.data_ptr()


def _is_view(part: Part, value: torch.Tensor | None) -> bool:
    """Whether the operand of a half, if it has one, starts where the value does: it is no copy."""
    return part.operand is None or (value is not None and part.operand.base.data_ptr() == value.data_ptr())


@dataclasses.dataclass(frozen=True)
class _Launches:
    """The launches for a group.

    Attributes:
        bound: each with its grid.
        words: what they are told of its halves, but for addresses of a call's tensors.
        views, operands: by half, which of the call's tensors it is, and its operand if it has one.
        sources: which of a call's tensors the other arguments are that change, and how many bytes behind its start.
    """

    bound: Sequence[tuple[BoundLaunch, tuple[int, int, int]]]
    words: array[int]
    views: Sequence[int]
    operands: Sequence[int | None]
    sources: Sequence[tuple[int, int]]

    def told(self, addresses: Sequence[int]) -> array[int]:
        words, halves = self.words[:], len(self.views)
        words[: halves * TABLE_COLUMNS : TABLE_COLUMNS] = array("q", [addresses[i] for i in self.views])
        given = array("q", [0 if i is None else addresses[i] for i in self.operands])
        words[halves * TABLE_COLUMNS :: GIVEN_COLUMNS] = given
        return words

    def run(self, table: torch.Tensor, tensors: Sequence[torch.Tensor | None], addresses: Sequence[int]) -> None:
        words = [table.data_ptr(), *(addresses[i] + behind for i, behind in self.sources)]
        for launch, grid in self.bound:
            if launch.ready:
                launch(grid, words, None)
            else:
                launch.first(grid, [table, *(_behind_by(tensors[i], behind) for i, behind in self.sources)], None)


def _behind_by(tensor: torch.Tensor | None, size: int) -> torch.Tensor:
    """A tensor that starts so many bytes behind the start of another: only its address counts."""
    assert tensor is not None
    return tensor if size == 0 else tensor.as_strided((1,), (1,), tensor.storage_offset() + size // tensor.itemsize)


def _before(group: _Group, write_id: int, ops: int, index_at: int) -> _Launches:
    """One for bounds, for what is replaced, and for what must be compared out of turn; one for the slots in turn."""
    first, rows = group.parts[0], len(group.parts)
    site, words = first.site, first.site.layout.words
    programs = programs_of(site, group.tokens.n)
    arguments = verify_args(first, first, group.tokens, group.plan, write_id, ops, programs.scanners)
    arguments["ROWS"] = LOOKED_AT
    in_turn = arguments | dict(BLOCK=TURNS.slots, BLOCK_WORDS=min(TURNS.words, triton.next_power_of_2(words)))
    turns = -(-strided_grid(site.layout.slots * rows, TURNS.slots, site.gate.device) // rows)
    lookers = -(-strided_grid(programs.scanners * rows, 1, site.gate.device) // (LOOKED_BY * rows))
    made = [
        (kernels.verify_layers_kernel, arguments, programs.writers + lookers, VERIFY_WARPS),
        (kernels.verify_turns_kernel, in_turn, turns, TURNS.warps),
    ]
    return _bound(group, made, [None] * rows, _indices(group, index_at))


def _behind(
    group: _Group,
    ops: int,
    tensors: Sequence[torch.Tensor | None],
    index_at: int,
    values_at: int,
) -> _Launches:
    first, rows, positions = group.parts[0], len(group.parts), tensors[-1]
    layout, n, sources = first.site.layout, group.tokens.n, _indices(group, index_at)
    last = ends_of_rows(positions, layout.rows, n) if layout.has_rows else None
    arguments = record_args(first, first, group.tokens, last, ops)
    if last is not None and positions is not None:
        sources["last_ptr"] = len(tensors) - 1, last.data_ptr() - positions.data_ptr()
    else:
        arguments["last_ptr"] = first.site.half.rows  # any: it is not read
    operands = [
        None if part.operand is None else values_at + number
        for part, number in zip(group.parts, group.numbers, strict=True)
    ]
    arguments["OPERANDS_ALIGNED"] = all(p.operand is None or p.operand.base.data_ptr() % 16 == 0 for p in group.parts)
    programs = -(-strided_grid(n * rows, FEW.slots, first.site.gate.device) // rows)
    return _bound(group, [(kernels.record_layers_kernel, arguments, programs, FEW.warps)], operands, sources)


def _indices(group: _Group, index_at: int) -> dict[str, tuple[int, int]]:
    """Where the index tensors are among those of a call, by argument."""
    return {name: (index_at + number, 0) for name, (_, number) in group.tokens.found.items()}


def _bound(
    group: _Group,
    launches: Sequence[tuple[Any, Mapping[str, Any], int, int]],
    operands: Sequence[int | None],
    sources: Mapping[str, tuple[int, int]],
) -> _Launches:
    """
    Args:
        launches: kernel, arguments, some of which it may not take, programs for each half, and warps.
    """
    device, found = group.parts[0].site.gate.device, group.tokens.found
    of_layers: dict[str, Any] = {"ALIGNED": all(part.geometry.base.data_ptr() % 16 == 0 for part in group.parts)}
    for name in ("a", "b"):
        place = found.get(f"{name}_ptr")
        of_layers[f"{name}_layer"] = 0 if place is None else group.steps[place[1]]
    bound = []
    for kernel, arguments, programs, warps in launches:
        given = {k: v for k, v in arguments.items() if k in parameters_of(kernel.fn) and k not in sources}
        launch = BoundLaunch(kernel, device, given | of_layers, ("table_ptr", *sources), warps)
        bound.append((launch, (programs, len(group.parts), 1)))
    words = array("q")
    for part in group.parts:
        words.extend(table_row(part.site, part.geometry.base.data_ptr()))
    for part, number in zip(group.parts, group.numbers, strict=True):
        words.extend((0, (part.operand or part.geometry).slot_strides[1], number // HALVES))
    return _Launches(bound, words, group.numbers, operands, list(sources.values()))

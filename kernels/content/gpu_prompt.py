"""The checks around a write of many tokens that a graph shows, such as a prompt's, on a GPU: a launch for each step.

With as many tokens no program can look at all of them, so the slots are computed first.  See :mod:`.gpu_write`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..bound_launch import BoundLaunch
from ..buffers import Site
from ..checks import Check, Phase
from ..slots.positions import ends_of_rows
from ..writes import gpu as writes
from ..writes import triton_resolve
from ..writes.geometry import Geometry, geometry_of
from ..writes.gpu import BLOCK_TOKENS, TokenGrid
from ..writes.plan import WritePlan
from . import triton_half
from . import triton_layer as records
from .gpu_layer import Part, in_launches, record_args, record_grid, record_launch
from .kept_launches import Launch, again, first, keep, scratch_of, seen
from .launch_args import BLOCK_SLOTS, PLAN_TOKENS, plan_args, scan_args

#: Triton's default, which these kernels have always had.
WARPS = 4


def verify_write(
    sites: Sequence[Site],
    views: Sequence[torch.Tensor],
    plans: Sequence[WritePlan],
    tokens: TokenGrid,
    form: tuple[Any, ...],
    tensors: Sequence[torch.Tensor | None],
) -> None:
    """The steps of :func:`.gpu_write.verify_write`.

    Args:
        form: of ``tensors``, by which the launches are kept: views and indices.
    """
    n, layout = tokens.n, sites[0].layout
    words = 2 * n + -(-layout.rows // 2)
    made = _Steps(sites[0], tokens, tensors, len(views), words)
    starts = None
    if layout.has_rows:
        starts = made.scratch[2 * n :].view(torch.int32)[: layout.rows]
        arguments = dict(n=n, positions=layout.positions, BLOCK=BLOCK_TOKENS)
        made.launch(triton_resolve.first_kernel, layout.rows, arguments, slot_ptr=made.slots, first_ptr=starts)
    ops = 1
    for i, (site, view, plan) in enumerate(zip(sites, views, plans, strict=True)):
        arguments = plan_args(site, n, plan.write_id, Phase.PRE)
        made.launch(triton_half.plan_kernel, -(-n // PLAN_TOKENS), arguments, slot_ptr=made.slots, raw_ptr=made.raw)
        made.scan(site, geometry_of(view, layout.slot_axes), i, starts, plan, ops)
        ops = 0
    keep(sites[0], form, made.launches, words)


def record_write(
    sites: Sequence[Site],
    views: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor | None],
    plans: Sequence[WritePlan],
    tokens: TokenGrid,
    extent: Sequence[int],
    positions: torch.Tensor | None,
    form: tuple[Any, ...],
    tensors: Sequence[torch.Tensor | None],
) -> None:
    """The steps of :func:`.gpu_write.record_write`."""
    n, layout = tokens.n, sites[0].layout
    wanted = [value if site.checks & Check.OPERAND else None for site, value in zip(sites, values, strict=True)]
    rows = [
        None if value is None else plan.rows_of(site.layout, value, n, tokens.shape)
        for site, value, plan in zip(sites, wanted, plans, strict=True)
    ]
    values_at = len(tensors) - 1 - len(values)
    if not all(map(_is_view, rows, wanted)):
        tensors = (*tensors[:values_at], *rows, positions)
        form = seen("record rows", sites, tensors, extent)
        if again(sites[0], form, tensors):
            return
    made = _Steps(sites[0], tokens, tensors, len(views), 2 * n)
    ends = ends_of_rows(positions, layout.rows, n) if layout.has_rows else None
    parts = []
    for site, view, row in zip(sites, views, rows, strict=True):
        if layout.has_rows:
            made.rows(site, ends, len(tensors) - 1)
        operand = None if row is None else geometry_of(row, (0,))
        parts.append(Part(site, geometry_of(view, site.layout.slot_axes), operand))
    place = {id(part): i for i, part in enumerate(parts)}
    ops = 1
    for a, b in in_launches(parts):
        bases = [(part.geometry.base, place[id(part)]) for part in (a, b)]
        operands = [operand_of(part, place[id(part)], values_at) for part in (a, b)]
        arguments = record_args(a, b, n, plans[-1].write_id, ops, planned=False) | dict(n=n)
        del arguments["base"], arguments["other_base"]
        changing = ("base", "other_base", "value_base", "other_value_base", "slot_ptr")
        bound = record_launch(records.record_kernel, made.device, arguments, changing, n)
        given = [*bases, *operands, (made.slots, len(tensors))]
        made.launches.append(first(bound, record_grid(n, made.device, 1 if a is b else 2), given, made.tensors))
        ops = 0
    keep(sites[0], form, made.launches, 2 * n)


def _is_view(row: torch.Tensor | None, value: torch.Tensor | None) -> bool:
    if row is None or value is None:
        return True
    return bool(row.untyped_storage()._cdata == value.untyped_storage()._cdata)


def indices_of(tokens: TokenGrid, after: int) -> list[tuple[torch.Tensor, int]]:
    """The index tensors of a launch, with their numbers among a call's tensors."""
    return [(indices, after + number) for indices, number in tokens.found.values()]


def operand_of(part: Part, place: int, values_at: int) -> tuple[torch.Tensor, int]:
    """Where the operand of a half starts; the half itself, if there is none."""
    if part.operand is None:
        return part.geometry.base, place
    return part.operand.base, values_at + place


class _Steps:
    """The launches of one call, made for the first time; the first one fills ``slots`` and ``raw``.

    Attributes:
        tensors: of the call, with the scratch memory behind them.
    """

    def __init__(self, site: Site, tokens: TokenGrid, tensors: Sequence[torch.Tensor | None], halves: int, words: int):
        scratch = scratch_of(site, words)
        assert scratch is not None
        self.scratch, self.device, self.tensors = scratch, site.gate.device, (*tensors, scratch)
        self.slots, self.raw = scratch[: tokens.n], scratch[tokens.n : 2 * tokens.n]
        self.launches: list[Launch | None] = []
        arguments = writes.resolve_args(tokens, site.gate)
        changing = ("slot_ptr", "raw_ptr", *tokens.found)
        bound = BoundLaunch(triton_resolve.resolve_kernel, self.device, arguments, changing, WARPS)
        mine = len(tensors)
        given = [(self.slots, mine), (self.raw, mine), *indices_of(tokens, halves)]
        grid = (-(-tokens.n // BLOCK_TOKENS), 1, 1)
        self.launches.append(first(bound, grid, given, self.tensors))

    def launch(self, kernel: Any, programs: int, arguments: dict[str, Any], **scratch: torch.Tensor) -> None:
        """A launch of which only the scratch memory changes."""
        bound = BoundLaunch(kernel, self.device, arguments, tuple(scratch), WARPS)
        given = [(tensor, len(self.tensors) - 1) for tensor in scratch.values()]
        self.launches.append(first(bound, (programs, 1, 1), given, self.tensors))

    def scan(
        self, site: Site, geometry: Geometry, place: int, starts: torch.Tensor | None, plan: WritePlan, ops: int
    ) -> None:
        """Content of the due slots of a half."""
        arguments = scan_args(
            site, geometry, triton_half.VERIFY, ops, plan.write_id, site.layout.has_rows, plan.own_rows
        )
        arguments |= dict(planned_ptr=site.half.digest, PLANNED=False, first_ptr=site.half.rows)
        given = [(geometry.base, place)]
        changing = ["base"]
        del arguments["base"]
        if starts is not None:
            del arguments["first_ptr"]
            changing.append("first_ptr")
            given.append((starts, len(self.tensors) - 1))
        bound = BoundLaunch(triton_half.scan_kernel, self.device, arguments, changing, WARPS)
        grid = (-(-site.layout.slots // BLOCK_SLOTS), 1, 1)
        self.launches.append(first(bound, grid, given, self.tensors))

    def rows(self, site: Site, ends: torch.Tensor | None, place: int) -> None:
        """How far the rows go that were written to."""
        arguments = dict(
            n=self.slots.shape[0],
            rows_ptr=site.half.rows,
            positions=site.layout.positions,
            last_stride=ends.stride(0) if ends is not None else 0,
            moved=-1,
            SOURCE=triton_resolve.FROM_INDICES if ends is None else triton_resolve.FROM_POSITIONS,
            BLOCK=BLOCK_TOKENS,
        )
        given, changing = [(self.slots, len(self.tensors) - 1)], ["slot_ptr"]
        if ends is None:
            arguments["last_ptr"] = site.half.rows
        else:
            given.append((ends, place))
            changing.append("last_ptr")
        bound = BoundLaunch(triton_resolve.rows_kernel, self.device, arguments, changing, WARPS)
        self.launches.append(first(bound, (site.layout.rows, 1, 1), given, self.tensors))

"""The checks around a write that a graph shows, on a GPU: one launch before the write and one after it, for K and V.

For few tokens, as in a decode step; with more of them, see :mod:`.gpu_prompt`.  A site keeps the launches: a call only
looks whether its tensors lie in memory as those of an earlier one, and launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..bound_launch import BoundLaunch
from ..buffers import IdentityBuffers, Site
from ..checks import Check
from ..ring import BY_BUDGET
from ..slots.positions import ends_of_rows, per_row
from ..writes.geometry import geometry_of
from ..writes.gpu import TokenGrid, token_grid
from ..writes.layout import poison_mask
from ..writes.plan import WritePlan
from . import gpu_prompt, triton_write
from .gpu_layer import FEW, Part, in_launches
from .gpu_prompt import indices_of, operand_of
from .kept_launches import again, first, keep, seen
from .launch_args import BLOCK_SLOTS, digest_args, other_args, row_args, site_args, strided_grid

#: Tokens that each program looks at, by the size of the write.
TOKENS = (16, 64, 256)
MOST_TOKENS = TOKENS[-1]

VERIFY_WARPS = 4

#: Slots that a program scans for those that are due though it is not their turn, and slots times tokens that it
#: compares at once.
SCANNED, MOST_COMPARED = 1024, 4096

#: Of the programs that keep a device busy, one in so many shares the slots whose turn it is, for each half.  With 8 in
#: the place of 4, comparing everything in 16 requests of 4,096 tokens took 19.8 ms a step, not 17.8 (H200).
SHARED_BY = 4


def verify_write(
    sites: Sequence[Site],
    views: Sequence[torch.Tensor],
    plans: Sequence[WritePlan],
    index: Sequence[torch.Tensor],
    extent: Sequence[int],
) -> bool:
    """Bounds of a write to come and content of what is due, in the halves of a layer; whether this was done.

    What ``resolve``, ``check_plan``, ``first_positions`` and ``verify`` do for each half in turn.

    Args:
        plans: the same but for their numbers.
    """
    tensors = (*views, *index)
    form = seen("verify", sites, tensors, extent)
    if again(sites[0], form, tensors):
        return True
    tokens = tokens_of(sites, plans, index, extent)
    if tokens is None:
        return False
    if tokens.n > MOST_TOKENS:
        gpu_prompt.verify_write(sites, views, plans, tokens, form, tensors)
        return True
    write_ids = {id(site): plan.write_id for site, plan in zip(sites, plans, strict=True)}
    parts = [Part(site, geometry_of(view, site.layout.slot_axes)) for site, view in zip(sites, views, strict=True)]
    place = {id(part): i for i, part in enumerate(parts)}
    launches, ops = [], 1
    for a, b in in_launches(parts):
        programs = programs_of(a.site, tokens.n)
        arguments = verify_args(a, b, tokens, plans[0], write_ids[id(b.site)], ops, programs.scanners)
        changing = ("base", "other_base", *tokens.found)
        bound = BoundLaunch(triton_write.verify_write_kernel, a.site.gate.device, arguments, changing, VERIFY_WARPS)
        grid = (sum(programs), 1 if a is b else 2, 1)
        bases = [(part.geometry.base, place[id(part)]) for part in (a, b)]
        launches.append(first(bound, grid, [*bases, *indices_of(tokens, len(views))], tensors))
        ops = 0
    keep(sites[0], form, launches)
    return True


def record_write(
    sites: Sequence[Site],
    views: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor | None],
    plans: Sequence[WritePlan],
    index: Sequence[torch.Tensor],
    extent: Sequence[int],
    positions: torch.Tensor | None,
) -> bool:
    """Fingerprint the slots just written, in the halves of a layer; whether this was done.

    What ``resolve``, ``update_rows`` and ``record`` do for each half in turn.

    Args:
        plans: as for :func:`verify_write`, of writes whose bounds it has checked.
    """
    tensors = (*views, *index, *values, positions)
    form = seen("record", sites, tensors, extent)
    if again(sites[0], form, tensors):
        return True
    tokens = tokens_of(sites, plans, index, extent)
    if tokens is None:
        return False
    if tokens.n > MOST_TOKENS:
        gpu_prompt.record_write(sites, views, values, plans, tokens, extent, positions, form, tensors)
        return True
    parts = [
        written_part(site, view, value, plan, tokens)
        for site, view, value, plan in zip(sites, views, values, plans, strict=True)
    ]
    layout, last = sites[0].layout, None
    if layout.has_rows:
        last = ends_of_rows(positions, layout.rows, tokens.n)
    place, values_at = {id(part): i for i, part in enumerate(parts)}, len(views) + len(index)
    launches, ops = [], 1
    for a, b in in_launches(parts):
        arguments = record_args(a, b, tokens, last, ops)
        changing = ("base", "other_base", "value_base", "other_value_base", "last_ptr", *tokens.found)
        bound = BoundLaunch(triton_write.record_write_kernel, a.site.gate.device, arguments, changing, FEW.warps)
        grid = (strided_grid(tokens.n, FEW.slots, views[0].device), 1 if a is b else 2, 1)
        bases = [(part.geometry.base, place[id(part)]) for part in (a, b)]
        operands = [operand_of(part, place[id(part)], values_at) for part in (a, b)]
        ends = (last, len(tensors) - 1) if last is not None else bases[0]
        given = [*bases, *operands, ends, *indices_of(tokens, len(views))]
        launches.append(first(bound, grid, given, tensors))
        ops = 0
    keep(sites[0], form, launches)
    return True


def written_part(
    site: Site, view: torch.Tensor, value: torch.Tensor | None, plan: WritePlan, tokens: TokenGrid
) -> Part:
    """A half that was written, and what it was given if that is compared."""
    operand = None
    if value is not None and site.checks & Check.OPERAND:
        operand = geometry_of(plan.rows_of(site.layout, value, tokens.n, tokens.shape), (0,))
    return Part(site, geometry_of(view, site.layout.slot_axes), operand)


def identify_write(
    site: Site,
    identity: IdentityBuffers,
    plan: WritePlan,
    index: Sequence[torch.Tensor],
    extent: Sequence[int],
    tokens: torch.Tensor,
    positions: torch.Tensor | None,
) -> bool:
    """Chain: of a write of one token a row; whether this was done.

    What ``resolve`` and ``identify`` do.

    Args:
        tokens: ``[rows, 1]``.
        positions: as the graph has them.
    """
    tensors = (*index, tokens, positions)
    form = seen("identify", [site], tensors, extent)
    if again(site, form, tensors):
        return True
    if tokens.dim() != 2 or tokens.shape[1] != 1 or not site.layout.has_rows:
        return False
    grid = tokens_of([site], [plan], index, extent)
    if grid is None or grid.n != tokens.numel() or grid.n > MOST_TOKENS:
        return False
    given = per_row(positions, grid.n, 1)
    bound = _bound_identify(site, identity, grid, tokens, given)
    where = (given, len(tensors) - 1) if given is not None else (tokens, len(index))
    launch = first(bound, (1, 1, 1), [(tokens, len(index)), where, *indices_of(grid, 0)], tensors)
    keep(site, form, [launch])
    return True


def tokens_of(
    sites: Sequence[Site], plans: Sequence[WritePlan], index: Sequence[torch.Tensor], extent: Sequence[int]
) -> TokenGrid | None:
    """How the kernels find the slots of a write; None if they do not take it."""
    site, plan = sites[0], plans[0]
    if plan.covers_all or not site.layout.slots or any(s.space is not None for s in sites):
        return None
    return token_grid(plan, site.layout, list(index), list(extent), site.gate.device)


def _token_args(tokens: TokenGrid, unused: torch.Tensor) -> dict[str, Any]:
    return dict(
        n=tokens.n,
        g1=tokens.grid[1],
        g2=tokens.grid[2],
        WRITE_AXES=tokens.axes,
        WRAPS=tokens.wraps,
        SKIPS=tokens.skips,
        TOKENS=_padded(tokens.n),
        **tokens.arguments(unused),
    )


class Programs(NamedTuple):
    """Programs of a check before a write, see :func:`.triton_write.verify_write_kernel`."""

    writers: int
    scanners: int
    turns: int


def programs_of(site: Site, n: int) -> Programs:
    """Those for a half that ``n`` tokens are written to."""
    layout = site.layout
    rows, positions = (layout.rows, layout.positions) if layout.has_rows else (1, layout.slots)
    scanners = rows * -(-positions // _slots_of_scanner(site, n))
    turns = -(-strided_grid(layout.slots, BLOCK_SLOTS, site.gate.device) // SHARED_BY)
    return Programs(-(-n // BLOCK_SLOTS), scanners, turns)


def _slots_of_scanner(site: Site, n: int) -> int:
    """Fewer where it also looks which of them are replaced."""
    return SCANNED if site.half.baseline is None else MOST_COMPARED // _padded(n)


def _padded(n: int) -> int:
    return next(size for size in TOKENS if n <= size)


def verify_args(
    a: Part, b: Part, tokens: TokenGrid, plan: WritePlan, write_id: int, ops: int, scanners: int
) -> dict[str, Any]:
    """The arguments of the check before a write, all but addresses of tensors of the call."""
    site, other = a.site, b.site
    control, kept = site.control, site.half.baseline is not None
    return dict(
        gate_ptr=site.gate,
        ops=ops,
        counters_ptr=site.counters,
        baseline_ptr=site.half.baseline if kept else site.half.digest,
        other_baseline_ptr=other.half.baseline if kept else other.half.digest,
        stamp_ptr=control.stamps,
        stamp_count=control.stamps.shape[1],
        write_id=write_id,
        box_ptr=control.blackbox if control.blackbox is not None else control.words,
        every=site.verify_every,
        slot_stride0=a.geometry.slot_strides[0],
        slot_stride1=a.geometry.slot_strides[1],
        OWN_ROWS=site.layout.has_rows and plan.own_rows,
        BY_BUDGET=site.verify_every == BY_BUDGET,
        KEEPS=kept,
        LENIENT=site.lenient,
        CONTENT=bool(site.checks & Check.CONTENT),
        CHECK=int(Check.BOUNDS),
        BOUNDS=bool(site.checks & Check.BOUNDS),
        HAS_BOX=control.blackbox is not None,
        WIDE=_slots_of_scanner(site, tokens.n),
        scanners=scanners,
        UNIT=a.geometry.unit,
        ELEMENT=site.layout.dtype.itemsize,
        **_token_args(tokens, site.gate),
        **row_args(a.geometry),
        **digest_args(site),
        **site_args(site),
        **other_args(other),
    )


def record_args(a: Part, b: Part, tokens: TokenGrid, last: torch.Tensor | None, ops: int) -> dict[str, Any]:
    """The arguments of the record behind a write, all but addresses of tensors of the call."""
    site, operand = a.site, a.operand or a.geometry
    mask, bits = poison_mask(site.layout.dtype) if site.checks & Check.POISON else (0, 1)
    return dict(
        last_stride=last.stride(0) if last is not None else 0,
        gate_ptr=site.gate,
        ops=ops,
        counters_ptr=site.counters,
        slot_stride0=a.geometry.slot_strides[0],
        slot_stride1=a.geometry.slot_strides[1],
        token_stride=operand.slot_strides[1],
        other_token_stride=(b.operand or b.geometry).slot_strides[1],  # K is often a tensor, V a part of one
        HAS_LAST=last is not None,
        OPERAND=a.operand is not None,
        UNIT=a.geometry.unit,
        OPERAND_UNIT=operand.unit,
        ELEMENT=site.layout.dtype.itemsize,
        POISON_MASK=mask,
        POISON_BITS=bits,
        **_token_args(tokens, site.gate),
        **row_args(a.geometry),
        **{f"v_{k}": v for k, v in row_args(operand).items()},
        **digest_args(site, FEW.slots, FEW.words),
        **site_args(site),
        **other_args(b.site),
    )


def _bound_identify(
    site: Site, identity: IdentityBuffers, grid: TokenGrid, tokens: torch.Tensor, given: torch.Tensor | None
) -> BoundLaunch:
    arguments = dict(
        token_stride=tokens.stride(0),
        position_stride=given.stride(0) if given is not None else 0,
        gate_ptr=site.gate,
        ops=1,
        who_ptr=identity.tokens,
        where_ptr=identity.positions,
        chain_ptr=identity.chain,
        HAS_POSITIONS=given is not None,
        REPORT=bool(site.checks & Check.CHAIN) and not site.lenient,
        CHECK=int(Check.CHAIN),
        **_token_args(grid, site.gate),
        **site_args(site),
    )
    changing = ("token_ptr", "position_ptr", *grid.found)
    return BoundLaunch(triton_write.identify_write_kernel, site.gate.device, arguments, changing, warps=4)

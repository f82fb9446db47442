"""The checks on a GPU: Triton kernels and their launches.  Bit-equal to :mod:`.naive`.

No launch depends on data: grids are fixed by shapes, lengths and steps are read from device memory, and
nothing waits for the device, so every function here may run while a CUDA graph is captured.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..bound_launch import BoundLaunches
from ..buffers import Count, IdentityBuffers, Site
from ..checks import Check, Phase
from ..compile_ahead import launch_or_compile
from ..counting import count_op
from ..slots.identity import identify_with
from ..writes.geometry import geometry_of, on_device
from ..writes.gpu import first_positions as first_positions
from ..writes.gpu import resolve as resolve
from ..writes.gpu import update_rows
from . import triton_half as tk
from .gpu_layer import record_halves as record_halves
from .gpu_layer import verify_halves as verify_halves
from .gpu_write import identify_write as identify_write
from .gpu_write import record_write as record_write
from .gpu_write import verify_write as verify_write
from .gpu_write_layers import record_layers as record_layers
from .gpu_write_layers import verify_layers as verify_layers
from .launch_args import BLOCK_SLOTS, PLAN_TOKENS, plan_args, scan_args, site_args


def begin(control_words: torch.Tensor, gate: torch.Tensor, counts: torch.Tensor | None = None) -> None:
    """Start one call of a guarded graph.  See :func:`.cpu.begin`."""
    counted, tensors = counts is not None, (control_words, gate, control_words if counts is None else counts)
    launches, at = _begin_launches(tk.begin_kernel, gate.device), tuple(t.data_ptr() for t in tensors)
    known = counted, at[0] & 15, at[1] & 15, at[2] & 15
    if not launches.again(known, (1, 1, 1), at):
        launches(counted, (1, 1, 1), tensors, lambda: dict(COUNTED=counted), known)


@functools.cache
def _begin_launches(kernel: Any, device: torch.device) -> BoundLaunches:
    return BoundLaunches(kernel, device, ("words_ptr", "gate_ptr", "counts_ptr"), warps=4)


def check_plan(site: Site, slots: torch.Tensor, raw: torch.Tensor, write_id: int, phase: Phase) -> None:
    """Bounds: indices outside the pool, and two tokens sent to one slot.  See :func:`.cpu.check_plan`."""
    n = slots.shape[0]
    if n == 0:
        return
    with on_device(slots):
        launch_or_compile(
            tk.plan_kernel,
            (-(-n // PLAN_TOKENS),),
            slot_ptr=slots.contiguous(),
            raw_ptr=raw.contiguous(),
            **plan_args(site, n, write_id, phase),
        )


def _scan(
    site: Site,
    view: torch.Tensor,
    first: torch.Tensor | None,
    mode: int,
    ops: int = 0,
    coming: int | None = None,
    planned: torch.Tensor | None = None,
    own_rows: bool = False,
) -> None:
    """One pass over all slots of the half."""
    layout = site.layout
    if layout.slots == 0:
        count_op(site.gate, ops)
        return
    geometry = geometry_of(view, layout.slot_axes)
    has_first = first is not None and layout.has_rows
    with on_device(view):
        launch_or_compile(
            tk.scan_kernel,
            (-(-layout.slots // BLOCK_SLOTS),),
            first_ptr=first if first is not None and has_first else site.half.rows,
            planned_ptr=planned if planned is not None else site.half.digest,
            PLANNED=planned is not None,
            **scan_args(site, geometry, mode, ops, coming, has_first, own_rows),
        )


def verify(
    site: Site,
    view: torch.Tensor,
    first: torch.Tensor | None,
    ops: int = 0,
    coming: int | None = None,
    in_flight: bool = False,
    own_rows: bool = False,
) -> None:
    """Content: compare every due slot with its digest.  See :func:`.cpu.verify`."""
    if site.space is None:
        _scan(site, view, first, tk.VERIFY, ops, coming, own_rows=own_rows)
    else:
        _verify_listed(site, view, ops, in_flight)


def _verify_listed(site: Site, view: torch.Tensor, ops: int, in_flight: bool) -> None:
    """The slots that the walk of this forward listed; nothing is adopted, since an engine reports its other writes."""
    if site.checks & Check.CONTENT and site.layout.slots:
        verify_halves([site], [view], ops, in_flight)
        return
    site.counters[Count.VERIFY_RUNS : Count.VERIFY_RUNS + 1].add_(1)
    count_op(site.gate, ops)


def adopt(site: Site, view: torch.Tensor, first: torch.Tensor) -> None:
    """Record, unverified, the unrecorded slots below the coming write."""
    _scan(site, view, first, tk.ADOPT)


def snapshot(site: Site, view: torch.Tensor) -> None:
    """Keep the digest of every slot: the state before a write that we cannot read.  See :func:`.cpu.snapshot`."""
    _scan(site, view, None, tk.SNAPSHOT)


def record_changed(site: Site, view: torch.Tensor, planned: torch.Tensor | None = None) -> None:
    """Fingerprint the slots whose bytes differ from :func:`snapshot`.  See :func:`.cpu.record_changed`."""
    _scan(site, view, None, tk.CHANGED, planned=planned)


def record(
    site: Site,
    view: torch.Tensor,
    slots: torch.Tensor,
    values: torch.Tensor | None,
    write_id: int,
    last_position: torch.Tensor | None = None,
    moved: int | None = None,
    ops: int = 0,
    planned: bool = False,
) -> None:
    """Fingerprint the slots just written.  See :func:`.cpu.record`."""
    update_rows(site.layout, site.half.rows, slots, last_position, moved)
    record_halves([site], [view], slots, [values], write_id, ops, planned)


def identify(
    site: Site, identity: IdentityBuffers, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
) -> None:
    """Chain: does a decoded token's position follow its predecessor's?  See :mod:`.slots.identity`."""
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
        launch_or_compile(
            tk.report_kernel,
            (-(-n // 128),),
            mask.contiguous(),
            slots.contiguous(),
            stored.contiguous(),
            found.contiguous(),
            detail.contiguous(),
            n,
            phase=int(phase),
            check=int(check),
            BLOCK=128,
            **site_args(site),
        )

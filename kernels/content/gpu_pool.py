"""The launches that compare the bytes of slots in all tensors of an engine's pool.  See :mod:`.pool`."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ..bound_launch import BoundLaunch, BoundLaunches
from ..buffers import Site
from ..checks import Phase
from ..writes.geometry import Geometry, geometry_of
from .digest import coefficients
from .gpu_layer import REGISTERS, list_args, most_listed
from .launch_args import row_args, strided_grid
from .pool import PoolBytes
from .triton_half import as_signed
from .triton_listed import verify_pool_kernel
from .triton_pool import fingerprint_slots_kernel, verify_slots_kernel

#: As of the check of listed slots, see :mod:`.gpu_layer`.
SLOTS, WORDS = 8, 128


def prepare(pool: PoolBytes) -> None:
    """Make the tables of the launches.  Not while a CUDA graph is captured, which cannot copy them from the host.

    Tensors with the same memory layout take one launch: usually all of a pool's.
    """
    groups: list[tuple[Geometry, list[int]]] = []
    for i, (site, view) in enumerate(zip(pool.sites, pool.views, strict=True)):
        geometry = geometry_of(view, site.layout.slot_axes)
        for known, members in groups:
            if known.alike(geometry) and pool.sites[members[0]].layout == site.layout:
                members.append(i)
                break
        else:
            groups.append((geometry, [i]))
    for _, members in groups:
        rows = [table_row(pool.sites[i], pool.views[i].data_ptr()) for i in members]
        device = pool.views[0].device
        pool.table.append((torch.tensor(rows, dtype=torch.int64, device="cpu").to(device), tuple(members)))


def table_row(site: Site, address: int) -> list[int]:
    """A half in the table of a launch, see :data:`.triton_pool.TABLE_COLUMNS`."""
    seeds = as_signed(site.seed1), as_signed(site.seed2)
    shadow = site.half.rows.data_ptr(), site.counters.data_ptr()
    return [address, site.half.digest.data_ptr(), *seeds, site.half_id, *shadow]


def _aligned(pool: PoolBytes, members: tuple[int, ...]) -> bool:
    return all(pool.views[i].data_ptr() % 16 == 0 for i in members)


def verify_listed(pool: PoolBytes, in_flight: bool, stream: torch.cuda.Stream | None = None) -> None:
    """Content of the slots that the walk of this forward listed, in all layers.  See :func:`.pool.verify_listed`."""
    if not pool.table:
        prepare(pool)
    if not pool.launches:
        pool.launches.extend(_bind_listed(pool, table, members) for table, members in pool.table)
    for launch, grid in pool.launches:
        (launch if launch.ready else launch.first)(grid, (int(in_flight),), stream)


def _bind_listed(
    pool: PoolBytes, table: torch.Tensor, members: tuple[int, ...]
) -> tuple[BoundLaunch, tuple[int, int, int]]:
    site, view, space = pool.sites[members[0]], pool.views[members[0]], pool.space
    due = most_listed(site, space)
    programs = -(-strided_grid(due * len(members), SLOTS, view.device) // len(members))
    arguments = dict(
        table_ptr=table,
        HAS_ROWS=site.layout.has_rows,
        ALIGNED=_aligned(pool, members),
        **list_args(space),
        **_slot_args(pool, members),
    )
    launch = BoundLaunch(verify_pool_kernel, view.device, arguments, ("ahead",), warps=1, registers=REGISTERS)
    return launch, (programs, len(members), 1)


def _slot_args(pool: PoolBytes, members: tuple[int, ...]) -> dict[str, Any]:
    """The arguments of a launch that reports: from the pool, and from tensors with the same memory layout."""
    control = pool.space.control
    told = dict(words_ptr=control.words, ring_ptr=control.ring, capacity=control.capacity)
    return told | _row_args(pool, members)


def _row_args(pool: PoolBytes, members: tuple[int, ...]) -> dict[str, Any]:
    """Those of them that say where the rows of slots are."""
    site, view = pool.sites[members[0]], pool.views[members[0]]
    geometry, words = geometry_of(view, site.layout.slot_axes), site.layout.words
    return dict(
        coef_ptr=coefficients(words, view.device),
        slots_total=site.layout.slots,
        words_in_row=words,
        positions=site.layout.positions,
        slot_stride0=geometry.slot_strides[0],
        slot_stride1=geometry.slot_strides[1],
        TWO_AXES=site.layout.two_axes,
        UNIT=geometry.unit,
        PLANES=site.half.digest.shape[0],
        BLOCK=SLOTS,
        BLOCK_WORDS=min(WORDS, triton.next_power_of_2(words)),
        **row_args(geometry),
    )


def verify_slots(
    pool: PoolBytes,
    slots: torch.Tensor,
    count: torch.Tensor | None,
    owners: torch.Tensor | None,
    phase: Phase,
    positions: torch.Tensor | None = None,
) -> None:
    """Compare the bytes of slots with their digests.  See :func:`.pool.verify_slots`."""
    n, space = slots.shape[0], pool.space
    if n == 0:
        return
    if not pool.table:
        prepare(pool)
    if not pool.slot_launches:
        changing, device = ("slots_ptr", "n", "owners_ptr", "places_ptr"), space.block.device
        pool.slot_launches.extend(BoundLaunches(verify_slots_kernel, device, changing, warps=1) for _ in pool.table)
    whose = owners if owners is not None else space.counters
    where = positions if positions is not None else space.counters
    form = count.data_ptr() if count is not None else None, owners is not None, positions is not None, int(phase)
    slots = slots.contiguous()
    words = slots.data_ptr(), n, whose.data_ptr(), where.data_ptr()
    known = form, slots.dtype, whose.dtype, where.dtype, words[0] & 15, words[2] & 15, words[3] & 15
    for (table, members), launch in zip(pool.table, pool.slot_launches, strict=True):
        grid = -(-strided_grid(n * len(members), SLOTS, slots.device) // len(members)), len(members), 1
        if launch.again(known, grid, words):
            continue

        def others(table: torch.Tensor = table, members: tuple[int, ...] = members) -> dict[str, Any]:
            return dict(
                table_ptr=table,
                count_ptr=count if count is not None else space.listed_count,
                wide_ptr=space.block.view(torch.int64),
                HAS_COUNT=count is not None,
                HAS_OWNERS=owners is not None,
                HAS_PLACES=positions is not None,
                ALIGNED=_aligned(pool, members),
                PHASE=int(phase),
                **_slot_args(pool, members),
            )

        launch(form, grid, (slots, n, whose, where), others, known)


def fingerprint_slots(pool: PoolBytes, slots: torch.Tensor) -> None:
    """Keep the digests of slots as they are.  See :func:`.pool.fingerprint_slots`."""
    n, device = slots.shape[0], pool.space.block.device
    if n == 0:
        return
    if not pool.table:
        prepare(pool)
    if not pool.kept_launches:
        changing = "slots_ptr", "n"
        pool.kept_launches.extend(BoundLaunches(fingerprint_slots_kernel, device, changing, 1) for _ in pool.table)
    slots = slots.contiguous()
    for (table, members), launch in zip(pool.table, pool.kept_launches, strict=True):
        grid = -(-strided_grid(n * len(members), SLOTS, device) // len(members)), len(members), 1

        def others(table: torch.Tensor = table, members: tuple[int, ...] = members) -> dict[str, Any]:
            return dict(table_ptr=table, ALIGNED=_aligned(pool, members), **_row_args(pool, members))

        launch(None, grid, (slots, n), others)

"""Compares the bytes of slots in every tensor of an engine's pool at once: around a forward, and before a release.

In plain torch, for the CPU; on a GPU :mod:`.gpu_pool` does the same in a launch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..buffers import Site
from ..checks import Check, Phase
from ..findings import Findings
from ..slots.space import SlotSpace
from ..turns import taking_turns
from .cpu import digest_slots, packed, verify_halves


@dataclasses.dataclass(frozen=True, eq=False)
class PoolBytes:
    """All tensors of an engine's pool.

    Attributes:
        sites, views: one for each of the pool's halves.
    """

    sites: tuple[Site, ...]
    views: tuple[torch.Tensor, ...]
    space: SlotSpace
    table: list[tuple[torch.Tensor, tuple[int, ...]]] = dataclasses.field(default_factory=list)  # of the launches
    launches: list[Any] = dataclasses.field(default_factory=list)  # of :func:`verify_listed`, bound
    slot_launches: list[Any] = dataclasses.field(default_factory=list)  # of :func:`verify_slots`, one a table
    kept_launches: list[Any] = dataclasses.field(default_factory=list)  # of :func:`fingerprint_slots`, one a table


def verify_listed(pool: PoolBytes, in_flight: bool, stream: torch.cuda.Stream | None = None) -> None:
    """Compare the bytes of the slots that the walk of this forward listed with their digests, in all halves.

    What :func:`.cpu.verify_halves` does for the halves of a layer.

    Args:
        in_flight: the forward reads slots that it has yet to write itself.
        stream: where to launch; None for the current one.
    """
    verify_halves(pool.sites, pool.views, 0, in_flight)


@taking_turns
def verify_slots(
    pool: PoolBytes,
    slots: torch.Tensor,
    count: torch.Tensor | None,
    owners: torch.Tensor | None,
    phase: Phase,
    positions: torch.Tensor | None = None,
) -> None:
    """Compare the bytes of slots with their digests, in all halves, and keep what was found, so that it is reported
    once.

    Slots without a digest are skipped; the caller decides which ones are due, ``verify_fraction`` does not apply.

    Args:
        slots: integer ``[n]``, each slot once; negative ones are skipped.
        count: int32 ``[1]``, how many of them there are, the first ones; None for all.
        owners: int64 ``[n]``, the slots' owners for reports; None for the current ones.
        phase: for the report.
        positions: as ``owners``, the positions in them.
    """
    slots = slots if count is None else slots[: int(count)]
    there = slots >= 0
    slots = slots[there].to(torch.int64)
    if not slots.numel():
        return
    space = pool.space
    owners = space.owners[slots] if owners is None else owners[there]
    positions = space.positions[slots] if positions is None else positions[there]
    for site, view in zip(pool.sites, pool.views, strict=True):
        stored, found = site.half.digest[:, slots], digest_slots(site, view, slots)
        recorded = stored[0] != 0
        bad = recorded & (stored != found).any(0)
        if not bool(bad.any()):  # as almost always
            continue
        findings = Findings(recorded, space.checks)
        findings.add(Check.CONTENT, bad, packed(stored), packed(found))
        findings.report(space.control, site.half_id, phase, slots, positions, owners)
        site.half.digest[:, slots] = torch.where(recorded, found, stored)


@taking_turns
def fingerprint_slots(pool: PoolBytes, slots: torch.Tensor) -> None:
    """Keep the digests of the bytes of slots as they are, in all halves.

    Args:
        slots: integer ``[n]``; those that the pool does not have are skipped.
    """
    slots = slots[(slots >= 0) & (slots < pool.space.slots)].to(torch.int64)
    for site, view in zip(pool.sites, pool.views, strict=True):
        site.half.digest[:, slots] = digest_slots(site, view, slots)

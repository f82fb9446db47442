"""The identity checks of slots that a prefix cache lists: what a forward that took the prefix would check.

Vectorised torch without host syncs, on every device; the checks themselves are those of :mod:`.checks`.
"""

from __future__ import annotations

import dataclasses

import torch

from ..checks import Phase, Why
from ..findings import Findings
from .checks import _check_identity, _check_place
from .space import RequestPlan, SlotSpace
from .tokens import kept_bits

#: Slots processed together; bounds the scratch memory.
CHUNK = 1 << 17


@dataclasses.dataclass(frozen=True)
class ListedSlots:
    """Slots in the order in which a prefix cache lists them, int64 ``[n]`` each.

    Attributes:
        slots: as they are listed.
        positions: of their tokens.
        before: the slot of the token before; -1 if unknown.
        owners: hash of the id of their owner; 0 if unknown.
        namespaces: of the prefix that each is in.
        tokens: what the cache takes the slot's token to be; -1 where it does not say.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    before: torch.Tensor
    owners: torch.Tensor
    namespaces: torch.Tensor
    tokens: torch.Tensor

    def split(self, size: int) -> list[ListedSlots]:
        """The same in parts of so many slots."""
        columns = [getattr(self, field.name).split(size) for field in dataclasses.fields(self)]
        return [ListedSlots(*part) for part in zip(*columns, strict=True)]


def check_listed(space: SlotSpace, listed: ListedSlots) -> None:
    """Is each slot one that a request may take, and does it hold the token that belongs there?"""
    for part in listed.split(CHUNK):
        if part.slots.numel():
            _check_part(space, part)


def _check_part(space: SlotSpace, listed: ListedSlots) -> None:
    """Each slot stands for a request that reads it and nothing else."""
    plan = _one_each(listed)
    slot, position = listed.slots.unsqueeze(1), listed.positions.unsqueeze(1)
    outside = (slot < 0) | (slot >= space.slots)
    at = torch.where(outside, space.nowhere, slot)
    findings = Findings(torch.ones_like(outside), space.checks)
    _check_place(findings, space, plan, slot, at, outside)
    token, expected = space.tokens[at].to(torch.int64), listed.tokens.unsqueeze(1)
    findings.add(Why.WRONG_TOKEN, (expected >= 0) & (token != kept_bits(expected)), expected, token)
    before = listed.before.unsqueeze(1)
    known = (before >= 0) & (before < space.slots)
    _check_identity(findings, space, plan, at, torch.where(known, before, space.nowhere), position)
    whose = torch.where(plan.owners.unsqueeze(1) != 0, plan.owners.unsqueeze(1), space.owners[at])
    findings.report(
        space.control,
        space.space_id,
        Phase.SWEEP,
        slot,
        position,
        torch.where(outside, 0, whose),
        torch.where(outside, -1, token),
    )


def _one_each(listed: ListedSlots) -> RequestPlan:
    n, device = listed.slots.shape[0], listed.slots.device
    none = torch.zeros(n, dtype=torch.int64, device=device)
    return RequestPlan(
        counts=torch.zeros(3, dtype=torch.int64, device=device),
        rows=none,
        prefix_lens=none,
        extend_lens=none,
        tokens=none[:0],
        slots=none[:0],
        positions=None,
        owners=listed.owners,
        namespaces=listed.namespaces,
        table=none[:0].unsqueeze(1),
        columns=0,
    )

"""What a forward is going to write, known before it reads: marks of slots, and which added token goes where first.

Vectorised torch without host syncs; the kernels leave the same marks (:mod:`.triton_writes`).
"""

from __future__ import annotations

import torch

from .space import Flag, RequestPlan, SlotSpace
from .tokens import token_requests


def plan_writes(space: SlotSpace, plan: RequestPlan) -> None:
    """Note the slots that the forward writes, before its walk.

    Prefixes that are written in flight are legal, so their slots are not marked.
    """
    if plan.slots.shape[0] == 0 or plan.rows.shape[0] == 0:
        return
    at = _entries(space, plan)
    number = torch.arange(at.shape[0], device=at.device) - space.epoch()
    space.planned.scatter_reduce_(0, at, torch.where(at == space.nowhere, 0, number), "amin")
    if not plan.in_flight:
        space.flags[at] = space.flags[at] | int(Flag.PLANNED)


def unmark_writes(space: SlotSpace, plan: RequestPlan) -> None:
    """The walk is over."""
    at = _entries(space, plan)
    space.flags[at] = space.flags[at] & ~int(Flag.PLANNED)


def _entries(space: SlotSpace, plan: RequestPlan) -> torch.Tensor:
    """int64 ``[n]``: the entry of each added token's slot, ``space.nowhere`` for padding and what is outside."""
    slot, real = plan.slots.to(torch.int64), token_requests(plan)[2]
    return torch.where(real & (slot >= 0) & (slot < space.slots), slot, space.nowhere)


def planned_token(space: SlotSpace, slots: torch.Tensor) -> torch.Tensor:
    """int64, the shape of ``slots``: which added token of the running forward goes there first; negative or beyond all
    tokens where none does."""
    return space.planned[slots] + space.epoch()


def is_planned(space: SlotSpace, slots: torch.Tensor) -> torch.Tensor:
    """bool: slots that the plan of the running forward writes."""
    token = planned_token(space, slots)
    return (token >= 0) & (token < 1 << 32)


def lost_writes(space: SlotSpace, slots: torch.Tensor, in_flight: bool) -> torch.Tensor:
    """bool ``[n]``: of listed slots without a digest, those that must have one, as a forward stored a token there.

    Args:
        in_flight: the running forward writes some of what it reads, and has not yet.
    """
    named = (space.flags[slots] & int(Flag.NAMELESS)) == 0
    return named & ~is_planned(space, slots) if in_flight else named


def rival_writers(space: SlotSpace, plan: RequestPlan, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of slots that requests read, those that another request of the batch writes, and its owner.

    Two entries of a batch with one owner are one request, such as the branches of a draft.

    Args:
        at: int64 ``[bs, positions]``, entries of slots.

    Returns:
        bool and int64, shaped like ``at``.
    """
    marked = (space.flags[at] & int(Flag.PLANNED)) != 0
    if plan.slots.shape[0] == 0 or (not marked.is_cuda and not bool(marked.any())):
        return torch.zeros_like(marked), torch.zeros_like(at)
    token, n = planned_token(space, at), plan.slots.shape[0]
    request, _, real = token_requests(plan)
    inside = token.clamp(0, n - 1)
    writer, owner = request[inside], plan.owners[request[inside]]
    reader = torch.arange(at.shape[0], device=at.device).unsqueeze(1)
    stranger = (plan.owners == 0).unsqueeze(1) | (owner != plan.owners.unsqueeze(1))
    return marked & (token == inside) & real[inside] & (writer != reader) & stranger, owner

"""Whether a slot holds what the prefix of the request needs there that is about to read it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..kernels.slots.chain import mix_tensor
from ..kernels.slots.checks import first_read, table_slots
from ..kernels.slots.space import RequestPlan, SlotSpace
from ..kernels.slots.tokens import kept_bits

#: Requests, and positions of each, that are looked at.
REQUESTS, POSITIONS = 64, 1 << 17


def fits(space: SlotSpace, plan: RequestPlan, damaged: Iterable[int]) -> dict[int, bool]:
    """For slots that failed a check and that a request of the plan reads: whether the tokens in them are the request's.

    They are if each has its position, is the request's own token as far as its history is known, and follows the token
    before, as the chain has it; the token after them has to follow, too.  Nothing is said of a slot where neither the
    history nor a neighbour tells.
    """
    struck = torch.tensor(sorted(damaged), dtype=torch.int64, device=space.block.device)
    told: dict[int, bool] = {}
    for request in range(min(int(plan.counts[0]), plan.rows.shape[0], REQUESTS)):
        length = min(int(plan.prefix_lens[request]), POSITIONS)
        if length > 0 and 0 <= int(plan.rows[request]) < plan.table.shape[0]:
            for slot, fit in _of_request(space, plan, request, length, struck):
                told.setdefault(slot, fit)
    return told


def _of_request(
    space: SlotSpace, plan: RequestPlan, request: int, length: int, struck: torch.Tensor
) -> Iterable[tuple[int, bool]]:
    positions = torch.arange(length, device=struck.device)
    slots = table_slots(plan, torch.full_like(positions, request), positions)
    slots = torch.where((slots >= 0) & (slots < space.slots), slots, space.nowhere)
    oldest = int(first_read(space, torch.tensor(length)))  # what is older may have been given on
    hit = torch.isin(slots, struck) & (positions >= oldest)
    if not bool(hit.any()):
        return
    tokens, chain = space.tokens[slots].to(torch.int64), space.chain[slots]
    right = space.positions[slots] == positions
    known = torch.zeros_like(right)
    if plan.history is not None and plan.history_lens is not None:
        at = positions + space.token_offset
        known = at < min(int(plan.history_lens[request]), plan.history.shape[1])
        own = kept_bits(plan.history[request, at.clamp(max=plan.history.shape[1] - 1)])
        right &= ~known | (tokens == own)
    follows = torch.ones_like(right)
    follows[1:] = chain[1:] - mix_tensor(tokens[1:], space.positions[slots][1:].to(torch.int64)) == chain[:-1]
    follows[: oldest + 1] = True
    right &= follows
    hits, sound = hit.tolist(), right.tolist()
    for first, after in _runs(hits):
        ends = first > oldest or after < length
        if ends or bool(known[first:after].all()):
            whole = all(sound[first:after]) and (after >= length or sound[after])
            for slot in slots[first:after].tolist():
                yield slot, whole


def _runs(hits: list[bool]) -> Iterable[tuple[int, int]]:
    """First and one past the last of each run of true ones."""
    first = None
    for i, hit in enumerate([*hits, False]):
        if hit and first is None:
            first = i
        elif not hit and first is not None:
            yield first, i
            first = None

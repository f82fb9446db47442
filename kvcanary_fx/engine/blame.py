"""The record of a violation about a slot's bytes in an engine's pool: whose slot it is, and what is in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from ..kernels.checks import Check, Shown, how_shown
from ..kernels.ring import UNKNOWN, Ring
from ..kernels.slots import tokens
from ..kernels.slots.space import RequestPlan, SlotSpace
from ..reports.violation import HalfInfo, Violation, decode
from ..runtime.registry import PoolRegistry
from .guarded_pool import EnginePool
from .layouts.base import Layout
from .request_ids import RequestIds


class Blame:
    """Makes the records of the ring rows about an engine's pools."""

    def __init__(self, pools: Mapping[int, EnginePool], registry: PoolRegistry, ids: RequestIds):
        """
        Args:
            pools: by the number of their slot spaces.
        """
        self._pools, self._registry, self._ids = pools, registry, ids

    def pool_of(self, row: Sequence[int]) -> EnginePool | None:
        """The pool that a ring row is about; None if it is none of the engine's."""
        half = self._registry.by_id(row[Ring.HALF])
        number = half.space.space_id if half is not None and half.space is not None else row[Ring.HALF]
        return self._pools.get(number)

    def decode(
        self, row: Sequence[int], running: Mapping[int, RequestPlan], last: Mapping[int, RequestPlan]
    ) -> Violation | None:
        """The record of a ring row; None if it is not about a pool of the engine.

        Args:
            running, last: plans of the forward that is running and of the one before, by the number of the slot space.
        """
        pool, half = self._pools.get(row[Ring.HALF]), self._registry.by_id(row[Ring.HALF])
        if pool is not None:
            return _in_tokens(_decode_place(row, pool.info, self._ids), pool.declared.layout)
        if half is None or half.space is None:
            return None
        number = half.space.space_id
        pool, plan, before = self._pools[number], running.get(number), last.get(number)
        told = _decode_content(row, half.info, half.space, pool.came_with_transfer, plan, self._ids, before)
        return _in_tokens(told, pool.declared.layout)


def _in_tokens(violation: Violation, layout: Layout) -> Violation:
    """The record with the position of the token that its slot goes by."""
    if violation.position is None:
        return violation
    return dataclasses.replace(violation, position=layout.token_at(violation.position))


def _decode_place(row: Sequence[int], info: HalfInfo, ids: RequestIds) -> Violation:
    """The record of a ring row about a slot of a pool in all of its layers."""
    token = row[Ring.DETAIL]
    told = decode(row, info, token if token >= 0 else None, request=ids.name(row[Ring.REQUEST]))
    if how_shown(told.check, told.why) is not Shown.OWNER:
        return told
    return dataclasses.replace(told, owners=(ids.name(told.stored), ids.name(told.found)))


def _decode_content(
    row: Sequence[int],
    info: HalfInfo,
    space: SlotSpace,
    came: Callable[[int], bool],
    plan: RequestPlan | None,
    ids: RequestIds,
    last: RequestPlan | None,
) -> Violation:
    """The record of a ring row that a layer's op wrote.

    Args:
        came: whether the bytes of a slot came from elsewhere.
        plan: of the running forward, which knows more than the shadow about a slot that it writes; None outside one.
        last: of the last forward, for pools whose allocator reports no owners: one of its requests read the slot.
    """
    slot, request = row[Ring.SLOT], ids.name(row[Ring.REQUEST])
    if not 0 <= slot < space.slots:
        return decode(row, info, request=request)
    token, position, owner = (int(column[slot]) for column in (space.tokens, space.positions, space.owners))
    if row[Ring.CHECK] & Check.CONTENT and row[Ring.POSITION] != UNKNOWN:  # as it was when the check failed
        if (row[Ring.POSITION], row[Ring.REQUEST]) != (position, owner):
            token = UNKNOWN  # the slot holds another token by now
        position, owner = row[Ring.POSITION], row[Ring.REQUEST]
    else:
        token, position, owner = _planned(plan, slot) or (token, position, owner)
    if not owner and not space.owner_known:
        owner = _reader(plan or last, slot)
    told = decode(
        row,
        info,
        token if token >= 0 else None,
        position if position >= 0 else None,
        request if request is not None else ids.name(owner),
    )
    if told.check != "content":
        return told
    return dataclasses.replace(told, text="transfer" if came(slot) else "engine content")


def _reader(plan: RequestPlan | None, slot: int) -> int:
    """The hash of the first request that has the slot in its row of the table, 0 if none has."""
    if plan is None or plan.slot_map is not None or not plan.table.numel():
        return 0
    pages = plan.table[plan.rows.to(torch.int64).clamp(0, plan.table.shape[0] - 1)]
    start = torch.arange(pages.shape[1], device=pages.device) * plan.page_size
    used = start < (plan.prefix_lens + plan.extend_lens).unsqueeze(1)
    hits = ((pages == slot // plan.page_size) & (used | plan.ring)).nonzero()
    return int(plan.owners[hits[0, 0]]) if len(hits) else 0


def _planned(plan: RequestPlan | None, slot: int) -> tuple[int, int, int] | None:
    """``(token, position, owner)`` that a forward plans for a slot, if it writes it."""
    if plan is None:
        return None
    hits = (plan.slots == slot).nonzero()
    if not len(hits):
        return None
    i = int(hits[0])
    request, place, real = tokens.token_requests(plan)
    if not bool(real[i]):
        return None
    position = int(tokens.planned_positions(plan, request, place)[i])
    return int(plan.tokens[i]), position, int(plan.owners[request[i]])

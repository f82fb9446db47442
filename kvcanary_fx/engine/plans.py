"""What each pool is to read and write in a forward, where that is not one slot per token of the batch.

A compressed cache gets one slot for several tokens, a recurrent state one slot for all of them.  Their plan has fewer
tokens than the batch: those that complete a slot.  It lies in persistent memory, as captured graphs read it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..errors import EngineError
from ..kernels.slots import checks
from ..kernels.slots.space import RequestPlan
from ..kernels.slots.tokens import counted_requests, laid_out, real_requests
from .kv_pool import KVPool
from .step_inputs import StepInputs
from .step_view import StepView

#: Per token of the batch, and per request: what a plan with fewer tokens needs of its own.
_TOKENS = ("tokens", "slots", "positions", "taken")
_BATCH = ("prefix_lens", "extend_lens", "history_lens", "reads", "ends")


def name_of(field: str, place: int) -> str:
    """Where the step inputs keep a field of the plan of the pool that was given in this place."""
    return f"{field}_of_{place}"


def register(pool: KVPool, place: int, inputs: StepInputs) -> None:
    """Reserve the memory of a plan with fewer tokens than the batch."""
    if not pool.state and pool.tokens_per_slot == 1:
        return
    for field in _TOKENS:
        inputs.register_memory(name_of(field, place), "tokens", torch.int64)
    for field in _BATCH:
        inputs.register_memory(name_of(field, place), "batch", torch.int64)
    inputs.register_memory(name_of("counts", place), "batch", torch.int64, trailing=(3,))


def narrowed(pool: KVPool, place: int, plan: RequestPlan, view: StepView) -> RequestPlan:
    """The plan of a pool whose slots stand for several tokens, out of the one that has a slot per token."""
    if pool.tokens_per_slot == 1 and not pool.state:
        return plan
    if not plan.rows.shape[0] or not plan.slots.shape[0]:
        return plan
    prefix, extend = plan.prefix_lens.to(torch.int64), plan.extend_lens.to(torch.int64)
    if pool.state:  # where padding keeps its state is the table's business
        added = torch.where(real_requests(plan), extend.clamp(max=1), 0)
        before = prefix + (extend - 1).clamp(min=0)
    else:
        before = prefix // pool.tokens_per_slot
        added = torch.where(counted_requests(plan), (prefix + extend) // pool.tokens_per_slot - before, 0)
    request, taken = _taken(pool, plan, prefix, extend, before, added)
    fields = {
        "prefix_lens": before,
        "extend_lens": added,
        "tokens": plan.tokens[taken],
        "slots": _slots(pool, plan, request, taken),
        "taken": taken,
    }
    if plan.positions is not None:
        fields["positions"] = plan.positions[taken] // pool.tokens_per_slot
    if plan.history_lens is not None and plan.history is not None:
        fields["history_lens"] = plan.history_lens // pool.tokens_per_slot
    kept: dict[str, Any] = {field: _kept(view, field, place, value) for field, value in fields.items()}
    counts = getattr(view, name_of("counts", place))[0]
    counts.copy_(torch.stack((plan.counts[0], added.sum(), plan.counts[2])))
    history = plan.history
    if history is not None:
        history = history[:, pool.tokens_per_slot - 1 :: pool.tokens_per_slot]
    # other tokens end elsewhere: in memory shared with the batch's plan, the pool walked last would leave its own
    ends = getattr(view, name_of("ends", place))
    made = dataclasses.replace(plan, counts=counts, history=history, ring=pool.state, ends=ends, **kept)
    if not pool.state:
        return made
    # what is read is the state that the last step left, at the end of the prefix
    return dataclasses.replace(made, reads=dataclasses.replace(made, prefix_lens=_kept(view, "reads", place, prefix)))


def _taken(
    pool: KVPool,
    plan: RequestPlan,
    prefix: torch.Tensor,
    extend: torch.Tensor,
    before: torch.Tensor,
    added: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(request, token of the batch)`` of each slot that the forward completes, int64 ``[n]``; then zeros."""
    n = plan.slots.shape[0]
    request, place, there = laid_out(added, n)
    completes = (before[request] + place + 1) * pool.tokens_per_slot - 1
    if pool.state:  # the last token's
        completes = (prefix + extend - 1)[request]
    taken = (extend.cumsum(0) - extend)[request] + completes - prefix[request]
    return request, torch.where(there, taken, 0).clamp(0, n - 1)


def _slots(pool: KVPool, plan: RequestPlan, request: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    if pool.state:  # a batch says nothing about them: the slots are the table's
        return checks.table_slots(plan, request, torch.zeros_like(request))
    return plan.slots[taken].to(torch.int64)


def _kept(view: StepView, field: str, place: int, value: torch.Tensor) -> torch.Tensor:
    memory: torch.Tensor = getattr(view, name_of(field, place))
    memory.copy_(value)
    return memory


def sub_batch(pool: KVPool, batch: object) -> object:
    """The pool's own batch out of the engine's; None where it has none this time.

    Raises:
        EngineError: the batch cannot have one, as it has no such field.
    """
    assert pool.batch is not None
    if isinstance(batch, dict):
        return batch.get(pool.batch)
    if not hasattr(batch, pool.batch):
        raise EngineError(
            f"the batch has no {pool.batch!r}, where pool {pool.name!r} takes its own batch from: give it a Batch, or "
            "None where the forward neither reads nor writes the pool"
        )
    return getattr(batch, pool.batch)

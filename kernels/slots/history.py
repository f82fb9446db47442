"""What slots went through: what a call of the allocator and a forward add to it (:mod:`.past`).

Vectorised torch without host syncs.  Bit-equal to :mod:`.naive_history`; :mod:`.triton_history` is what the kernels
call: those of an allocator's calls, of what a forward wrote, and of the slots whose bytes are due.
"""

from __future__ import annotations

import torch

from ..ring import HALF_STEP, Word
from .past import (
    FORWARD_UNIT,
    FORWARDS,
    HEAD,
    TOLD,
    Kind,
    Past,
    Told,
    events_kept,
    forget_reads,
    low_half,
    what_word,
)
from .space import SlotSpace


def note(space: SlotSpace, at: torch.Tensor, kind: Kind, owner: int = 0, stack: int = 0) -> None:
    """Something happened to slots, in their order.

    Args:
        at: int64 ``[n]``, ``space.nowhere`` for those to skip; a slot may be named several times.
        owner: hash of the id that is named, 0 for none.
    """
    past, kept = space.past, events_kept(space.past)
    if not kept or not at.numel():
        return
    at, _ = at.sort(stable=True)
    index = torch.arange(at.numel(), device=at.device)
    begins = torch.cat((at.new_ones(1, dtype=torch.bool), at[1:] != at[:-1]))
    number = past[at, Past.EVENTS] + index - torch.where(begins, index, 0).cummax(0).values
    # of a slot that is named more often than its row has room, places are written again with the same
    _put(past, at, HEAD + number % kept * TOLD, _step(space), what_word(kind, stack=stack), low_half(owner))
    past[:, Past.EVENTS].scatter_add_(0, at, torch.ones_like(at, dtype=torch.int32))
    if kind is Kind.ALLOCATE:
        forget_reads(past, at)


def note_writes(space: SlotSpace, at: torch.Tensor, owners: torch.Tensor) -> None:
    """A forward wrote slots.

    Args:
        at: int64 ``[n]``, each once, ``space.nowhere`` for those to skip.
        owners: int64 ``[n]``, hashes of the ids of the requests that wrote them.
    """
    past, kept = space.past, events_kept(space.past)
    if not kept or not at.numel():
        return
    step, forward = _step(space), space.control.words.view(torch.int32)[2 * Word.FORWARD]
    what = what_word(Kind.WRITE) + forward % FORWARDS * FORWARD_UNIT
    owner = owners.to(torch.int32)
    number = past[at, Past.EVENTS]
    newest = HEAD + (number - 1).clamp(min=0) % kept * TOLD
    goes_on = (number > 0) & (past[at, newest + Told.WHAT] % FORWARD_UNIT == Kind.WRITE)
    goes_on &= past[at, newest + Told.OWNER] == owner
    number = number - goes_on.to(torch.int32)
    _put(past, at, HEAD + number % kept * TOLD, step, what, owner)
    _put(past, at, torch.full_like(number, Past.WRITE), step, what, owner)
    past[at, Past.EVENTS] = number + 1


def note_reads(space: SlotSpace, at: torch.Tensor) -> None:
    """The bytes of slots are compared for a forward that reads them.

    Args:
        at: int64 ``[n]``, ``space.nowhere`` for those to skip; named several times they are read once.
    """
    past = space.past
    if not events_kept(past) or not at.numel():
        return
    step, row = _step(space), past[at, :HEAD]
    first = row[:, Past.FIRST_READ]
    past[at, Past.FIRST_READ] = torch.where(row[:, Past.READS] == 0, step, first)
    past[at, Past.READ_BEFORE] = row[:, Past.LAST_READ]
    past[at, Past.LAST_READ] = step.expand(at.numel())
    past[at, Past.READS] = row[:, Past.READS] + 1


def _step(space: SlotSpace) -> torch.Tensor:
    """int32 ``[]``."""
    return space.control.words.view(torch.int32)[2 * Word.FORWARD + HALF_STEP]


def _put(
    past: torch.Tensor,
    at: torch.Tensor,
    place: torch.Tensor,
    step: torch.Tensor,
    what: torch.Tensor | int,
    owner: torch.Tensor | int,
) -> None:
    """Write an event into the rows ``at``, from the columns ``place`` on; int64 ``[n]`` each."""
    for column, value in ((Told.STEP, step), (Told.WHAT, what), (Told.OWNER, owner)):
        past[at, place + column] = value.expand(at.shape) if isinstance(value, torch.Tensor) else value

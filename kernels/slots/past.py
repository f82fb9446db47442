"""What slots went through: the last events of each slot, on the device, for a report that somebody reads later.

A row a slot (:class:`Past`), written by kernels that run anyhow: :mod:`.history`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .events import Event


class Past(enum.IntEnum):
    """The first columns of a slot's row, int32 each; behind them lie the last events, :class:`Told` each."""

    EVENTS = 0  # ever; the newest is event number EVENTS - 1, in place (EVENTS - 1) % those kept
    FIRST_READ = 1  # step in which the bytes were compared for a forward first since the allocation; -1 for none
    LAST_READ = 2
    READ_BEFORE = 3  # the one before the last
    READS = 4
    WRITE = 5  # the last write by a forward, also if other events have displaced it: a Told; all 0 if there was none


class Told(enum.IntEnum):
    """Columns of an event."""

    STEP = 0  # number of the engine's step that began last; -1 without an engine
    WHAT = 1  # Kind, forward and stack, see what_word
    OWNER = 2  # the lower half of the hash of the id that is named, 0 for none


class Kind(enum.IntEnum):
    """What happened; the calls of an allocator have the numbers of :class:`.Event`."""

    ALLOCATE = Event.ALLOCATE
    RELEASE = Event.RELEASE
    SHARE = Event.SHARE
    HAND_OVER = Event.HAND_OVER
    REJECT = Event.REJECT
    FORGET = Event.FORGET
    WRITE = 6  # by a forward; those of one request that follow each other are one event, the last of them
    FILL = 7  # from elsewhere: imported or adopted


#: Columns before the events, and those of an event.
HEAD, TOLD = 8, len(Told)

#: What comes before the forward and before the stack in ``Told.WHAT``, and one more than the largest of each.
FORWARD_UNIT, STACK_UNIT = 16, 1 << 12
FORWARDS, STACKS = STACK_UNIT // FORWARD_UNIT, 1 << 19

#: Most events of a slot.
MOST = 64


class Happened(NamedTuple):
    """One event, read back.

    Attributes:
        step: of the engine; -1 if it has none.
        forward: of a write, else None.
        stack: number of the stack of the call, 0 if none was kept.
        owner: the lower 32 bits of the hash of the id that is named, signed; 0 for none.
    """

    kind: Kind
    step: int
    forward: int | None
    stack: int
    owner: int


class SlotPast(NamedTuple):
    """The row of a slot, read back.

    Attributes:
        events: the last ones, oldest first.
        earlier: how many there were before them.
        written: the last write; None if there was none.
        first_read, last_read, read_before: steps in which the bytes were compared for a forward, since the slot was
            allocated; -1 for none.
    """

    events: tuple[Happened, ...]
    earlier: int
    written: Happened | None
    first_read: int
    last_read: int
    read_before: int
    reads: int


def new_past(slots: int, events: int, device: torch.device) -> torch.Tensor:
    """int32 ``[slots + 1, HEAD + TOLD * events]`` in which nothing happened; ``[slots + 1, 0]`` to keep nothing."""
    past = torch.zeros(slots + 1, HEAD + TOLD * events if events else 0, dtype=torch.int32, device=device)
    if events:
        forget_reads(past, slice(None))
    return past


def events_kept(past: torch.Tensor) -> int:
    """How many events a slot's row has room for."""
    return max(past.shape[1] - HEAD, 0) // TOLD


def what_word(kind: int, forward: int = 0, stack: int = 0) -> int:
    """Column ``WHAT`` of an event."""
    return kind + forward % FORWARDS * FORWARD_UNIT + stack * STACK_UNIT


def low_half(hashed: int) -> int:
    """The lower 32 bits of a hash, signed."""
    return ((hashed & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def count_steps_anew(past: torch.Tensor) -> None:
    """The steps are numbered from here: what happened until now was in step 0."""
    kept = events_kept(past)
    steps = (Past.FIRST_READ, Past.LAST_READ, Past.READ_BEFORE, Past.WRITE, *range(HEAD, HEAD + kept * TOLD, TOLD))
    for column in steps if kept else ():
        past[:, column].clamp_(max=0)


def read_back(rows: Sequence[Sequence[int]]) -> list[SlotPast]:
    """Rows of the history, as they are on the host, in words."""
    return [_read_row(row) for row in rows]


def _read_row(row: Sequence[int]) -> SlotPast:
    kept = (len(row) - HEAD) // TOLD
    count = row[Past.EVENTS]
    places = [HEAD + number % kept * TOLD for number in range(max(count - kept, 0), count)]
    return SlotPast(
        events=tuple(_happened(row[place : place + TOLD]) for place in places),
        earlier=max(count - kept, 0),
        written=_happened(row[Past.WRITE : Past.WRITE + TOLD]) if row[Past.WRITE + Told.WHAT] else None,
        first_read=row[Past.FIRST_READ],
        last_read=row[Past.LAST_READ],
        read_before=row[Past.READ_BEFORE],
        reads=row[Past.READS],
    )


def _happened(told: Sequence[int]) -> Happened:
    what = told[Told.WHAT]
    kind = Kind(what % FORWARD_UNIT)
    forward = what // FORWARD_UNIT % FORWARDS if kind is Kind.WRITE else None
    return Happened(kind, told[Told.STEP], forward, what // STACK_UNIT, told[Told.OWNER])


def forget_reads(past: torch.Tensor, at: torch.Tensor | slice) -> None:
    """Slots (int64 ``[n]``, or all) were allocated: they have not been read since."""
    for column in (Past.FIRST_READ, Past.LAST_READ, Past.READ_BEFORE):
        past[at, column] = -1
    past[at, Past.READS] = 0

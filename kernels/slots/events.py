"""What an allocator does to slots, as rows of numbers: many calls are one array and one launch (:mod:`.gpu_life`)."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch


class Event(enum.IntEnum):
    """What happened to slots; the functions of :mod:`.life` have their names."""

    ALLOCATE = 0
    RELEASE = 1
    SHARE = 2
    HAND_OVER = 3
    REJECT = 4
    FORGET = 5


#: Column EVENT of a row is the event, and the number of the call's stack times this.
STACK_UNIT = 256

#: After these a slot's bytes are unknown.
RENEWING = (Event.ALLOCATE, Event.FORGET)


class EventRow(enum.IntEnum):
    """Columns of a row, int64 each: one call of the allocator's."""

    EVENT = 0  # with the number of the stack, see STACK_UNIT
    BEGIN = 1  # its first entry; it has those up to the next row's first
    OWNER = 2  # hash of the id named in the call, 0 if none


#: How many these are.  An enum counts in Python, which takes the host longer than a look at the number.
COLUMNS = len(EventRow)

#: Words of a page in a step's row, see :class:`Due`.
RECORD = 4


class Along(enum.IntEnum):
    """Which calls of an allocator a step takes along."""

    NONE = 0
    OF_RING = 1  # those of an entry of :class:`.event_ring.EventRing`
    HANDED_OUT = 2  # pages were handed out, and are in the step's own row: no entry is needed


class Due(NamedTuple):
    """Where a launch that comes with each step finds which calls it takes along.

    Attributes:
        rows: int64 ``[n, size]``, in memory that the device reads.
        turn: int64 ``[>= 1]`` on the device, the row of the step.
        column: of the row, which :class:`Along`.
        pages: column of how many pages were handed out.
        holder: column of the hash of the id that had all of them and releases them first; 0: nobody had any.
        records: column of the first of these pages, :data:`RECORD` words each: the page is the third of them, the hash
            of its new owner the fourth.
    """

    rows: torch.Tensor
    turn: torch.Tensor
    column: int
    pages: int = 0
    holder: int = 0
    records: int = 0


class Events(NamedTuple):
    """Calls of an allocator in the order in which they were made.

    Attributes:
        rows: int64 ``[calls, len(EventRow)]``, each with at least one entry.
        entries: int64 ``[n]``, pages: page p are the slots from ``p * page_size`` on.
        page_size: slots of an entry.
    """

    rows: torch.Tensor
    entries: torch.Tensor
    page_size: int

    @property
    def slots(self) -> int:
        """How many slots are named, each as often as it is."""
        return self.entries.shape[0] * self.page_size

"""Allocator calls on their way to a device, at addresses that a captured graph can keep.

The host writes them into pinned memory, a ring of entries, and a kernel brings the entry of its turn to the device:
both sides count the turns.  An entry is int64::

    calls, pages, slots that these are, address of numbers that travel along or 0; 0 calls: the device has read it
    event, begin, owner                     of each call, as :class:`.events.EventRow` says
    page                                    behind the room for all calls
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from ..bound_launch import BoundLaunch
from ..handed import Part
from ..staging import lasting, packing
from .events import COLUMNS, RECORD, Along, Due, Event
from .triton_event_ring import land_kernel

#: Words before the calls; room for calls, and for pages.
HEAD, CALLS, PAGES = 4, 256, 2048

#: The first of these words, which say how much there is.
COUNTS = 3

#: Entries of the ring: how far the host may be ahead of the device.
AHEAD = 16

#: Words of a program.
BLOCK = 256

_HEAD = packing(HEAD)

#: Where the pages begin.
FIRST_PAGE = HEAD + CALLS * COLUMNS

#: The byte of an entry at which its pages begin.
_PAGES_AT = 8 * FIRST_PAGE


class EventRing:
    """Each :meth:`offer` that succeeds is for the one :meth:`land` behind it, or a launch of :meth:`lands_if_due`.

    Attributes:
        ring: int64 ``[AHEAD, size]`` on the host.
        turn: int64 ``[2]`` on the device: the entry of the next launch, and programs that have read it.
        landed: int64 ``[size]`` on the device, the last entry.
        counts: how many calls and pages it has; ``slots`` that these are.
        along: int64 ``[1]``, the address that came with it.
        rows: ``[CALLS, len(EventRow)]``, its calls; ``pages``, all room for them.
    """

    def __init__(self, device: torch.device):
        size, on_gpu = FIRST_PAGE + PAGES, device.type == "cuda"
        self.ring = lasting(AHEAD, size, dtype=torch.int64, device="cpu", pin_memory=on_gpu).zero_()
        self.turn = lasting(2, dtype=torch.int64, device=device).zero_()
        self.landed = lasting(size, dtype=torch.int64, device=device)
        self.counts, self.slots = self.landed[:2], self.landed[2:3]
        self.along = self.landed[3:4]
        self.rows = self.landed[HEAD:FIRST_PAGE].view(CALLS, COLUMNS)
        self.pages = self.landed[FIRST_PAGE:]
        self._views = [memoryview(entry.numpy()).cast("B") for entry in self.ring]  # type: ignore[arg-type]
        self._words = [view.cast("q") for view in self._views]
        self._turn, self._device, self._on_gpu = 0, device, on_gpu
        self._launch = self._bound(None)

    def offer(self, rows: Sequence[int], parts: Sequence[Part], pages: int, page_size: int, along: int = 0) -> bool:
        """Write the entry of the next launch, in the current stream; whether its memory was free: nothing waits.

        Args:
            rows: at most ``CALLS`` of them.
            parts: ``pages`` of them, at most ``PAGES``, one part after the other.
            along: an address that the device is told with them.

        Raises:
            struct.error: one of them is no whole number of 64 bits; the entry is the next one's.
        """
        turn = self._turn
        following = (turn + 1) % AHEAD
        # the launch that read this entry has ended once the next entry has been read; an event for each half of the
        # ring took the host as long as several entries
        if self._words[following][0] and self._on_gpu:
            return False
        words, view, at = len(rows), self._views[turn], 8 * FIRST_PAGE
        _HEAD.pack_into(view, 0, words // COLUMNS, pages, pages * page_size, along)
        view[8 * HEAD : 8 * (HEAD + words)] = packing(words).pack(*rows)  # pack_into copies the list once more
        for part in parts:
            n = 8 * len(part)
            view[at : at + n] = packing(len(part)).pack(*part) if isinstance(part, list) else part.tobytes()
            at += n
        self._turn = following
        return True

    def offer_few(self, rows: Sequence[int], pages: Sequence[int], page_size: int) -> bool:
        """:meth:`offer` of few calls, with few functions."""
        turn = self._turn
        following = (turn + 1) % AHEAD
        if self._words[following][0] and self._on_gpu:
            return False
        words, n, view = len(rows), len(pages), self._views[turn]
        packing(HEAD + words).pack_into(view, 0, words // COLUMNS, n, n * page_size, 0, *rows)
        packing(n).pack_into(view, _PAGES_AT, *pages)
        self._turn = following
        return True

    def land(self, room: int) -> None:
        """Launch what brings the entry to the device, in the current stream, if it has at most ``room`` pages."""
        _launch(self._launch, room)

    def lands_if_due(self, room: int, due: Due, page_size: int) -> Callable[[], None]:
        """What launches :meth:`land` where an entry is for the step; else there are no calls, or those of pages in the
        step's own row, and it is nobody's turn.

        Its launches may be in a graph that is replayed in each step: the host says of each.

        Args:
            page_size: slots of a page.
        """
        return functools.partial(_launch, self._bound(due, page_size), room)

    def _bound(self, due: Due | None, page_size: int = 1) -> BoundLaunch:
        size, said = FIRST_PAGE + PAGES, due or Due(self.ring, self.turn, 0)
        arguments = dict(ring_ptr=self.ring, size=size, turn_ptr=self.turn, out_ptr=self.landed)
        arguments |= dict(due_ptr=said.rows, due_size=said.rows.stride(0), due_turn_ptr=said.turn, page_size=page_size)
        constants = dict(AHEAD=AHEAD, HEAD=HEAD, FIRST_PAGE=FIRST_PAGE, COLUMNS=COLUMNS, BLOCK=BLOCK, COUNTS=COUNTS)
        constants |= dict(HAS_DUE=due is not None, DUE=said.column, COUNT=said.pages, HOLDER=said.holder)
        constants |= dict(RECORDS=said.records, RECORD=RECORD, HANDED_OUT=int(Along.HANDED_OUT))
        constants |= dict(ALLOCATE=int(Event.ALLOCATE), RELEASE=int(Event.RELEASE))
        return BoundLaunch(land_kernel, self._device, arguments | constants, (), 4)


def _launch(launch: BoundLaunch, room: int) -> None:
    grid = -(-(FIRST_PAGE + room) // BLOCK), 1, 1
    (launch if launch.ready else launch.first)(grid, (), None)


def naive(ring: EventRing, due: Due | None = None, page_size: int = 1) -> None:
    """What :meth:`EventRing.land` and :meth:`EventRing.lands_if_due` launch, in plain code: the reference."""
    if due is not None:
        row = due.rows[int(due.turn[0])].tolist()
        if row[due.column] == Along.NONE:
            ring.landed[:COUNTS] = 0
            return
        if row[due.column] == Along.HANDED_OUT:
            _naive_handed_out(ring, due, row, page_size)
            return
    turn = int(ring.turn[0])
    entry = ring.ring[turn].to(ring.landed.device, copy=True)
    ring.ring[turn, 0] = 0
    calls, pages = entry[:2].tolist()
    for begin, end in ((0, HEAD + calls * COLUMNS), (FIRST_PAGE, FIRST_PAGE + pages)):
        ring.landed[begin:end] = entry[begin:end]
    ring.turn[0] = (turn + 1) % AHEAD


def _naive_handed_out(ring: EventRing, due: Due, row: list[int], page_size: int) -> None:
    count, holder = row[due.pages], row[due.holder]
    records = [row[at : at + RECORD] for at in range(due.records, due.records + RECORD * count, RECORD)]
    new = [page for _, _, page, _ in records]
    pages = [*new, *new] if holder else new
    calls = [(Event.RELEASE, 0, holder)] if holder else []
    calls += [(Event.ALLOCATE, len(pages) - count + n, owner) for n, (*_, owner) in enumerate(records)]
    head = [len(calls), len(pages), len(pages) * page_size, 0]
    words = [*head, *(word for call in calls for word in call)]
    for begin, said in ((0, words), (FIRST_PAGE, pages)):
        ring.landed[begin : begin + len(said)] = torch.tensor(said, dtype=torch.int64)

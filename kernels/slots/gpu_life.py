"""What an engine's allocator does to slots on a GPU: any number of its calls in one launch.

Bit-equal to :mod:`.naive_life`, called for one row of the events after the other.
"""

from __future__ import annotations

import torch

from ..bound_launch import BoundLaunches
from ..checks import Check
from .events import Events
from .past import events_kept
from .space import SlotSpace
from .triton_life import life_kernel, renew_kernel

#: Slots that a program does, and entries that it looks through together.
BLOCK_SLOTS, SCAN = 64, 128


#: What differs between two launches of the same pool.
EVENTS = ("rows_ptr", "rows", "steps", "entries_ptr", "n", "page")
CHANGING = (*EVENTS, "gone_ptr", "holders_ptr", "places_ptr", "told")


class Apply:
    """Applies the calls of an allocator to one pool, in their order."""

    def __init__(self, space: SlotSpace, digests: torch.Tensor):
        """
        Args:
            digests: int32 ``[tensors, planes, slots]``, contiguous: what was allocated or forgotten has none.
        """
        self._space, self._digests = space, digests
        self._launches = BoundLaunches(life_kernel, space.block.device, CHANGING, warps=4)
        self._renewals = BoundLaunches(renew_kernel, space.block.device, EVENTS, warps=4)

    def __call__(
        self,
        events: Events,
        imported: torch.Tensor | None = None,
        gone: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            imported: bool ``[slots + 1]`` or None, cleared as the digests are.
            gone: int64 ``[3, >= events.slots]`` or None.  Takes for each slot named the slot itself, if that release
                made it free, or -1; whose it was; and the position in it.  The digests of what was allocated or
                forgotten then stay until :meth:`renew`, so that bytes of what became free can be compared before; of
                what was renewed here before it became free there is -1.
            counts: int64 ``[2]`` on the device or None: how many of the rows and of the entries there are, the first
                ones; else all.
        """
        n, page, rows = events.entries.shape[0], events.page_size, events.rows.shape[0]
        lanes, block = lanes_of(page)
        scan = SCAN
        grid = -(-n // block), -(-page // lanes), 1
        clears = imported.data_ptr() if imported is not None else None
        form = lanes, block, scan, clears, counts.data_ptr() if counts is not None else None
        at, entries = events.rows.data_ptr(), events.entries.data_ptr()
        freed, step, told = entries, 0, 0
        if gone is not None:
            freed, step, told = gone.data_ptr(), 8 * gone.stride(0), 1
        known = form, at & 15, entries & 15, freed & 15, step & 15
        places = freed, freed + step, freed + 2 * step
        numbers = (at, rows, rows.bit_length(), entries, n, page, *places, told)
        if self._launches.again(known, grid, numbers):
            return
        taker, whose, where = (gone[0], gone[1], gone[2]) if gone is not None else (events.entries,) * 3
        changing = (events.rows, rows, rows.bit_length(), events.entries, n, page, taker, whose, where, told)

        def others() -> dict[str, object]:
            space, control = self._space, self._space.control
            return dict(
                block_ptr=space.block,
                wide_ptr=space.block.view(torch.int64),
                slots=space.slots,
                digests_ptr=self._digests,
                planes=self._digests.shape[0] * self._digests.shape[1],
                imported_ptr=imported.view(torch.uint8) if imported is not None else space.block,
                past_ptr=space.past if events_kept(space.past) else space.block,
                words_ptr=control.words,
                ring_ptr=control.ring,
                capacity=control.capacity,
                source=space.space_id,
                checks=int(space.checks if space.owner_known else space.checks & ~Check.OWNER),
                counts_ptr=counts if counts is not None else control.words,
                KEPT=events_kept(space.past),
                HAS_IMPORTED=imported is not None,
                COUNTED=counts is not None,
                BLOCK=block,
                LANES=lanes,
                SCAN=scan,
            )

        self._launches(form, grid, changing, others, known)

    def renew(self, events: Events, imported: torch.Tensor | None = None, counts: torch.Tensor | None = None) -> None:
        """Forget the bytes of what the calls allocated or forgot; arguments as of the call with ``gone`` before it."""
        n, page, rows = events.entries.shape[0], events.page_size, events.rows.shape[0]
        lanes, block = lanes_of(page)
        clears = imported.data_ptr() if imported is not None else None
        form = lanes, block, clears, counts.data_ptr() if counts is not None else None

        def others() -> dict[str, object]:
            space = self._space
            return dict(
                slots=space.slots,
                digests_ptr=self._digests,
                planes=self._digests.shape[0] * self._digests.shape[1],
                imported_ptr=imported.view(torch.uint8) if imported is not None else space.block,
                counts_ptr=counts if counts is not None else space.control.words,
                HAS_IMPORTED=imported is not None,
                COUNTED=counts is not None,
                BLOCK=block,
                LANES=lanes,
            )

        changing = events.rows, rows, rows.bit_length(), events.entries, n, page
        self._renewals(form, (-(-n // block), -(-page // lanes), 1), changing, others)


def lanes_of(page: int) -> tuple[int, int]:
    """Slots of a page that a program does, and entries."""
    lanes = min(1 << (page - 1).bit_length(), BLOCK_SLOTS)
    return lanes, BLOCK_SLOTS // lanes

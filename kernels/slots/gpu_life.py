"""What an engine's allocator does to slots on a GPU: any number of its calls in one launch.

Bit-equal to :mod:`.naive_life`, called for one row of the events after the other.
"""

from __future__ import annotations

import torch
import triton

from ..checks import Check
from ..writes.geometry import on_device
from .events import Events
from .space import SlotSpace
from .triton_life import life_kernel

#: Slots that a program does, and entries that it looks through together.
BLOCK_SLOTS, SCAN = 64, 128


def apply(
    space: SlotSpace,
    events: Events,
    digests: torch.Tensor,
    imported: torch.Tensor | None = None,
    gone: torch.Tensor | None = None,
) -> None:
    """Apply the calls of an allocator in their order.

    Args:
        digests: int32 ``[tensors, planes, slots]``, contiguous: what was allocated or forgotten has none.
        imported: bool ``[slots + 1]`` or None, cleared likewise.
        gone: int64 ``[2, >= events.slots]`` or None.  Takes for each slot named the slot itself, if that release
            made it free, or -1; and whose it was.
    """
    n, page, control = events.entries.shape[0], events.page_size, space.control
    lanes = min(triton.next_power_of_2(page), BLOCK_SLOTS)
    block = BLOCK_SLOTS // lanes
    rows = events.rows.shape[0]
    checks = space.checks if space.owner_known else space.checks & ~Check.OWNER
    places = (gone[0], gone[1]) if gone is not None else (events.entries, events.entries)
    with on_device(space.block):
        life_kernel[(triton.cdiv(n, block), triton.cdiv(page, lanes))](
            space.block,
            space.block.view(torch.int64),
            space.slots,
            events.rows,
            rows,
            rows.bit_length(),
            events.entries,
            n,
            page,
            *places,
            int(gone is not None),
            digests,
            digests.shape[0] * digests.shape[1],
            imported.view(torch.uint8) if imported is not None else space.block,
            control.words,
            control.ring,
            control.capacity,
            space.space_id,
            int(checks),
            HAS_IMPORTED=imported is not None,
            BLOCK=block,
            LANES=lanes,
            SCAN=SCAN,
        )

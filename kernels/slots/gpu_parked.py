"""What is known of pages, copied to memory elsewhere by a GPU: any number of pages in one launch.

Equal to what :class:`.ParkedShadows` does without it, for pages that the pool has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..bound_launch import BoundLaunches
from ..staging import sent
from .gpu_life import lanes_of
from .space import SlotSpace
from .triton_parked import park_kernel

#: Planes of digests that a program copies.
PLANES = 16

#: What differs between two launches of the same pool.
CHANGING = ("n", "entries_ptr", "page")


class Park:
    """Copies what is known of pages of one pool."""

    def __init__(self, space: SlotSpace, digests: torch.Tensor):
        """
        Args:
            digests: int32 ``[tensors, planes, slots]``, contiguous.
        """
        self._space, self._digests = space, digests
        self._planes = digests.shape[0] * digests.shape[1]
        self._launches = BoundLaunches(park_kernel, space.block.device, CHANGING, warps=4)

    def __call__(self, pages: Sequence[int], addresses: Sequence[int], page_size: int) -> None:
        """
        Args:
            addresses: of a row each, int32 ``[page_size * (5 + planes)]``, that the device can write; no two are one.
            page_size: slots of a page.
        """
        entries = sent(torch.tensor([*pages, *addresses], dtype=torch.int64), self._space.block.device)
        lanes, _ = lanes_of(page_size)
        grid = len(pages), 1 + -(-self._planes // PLANES), -(-page_size // lanes)

        def others() -> dict[str, object]:
            block = self._space.block
            return dict(
                block_ptr=block,
                wide_ptr=block.view(torch.int64),
                slots=self._space.slots,
                digests_ptr=self._digests,
                planes=self._planes,
                PLANES=PLANES,
                LANES=lanes,
            )

        self._launches(lanes, grid, (len(pages), entries, page_size), others)

"""Where else in a pool the bytes of a damaged slot are, and where the bytes went that should be in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..kernels.content.cpu import packed
from ..reports.incidents import row_bytes
from ..reports.incidents.incident import Row
from .groups import Damage, Group
from .pool_half import PoolHalf

#: Bytes of a pool that are read in search of a row, those around the damaged slot; and at once.
SEARCHED, AT_ONCE = 32 << 20, 4 << 20

#: Rows that are told of.
SAME = 4


#: Slots in a row: the first, the digests of what is in them, and those recorded, int64 each.
Part = tuple[int, torch.Tensor, torch.Tensor]


class RowSearch:
    """Looks for rows in the tensors of one pool."""

    def __init__(self, group: Group):
        self._group, self._room = group, SEARCHED
        self._read: dict[int, list[Part]] = {}

    def same(self, damage: Damage, others: Sequence[Damage]) -> list[Row]:
        """Where else the bytes that were found are recorded: in any half and slot of the pool that failed no check.

        By the digests: the rows themselves need not be read.
        """
        halves = self._group.halves
        mine = next((h for h in halves if h.id == damage.number), None)
        total = row_bytes.sum_of(damage.found, mine.seeds) if mine is not None and damage.digests else None
        if total is None or mine is None or total == 0:  # a row of zeros is nobody's
            return []
        failed = {(d.number, d.slot) for d in others} | {(damage.number, damage.slot)}
        found: list[Row] = []
        for half in sorted(halves, key=lambda h: h is not mine):
            wanted = (total + half.seeds[0]) & 0xFFFFFFFF
            wanted -= (wanted >> 31) << 32
            hits = (half.buffers.digest[0] == wanted).nonzero().flatten()[: SAME + len(failed)] if wanted else ()
            found += [Row(half.id, slot) for slot in map(int, hits) if (half.id, slot) not in failed]
            if len(found) >= SAME:
                break
        return found[:SAME]

    def moved(self, damage: Damage, others: Sequence[Damage]) -> list[int]:
        """Slots of the same tensor that hold what should be in the damaged one, and are not recorded with it.

        Args:
            others: what else failed; what was found there may be recorded by now.
        """
        if not damage.digests:
            return []
        alike = [d for d in others if d.number == damage.number and d.digests]
        hits = [d.slot for d in alike if row_bytes.packed_equal(d.found, damage.stored)]
        wanted = (damage.stored + (1 << 63)) % (1 << 64) - (1 << 63)  # as an int64
        for first, now, recorded in self._digests(damage):
            hits += (((now == wanted) & (now != recorded)).nonzero().flatten() + first).tolist()
        return [slot for slot in dict.fromkeys(hits) if slot != damage.slot][:SAME]

    def _digests(self, damage: Damage) -> list[Part]:
        """The slots of a half, as far as there is room."""
        if damage.number not in self._read:
            pairs = zip(self._group.halves, self._group.views, strict=True)
            half, view = next((pair for pair in pairs if pair[0].id == damage.number), (None, None))
            self._read[damage.number] = (
                [] if half is None or view is None else list(self._parts(half, view, damage.slot))
            )
        return self._read[damage.number]

    def _parts(self, half: PoolHalf, view: torch.Tensor, middle: int) -> Iterator[Part]:
        layout, device = half.place.layout, half.buffers.digest.device
        count = min(self._group.slots, self._room // layout.row_bytes)
        self._room -= count * layout.row_bytes
        first = max(0, min(middle - count // 2, self._group.slots - count))
        step = max(1, AT_ONCE // layout.row_bytes)
        for start in range(first, first + count, step):
            slots = torch.arange(start, min(start + step, first + count), device=device)
            rows = layout.gather(view, slots).reshape(slots.numel(), -1).contiguous().view(torch.uint8)
            recorded = half.buffers.digest[:, slots]
            yield start, row_bytes.digests_of(rows, half.seeds, recorded.shape[0]), packed(recorded)

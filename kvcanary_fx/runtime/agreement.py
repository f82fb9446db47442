"""A change that a graph of one layer judges legal must be in the other layers' graphs as well: :mod:`.companions`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernels.content.cpu import digest_rows
from ..kernels.ring import Ring
from .pool_half import PoolHalf
from .registry import PoolRegistry


def shown_by_all(
    slots: set[int],
    mine: PoolHalf,
    step: int,
    rows: Sequence[Sequence[int]],
    registry: PoolRegistry,
    stamps: torch.Tensor,
    *,
    incomparable_vetoes: bool = False,
) -> set[int]:
    """Those of the slots that changed in the other layers of the forward as well.

    Args:
        mine: a half in which they changed.
        step: when the change was found.
        rows: the rows of the ring that are being judged.
        stamps: int64 ``[2, slots]`` of the device's control block.
        incomparable_vetoes: a half whose slots cannot be compared with these counts as unchanged; else only if nothing
            in it has changed.
    """
    if mine.forward is None or not slots:
        return slots
    left = set(slots)
    for number in mine.forward.above_first():
        if number in mine.peers:
            continue
        half = registry.by_id(number)
        view = registry.view_of(half) if half is not None else None
        if half is None or view is None:
            if incomparable_vetoes:
                return set()
            continue
        changed = {row[Ring.SLOT] for row in rows if row[Ring.HALF] == number and row[Ring.STEP] >= step}
        earlier = mine.forward.runs_before(number, mine.id)  # checked earlier in this forward
        # checked later: a graph that ran before this one may have read all layers
        ago = range(mine.forward.span if earlier else mine.forward.ahead + 1)
        changed |= {slot for slot, found in half.changed.items() if step - found in ago}
        if half.place.layout.slots != mine.place.layout.slots:
            if incomparable_vetoes or not (changed or _differs_somewhere(half, view)):
                return set()
            continue
        if earlier:
            changed |= _written(left, stamps, step - mine.forward.ahead)
        left -= _as_recorded(half, view, left - changed)
    return left


def _written(slots: set[int], stamps: torch.Tensor, first: int) -> set[int]:
    """The slots that a graph has written since a call began: what they held before is gone."""
    return {slot for slot in slots if int(stamps[0, slot]) >> 16 >= first}


def _differs_somewhere(half: PoolHalf, view: torch.Tensor) -> bool:
    """Whether any slot's bytes are others than those that were recorded."""
    recorded = set(half.buffers.digest[0].nonzero().squeeze(1).tolist())
    return _as_recorded(half, view, recorded) != recorded


def _as_recorded(half: PoolHalf, view: torch.Tensor, slots: set[int]) -> set[int]:
    """The slots whose bytes are still those that were recorded."""
    digest = half.buffers.digest
    listed = torch.tensor(sorted(slots), dtype=torch.int64, device=digest.device)
    now = digest_rows(half.place.layout, view, listed, half.seeds, digest.shape[0])
    return set(listed[(now == digest[:, listed]).all(0)].tolist())

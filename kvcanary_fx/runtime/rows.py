"""The rows of the rings: taken from a device, sorted, and put into records with what the shadow knows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernels.ring import UNKNOWN, Control, Ring, Word
from ..reports.violation import HalfInfo, Violation, decode
from .adoption import Verdict, judge
from .registry import PoolRegistry

#: A cache that was dropped before its violations were read.
_GONE = HalfInfo(-1, "?", "?", "a cache that is gone", None, 1)


def take_rows(control: Control) -> tuple[list[list[int]], int]:
    """The rows in a ring and how many there were to be, marked as taken."""
    control.hush()  # before the words are read: of a row that comes in between the host hears again
    words = control.words.tolist()
    head, drained = words[Word.HEAD], words[Word.DRAINED]
    if head == drained:
        return [], 0
    kept = min(head - drained, control.capacity)
    place = torch.arange(drained, drained + kept, device=control.ring.device) % control.capacity
    rows = control.ring[place].tolist()
    control.words[Word.DRAINED] = head
    return rows, head - drained


def take_judged(control: Control, registry: PoolRegistry) -> tuple[Verdict, int]:
    """The rows in a ring, sorted, and how many checks failed, those included whose rows found the ring full."""
    rows, total = take_rows(control)
    verdict = judge(rows, registry, control.stamps, lost=total - len(rows))
    return verdict, total - verdict.adopted_fingerprints


def decode_row(row: Sequence[int], registry: PoolRegistry) -> Violation:
    """The record of a ring row, with what the shadow knows about the slot's token."""
    half = registry.by_id(row[Ring.HALF])
    if half is None:
        return decode(row, _GONE)
    slot = row[Ring.SLOT]
    last = half.last_written(slot)
    identity = registry.identity_of(half)
    if identity is None or slot < 0:
        return decode(row, half.info, last_written=last)
    token, position = int(identity.tokens[slot]), int(identity.positions[slot])
    known = None if position == UNKNOWN else position
    return decode(row, half.info, token if token >= 0 else None, known, last_written=last)


def decode_blackbox(control: Control, registry: PoolRegistry) -> tuple[list[int], Violation] | None:
    """The row that a device left in host memory before it was lost, and its record; asks the device nothing."""
    if control.blackbox is None or not int(control.blackbox[-1]):
        return None
    row: list[int] = control.blackbox[:-1].tolist()
    half = registry.by_id(row[Ring.HALF])
    return row, decode(row, half.info if half is not None else _GONE)

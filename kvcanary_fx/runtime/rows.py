"""The rows of the rings: taken from a device, sorted, and put into records with what the shadow knows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from ..kernels.checks import Phase
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
    verdict.violations = list(in_order(verdict.violations))
    return verdict, total - verdict.adopted_fingerprints


def in_order(rows: Iterable[Sequence[int]]) -> Iterator[Sequence[int]]:
    """Rows of one launch in the order of their slots.

    The programs of a launch append their rows in any order: of three slots that a wrong stride missed, a GPU told the
    first one first in one run and the second in the next.  So rows of one forward that follow each other, all before
    or all after its writes, are grouped by check, reason and request, and each group is sorted by half, position and
    slot.  The groups keep the order of their first rows, since launches come one after the other.  An allocator's
    calls and the slices of a sweep also do, and are not sorted.
    """
    for (_, _, phase), found in itertools.groupby(rows, _found_together):
        if phase not in (Phase.PRE, Phase.POST):
            yield from found
            continue
        alike: dict[tuple[int, int, int], list[Sequence[int]]] = {}
        for row in found:
            alike.setdefault((row[Ring.CHECK], row[Ring.WHY], row[Ring.REQUEST]), []).append(row)
        for same in alike.values():
            yield from sorted(same, key=_place)


def _found_together(row: Sequence[int]) -> tuple[int, int, int]:
    return row[Ring.STEP], row[Ring.FORWARD], row[Ring.PHASE]


def _place(row: Sequence[int]) -> tuple[int, int, int]:
    return row[Ring.HALF], row[Ring.POSITION], row[Ring.SLOT]


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

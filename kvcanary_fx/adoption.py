"""Telling a legal change made outside the compiled graph from a corruption.

Between two calls of a guarded graph, code that we cannot see may legally rewrite slots: a prefill that is
not compiled, ``cache.reset()``, a beam reordering.  PyTorch's version counters say *that* something wrote
to a pool.  They cannot say whether it was legal, because a stray write by an op counts as well.  The
pattern of what changed can:

* A token's K and V depend on every token before it, in every layer but the first.  A legal rewrite of a
  slot therefore changes both halves of every layer above the first, while a flipped bit, a wrong stride or
  a bad copy hits one half or one layer.
* In a cache with rows, what follows a rewritten slot in its row was computed from it and changes too.  This is
  not asked of a cache that no guarded graph writes: who does may write single slots.
* A running state (a slot for each sequence) depends on all tokens: it changes in all of a layer's states at once.

Mismatches that show this pattern, in a step where something else did write to the pool (or may have:
inference tensors have no version counter, a captured graph runs without us), are adopted and counted.
So is one of a reported slot, back to the bytes that it had before: it was put right.  All others are violations.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from .kernels.buffers import Check, Ring, RowState
from .pools import PoolHalf, PoolRegistry

Row = Sequence[int]


@dataclasses.dataclass
class Verdict:
    """Ring rows sorted: violations, and slots adopted with how many fingerprints that was."""

    violations: list[Row]
    adopted_slots: int = 0
    adopted_fingerprints: int = 0


def judge(rows: Sequence[Row], registry: PoolRegistry, lost: int = 0) -> Verdict:
    """Sort the rows drained from one device's ring, which are in the order the ops wrote them.

    Args:
        lost: rows that came after these and found the ring full.
    """
    verdict = Verdict([])
    groups: dict[tuple[int, frozenset[int]], list[Row]] = defaultdict(list)
    for row in rows:
        half = registry.by_id(row[Ring.HALF])
        if row[Ring.LENIENT] and row[Ring.CHECK] == Check.CONTENT and half is not None:
            groups[(row[Ring.STEP], frozenset(half.peers))].append(row)
        else:
            verdict.violations.append(row)
    # Only the last half to report can have lost rows, and those after it have lost all of theirs.
    cut = rows[-1][Ring.HALF] if lost else None
    for members in groups.values():
        lead = registry.by_id(members[0][Ring.HALF])
        assert lead is not None
        _judge_group(members, lead, cut if cut in lead.peers else None, verdict, registry)
    if cut is not None and rows[-1][Ring.LENIENT]:
        verdict.adopted_fingerprints += lost  # more of the same rewrite
    verdict.violations.sort(key=lambda r: r[Ring.STEP])
    for row in verdict.violations:
        half = registry.by_id(row[Ring.HALF])
        if half is not None and row[Ring.CHECK] == Check.CONTENT:
            half.reported.setdefault(row[Ring.SLOT], row[Ring.STORED])
    return verdict


def _settle(row: Row, registry: PoolRegistry, verdict: Verdict) -> None:
    """Adopt a change of a slot back to what it was before it was reported: somebody put it right.  Any other is a
    violation.

    Seen with cross-attention: after a report the same prompt was encoded again, into the same bytes but for the slot
    whose corrupted bytes had been fingerprinted when they were reported.
    """
    half = registry.by_id(row[Ring.HALF])
    if half is None or half.reported.get(row[Ring.SLOT]) != row[Ring.FOUND]:
        verdict.violations.append(row)
        return
    del half.reported[row[Ring.SLOT]]
    verdict.adopted_slots += 1
    verdict.adopted_fingerprints += 1


def _judge_group(rows: list[Row], lead: PoolHalf, cut: int | None, verdict: Verdict, registry: PoolRegistry) -> None:
    """Sort the rows of one step and one slot space.

    Args:
        cut: the half whose rows the ring had no room for, so that this half and those that did not report
            at all say nothing; None if every row is here.
    """
    by_slot: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_slot[row[Ring.SLOT]].append(row)
    lowest = min(lead.peers.values())
    required = {h for h, layer in lead.peers.items() if layer > lowest}
    if not required or (len(required) == 1 and lead.kind == "state"):
        required = set(lead.peers)  # one state says nothing alone, and even the lowest layer's has seen every token
    if cut is not None:
        required &= {row[Ring.HALF] for row in rows} - {cut}
    rewritten = {slot for slot, hits in by_slot.items() if required <= {row[Ring.HALF] for row in hits}}
    if cut is None:
        rewritten = _closed_upwards(rewritten, lead) if len(required) >= 2 else set()
    for slot, hits in by_slot.items():
        if slot in rewritten:
            verdict.adopted_slots += 1
            verdict.adopted_fingerprints += len(hits)
        else:
            for row in hits:
                _settle(row, registry, verdict)


def _closed_upwards(slots: set[int], lead: PoolHalf) -> set[int]:
    """Those of ``slots`` after which, in their row, everything older than the last write changed too."""
    layout = lead.place.layout
    if not layout.has_rows or lead.kind == "read":
        return slots
    state = lead.buffers.rows.tolist()
    by_row: dict[int, set[int]] = defaultdict(set)
    for slot in slots:
        by_row[slot // layout.positions].add(slot % layout.positions)
    legal: set[int] = set()
    for row, positions in by_row.items():
        before = state[row][RowState.NEXT] - state[row][RowState.LENGTH]
        end = min(before if before > 0 else layout.positions, layout.positions)
        if all(p in positions for p in range(min(positions), end)):
            legal |= {row * layout.positions + p for p in positions}
    return legal

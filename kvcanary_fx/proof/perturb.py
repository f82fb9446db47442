"""Fault injection: damage a KV cache on purpose, and see whether the canary reports it.

Each perturbation has its own generator and acts on structures of any engine: pools, request tables, lists of slots
and tokens.  Call ``strike`` wherever its fault could happen; it decides, acts, logs one line and records it::

    fault = perturb.UsedBytes(probability=0.01, seed=7, warm_up=100)
    ...
    fault.strike(session.pool, [perturb.Spot(slot, request.id, position) for ...], step)

Faults of the writes inside a compiled graph (``Operand``, ``SkippedWrite``, ``Nan``) need :class:`FaultyWrites` as
the inner backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from typing import Any

import torch

from ..engine.guarded_pool import EnginePool
from ..engine.request_ids import RequestId
from .perturb_writes import FaultyWrites, Nan, Operand, SkippedWrite
from .perturbation import Perturbation, Spot, Strike, Target, flip_bit, row_of, same_bytes

#: What can be changed at an index: a list, or a tensor of one dimension.
Numbers = MutableSequence[int] | torch.Tensor


# ---- bytes


class UsedBytes(Perturbation):
    """A bit of a slot that the next forward reads."""

    kind = "used_bytes"

    def strike(self, pool: EnginePool, spots: Sequence[Spot], step: int | None = None) -> Strike | None:
        """Flip a bit of one of ``spots``, in one tensor of the pool."""
        numbers, chosen = self.halves(pool), [s for s in spots if self.wants(s)]
        if not numbers or not chosen or not self.due():
            return None
        number, spot = self.random.choice(numbers), self.random.choice(chosen)
        bit, info = flip_bit(row_of(pool, number, spot.slot), self.random), pool.halves[number].info
        return self.note(f"bit {bit} flipped", spot, pool=pool.name, layer=info.layer, half=info.half, step=step)


class IdleBytes(UsedBytes):
    """A bit of a cached slot that no request reads now."""

    kind = "idle_bytes"


class LateBytes(UsedBytes):
    """A bit of a slot that the forward just wrote."""

    kind = "late_bytes"


class Scale(UsedBytes):
    """A bit of a quantised slot's scale."""

    kind = "scale"

    def halves(self, pool: EnginePool) -> list[int]:
        return [n for n in super().halves(pool) if "scale" in pool.halves[n].info.half.lower()]


class LateWrite(Perturbation):
    """A write into a slot after it was released and given to another: the bytes of its last owner come back."""

    kind = "late_write"

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self._rows: dict[tuple[str, int, int], torch.Tensor] = {}

    def remember(self, pool: EnginePool, slots: Sequence[int]) -> None:
        """Slots are about to be released: save their contents."""
        for number in self.halves(pool):
            for slot in slots:
                self._rows[pool.name, number, slot] = row_of(pool, number, slot).clone()

    def strike(self, pool: EnginePool, spots: Sequence[Spot], step: int | None = None) -> Strike | None:
        """Restore what one of ``spots`` held at its last release, in one tensor of the pool."""
        found = [(n, s) for s in spots if self.wants(s) for n in self.halves(pool) if self._differs(pool, n, s.slot)]
        if not found or not self.due():
            return None
        number, spot = self.random.choice(found)
        row_of(pool, number, spot.slot).copy_(self._rows[pool.name, number, spot.slot])
        info = pool.halves[number].info
        what = "bytes of the slot's last owner"
        return self.note(what, spot, pool=pool.name, layer=info.layer, half=info.half, step=step)

    def _differs(self, pool: EnginePool, number: int, slot: int) -> bool:
        kept = self._rows.get((pool.name, number, slot))
        return kept is not None and not same_bytes(kept, row_of(pool, number, slot))


class LostTransfer(Perturbation):
    """Bytes that never arrived: zeros in what was sent."""

    kind = "lost_transfer"

    def strike(self, raw: bytearray, request: RequestId | None = None, step: int | None = None) -> Strike | None:
        """Zero some bytes of ``raw`` in place."""
        spot = Spot(-1, request)
        if not any(raw) or not self.wants(spot) or not self.due():
            return None
        start = self.random.choice([i for i, byte in enumerate(raw) if byte])
        stop = min(len(raw), start + self.random.randint(1, 64))
        raw[start:stop] = bytes(stop - start)
        return self.note(f"bytes {start} to {stop - 1} of {len(raw)} are zero", spot, step=step)


# ---- tables, plans and tokens


class TableEntry(Perturbation):
    """Another page in the request table."""

    kind = "table_entry"

    def strike(
        self, pool: EnginePool, row: int, columns: Mapping[int, Spot], pages: Sequence[int], step: int | None = None
    ) -> Strike | None:
        """Replace one of the entries ``columns`` of a row by another of ``pages``."""
        table, chosen = pool.declared.request_table, self.indices(columns)
        if self.target.pool not in (None, pool.name) or not chosen or len(set(pages)) < 2 or not self.due():
            return None
        column = self.random.choice(chosen)
        old = int(table[row, column])
        new = self.random.choice([p for p in pages if p != old])
        table[row, column] = new
        return self._noted(pool, columns[column], f"row {row}, column {column}: page {new} for {old}", new, step)

    def _noted(self, pool: EnginePool, spot: Spot, what: str, page: int, step: int | None) -> Strike:
        partner = Spot(page * pool.declared.table_page_size)
        return self.note(what, spot, pool=pool.name, partner=partner, step=step)


class SlotIndex(Perturbation):
    """The write receives another slot than the planned one."""

    kind = "slot_index"

    def strike(
        self, slots: Numbers, spots: Mapping[int, Spot], others: Sequence[int], step: int | None = None
    ) -> Strike | None:
        """Replace the slot at one of the indices of ``spots`` by one of ``others``."""
        chosen = self.indices(spots)
        if not chosen or not others or not self.due():
            return None
        index = self.random.choice(chosen)
        planned = int(slots[index])
        slots[index] = other = self.random.choice([s for s in others if s != planned])
        return self.note(f"slot {other} for {planned}", spots[index], partner=Spot(other), step=step)


class StaleLength(Perturbation):
    """A prefix length of another step."""

    kind = "stale_length"

    def strike(
        self,
        lengths: Numbers,
        spots: Mapping[int, Spot],
        changes: Sequence[int] = (-1, 1),
        step: int | None = None,
    ) -> Strike | None:
        """Change the length at one of the indices of ``spots`` by one of ``changes``."""
        chosen = self.indices(spots)
        if not chosen or not self.due():
            return None
        index, change = self.random.choice(chosen), self.random.choice(changes)
        before = int(lengths[index])
        lengths[index] = before + change
        return self.note(f"prefix length {before + change} for {before}", spots[index], step=step)


class SwappedTokens(Perturbation):
    """Two requests get each other's next token."""

    kind = "swapped_tokens"

    def strike(self, tokens: Numbers, spots: Mapping[int, Spot], step: int | None = None) -> Strike | None:
        """Swap two different tokens at indices of ``spots``; one of them belongs to the target's request."""
        pairs = [(i, j) for i in self.indices(spots) for j in spots if int(tokens[i]) != int(tokens[j])]
        if not pairs or not self.due():
            return None
        one, two = self.random.choice(pairs)
        tokens[one], tokens[two] = int(tokens[two]), int(tokens[one])
        what = f"tokens {int(tokens[two])} and {int(tokens[one])} swapped"
        return self.note(what, spots[one], partner=spots[two], step=step)


class RankSkew(Perturbation):
    """One of several ranks continues with another token."""

    kind = "rank_skew"

    def strike(
        self, tokens: Numbers, spots: Mapping[int, Spot], vocabulary: int, step: int | None = None
    ) -> Strike | None:
        """Replace the token at one of the indices of ``spots`` by another below ``vocabulary``."""
        chosen = self.indices(spots)
        if not chosen or not self.due():
            return None
        index = self.random.choice(chosen)
        before = int(tokens[index])
        tokens[index] = (before + self.random.randrange(1, vocabulary)) % vocabulary
        return self.note(f"token {int(tokens[index])} for {before}", spots[index], step=step)


# ---- the life of pages


class EarlyFree(Perturbation):
    """A page is freed while its request still reads it."""

    kind = "early_free"

    def strike(
        self, pages: Mapping[int, Spot], release: Callable[[list[int]], object], step: int | None = None
    ) -> Strike | None:
        """``release`` one of ``pages``."""
        chosen = self.indices(pages)
        if not chosen or not self.due():
            return None
        page = self.random.choice(chosen)
        strike = self.note(f"page {page} freed", pages[page], step=step)
        release([page])
        return strike


class DoubleFree(Perturbation):
    """A page is freed twice."""

    kind = "double_free"

    def strike(self, pages: Mapping[int, Spot], step: int | None = None) -> list[int]:
        """The pages to free: all of ``pages``, and perhaps one of them again."""
        chosen = self.indices(pages)
        if not chosen or not self.due():
            return list(pages)
        page = self.random.choice(chosen)
        self.note(f"page {page} freed twice", pages[page], step=step)
        return [*pages, page]


#: Perturbations by the name of the fault class.
CLASSES: dict[str, type[Perturbation]] = {
    kind.kind: kind
    for kind in (
        TableEntry, UsedBytes, IdleBytes, LateBytes, SwappedTokens, Operand, SlotIndex, StaleLength, EarlyFree,
        DoubleFree, SkippedWrite, LateWrite, Scale, Nan, LostTransfer, RankSkew,
    )
}  # fmt: skip

__all__ = [
    "CLASSES",
    "DoubleFree",
    "EarlyFree",
    "FaultyWrites",
    "IdleBytes",
    "LateBytes",
    "LateWrite",
    "LostTransfer",
    "Nan",
    "Operand",
    "Perturbation",
    "RankSkew",
    "Scale",
    "SkippedWrite",
    "SlotIndex",
    "Spot",
    "StaleLength",
    "Strike",
    "SwappedTokens",
    "TableEntry",
    "Target",
    "UsedBytes",
]

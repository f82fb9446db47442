"""Violations: from a ring row to a record, to one line for grep, to a text for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .kernels.buffers import UNKNOWN, Check, Phase, Ring


@dataclasses.dataclass(frozen=True)
class HalfInfo:
    """What a report says about a half."""

    id: int
    layer: str
    half: str
    pool: str
    rows: int | None  # size of the row axis, None without one
    positions: int  # slots in one row


@dataclasses.dataclass(frozen=True)
class Violation:
    """One failed check.

    Attributes:
        check: ``content``, ``operand``, ``bounds``, ``poison`` or ``chain``.
        phase: ``pre`` (before the layer's write) or ``post``.
        step: number of the guarded graph call on this device.
        layer, half, pool: ``model.layers.3.self_attn``, ``K``, ``past_key_values.layers[3].keys``.
        row: batch row (or page) of the slot, None where the pool has none.
        index: index inside the row; the slot itself where the pool has no rows.
        slot: slot number in the whole pool, -1 where a write had no slot.
        position: token position, None if nothing showed it.
        stored, found: what the check compared: digests, indices or positions.
        detail: the word of the row that holds a NaN (poison), 1 for a slot written twice (bounds), the
            token (chain).
        request, token: the request and the token in the slot, where an engine told us; else None.
    """

    check: str
    phase: str
    step: int
    layer: str
    half: str
    pool: str
    row: int | None
    index: int
    slot: int
    position: int | None
    stored: int
    found: int
    detail: int = 0
    request: str | None = None
    token: int | None = None

    def line(self) -> str:
        """The record as one stable line of ``key=value`` pairs."""
        shown = {
            "check": self.check,
            "phase": self.phase,
            "layer": self.layer,
            "half": self.half,
            "row": self.row,
            "position": self.position,
            "slot": self.slot,
            "step": self.step,
            "token": self.token,
            "request": self.request,
            "stored": self._shown(self.stored),
            "found": self._shown(self.found),
            "detail": self.detail,
            "pool": self.pool,
        }
        return "kvcanary.violation " + " ".join(f"{k}={'-' if v is None else v}" for k, v in shown.items())

    def _shown(self, value: int) -> str:
        return f"{value & 0xFFFFFFFFFFFFFFFF:#x}" if self.check in ("content", "operand", "poison") else str(value)

    def where(self) -> str:
        """The place, in words."""
        place = f"layer {self.layer}, half {self.half}"
        if self.row is not None:
            place += f", row {self.row}"
        if self.position is not None:
            place += f", position {self.position}"
        if self.token is not None:
            place += f", token {self.token}"
        return f"{place}, slot {self.slot} of {self.pool}" if self.slot >= 0 else f"{place}, no slot of {self.pool}"

    def explain(self) -> str:
        """A short text for people: what failed, where, stored and found, the usual meaning, what to try."""
        what, meaning, remedy = _TEXTS[self._text_key()]
        facts = what.format(
            stored=self._shown(self.stored),
            found=self._shown(self.found),
            value=self.stored,
            hit=self.found,
            detail=self.detail,
        )
        return (
            f"[{self.check}] {facts}\n  where: {self.where()}, step {self.step}\n  usually: {meaning}\n  try: {remedy}"
        )

    def _text_key(self) -> str:
        if self.check != "bounds":
            return self.check
        if self.detail == 1:
            return "twice"
        return "lost" if self.found < 0 else "wrapped"


_TEXTS = {
    "content": (
        "the bytes of a slot changed since they were written (digest {stored}, now {found})",
        "something else wrote to the slot between two steps: a freed block still in use, a stray copy or off-load, "
        "a kernel with a wrong stride, a flipped bit",
        "what ran since the last step? If the write was legal, tell the canary: session.forget(cache)",
    ),
    "operand": (
        "the slot read back is not what the write was given (operand {stored}, read back {found})",
        "the write went to another slot, used a wrong stride, or changed the values on the way",
        "compare the write kernel's index and stride arithmetic with the pool's real layout",
    ),
    "wrapped": (
        "index {value} is out of range and wrapped to slot {hit}",
        "a padding value used as an index: -1 counts from the end in Python",
        "mask padded tokens before the write, or point them at a reserved slot",
    ),
    "lost": (
        "index {value} is out of range",
        "a sequence longer than the cache, or a stale or foreign slot table",
        "check the cache's length and where the index comes from; on a GPU such a write faults or corrupts",
    ),
    "twice": (
        "two tokens of one step were written to the same slot",
        "a slot handed out twice, or padding that shares a real token's slot",
        "check the allocator, and what slot padded tokens get",
    ),
    "poison": (
        "NaN or Inf was written (word {detail} of the row is {found})",
        "an overflow in the layer before, a fully masked row, or uninitialised memory in a padded token",
        "look at the layer's input; clear the slot before it is read: 0 * NaN is NaN even under a mask",
    ),
    "chain": (
        "the token's position is {found} where its predecessor's asks for {stored}",
        "position ids and cache position ran apart: a position bumped twice, or built without the cache's offset",
        "compare the model's position_ids with the slots it writes",
    ),
}


def decode(row: Sequence[int], info: HalfInfo, token: int | None = None, position: int | None = None) -> Violation:
    """The record of one ring row.

    Args:
        token, position: who is in the slot, where the shadow knows it.
    """
    slot, origin = row[Ring.SLOT], row[Ring.ORIGIN]
    in_row = info.rows is not None and slot >= 0
    index = slot % info.positions if in_row else slot
    if in_row and origin != UNKNOWN:
        position = origin + index
    return Violation(
        check=(Check(row[Ring.CHECK]).name or "?").lower(),
        phase=Phase(row[Ring.PHASE]).name.lower(),
        step=row[Ring.STEP],
        layer=info.layer,
        half=info.half,
        pool=info.pool,
        row=slot // info.positions if in_row else None,
        index=index,
        slot=slot,
        position=position,
        stored=row[Ring.STORED],
        found=row[Ring.FOUND],
        detail=row[Ring.DETAIL],
        token=token,
    )

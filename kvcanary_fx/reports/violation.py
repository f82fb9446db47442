"""Violations: from a ring row to a record, to one line for grep, to a readable text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ..errors import CanaryError
from ..kernels.checks import REASONS, TEXTS, Check, Phase, Shown, Why, how_shown
from ..kernels.ring import UNKNOWN, Ring, forward_and_step
from ..kernels.slots.chain import MASK64
from .untrusted import one_line, one_word

#: Layer name of a violation that concerns a slot in all layers.
ALL_LAYERS = "*"


@dataclasses.dataclass(frozen=True)
class HalfInfo:
    """The names and sizes of a half, for reports."""

    id: int
    layer: str
    half: str
    pool: str
    rows: int | None  # size of the row axis, None without one
    positions: int  # slots in one row
    heads: int = 1  # shadow rows per sequence; reports count sequences


@dataclasses.dataclass(frozen=True)
class Violation:
    """One failed check.

    Attributes:
        check: ``content``, ``operand``, ``bounds``, ``poison``, ``chain``, ``index``, ``owner``, ``namespace``,
            ``token`` or ``digest``.
        phase: ``pre`` (before the layer's write), ``post``, ``sweep``, or ``life`` (an allocator's call).
        step: number of the guarded graph call on this device; in an engine's session number of the engine's step, 1 for
            the first one after ``mark_ready()``.  What is found between two steps has the number of the earlier one.
        layer, half, pool: ``model.layers.3.self_attn``, ``K``, ``cache.layers[3].keys``; layer ``*``
            where a slot of an engine's pool is wrong in all of them.
        row: batch row (or page) of the slot, None if the pool has none.
        index: index inside the row; the slot itself if the pool has no rows.
        slot: slot number in the whole pool, -1 if a write had no slot.
        position: token position, None if unknown.
        stored, found: what the check compared: digests, indices or positions.
        detail: the word of the row that holds a NaN (poison), 1 for a slot written twice (bounds), the
            token (chain).
        request, token: the request and the token in the slot, if known from an engine; else None.
        why: what exactly failed, such as ``READ_AFTER_FREE``; None if the check says it.
        also: other checks that failed for the same slot at the same time.
        forward: index of the engine's forward (``session.forward(index)``) in which it was found; None outside one.
        owners: in an owner check, ids of the requests with the hashes ``stored`` and ``found``; None if unknown.
        history: what the slot went through, in words; None if it is not kept, or was not read for this record.
        text: name of the text that explains it, if that is neither ``why`` nor ``check``.
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
    request: str | int | None = None
    token: int | None = None
    why: str | None = None
    also: tuple[str, ...] = ()
    forward: int | None = None
    owners: tuple[str | int | None, str | int | None] = (None, None)
    text: str | None = None
    history: str | None = dataclasses.field(default=None, compare=False)

    def fields(self) -> dict[str, object]:
        """The record for a log line, by the names in it.  What was compared is text: it may not fit into a float."""
        return {
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
            "stored": self._shown(self.stored, self.owners[0]),
            "found": self._shown(self.found, self.owners[1]),
            "detail": self.detail,
            "why": self._shown_why(),
            "also": ",".join(self.also) or None,
            "forward": self.forward,
            "pool": self.pool,
        }

    def line(self, **counted: int) -> LogLine:
        """The record as one stable line of ``key=value`` pairs; a value that is not a plain word is a JSON string.

        Args:
            counted: what this line stands for, such as ``times=100``; at its end, behind the history if there is one.
        """
        told = {"history": self.history} if self.history else {}
        shown = {**self.fields(), **told, **counted}
        text = " ".join(f"{k}={'-' if v is None else one_word(v)}" for k, v in shown.items())
        fields = {"message": self.explain().splitlines()[0], **self.fields(), "history": self.history, **counted}
        return LogLine(f"kvcanary.violation {text}", fields)

    def _shown_why(self) -> str | None:
        """What failed, and of bytes, whose check has no reason of its own, whether they came with a transfer."""
        return self.why.lower() if self.why else "transfer" if self.text == "transfer" else None

    def _shown(self, value: int, owner: str | int | None = None) -> str:
        if owner is not None:
            return str(owner)
        plain = how_shown(self.check, self.why) is Shown.NUMBER
        return str(value) if plain else f"{value & MASK64:#x}"

    def where(self) -> str:
        """The place, as text."""
        place = "all layers" if self.layer == ALL_LAYERS else f"layer {self.layer}, half {self.half}"
        if self.request is not None:
            place += f", request {one_line(self.request)}"
        if self.row is not None:
            place += f", row {self.row}"
        if self.position is not None:
            place += f", position {self.position}"
        if self.token is not None:
            place += f", token {self.token}"
        pool = one_line(self.pool)
        return f"{place}, slot {self.slot} of {pool}" if self.slot >= 0 else f"{place}, no slot of {pool}"

    def when(self) -> str:
        """The step, and in an engine's session the forward."""
        return f"step {self.step}" if self.forward is None else f"step {self.step}, forward {self.forward}"

    def explain(self, advice: Mapping[str, str] | None = None) -> str:
        """A short readable text: what failed, where, stored and found, the usual meaning, what to try.

        Args:
            advice: what to try with the engine at hand, by the name of the text.
        """
        name = self._text_name()
        text = TEXTS[name]
        remedy = text.remedy if advice is None else advice.get(name, text.remedy)
        if self.phase == "sweep":  # which reads nothing
            text = text._replace(what=text.what.replace("attention is about to read", "a prefix cache lists"))
        facts = text.what.format(
            stored=one_line(self._shown(self.stored, self.owners[0])),
            found=one_line(self._shown(self.found, self.owners[1])),
            value=self.stored,
            hit=self.found,
            detail=self.detail,
        )
        history = f"  history: {one_line(self.history)}\n" if self.history else ""
        return (
            f"[{self.check}] {facts}\n  where: {self.where()}, {self.when()}\n{history}  usually: {text.meaning}\n"
            f"  try: {remedy}"
        )

    def _text_name(self) -> str:
        if self.why is not None:
            return self.why
        if self.check == "content" and self.phase in ("post", "life") and self.text != "transfer":
            return f"content {self.phase}"
        if self.text is not None:
            return self.text
        if self.check != "bounds":
            return self.check
        if self.detail == 1:
            return "twice"
        return "lost" if self.found < 0 else "wrapped"


class LogLine(str):
    """A line of the log that still knows what it was made of.

    Attributes:
        fields: for a log of objects, by name; ``message`` is what the line says in a sentence.
    """

    fields: Mapping[str, object]

    def __new__(cls, text: str, fields: Mapping[str, object]) -> LogLine:
        line = super().__new__(cls, text)
        line.fields = fields
        return line


def _primary(bits: int, why: Why) -> Check:
    """The check whose failure a row reports."""
    return REASONS[why].check if why in REASONS else Check(bits)


def decode(
    row: Sequence[int],
    info: HalfInfo,
    token: int | None = None,
    position: int | None = None,
    request: str | int | None = None,
    last_written: int | None = None,
) -> Violation:
    """The record of one ring row.

    Args:
        token, position, request: who is in the slot, if the shadow knows it.
        last_written: index of the last written slot in the slot's row.
    """
    slot, origin, why = row[Ring.SLOT], row[Ring.ORIGIN], Why(row[Ring.WHY])
    check = _primary(row[Ring.CHECK], why)
    if row[Ring.POSITION] != UNKNOWN:
        position = row[Ring.POSITION]
    inside = row[Ring.PHASE] in (Phase.PRE, Phase.POST)  # the other phases are between forwards
    forward, step = forward_and_step(row[Ring.FORWARD])
    in_row = info.rows is not None and slot >= 0
    index = slot % info.positions if in_row else slot
    sequence = slot // info.positions // info.heads if in_row else None
    if in_row and origin != UNKNOWN:
        position = origin + index
        if origin > 0 and last_written is not None and index > last_written:
            position -= info.positions  # a ring: slots behind its newest token are from the round before
    return Violation(
        check=(check.name or "?").lower(),
        phase=Phase(row[Ring.PHASE]).name.lower(),
        step=step if step >= 0 else row[Ring.STEP],
        layer=info.layer,
        half=info.half,
        pool=info.pool,
        row=sequence,
        index=index,
        slot=slot if sequence is None else sequence * info.positions + index,
        position=position,
        stored=row[Ring.STORED],
        found=row[Ring.FOUND],
        detail=row[Ring.DETAIL],
        token=token,
        request=request,
        why=why.name if why != Why.NONE else None,
        forward=forward if inside and forward >= 0 else None,
        also=tuple((c.name or "?").lower() for c in Check if c & row[Ring.CHECK] & ~check),
    )


class KVCacheViolation(CanaryError):
    """The KV cache is not what it should be.

    Attributes:
        violations: the records, most informative first.
        total: how many violations there were, including those that did not fit into the ring.
    """

    def __init__(self, violations: Sequence[Violation], total: int, advice: Mapping[str, str] | None = None):
        """Show the first violations.

        Args:
            advice: as in :meth:`Violation.explain`.
        """
        self.violations = list(violations)
        self.total = total
        shown = [v.explain(advice) for v in self.violations[:3]]
        more = total - len(shown)
        if more > 0:
            shown.append(f"... and {more} more (session.violations() has the records)")
        super().__init__("KV cache violation\n\n" + "\n\n".join(shown))

"""The likeliest cause of what failed in one step: the rules, in one place.

``tests/bugs/measure_causes.py`` says how often the first cause is right, on documented bugs that no rule was made on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .incident import Incident, PoolScene, Record, RequestScene, SlotScene

#: Every cause, and what is meant by it.
CAUSES = {
    "stale table": "a table, map, plan or length is that of another step, or names slots that were given on",
    "early free": "a slot was given back while a forward still used it",
    "double free": "slots were released twice, or by somebody who does not own them",
    "torn transfer": "a copy between pools, hosts or engines was cut short, mixed up, unordered, or lost an end",
    "wrong slot": "an index of another space, a wrong stride, or a mapping applied wrongly",
    "too narrow": "a row, a buffer or a pool is smaller than what is put into it",
    "wrong position": "positions, lengths or where a window begins are off, by a token, a page or an offset",
    "wrong prefix": "a prefix cache serves or lists slots that do not hold that prefix: its key, a hash, an old entry",
    "shared write": "a request writes to a slot that it shares",
    "wrong token": "what was stored is not the request's own token",
    "padding": "padding reads or writes real slots, or leaves NaN where they are read",
    "uncleared": "a slot still holds what its last tenant left",
    "wrong rank": "ranks disagree, or one of them did not load",
    "bit flip": "one bit changed: memory, or a stray write of one element",
    "unknown": "no rule fits what was reported",
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What failed in the first step of an incident.

    Attributes:
        first: the most telling record.
        records: all of the step.
    """

    incident: Incident
    first: Record
    records: tuple[Record, ...]

    @property
    def pool(self) -> PoolScene | None:
        return None if self.first.pool is None else self.incident.pools[self.first.pool]

    @property
    def slot(self) -> SlotScene | None:
        """What is known of the slot of the first record."""
        near = () if self.pool is None else self.pool.near
        return next((s for s in near if s.slot == self.first.slot), None)

    @property
    def request(self) -> RequestScene | None:
        """The request of the first record, in the batch."""
        batch = () if self.pool is None else self.pool.batch
        asked = self.first.violation.request
        return next((r for r in batch if asked is not None and r.request == asked), None)

    @property
    def reasons(self) -> set[str | None]:
        return {record.violation.why for record in self.records}

    def held(self, slot: int) -> bool:
        """Whether anybody holds a slot of the pool, as far as the file has a map."""
        if self.pool is None or self.pool.map is None or not 0 <= slot < self.pool.slots:
            return False
        return int(self.pool.map[slot]) in (1, 3)  # written, shared


def likely(incident: Incident) -> list[str]:
    """Names of causes, the likeliest first; ``unknown`` alone if no rule fits.  Empty without violations."""
    if not incident.records:
        return []
    first = incident.records[0]
    step = tuple(r for r in incident.records if r.violation.step == first.violation.step)
    facts = Facts(incident, first, step)
    violation = first.violation
    rule = _BY_REASON.get(violation.why) if violation.why is not None else _BY_CHECK.get(violation.check)
    if rule is None:
        return ["unknown"]
    return list(rule(facts) if callable(rule) else rule)


def told(incident: Incident) -> str:
    """The causes in a line; empty without violations."""
    names = likely(incident)
    if not names:
        return ""
    others = f" Else: {' or '.join(names[1:])}." if names[1:] else ""
    return f"Likeliest cause: {names[0]} ({CAUSES[names[0]]}).{others}"


Names = tuple[str, ...]
Rule = Names | Callable[[Facts], Names]


def _content(facts: Facts) -> Names:
    """Bytes changed.  What came with a transfer, or changed in every tensor at once, was copied there."""
    seen = [r.evidence for r in facts.records if r.evidence is not None]
    everywhere = _in_every_tensor(facts)
    if facts.first.violation.text == "transfer" or (facts.slot is not None and facts.slot.imported):
        if everywhere and seen and all(e.nonzero == 0 for e in seen):
            return "wrong rank", "torn transfer"  # nothing arrived at all
        return "torn transfer", "wrong rank"
    if seen and all(e.bit is not None for e in seen) and len(seen) <= 2:
        return "bit flip", "wrong slot"
    if everywhere:
        return "torn transfer", "early free"
    return "wrong slot", "torn transfer"


def _in_every_tensor(facts: Facts) -> bool:
    """Whether a slot's bytes are wrong in all layers, K and V."""
    hit = {r.half for r in facts.records if r.violation.check == "content" and r.slot == facts.first.slot}
    return facts.pool is not None and hit >= {half.id for half in facts.pool.halves}


def _wrong_position(facts: Facts) -> Names:
    """A position of the batch itself, or of a slot that holds something else."""
    slot, request = facts.slot, facts.request
    if slot is not None and slot.imported:
        return "torn transfer", "wrong position"
    if request is not None and facts.first.slot in request.slots:
        return "wrong position", "stale table"
    same = [r.violation for r in facts.records if r.violation.why == "WRONG_POSITION"]
    shifts = {v.found - v.stored for v in same}
    if len(shifts) == 1 and (len(same) > 1 or shifts <= {-1, 1}):
        return "wrong position", "wrong prefix"
    return "torn transfer", "stale table"


def _never_written(facts: Facts) -> Names:
    if "WRONG_POSITION" in facts.reasons:
        return "wrong position", "torn transfer"
    if facts.slot is not None and facts.slot.imported:
        return "torn transfer", "uncleared"
    return "uncleared", "torn transfer"


def _foreign_read(facts: Facts) -> Names:
    """A request that decodes has lost its slot; one that begins was given another's as its prefix."""
    if facts.request is not None and facts.request.extend > 1:
        return "wrong prefix", "stale table", "early free"
    return "early free", "stale table", "wrong prefix"


def _other_slot(facts: Facts) -> Names:
    """A slot that somebody holds was right in another step; one that nobody holds is of another index space."""
    if facts.held(facts.first.violation.found):
        return "stale table", "wrong slot", "too narrow"
    return "wrong slot", "stale table", "too narrow"


def _out_of_range(facts: Facts) -> Names:
    return ("padding", "wrong slot") if facts.first.violation.stored < 0 else ("wrong slot", "too narrow")


def _bounds(facts: Facts) -> Names:
    if facts.first.violation.detail == 1:  # two tokens to one slot
        return "double free", "padding"
    return ("padding", "wrong slot") if facts.first.violation.stored < 0 else ("too narrow", "wrong slot")


def _other_content(facts: Facts) -> Names:
    """The slot holds another prefix or token: it came with a transfer, or a cache took it for this one."""
    if facts.slot is not None and facts.slot.imported:
        return "torn transfer", "wrong prefix"
    return "wrong prefix", "torn transfer"


def _wrong_token(facts: Facts) -> Names:
    if facts.slot is not None and facts.slot.imported:
        return "torn transfer", "wrong token"
    return "wrong token", "wrong prefix"


_BY_CHECK: dict[str, Rule] = {
    "content": _content,
    "operand": ("wrong slot", "too narrow"),
    "index": ("wrong slot", "padding"),
    "poison": ("padding", "uncleared"),
    "bounds": _bounds,
    "chain": ("wrong position", "wrong token"),
}

_BY_REASON: dict[str, Rule] = {
    "OUT_OF_RANGE": _out_of_range,
    "RESERVED_SLOT": ("padding", "stale table"),
    "PADDING_WRITES": ("padding", "stale table"),
    "PLANNED_TWICE": ("double free", "padding"),
    "ROW_TOO_NARROW": ("too narrow", "wrong position"),
    "NO_SUCH_ROW": ("padding", "stale table"),
    "READ_AFTER_FREE": ("stale table", "early free"),
    "FOREIGN_READ": _foreign_read,
    "WRITE_AFTER_FREE": ("early free", "stale table"),
    "OVERWRITE": ("early free", "double free"),
    "WRITE_SHARED": ("shared write", "wrong position"),
    "DOUBLE_FREE": ("double free", "stale table"),
    "FOREIGN_FREE": ("double free", "stale table"),
    "DOUBLE_ALLOCATE": ("double free", "early free"),
    "SHARE_AFTER_FREE": ("wrong prefix", "double free"),
    "NEVER_WRITTEN": _never_written,
    "WRONG_POSITION": _wrong_position,
    "WRONG_PREDECESSOR": _other_content,
    "OTHER_NAMESPACE": ("wrong prefix", "torn transfer"),
    "WRONG_TOKEN": _wrong_token,
    "REJECTED_TOKEN": ("wrong token", "wrong position"),
    "NOT_THE_PLANNED_SLOT": _other_slot,
    "READ_DIFFERS": _other_slot,
    "TABLE_DIFFERS": ("stale table", "wrong slot"),
    "LENGTH_DIFFERS": ("stale table", "wrong position"),
    "DIGEST_DIFFERS": ("wrong rank", "torn transfer"),
    "WRITTEN_BEFORE": ("wrong slot", "shared write"),
    "READ_WHILE_WRITTEN": ("stale table", "wrong prefix"),
}

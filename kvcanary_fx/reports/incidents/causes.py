"""The likeliest cause of what failed in one step: the rules, in one place.

``tests/bugs/measure_causes.py`` says how often the first cause is right, on documented bugs that no rule was made on.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .facts import Facts
from .incident import Incident

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
    "lost write": "a write that did not happen, or did not reach memory: the slot holds what it held",
    "bad value": "the model itself computed NaN or Inf",
    "unknown": "no rule fits what was reported",
}


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
    """Bytes changed.  What came with a transfer, or changed in every tensor at once, was copied there.

    A write of this forward that went astray is seen after it; what is seen before it came from outside: from one who
    had the slot before, or whose copy was late.  If nobody had it, or the bytes were right long after that one had
    released it, it went astray after all.
    """
    seen = [r.evidence for r in facts.records if r.evidence is not None]
    everywhere = _in_every_tensor(facts)
    if facts.first.violation.text == "transfer" or (facts.slot is not None and facts.slot.imported):
        if everywhere and not facts.arrived and seen and all(e.nonzero == 0 for e in seen):
            return "wrong rank", "torn transfer"  # nothing arrived at all
        return "torn transfer", "wrong rank"
    if seen and all(e.bit is not None for e in seen) and len(seen) <= 2:
        return "bit flip", "wrong slot"
    if everywhere:
        return "torn transfer", "early free"
    if facts.first.violation.phase == "post" or len({r.slot for r in facts.alike}) > 1:
        return "wrong slot", "early free"
    settled = facts.tenants is not None and facts.tenants.settled(facts.first.violation.step)
    return ("wrong slot", "early free") if settled else ("early free", "wrong slot")


def _in_every_tensor(facts: Facts) -> bool:
    """Whether a slot's bytes are wrong in all layers, K and V."""
    hit = {r.half for r in facts.records if r.violation.check == "content" and r.slot == facts.first.slot}
    return facts.pool is not None and hit >= {half.id for half in facts.pool.halves}


def _operand(facts: Facts) -> Names:
    """What was to be written is elsewhere, or nowhere: then one token is lost, or all are written wrongly."""
    seen = facts.first.evidence
    if seen is None or seen.moved_to:
        return "wrong slot", "too narrow"
    if seen.nonzero == 0 or len({r.slot for r in facts.alike}) < facts.tokens:
        return "lost write", "wrong slot"
    return "wrong slot", "too narrow"


def _poison(facts: Facts) -> Names:
    """Attention over NaN gives whole rows of it, an overflow single elements."""
    near = () if facts.pool is None else facts.pool.near
    reserved = {s.slot for s in near if s.state == "reserved"} & {r.slot for r in facts.alike}
    half, seen = facts.incident.half(facts.first.half), facts.first.evidence
    whole = half is not None and seen is not None and seen.poisoned == math.prod(half.row_shape)
    return ("padding", "bad value") if reserved or whole else ("bad value", "padding")


def _wrong_position(facts: Facts) -> Names:
    """A position of the batch itself, or of a slot that holds something else."""
    slot, request = facts.slot, facts.request
    if slot is not None and slot.imported:
        return "torn transfer", "wrong position"
    if request is not None and facts.first.slot in request.slots:
        return "wrong position", "stale table"
    if facts.missing:
        return "stale table", "wrong position"
    same = [r.violation for r in facts.records if r.violation.why == "WRONG_POSITION"]
    shifts = {v.found - v.stored for v in same}
    if len(shifts) == 1 and (len(same) > 1 or shifts <= {-1, 1}):
        return "wrong position", "wrong prefix"
    return "torn transfer", "stale table"


def _never_written(facts: Facts) -> Names:
    """If it is only the last token of a prefix, the length counts one too many.

    Nobody has left anything in a slot that nobody had before: there, what should have come from elsewhere is missing
    from its beginning on, or beside what came; else tokens are counted that are not there.
    """
    if "WRONG_POSITION" in facts.reasons:
        return "wrong position", "torn transfer"
    if facts.slot is not None and facts.slot.imported:
        return "torn transfer", "uncleared"
    if facts.missing:
        return "stale table", "wrong position"
    last = None if facts.request is None else facts.request.prefix - 1
    if last is not None and last > 0 and [r.violation.position for r in facts.alike] == [last]:
        return "wrong position", "uncleared"
    if facts.tenants is not None and facts.tenants.former is False:
        whole = facts.arrived or any(r.violation.position == 0 for r in facts.alike)
        return ("torn transfer", "wrong position") if whole else ("wrong position", "torn transfer")
    return "uncleared", "torn transfer"


def _freed_read(facts: Facts) -> Names:
    """If the request had the slot, or it still holds what the request needs, it was released too early; else the table
    is wrong.

    Where a map leads to the slot, the map may be that of another step.  A prefix cache lists a slot that was released
    once more than it was taken.
    """
    if facts.first.violation.phase == "sweep":
        return "double free", "wrong prefix"
    if not facts.named or facts.missing:
        return "stale table", "early free"
    fits = facts.slot is not None and facts.slot.fits
    return ("early free", "double free") if fits or facts.had else ("stale table", "early free")


def _foreign_read(facts: Facts) -> Names:
    """A request that had the slot has lost it, or its row names another; one that begins was given another's as its
    prefix.  What a request never had, it cannot have lost."""
    if facts.missing:
        return "stale table", "early free"
    begins = facts.request is not None and facts.request.extend > 1
    if facts.had or (facts.had is None and not begins):
        return "early free", "stale table", "wrong prefix"
    return ("wrong prefix", "stale table", "early free") if begins else ("stale table", "wrong prefix", "early free")


def _written_after_free(facts: Facts) -> Names:
    """A request that had the slot has lost it too early.  One that never had it has an index that is wrong, or a plan:
    then it is so for all tokens of the batch."""
    if facts.tenants is not None and facts.tenants.allocated_twice:
        return "double free", "early free"
    if facts.had is not False:
        return "early free", "stale table"
    return ("wrong slot", "stale table") if len(facts.alike) < facts.tokens else ("stale table", "wrong slot")


def _shared_after_free(facts: Facts) -> Names:
    """A cache lists what it has evicted.  If it never had a share of the slot, the request has released what the cache
    took over from it."""
    tenants = facts.tenants
    if tenants is not None and tenants.shared is False and tenants.released_by_its_own:
        return "double free", "wrong prefix"
    return "wrong prefix", "double free"


def _other_write(facts: Facts) -> Names:
    """A plan or a buffer that is wrong is so for all tokens of the batch, and names slots that are in use."""
    asked = {(r.violation.request, r.violation.position, r.violation.found) for r in facts.alike}
    if len(asked) < facts.tokens or not all(facts.held(found) for _, _, found in asked):
        return "wrong slot", "stale table"
    if all(facts.slot_of(request, (position or 0) - 1) == found for request, position, found in asked):
        return "stale table", "wrong slot"  # the slots of the step before
    if all(facts.reads(found) for _, _, found in asked):
        return "too narrow", "stale table"  # slots of the prefix: a table lies over the plan
    return "stale table", "wrong slot"


def _other_slot(facts: Facts) -> Names:
    """A slot that somebody holds was right in another step; one that nobody holds is of another index space."""
    if facts.held(facts.first.violation.found):
        return "stale table", "wrong slot", "too narrow"
    return "wrong slot", "stale table", "too narrow"


def _reserved(facts: Facts) -> Names:
    """A row that names the slot was not filled, or was cleared; a token that goes there has a padded index."""
    return ("stale table", "padding") if facts.named else ("padding", "stale table")


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
    if facts.missing:
        return "stale table", "wrong prefix"
    return "wrong prefix", "torn transfer"


def _wrong_token(facts: Facts) -> Names:
    """Written: at a position that is stored already, or another token than the request's.  Read: whose slot is it?"""
    slot, asked = facts.slot, facts.first.violation.request
    if slot is not None and slot.imported:
        return "torn transfer", "wrong token"
    if facts.rewritten:
        return "wrong position", "wrong token"
    if facts.named and slot is not None and (slot.state == "shared" or slot.owner not in (None, asked)):
        return "wrong prefix", "wrong token"
    return "wrong token", "wrong prefix"


def _written_while_read(facts: Facts) -> Names:
    return ("wrong position", "shared write") if facts.rewritten else ("stale table", "wrong prefix")


_BY_CHECK: dict[str, Rule] = {
    "content": _content,
    "operand": _operand,
    "index": ("wrong slot", "padding"),
    "poison": _poison,
    "bounds": _bounds,
    "chain": ("wrong position", "wrong token"),
}

_BY_REASON: dict[str, Rule] = {
    "OUT_OF_RANGE": _out_of_range,
    "RESERVED_SLOT": _reserved,
    "PADDING_WRITES": ("padding", "stale table"),
    "PLANNED_TWICE": ("double free", "padding"),
    "ROW_TOO_NARROW": ("too narrow", "wrong position"),
    "NO_SUCH_ROW": ("padding", "stale table"),
    "READ_AFTER_FREE": _freed_read,
    "FOREIGN_READ": _foreign_read,
    "WRITE_AFTER_FREE": _written_after_free,
    "OVERWRITE": _written_after_free,
    "WRITE_SHARED": ("shared write", "wrong position"),
    "DOUBLE_FREE": ("double free", "stale table"),
    "FOREIGN_FREE": ("double free", "stale table"),
    "DOUBLE_ALLOCATE": ("double free", "early free"),
    "SHARE_AFTER_FREE": _shared_after_free,
    "NEVER_WRITTEN": _never_written,
    "WRONG_POSITION": _wrong_position,
    "WRONG_PREDECESSOR": _other_content,
    "OTHER_NAMESPACE": ("wrong prefix", "torn transfer"),
    "WRONG_TOKEN": _wrong_token,
    "REJECTED_TOKEN": ("wrong token", "wrong position"),
    "NOT_THE_PLANNED_SLOT": _other_write,
    "READ_DIFFERS": _other_slot,
    "TABLE_DIFFERS": ("stale table", "wrong slot"),
    "LENGTH_DIFFERS": ("stale table", "wrong position"),
    "DIGEST_DIFFERS": ("wrong rank", "torn transfer"),
    "WRITTEN_BEFORE": ("wrong slot", "shared write"),
    "READ_WHILE_WRITTEN": _written_while_read,
}

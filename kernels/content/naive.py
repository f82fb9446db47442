"""The checks in plain loops, one slot at a time: the definition that the CPU and GPU kernels must equal.

Used by tests only.  Each function does what the one of the same name in :mod:`.cpu` documents.
"""

from __future__ import annotations

import torch

from ..buffers import NOT_WRITTEN, Count, Gate, IdentityBuffers, RowState, Site
from ..checks import Check, Phase, Why
from ..counting import count_op
from ..ring import UNKNOWN, Word, append
from ..slots.chain import MASK64, SEED, mix
from ..slots.space import Flag, SlotSpace
from ..writes.layout import poison_mask
from .digest import MASK32, as_int32, digest_reference, empty_digest, stored_form


def row_bytes(site: Site, view: torch.Tensor, slot: int) -> bytes:
    """The bytes of one slot, in index order."""
    first = site.layout.slots_first(view)
    row = first[divmod(slot, site.layout.positions)] if site.layout.two_axes else first[slot]
    return bytes(row.contiguous().view(torch.uint8).flatten().tolist()) if row.dim() else _scalar_bytes(row)


def _scalar_bytes(element: torch.Tensor) -> bytes:
    return bytes(element.reshape(1).view(torch.uint8).tolist())


def digest_of(site: Site, data: bytes) -> list[int]:
    """What the shadow stores for a row: one signed 32-bit integer per plane."""
    h1, h2 = digest_reference(data, site.seed1, site.seed2)
    return [as_int32(stored_form(h1)), as_int32(h2)][: site.half.digest.shape[0]]


def _packed(planes: list[int]) -> int:
    low = planes[0] & MASK32
    packed = low if len(planes) == 1 else low | ((planes[1] & MASK32) << 32)
    return packed - (1 << 64) if packed >> 63 else packed


def _report(
    site: Site,
    phase: Phase,
    check: Check,
    slot: int,
    stored: int,
    found: int,
    detail: int = 0,
    lenient: bool = False,
    why: Why = Why.NONE,
) -> None:
    row = max(slot, 0) // site.layout.positions if site.layout.has_rows else 0
    known = site.space if check is Check.CONTENT or why else None
    append(
        site.control,
        True,
        half=site.half_id,
        check=int(check),
        phase=phase,
        lenient=lenient,
        slot=slot,
        origin=int(site.half.rows[row, RowState.ORIGIN]),
        stored=stored,
        found=found,
        detail=detail,
        request=int(known.owners[slot]) if known is not None else 0,
        position=int(known.positions[slot]) if known is not None else UNKNOWN,
        why=int(why),
    )


def begin(control_words: torch.Tensor, gate: torch.Tensor, counts: torch.Tensor | None = None) -> None:
    if counts is not None and counts[0] < 0:
        return
    control_words[Word.STEP] += 1
    gate[Gate.STEP] += 1
    gate[Gate.LENIENT_NOW] = int(gate[Gate.LENIENT_NEXT])
    gate[Gate.LENIENT_NEXT] = 0
    count_op(gate)


def _epoch(site: Site, write_id: int) -> int:
    return int(site.control.words[Word.STEP]) * 65536 + write_id


def _takes_padding(site: Site, slot: int) -> bool:
    if site.space is not None:
        return slot >= 0 and bool(int(site.space.flags[slot]) & Flag.RESERVED)
    return slot == 0 and not site.layout.has_rows


def check_plan(site: Site, slots: torch.Tensor, raw: torch.Tensor, write_id: int, phase: Phase) -> None:
    seen: set[int] = set()
    told: set[int] = set()
    for slot, given in zip(slots.tolist(), raw.tolist(), strict=True):
        report = bool(site.checks & Check.BOUNDS)
        if given != slot and report:
            _report(site, phase, Check.BOUNDS, slot, given, slot)
        if slot in seen and slot not in told:
            told.add(slot)
            site.control.stamps[1, slot] = _epoch(site, write_id)
            if report and not _takes_padding(site, slot):
                _report(site, phase, Check.BOUNDS, slot, slot, slot, detail=1)
        if slot >= 0:
            seen.add(slot)
            site.control.stamps[0, slot] = _epoch(site, write_id)


def verify(
    site: Site,
    view: torch.Tensor,
    first: torch.Tensor | None,
    ops: int = 0,
    coming: int | None = None,
    in_flight: bool = False,
    own_rows: bool = False,
) -> None:
    site.counters[Count.VERIFY_RUNS] += 1
    count_op(site.gate, ops)
    now = bool(site.gate[Gate.LENIENT_NOW]) and site.space is None
    lenient = (now or site.lenient) and site.space is None
    baseline = site.half.baseline if site.space is None else None
    every = int(site.control.every(site.verify_every))
    for slot in range(site.layout.slots):
        stored = site.half.digest[:, slot].tolist()
        if baseline is not None:
            baseline[slot] = stored[0]
        if not site.checks & Check.CONTENT:
            continue
        if site.space is not None and int(site.space.reads[slot]) != int(site.space.clock[0]):
            continue
        if stored[0] == 0:
            if site.space is not None and _is_lost(site, site.space, slot, in_flight):
                _report(site, Phase.PRE, Check.POISON, slot, 0, 0, why=Why.NEVER_WRITTEN)
                site.half.digest[:, slot] = torch.tensor(digest_of(site, row_bytes(site, view, slot)))
            continue
        shifted = _is_shifted(site, slot, first)
        turn = site.space is not None or (slot + int(site.gate[Gate.STEP])) % every == 0
        rewritten = coming is not None and int(site.control.stamps[0, slot]) == _epoch(site, coming)
        due = now or turn or rewritten or (lenient and shifted)
        if not due or (own_rows and _is_of_others(site, slot, first)):
            continue
        site.counters[Count.CHECKED] += 1
        found = digest_of(site, row_bytes(site, view, slot))
        if found == stored:
            continue
        if lenient and shifted:
            site.counters[Count.ADOPTED] += 1
        else:
            _report(site, Phase.PRE, Check.CONTENT, slot, _packed(stored), _packed(found), lenient=lenient)
        site.half.digest[:, slot] = torch.tensor(found, dtype=torch.int32)
        if baseline is not None:
            baseline[slot] = found[0]
    if first is not None:
        adopt(site, view, first)


def _is_lost(site: Site, space: SlotSpace, slot: int, in_flight: bool) -> bool:
    """Whether a slot without a digest should have one: a forward stored a token there, and the half is recorded."""
    if not site.checks & Check.POISON or not int(site.half.rows[0, RowState.NEXT]):
        return False
    return not int(space.flags[slot]) & Flag.NAMELESS and not (in_flight and _is_planned(space, slot))


def _is_planned(space: SlotSpace, slot: int) -> bool:
    return 0 <= int(space.planned[slot]) + int(space.epoch()) < 1 << 32


def _is_of_others(site: Site, slot: int, first: torch.Tensor | None) -> bool:
    return first is not None and int(first[slot // site.layout.positions]) == NOT_WRITTEN


def _is_shifted(site: Site, slot: int, first: torch.Tensor | None) -> bool:
    if first is None or not site.layout.has_rows:
        return False
    row = slot // site.layout.positions
    return int(first[row]) not in (NOT_WRITTEN, int(site.half.rows[row, RowState.NEXT]))


def adopt(site: Site, view: torch.Tensor, first: torch.Tensor) -> None:
    if not site.layout.has_rows:
        return
    every, step = int(site.control.every(site.verify_every)), int(site.gate[Gate.STEP])
    for slot in range(site.layout.slots):
        row, position = divmod(slot, site.layout.positions)
        below = int(first[row]) != NOT_WRITTEN and position < int(first[row])
        gap = int(first[row]) > int(site.half.rows[row, RowState.NEXT])
        wanted = gap or bool(site.gate[Gate.LENIENT_NOW]) or (slot + step) % every == 0
        if below and wanted and int(site.half.digest[0, slot]) == 0:
            _adopt_slot(site, slot, digest_of(site, row_bytes(site, view, slot)))


def _adopt_slot(site: Site, slot: int, found: list[int]) -> None:
    site.half.digest[:, slot] = torch.tensor(found, dtype=torch.int32)
    site.counters[Count.ADOPTED] += 1
    if site.half.baseline is not None:
        site.half.baseline[slot] = found[0]


def record(
    site: Site,
    view: torch.Tensor,
    slots: torch.Tensor,
    values: torch.Tensor | None,
    write_id: int,
    last_position: torch.Tensor | None = None,
    moved: int | None = None,
    ops: int = 0,
    planned: bool = False,
) -> None:
    if site.space is not None:
        site.half.rows[0, RowState.NEXT] = 1
    site.counters[Count.RECORD_RUNS] += 1
    count_op(site.gate, ops)
    _update_rows(site, slots.tolist(), last_position, moved)
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        site.counters[Count.RECORDED] += 1
        data = row_bytes(site, view, slot)
        found = digest_of(site, data)
        _check_poison(site, slot, data)
        twice = int(site.control.stamps[1, slot]) == _epoch(site, write_id)
        spared = site.space is not None and _takes_padding(site, slot)
        if values is not None and site.checks & Check.OPERAND and not twice and not spared:
            given = bytes(values[i].contiguous().view(torch.uint8).flatten().tolist())
            if given != data:
                _report(site, Phase.POST, Check.OPERAND, slot, _packed(digest_of(site, given)), _packed(found))
        if not planned or site.space is None or _is_planned(site.space, slot):
            site.half.digest[:, slot] = torch.tensor(found, dtype=torch.int32)


def _check_poison(site: Site, slot: int, data: bytes) -> None:
    mask, bits = poison_mask(site.layout.dtype)
    if mask == 0 or not site.checks & Check.POISON:
        return
    size = site.layout.dtype.itemsize
    for at in range(0, len(data), size):
        element = int.from_bytes(data[at : at + size], "little")
        high = element >> 32 if size == 8 else element
        if high & mask == bits:
            word = (at + size - 1) // 4
            found = int.from_bytes((data + b"\0\0\0")[4 * word : 4 * word + 4], "little")
            _report(site, Phase.POST, Check.POISON, slot, 0, found, detail=word)
            return


def _update_rows(site: Site, slots: list[int], last_position: torch.Tensor | None, moved: int | None) -> None:
    layout, rows = site.layout, site.half.rows
    if not layout.has_rows:
        return
    for row in range(layout.rows):
        inside = [s % layout.positions for s in slots if s >= 0 and s // layout.positions == row]
        if not inside:
            continue
        old = rows[row].tolist()
        if last_position is not None:
            origin = int(last_position[row]) - max(inside)
        elif moved is None:
            origin = 0
        elif moved == 0 or old[RowState.ORIGIN] == UNKNOWN:
            origin = UNKNOWN
        else:
            origin = old[RowState.ORIGIN] + old[RowState.NEXT] + moved - layout.positions
        rows[row, RowState.NEXT] = max(inside) + 1
        rows[row, RowState.ORIGIN] = origin
        rows[row, RowState.LENGTH] = len(inside) if moved is None else moved


def snapshot(site: Site, view: torch.Tensor) -> None:
    assert site.half.baseline is not None
    empty = list(empty_digest((site.seed1, site.seed2)))[: site.half.digest.shape[0]]
    for slot in range(site.layout.slots):
        found = digest_of(site, row_bytes(site, view, slot))
        site.half.baseline[slot] = found[0]
        if site.space is None and int(site.half.digest[0, slot]) == 0 and found != empty:
            _adopt_slot(site, slot, found)


def record_changed(site: Site, view: torch.Tensor, planned: torch.Tensor | None = None) -> None:
    assert site.half.baseline is not None
    site.counters[Count.RECORD_RUNS] += 1
    for slot in range(site.layout.slots):
        data = row_bytes(site, view, slot)
        found = digest_of(site, data)
        again = planned is None and int(site.half.digest[0, slot]) not in (0, found[0])
        if found[0] == int(site.half.baseline[slot]) and not again:
            continue
        if planned is not None and not bool(planned[slot]):
            if site.checks & Check.INDEX:
                stored = site.half.digest[:, slot].tolist()
                _report(site, Phase.POST, Check.INDEX, slot, _packed(stored), _packed(found))
        else:
            site.half.digest[:, slot] = torch.tensor(found, dtype=torch.int32)
            site.counters[Count.RECORDED] += 1
            _check_poison(site, slot, data)


def identify(
    site: Site, identity: IdentityBuffers, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
) -> None:
    for where, who, at in zip(slots.tolist(), tokens.tolist(), positions.tolist(), strict=True):
        if min(where) < 0:
            continue
        row, index = divmod(where[0], site.layout.positions)
        next_index, _, length = site.half.rows[row].tolist()
        before = where[0] - 1
        follows = index > 0 and index == next_index and int(identity.positions[before]) != UNKNOWN
        strict = not site.lenient and not int(site.gate[Gate.LENIENT_NOW])
        expected = int(identity.positions[before]) + 1 if follows else 0
        decoding = follows and len(where) == 1 and length == 1
        if site.checks & Check.CHAIN and strict and decoding and at[0] != expected:
            _report(site, Phase.PRE, Check.CHAIN, where[0], expected, at[0], detail=who[0])
        chain = int(identity.chain[before]) if follows else SEED
        for slot, token, position in zip(where, who, at, strict=True):
            chain = (chain + mix(token, position)) & MASK64
            chain = chain - (1 << 64) if chain >> 63 else chain
            identity.tokens[slot] = token
            identity.positions[slot] = position
            identity.chain[slot] = chain

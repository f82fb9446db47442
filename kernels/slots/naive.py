"""The checks of slot spaces in plain loops, one slot at a time: the definition that the vectorised code must equal.

Used by tests only.  Each function does what the one of the same name in :mod:`.checks` or
:mod:`.life` documents.
"""

from __future__ import annotations

import torch

from ..checks import Check, Phase, Why
from ..ring import UNKNOWN
from .chain import SEED, as_int64, mix
from .naive_entry import Entry
from .naive_history import note_read, note_write
from .naive_life import allocate as allocate
from .naive_life import forget as forget
from .naive_life import hand_over as hand_over
from .naive_life import name as name
from .naive_life import reject as reject
from .naive_life import release as release
from .naive_life import share as share
from .space import REFERENCE, Flag, RequestPlan, SlotSpace, SpaceCount


def namespace_seed(namespace: int) -> int:
    return SEED if namespace == 0 else as_int64(SEED + mix(namespace, -1))


def _table_slot(plan: RequestPlan, request: int, position: int) -> int:
    row = min(max(int(plan.rows[request]), 0), plan.table.shape[0] - 1)
    page = max(position // plan.page_size, 0)
    columns = plan.table.shape[1]
    page = page % columns if plan.ring else min(page, columns - 1)
    slot = int(plan.table[row, page]) * plan.page_size + position % plan.page_size
    if plan.slot_map is None:
        return slot
    return int(plan.slot_map[slot]) if 0 <= slot < plan.slot_map.shape[0] else -1


def _row_exists(plan: RequestPlan, request: int) -> bool:
    return 0 <= int(plan.rows[request]) < plan.table.shape[0]


def _namespace(plan: RequestPlan, request: int) -> int:
    return 0 if plan.namespaces is None else int(plan.namespaces[request])


def walk(space: SlotSpace, plan: RequestPlan) -> None:
    if plan.counts[0] < 0:
        return
    space.clock.add_(1)
    space.counters[SpaceCount.FORWARDS] += 1
    writers = _plan_writes(space, plan)
    if plan.rows.shape[0] == 0 or plan.table.numel() == 0:
        return
    for request in _requests(plan):
        _check_row(space, plan, request)
    for request in _requests(plan):
        prefix = int(plan.prefix_lens[request])
        first = 0 if space.window is None else max(prefix - space.window + 1, 0)
        if space.chunk is not None:
            first = max(first, prefix - prefix % space.chunk)
        for position in range(first, prefix if plan.ring else min(prefix, plan.columns, plan.width)):
            if _row_exists(plan, request):
                _walk_slot(space, plan, request, position, first, writers)


def _requests(plan: RequestPlan) -> list[int]:
    """The requests that are no padding."""
    return [r for r in range(int(plan.counts[0])) if not _of_padding(plan, r)]


def _plan_writes(space: SlotSpace, plan: RequestPlan) -> dict[int, int]:
    """Mark the slots that the forward writes; for each of them the request whose token goes there first."""
    writers: dict[int, int] = {}
    for i, request, _ in _tokens(plan):
        slot = int(plan.slots[i])
        if 0 <= slot < space.slots and slot not in writers:
            writers[slot] = request
            space.planned[slot] = i - int(space.epoch())
            if not plan.in_flight:
                space.flags[slot] = int(space.flags[slot]) | Flag.PLANNED
    return writers


def _check_row(space: SlotSpace, plan: RequestPlan, request: int) -> None:
    entry, length = Entry(space), int(plan.prefix_lens[request]) + int(plan.extend_lens[request])
    if not _row_exists(plan, request):
        entry.add(Why.NO_SUCH_ROW, plan.table.shape[0], int(plan.rows[request]))
    if length > plan.width:
        entry.add(Why.ROW_TOO_NARROW, plan.width, length)
    entry.report(Phase.PRE, -1, UNKNOWN, int(plan.owners[request]), -1)


def _walk_slot(
    space: SlotSpace, plan: RequestPlan, request: int, position: int, first: int, writers: dict[int, int]
) -> None:
    entry, slot = Entry(space), _table_slot(plan, request, position)
    space.counters[SpaceCount.CHECKED] += 1
    owner = int(plan.owners[request])
    if not 0 <= slot < space.slots:
        entry.add(Why.OUT_OF_RANGE, slot, -1)
        entry.report(Phase.PRE, slot, position, owner, -1)
        return
    flags = int(space.flags[slot])
    if flags & Flag.RESERVED:
        entry.add(Why.RESERVED_SLOT, slot, slot)
    else:
        writer = writers.get(slot, request) if flags & Flag.PLANNED else request
        rival = None if writer == request else int(plan.owners[writer])
        _check_reader(entry, space, slot, owner, None if rival == owner != 0 else rival)
        if flags & Flag.WRITTEN and not flags & Flag.NAMELESS:
            _check_identity(entry, space, plan, request, position, slot, first)
    entry.report(Phase.PRE, slot, position, owner, int(space.tokens[slot]))
    if not space.checks & Check.CONTENT:  # nobody compares bytes
        return
    turn = (slot + int(plan.counts[2])) % int(space.control.every(space.verify_every)) == 0
    if flags & Flag.WRITTEN and flags >= REFERENCE and (turn or flags & Flag.DUE):
        space.flags[slot] &= ~int(Flag.DUE)
        if space.reads[slot] != space.clock[0]:
            note_read(space, slot)
        space.reads[slot] = space.clock[0]


def _check_reader(entry: Entry, space: SlotSpace, slot: int, request: int, rival: int | None) -> None:
    flags, owner = int(space.flags[slot]), int(space.owners[slot])
    if space.owner_known:
        if flags < REFERENCE:
            entry.add(Why.READ_AFTER_FREE, request, 0)
        elif request != 0 and owner not in (0, request) and flags < 2 * REFERENCE:
            entry.add(Why.FOREIGN_READ, request, owner)
    if not flags & Flag.WRITTEN:
        entry.add(Why.NEVER_WRITTEN, 0, 0)
    if rival is not None:
        entry.add(Why.READ_WHILE_WRITTEN, request, rival)
    if flags & Flag.WRITTEN and flags & Flag.REJECTED:
        entry.add(Why.REJECTED_TOKEN, 0, int(space.tokens[slot]))


def _check_identity(
    entry: Entry, space: SlotSpace, plan: RequestPlan, request: int, position: int, slot: int, first: int
) -> None:
    token, stored, chain = int(space.tokens[slot]), int(space.positions[slot]), int(space.chain[slot])
    _check_token(entry, space, plan, request, position, token)
    if stored != position:
        entry.add(Why.WRONG_POSITION, position, stored)
    start = as_int64(namespace_seed(_namespace(plan, request)) + mix(token, stored))
    if position == 0 and stored == position and chain != start:
        entry.add(Why.OTHER_NAMESPACE, start, chain)
    before = _table_slot(plan, request, position - 1) if position > first else -1
    if not 0 <= before < space.slots:
        return
    flags = int(space.flags[before])
    if flags & Flag.WRITTEN and not flags & Flag.NAMELESS:
        after = as_int64(int(space.chain[before]) + mix(token, stored))
        if chain != after:
            entry.add(Why.WRONG_PREDECESSOR, after, chain)


def _check_token(entry: Entry, space: SlotSpace, plan: RequestPlan, request: int, position: int, token: int) -> None:
    if plan.history is None or plan.history_lens is None:
        return
    place = position + space.token_offset
    if place < min(int(plan.history_lens[request]), plan.history.shape[1]):
        of = min(max(int(plan.rows[request]), 0), plan.history.shape[0] - 1) if plan.history_by_row else request
        expected = _kept_bits(int(plan.history[of, place]))
        if token != expected:
            entry.add(Why.WRONG_TOKEN, expected, token)


def _kept_bits(token: int) -> int:
    """A token id as a slot keeps it."""
    return ((token + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


def _tokens(plan: RequestPlan) -> list[tuple[int, int, int]]:
    """``(number, request, place)`` of every real token."""
    return [token for token in _counted_tokens(plan) if not _of_padding(plan, token[1])]


def _counted_tokens(plan: RequestPlan) -> list[tuple[int, int, int]]:
    """:func:`_tokens`, where what is padding by its row counts as well."""
    found = []
    for request in range(int(plan.counts[0])):
        found += [(request, place) for place in range(int(plan.extend_lens[request]))]
    counted = min(int(plan.counts[1]), plan.slots.shape[0])
    return [(i, request, place) for i, (request, place) in enumerate(found[:counted])]


def _of_padding(plan: RequestPlan, request: int) -> bool:
    return int(plan.rows[request]) == plan.padding_row


def _takes_tokens(space: SlotSpace, slot: int) -> bool:
    return 0 <= slot < space.slots and not int(space.flags[slot]) & Flag.RESERVED


def _parent(plan: RequestPlan, i: int, place: int) -> int:
    """The place of the token that one follows, -1 for the prefix."""
    parent = place - 1 if plan.parents is None else int(plan.parents[i])
    return parent if 0 <= parent < place else -1


def _position(plan: RequestPlan, i: int, request: int, place: int) -> int:
    position, first = int(plan.prefix_lens[request]), i - place
    while (place := _parent(plan, first + place, place)) >= 0:
        position += 1
    return position


def check_indices(
    space: SlotSpace, plan: RequestPlan, index: torch.Tensor, longest: int, unit: int, stride: int
) -> None:
    first = 0
    for request in range(plan.rows.shape[0]):
        total, owner = int(plan.prefix_lens[request]) + int(plan.extend_lens[request]), int(plan.owners[request])
        if request in _requests(plan) and _row_exists(plan, request) and plan.table.numel():
            for position in range(min(total, longest)):
                at = first + position
                row, slot = int(index[at]) if at < index.shape[0] else -1, _table_slot(plan, request, position)
                page, offset = divmod(row, stride)
                got = page * unit + offset if row >= 0 and offset < unit else -1
                if got != slot:
                    entry = Entry(space)
                    entry.add(Why.READ_DIFFERS, slot, got)
                    entry.report(Phase.PRE, slot, position, owner, -1)
        first += total


def check_writes(space: SlotSpace, plan: RequestPlan) -> None:
    seen: set[int] = set()
    for i, request, place in _counted_tokens(plan):
        entry, slot = Entry(space), int(plan.slots[i])
        position, owner = _position(plan, i, request, place), int(plan.owners[request])
        if _of_padding(plan, request):
            if _takes_tokens(space, slot):
                entry.add(Why.PADDING_WRITES, slot, slot)
        elif _left_out(space, plan, request, position, slot):
            continue
        elif not 0 <= slot < space.slots:
            entry.add(Why.OUT_OF_RANGE, slot, -1)
        elif int(space.flags[slot]) & Flag.RESERVED:
            entry.add(Why.RESERVED_SLOT, slot, slot)
        else:
            if slot in seen:
                entry.add(Why.PLANNED_TWICE, slot, slot)
            seen.add(slot)
            _check_writer(entry, space, slot, owner)
            _check_against_plan(entry, plan, i, request, place)
            _check_token(entry, space, plan, request, position, _kept_bits(int(plan.tokens[i])))
        entry.report(Phase.PRE, slot, position, owner, _kept_bits(int(plan.tokens[i])))
    for i, _, _ in _tokens(plan):
        if 0 <= int(plan.slots[i]) < space.slots:
            space.flags[plan.slots[i]] = int(space.flags[plan.slots[i]]) & ~int(Flag.PLANNED)


def _left_out(space: SlotSpace, plan: RequestPlan, request: int, position: int, slot: int) -> bool:
    if space.window is None and space.chunk is None:
        return False
    nowhere = slot == -1 or (0 <= slot < space.slots and bool(int(space.flags[slot]) & Flag.RESERVED))
    if not nowhere:
        return False
    newest = int(plan.prefix_lens[request]) + int(plan.extend_lens[request]) - 1
    if plan.parents is not None:
        newest = max(_position(plan, j, other, place) for j, other, place in _tokens(plan) if other == request)
    if position >= newest:
        return False
    if space.window is not None and position <= newest - space.window + 1:
        return True
    return space.chunk is not None and position // space.chunk < (newest + 1) // space.chunk


def _check_writer(entry: Entry, space: SlotSpace, slot: int, request: int) -> None:
    flags, owner = int(space.flags[slot]), int(space.owners[slot])
    if not space.owner_known:
        return
    if flags < REFERENCE:
        entry.add(Why.WRITE_AFTER_FREE, request, 0)
    elif flags >= 2 * REFERENCE:
        entry.add(Why.WRITE_SHARED, request, owner)
    elif request != 0 and owner not in (0, request):
        entry.add(Why.OVERWRITE, request, owner)
    if space.once and flags & Flag.WRITTEN:
        entry.add(Why.WRITTEN_BEFORE, request, owner)


def _check_against_plan(entry: Entry, plan: RequestPlan, i: int, request: int, place: int) -> None:
    position, column = _position(plan, i, request, place), int(plan.prefix_lens[request]) + place
    if plan.table.numel() and column < plan.width and _row_exists(plan, request):
        there = _table_slot(plan, request, column)
        if there != int(plan.slots[i]):
            entry.add(Why.TABLE_DIFFERS, int(plan.slots[i]), there)
    if plan.positions is not None and int(plan.positions[i]) != position:
        entry.add(Why.WRONG_POSITION, position, int(plan.positions[i]))


def store(space: SlotSpace, plan: RequestPlan) -> None:
    links: dict[tuple[int, int], int] = {}  # the sum up to a token, from its request's first added one on
    writers: dict[int, tuple[int, int]] = {}
    entries = []
    for i, request, place in _tokens(plan):
        parent = _parent(plan, i, place)
        links[request, place] = links[request, parent] if parent >= 0 else 0
        slot, token = int(plan.slots[i]), _kept_bits(int(plan.tokens[i]))
        if not 0 <= slot < space.slots or int(space.flags[slot]) & Flag.RESERVED:
            continue
        position = _position(plan, i, request, place) if plan.positions is None else int(plan.positions[i])
        links[request, place] += mix(token, position)
        writers[slot] = request, links[request, place]
        entries.append((slot, token, position, request, links[request, place]))
    before = [_chain_before(space, plan, r, writers) for r in range(int(plan.counts[0]))]
    for slot, token, position, request, added in entries:
        space.tokens[slot], space.positions[slot] = token, position
        space.chain[slot] = as_int64(before[request] + added)
        space.flags[slot] = (int(space.flags[slot]) | Flag.WRITTEN) & ~int(Flag.NAMELESS | Flag.REJECTED)
        note_write(space, slot, int(plan.owners[request]))
        space.counters[SpaceCount.RECORDED] += 1


def _chain_before(space: SlotSpace, plan: RequestPlan, request: int, writers: dict[int, tuple[int, int]]) -> int:
    """Through requests of the same forward that write the last slot of each other's prefix.

    Those that follow each other in a circle are wrong anyhow, and are left after as many steps as the doubling makes.
    """
    added = 0
    for _ in range(2 ** plan.rows.shape[0].bit_length() if plan.in_flight else 0):
        writer, links = writers.get(_last_of_prefix(plan, request), (request, 0))
        if writer == request:
            break
        request, added = writer, added + links
    last = _last_of_prefix(plan, request)
    known = 0 <= last < space.slots
    return added + (int(space.chain[last]) if known else namespace_seed(_namespace(plan, request)))


def _last_of_prefix(plan: RequestPlan, request: int) -> int:
    prefix = int(plan.prefix_lens[request])
    return _table_slot(plan, request, prefix - 1) if prefix > 0 and plan.table.numel() else -1


def check_received(space: SlotSpace, plan: RequestPlan, received: torch.Tensor, half_id: int) -> None:
    for i, request, place in _counted_tokens(plan):
        entry = Entry(space)
        got, planned = int(received[i]) if i < received.shape[0] else -1, int(plan.slots[i])
        if got != planned and (_takes_tokens(space, got) or not _of_padding(plan, request)):
            entry.add(Why.NOT_THE_PLANNED_SLOT, planned, got)
        position, owner = _position(plan, i, request, place), int(plan.owners[request])
        entry.report(Phase.POST, planned, position, owner, _kept_bits(int(plan.tokens[i])), half_id)


def check_reads(space: SlotSpace, plan: RequestPlan, pages: torch.Tensor, lengths: torch.Tensor, size: int) -> None:
    for request in _requests(plan):
        if not _row_exists(plan, request) or not plan.table.numel():
            continue
        total, given = int(plan.prefix_lens[request]) + int(plan.extend_lens[request]), int(lengths[request])
        owner = int(plan.owners[request])
        entry, room = Entry(space), pages.shape[1] * size
        if given > room:
            entry.add(Why.ROW_TOO_NARROW, room, given)
        if given != total:
            entry.add(Why.LENGTH_DIFFERS, total, given)
        entry.report(Phase.PRE, -1, UNKNOWN, owner, -1)
        first = 0 if space.window is None else max(total - space.window, 0)
        if space.chunk is not None and total:
            first = max(first, total - 1 - (total - 1) % space.chunk)
        for position in range(first, min(given, total, room)):
            slot = _table_slot(plan, request, position)
            got = int(pages[request, position // size]) * size + position % size
            if got != slot:
                entry = Entry(space)
                entry.add(Why.READ_DIFFERS, slot, got)
                entry.report(Phase.PRE, slot, position, owner, -1)

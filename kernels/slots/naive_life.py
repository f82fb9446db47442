"""What an allocator does to slots in plain loops: the definition that :mod:`.life` must equal.  For tests only."""

from __future__ import annotations

import torch

from ..checks import Phase, Why
from ..ring import UNKNOWN
from .naive_entry import Entry
from .naive_history import note
from .past import Kind
from .space import MARKS, REFERENCE, Flag, SlotSpace


def _named(space: SlotSpace, entry: Entry, slot: int) -> bool:
    """Whether an engine may name this slot."""
    if not 0 <= slot < space.slots:
        entry.add(Why.OUT_OF_RANGE, slot, -1)
        return False
    if int(space.flags[slot]) & Flag.RESERVED:
        entry.add(Why.RESERVED_SLOT, slot, slot)
        return False
    return True


def _tell(entry: Entry, space: SlotSpace, slot: int, named: bool, owner: int) -> None:
    position, token = (int(space.positions[slot]), int(space.tokens[slot])) if named else (UNKNOWN, -1)
    entry.report(Phase.LIFE, slot, position, owner, token)


def allocate(space: SlotSpace, slots: torch.Tensor, owner: int, stack: int = 0) -> None:
    before, taken = space.flags.tolist(), set()
    entries = []
    for slot in slots.tolist():
        entry = Entry(space)
        named = _named(space, entry, slot)
        if named and space.owner_known and (before[slot] >= REFERENCE or slot in taken):
            entry.add(Why.DOUBLE_ALLOCATE, owner if slot in taken else int(space.owners[slot]), owner)
        taken.add(slot)
        _tell(entry, space, slot, named, owner)
        entries.append((slot, named))
    for slot, named in entries:
        if named:
            space.flags[slot], space.owners[slot] = REFERENCE, owner
            space.tokens[slot], space.positions[slot], space.chain[slot] = -1, UNKNOWN, 0
            note(space, slot, Kind.ALLOCATE, owner, stack)


def release(space: SlotSpace, slots: torch.Tensor, owner: int, stack: int = 0) -> None:
    before, owners, dropped = space.flags.tolist(), space.owners.tolist(), set()
    for slot in slots.tolist():
        entry = Entry(space)
        named = _named(space, entry, slot)
        if named:
            holder, alone = owners[slot], before[slot] < 2 * REFERENCE
            if space.owner_known:
                if before[slot] < REFERENCE or (slot in dropped and alone):
                    entry.add(Why.DOUBLE_FREE, holder, owner)
                elif alone and owner != 0 and holder not in (0, owner):
                    entry.add(Why.FOREIGN_FREE, holder, owner)
            dropped.add(slot)
            if not alone and owner in (0, holder):
                space.owners[slot] = 0
            flags = int(space.flags[slot])
            left = max(flags // REFERENCE - 1, 0) * REFERENCE
            space.flags[slot] = left + flags % REFERENCE if left else 0
            if not left:
                space.owners[slot] = 0
            note(space, slot, Kind.RELEASE, owner, stack)
        _tell(entry, space, slot, named, owner)


def share(space: SlotSpace, slots: torch.Tensor, owner: int, stack: int = 0) -> None:
    before = space.flags.tolist()
    for slot in slots.tolist():
        entry = Entry(space)
        named = _named(space, entry, slot)
        if named:
            if space.owner_known and before[slot] < REFERENCE:
                entry.add(Why.SHARE_AFTER_FREE, owner, 0)
            space.flags[slot] = (int(space.flags[slot]) + REFERENCE) | Flag.DUE
            note(space, slot, Kind.SHARE, owner, stack)
        _tell(entry, space, slot, named, owner)


def hand_over(space: SlotSpace, slots: torch.Tensor, owner: int, stack: int = 0) -> None:
    for slot in slots.tolist():
        entry = Entry(space)
        named = _named(space, entry, slot)
        if named and space.owner_known and int(space.flags[slot]) < REFERENCE:
            entry.add(Why.SHARE_AFTER_FREE, owner, 0)
        _tell(entry, space, slot, named, owner)
        if named:
            space.owners[slot] = owner
            space.flags[slot] |= int(Flag.DUE)
            note(space, slot, Kind.HAND_OVER, owner, stack)


def name(
    space: SlotSpace,
    slots: torch.Tensor,
    marks: torch.Tensor,
    who: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    owner: int,
) -> None:
    for i, slot in enumerate(slots.tolist()):
        entry = Entry(space)
        named = _named(space, entry, slot)
        if named and space.owner_known:
            holder = int(space.owners[slot])
            if int(space.flags[slot]) < REFERENCE:
                entry.add(Why.WRITE_AFTER_FREE, owner, 0)
            elif owner != 0 and holder not in (0, owner):
                entry.add(Why.OVERWRITE, owner, holder)
        _tell(entry, space, slot, named, owner)
        if named:
            space.flags[slot] = (int(space.flags[slot]) & ~int(MARKS)) | int(marks[i])
            if who is not None:
                space.tokens[slot], space.positions[slot], space.chain[slot] = (t[i] for t in who)
            note(space, slot, Kind.FILL, owner)


def reject(space: SlotSpace, slots: torch.Tensor, stack: int = 0) -> None:
    for slot in slots.tolist():
        entry = Entry(space)
        if _named(space, entry, slot):
            if int(space.flags[slot]) & Flag.WRITTEN:
                space.flags[slot] = int(space.flags[slot]) | Flag.REJECTED
            note(space, slot, Kind.REJECT, stack=stack)
        entry.report(Phase.LIFE, slot, UNKNOWN, 0, -1)


def forget(space: SlotSpace, slots: torch.Tensor, stack: int = 0) -> None:
    for slot in slots.tolist():
        if not 0 <= slot < space.slots:
            entry = Entry(space)
            entry.add(Why.OUT_OF_RANGE, slot, -1)
            entry.report(Phase.LIFE, slot, UNKNOWN, 0, -1)
            continue
        flags = int(space.flags[slot])
        if not flags & Flag.RESERVED:
            note(space, slot, Kind.FORGET, stack=stack)
        if flags >= REFERENCE and not flags & Flag.RESERVED:
            space.flags[slot] = (flags & ~int(MARKS)) | Flag.WRITTEN | Flag.NAMELESS

"""The last events of a slot in plain code: the definition that :mod:`.history` must equal.  For tests only."""

from __future__ import annotations

from ..ring import Word, forward_and_step
from .past import HEAD, TOLD, Kind, Past, Told, events_kept, low_half, what_word
from .space import SlotSpace


def _tell(space: SlotSpace, slot: int, place: int, what: int, owner: int) -> None:
    step = forward_and_step(int(space.control.words[Word.FORWARD]))[1]
    space.past[slot, place + Told.STEP] = step
    space.past[slot, place + Told.WHAT] = what
    space.past[slot, place + Told.OWNER] = low_half(owner)


def note(space: SlotSpace, slot: int, kind: Kind, owner: int = 0, stack: int = 0) -> None:
    kept = events_kept(space.past)
    if not kept:
        return
    number = int(space.past[slot, Past.EVENTS])
    _tell(space, slot, HEAD + number % kept * TOLD, what_word(kind, stack=stack), owner)
    space.past[slot, Past.EVENTS] = number + 1
    if kind is Kind.ALLOCATE:
        for column in (Past.FIRST_READ, Past.LAST_READ, Past.READ_BEFORE):
            space.past[slot, column] = -1
        space.past[slot, Past.READS] = 0


def note_write(space: SlotSpace, slot: int, owner: int) -> None:
    kept = events_kept(space.past)
    if not kept:
        return
    what = what_word(Kind.WRITE, forward_and_step(int(space.control.words[Word.FORWARD]))[0])
    _tell(space, slot, Past.WRITE, what, owner)
    number = int(space.past[slot, Past.EVENTS])
    if number > 0:
        newest = space.past[slot, HEAD + (number - 1) % kept * TOLD :]
        if what_word(int(newest[Told.WHAT]) % 16) == Kind.WRITE and int(newest[Told.OWNER]) == low_half(owner):
            number -= 1
    _tell(space, slot, HEAD + number % kept * TOLD, what, owner)
    space.past[slot, Past.EVENTS] = number + 1


def note_read(space: SlotSpace, slot: int) -> None:
    if not events_kept(space.past):
        return
    step = forward_and_step(int(space.control.words[Word.FORWARD]))[1]
    if not int(space.past[slot, Past.READS]):
        space.past[slot, Past.FIRST_READ] = step
    space.past[slot, Past.READ_BEFORE] = space.past[slot, Past.LAST_READ].clone()
    space.past[slot, Past.LAST_READ] = step
    space.past[slot, Past.READS] += 1

"""Allocator calls as they are queued, in the order in which they were made, and the numbers that a device gets of
them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch

from ..kernels.slots.events import COLUMNS, STACK_UNIT, Event, EventRow
from .arguments import integers
from .gathered import numbers_of, packed, plain_numbers
from .request_ids import RequestId, RequestIds

#: Pages of a call: a few that the engine gave, or what they were made into, here or on the device.
Pages: TypeAlias = "list[int] | array[int] | torch.Tensor"


_RELEASE = Event.RELEASE

#: Pages of an array that may as well be looked at one by one.
SHORT = 16


class AtOnce(NamedTuple):
    """Calls of one event that were noted at once.  Their pages are one list, which only a send looks through.

    Attributes:
        rows: :class:`.EventRow` after :class:`.EventRow`, as the device gets them if ``base`` pages come before.
        pages: how many theirs are.
    """

    rows: list[int]
    base: int
    pages: int

    @property
    def calls(self) -> int:
        """How many calls these are."""
        return len(self.rows) // COLUMNS

    @property
    def owners(self) -> list[int]:
        """The hash of the owner of each."""
        return self.rows[EventRow.OWNER :: COLUMNS]

    @property
    def lengths(self) -> list[int]:
        """The number of pages of each."""
        begins = self.rows[EventRow.BEGIN :: COLUMNS]
        return [end - begin for begin, end in pairwise([*begins, self.base + self.pages])]

    def rows_behind(self, pages: int) -> list[int]:
        """The rows, if so many pages come before."""
        if pages == self.base:
            return self.rows
        rows = self.rows[:]
        rows[EventRow.BEGIN :: COLUMNS] = [begin + pages - self.base for begin in rows[EventRow.BEGIN :: COLUMNS]]
        return rows


#: An event with the number of its stack, pages, hash of the owner, slots of a page.  Calls that were noted at once are
#: one such tuple, with the pages of all: a tuple for each took the host longer to make, read and free.
Call: TypeAlias = tuple[int, Pages, int | AtOnce, int]


def noted_at_once(
    event: Event, given: Sequence[tuple[Any, RequestId | None]], base: int, ids: RequestIds
) -> tuple[list[int], AtOnce] | None:
    """The pages of all calls, and the calls; None if one of them has to be looked at by itself: it names no pages, or
    such that are not in a list, or something that is no id.  Only the first page of each is known to be a number.

    Args:
        base: how many pages probably come before.
    """
    known = ids.known
    numbers: list[int] = []
    rows: list[int] = []
    try:
        for slots, owner in given:
            if type(slots) is not list or type(slots[0]) is not int:
                return None
            rows += (event, base + len(numbers), known[owner])
            numbers += slots
    except KeyError:  # a request that is new
        return noted_at_once(event, given, base, ids) if _become_known(given, ids) else None
    except (IndexError, TypeError):  # no pages, or no id
        return None
    return numbers, AtOnce(rows, base, len(numbers))


def _become_known(given: Sequence[tuple[Any, RequestId | None]], ids: RequestIds) -> bool:
    """Hash the owners of all calls; False where one is no id, or was forgotten again."""
    try:
        for _, owner in given:
            ids.hash(owner)
        return all(owner in ids.known for _, owner in given)
    except TypeError:
        return False


def one_by_one(calls: Sequence[Call]) -> list[Call]:
    """The same calls, those that were noted at once as one each."""
    each: list[Call] = []
    for kind, held, whose, size in calls:
        if not isinstance(whose, AtOnce):
            each.append((kind, held, whose, size))
            continue
        begin = 0
        for owner, n in zip(whose.owners, whose.lengths, strict=True):
            each.append((kind, held[begin : begin + n], owner, size))
            begin += n
    return each


class Words(NamedTuple):
    """Calls of one page size as numbers: :class:`.EventRow` after :class:`.EventRow`, their pages, part after part,
    which nobody has looked at, how many these are, and whether a call may free slots."""

    rows: list[int]
    parts: list[list[int]]
    pages: int
    released: bool


def in_words(calls: Sequence[Call]) -> Words | None:
    """Calls of no stack; None where they are of several page sizes, or name pages of the device, or there are arrays
    among these: they are joined without a look at each number, which takes the host less than this."""
    rows: list[int] = []
    listed: list[int] = []  # pages of calls that were noted one by one
    parts: list[list[int]] = []
    pages, page_size, released = 0, calls[0][3], False
    for kind, held, whose, size in calls:
        if size != page_size:
            return None
        if type(whose) is AtOnce:
            rows += whose.rows if whose.base == pages else whose.rows_behind(pages)
            listed = []
            parts.append(held)  # type: ignore[arg-type]
        elif isinstance(held, torch.Tensor) or (type(held) is array and len(held) > SHORT):
            return None
        else:
            if not listed:
                parts.append(listed)
            rows += (kind, pages, whose)  # type: ignore[arg-type]
            listed += held
        pages += len(held)
        if kind == _RELEASE:
            released = True
    return Words(rows, parts, pages, released)


def in_words_one_by_one(calls: Sequence[Call]) -> Words | None:
    """:func:`in_words` of calls that were noted one by one, none at once with others: with fewer questions to each."""
    rows: list[int] = []
    listed: list[int] = []
    page_size = calls[0][3]
    for kind, held, whose, size in calls:
        if size != page_size or (type(held) is not list and not (type(held) is array and len(held) <= SHORT)):
            return None
        rows += (kind, len(listed), whose)  # type: ignore[arg-type]
        listed += held
    return Words(rows, [listed], len(listed), _RELEASE in rows[EventRow.EVENT :: COLUMNS])


def how_many_fit(
    lengths: Sequence[int], owners: Sequence[int | AtOnce], sizes: Sequence[int], most: int, room: int
) -> int:
    """How many entries of the queue, from the first on, go into one launch: it takes at most ``most`` calls of one page
    size, which name at most ``room`` pages."""
    calls = pages = 0
    for n, (length, owner, size) in enumerate(zip(lengths, owners, sizes, strict=True)):
        calls, pages = calls + (owner.calls if isinstance(owner, AtOnce) else 1), pages + length
        if calls > most or pages > room or size != sizes[0]:
            return n
    return len(sizes)


def names_many(calls: Sequence[Call], few: int) -> bool:
    """Whether a release among them names more than ``few`` pages; several at once have few each, on average."""
    return any(
        kind % STACK_UNIT == Event.RELEASE and len(held) > few and not isinstance(whose, AtOnce)
        for kind, held, whose, _ in calls
    )


def call_by_call(
    kinds: Sequence[int], owners: Sequence[int | AtOnce], lengths: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Event, owner and number of pages of each call, where those that were noted at once are one entry."""
    each_kind: list[int] = []
    each_owner: list[int] = []
    each_length: list[int] = []
    for kind, owner, length in zip(kinds, owners, lengths, strict=True):
        if isinstance(owner, AtOnce):
            each_kind += [kind] * owner.calls
            each_owner += owner.owners
            each_length += owner.lengths
        else:
            each_kind.append(kind)
            each_owner.append(owner)
            each_length.append(length)
    return each_kind, each_owner, each_length


def rows_of(kinds: Sequence[int], owners: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """:class:`.EventRow` after :class:`.EventRow`."""
    rows = [0] * (COLUMNS * len(kinds))
    rows[EventRow.EVENT :: COLUMNS], rows[EventRow.OWNER :: COLUMNS] = kinds, owners
    rows[EventRow.BEGIN :: COLUMNS] = accumulate(lengths[:-1], initial=0)
    return rows


def one_behind_the_other(rows: list[int], pages: array[int]) -> array[int]:
    """Rows of calls and their pages as one array.  The pages begin at an even place: a kernel is compiled anew for
    pages that begin at another alignment."""
    padded = [*rows, 0] if len(rows) // COLUMNS % 2 else rows
    return packed(padded) + pages


def numbers_of_all(pages: Sequence[Pages]) -> tuple[array[int], list[tuple[int, torch.Tensor]]]:
    """The pages of calls, one call's after the other's; and those of the device, each with the place that was left for
    them.

    Raises:
        TypeError, OverflowError: a call names something else than whole numbers of 64 bits.
    """
    numbers = array("q")
    listed: list[int] = []
    on_device: list[tuple[int, torch.Tensor]] = []
    for held in pages:
        if type(held) is list:
            listed += held
            continue
        if listed:
            numbers.extend(packed(listed))
            listed.clear()
        if type(held) is array:
            numbers.extend(held)
        elif isinstance(held, torch.Tensor):
            on_device.append((len(numbers), held))
            numbers.frombytes(bytes(8 * len(held)))
    numbers.extend(packed(listed))
    return numbers, on_device


def first_odd(pages: Sequence[Pages]) -> int:
    """Which call is the first that names something else than whole numbers of 64 bits."""
    for at, held in enumerate(pages):
        try:
            numbers_of_all([held])
        except (TypeError, OverflowError):
            return at
    raise ValueError("all calls name whole numbers")


def pages_of(slots: Any) -> array[int] | torch.Tensor:
    """Whole numbers as they are queued: those of a device as integers ``[n]`` there, all others on the host.

    Raises:
        EngineError: they are no integers.
    """
    if (
        type(slots) is torch.Tensor
        and slots.dtype == torch.int64
        and slots.dim() == 1
        and slots.layout == torch.strided
    ):
        if slots.is_cuda:
            return slots
        if slots.is_cpu:
            return numbers_of(slots)
    plain = plain_numbers(slots)
    if plain is not None:
        return plain
    if type(slots).__module__ == "numpy" and slots.dtype.kind == "i":
        listed = array("q")
        listed.frombytes(slots.astype("int64").tobytes())
        return listed
    given = integers(slots, "slots").reshape(-1)
    return numbers_of(given) if given.device.type == "cpu" else given

"""The pages of each request, in a row of the tables that is its own as long as it runs."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch

from ....kernels.slots.events import RECORD
from ....kernels.staging import Staging, lasting
from ..tables import Ledger


class _Sent(NamedTuple):
    """Of a request that has a row: the version of its pages, its pages by group, in each group's table the place of the
    next one, and the hash of its id, 0 if that is not known."""

    version: int
    groups: list[list[int]]
    places: list[int]
    owner: int


class Rows(Ledger):
    """A :class:`.Ledger` of which only the new pages go to the device: the second runner's batches change their order
    in each step, and the tables of :class:`.Ledger` are copied whole.

    Attributes:
        moved: how often a request got a row, or one of those that were asked for last gave it back.
        behind: requests whose pages the tables on the device lack, and are not ``added``.
        added: of :meth:`more` and :meth:`handed_out`, as :meth:`new_pages` has them: the tables get them next.
        owners: the hash of each request's id, where it is known.
    """

    def __init__(self, max_requests: int, widths: Sequence[int], device: torch.device):
        super().__init__(max_requests, widths, device)
        self.moved = 0
        self._free = list(range(max_requests))[::-1]
        self._row_of: dict[str, int] = {}
        self._asked: Sequence[str] = ()  # whose rows were asked for last
        self._sent: dict[str, _Sent] = {}
        self.behind: dict[str, None] = {}
        self.added: list[int] = []
        self.owners: Mapping[Any, int] = {}
        self._widths = list(widths)
        self._staging = Staging(device)
        self._landing = lasting(0, dtype=torch.int32, device=device)

    def take(self, scheduled: Any) -> None:
        """Apply a ``SchedulerOutput``; requests that were preempted give back their rows, too."""
        if scheduled.finished_req_ids or scheduled.preempted_req_ids:
            for request in (*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())):
                self._forget(request)
        super().take(scheduled)

    def ended(self, requests: Iterable[str]) -> None:
        """Requests have ended, and give back their rows."""
        for request in requests:
            self._forget(request)

    def more(self, requests: Sequence[str], pages: Sequence[Sequence[Sequence[int]] | None]) -> None:
        """Requests that have rows got more pages, and nothing else happened; few functions, for a step that waits for
        the host.

        Args:
            pages: of each request, by group; None: no more.
        """
        sent, behind, added = self._sent, self.behind, self.added
        for number, new in enumerate(pages):
            if new is None:
                continue
            request = requests[number]
            known = sent.get(request)
            if known is None or request in behind:
                self._extend(request, new)
                continue
            _, groups, places, _ = known
            for group, more in enumerate(new):
                for page in more:
                    place = places[group]
                    places[group] = place + 1
                    groups[group].append(page)
                    added += (group, place, page, 0)

    def handed_out(
        self,
        requests: Sequence[str],
        pages: Sequence[Sequence[Sequence[int]] | None],
        who: list[str | None],
        blocks: list[int],
        lengths: list[int],
    ) -> bool:
        """:meth:`more` of requests with one group, if their pages are the blocks of which the allocator says the same.

        Args:
            who, blocks, lengths: as of :meth:`.Books.taken`.

        Returns:
            False: they are not, or other pages wait; nothing was noted.
        """
        given = [new[0] for new in pages if new is not None]
        if self.behind or self.added or list(compress(requests, pages)) != who or list(map(len, given)) != lengths:
            return False
        if [page for new in given for page in new] != blocks:
            return False
        known = [one for one in map(self._sent.get, who) if one is not None and one.owner]  # type: ignore[arg-type]
        if len(known) < len(who):
            return False
        added = self.added
        for (_, (table,), places, owner), new in zip(known, given, strict=True):
            place = places[0]
            for page in new:
                added += (0, place, page, owner)
                place += 1
            places[0] = place
            table += new
        return True

    def _forget(self, request: str) -> None:
        self._requests.pop(request, None)
        self._sent.pop(request, None)
        self.behind.pop(request, None)
        row = self._row_of.pop(request, None)
        if row is not None:
            self._free.append(row)
            self.moved += request in self._asked
            if self.added:  # one launch is to write each place once
                each = zip(*[iter(self.added)] * RECORD, strict=True)
                self.added = [n for one in each if one[1] // self._widths[one[0]] != row for n in one]

    def _extend(self, request: str, pages: Sequence[Sequence[int]]) -> None:
        super()._extend(request, pages)
        self.behind[request] = None

    def _replace(self, request: str, pages: Sequence[Sequence[int]]) -> None:
        super()._replace(request, pages)
        self.behind[request] = None

    def rows_of(self, requests: Sequence[str]) -> list[int]:
        """The row of each request."""
        self._asked = list(requests)
        for request in requests:
            if request not in self._row_of:
                self._row_of[request] = self._free.pop()
                self.moved += 1
        return [self._row_of[request] for request in requests]

    def blocks_at(
        self, requests: Sequence[str], groups: Sequence[int], columns: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Of each request, the page of some groups in a column of their tables; -1 where it has none there."""
        found = []
        for request, column in zip(requests, columns, strict=True):
            pages = self._requests[request].groups
            found.append(tuple(pages[g][column] if column < len(pages[g]) else -1 for g in groups))
        return found

    def new_pages(self) -> list[int]:
        """What the tables on the device lack, each once: group, place in its table, page and, if this is how the device
        is told that it was handed out, the owner's hash, else 0; one after the other."""
        found, self.added = self.added, []
        if not self.behind:
            return found
        waiting: dict[str, None] = {}  # they have no row yet
        for request in self.behind:
            row = self._row_of.get(request)
            if row is None:
                waiting[request] = None
                continue
            pages, sent = self._requests[request], self._sent.get(request)
            begins = [row * width for width in self._widths]
            if sent is None or sent.version != pages.version:
                owner = self.owners.get(request, 0)
                sent = self._sent[request] = _Sent(pages.version, pages.groups, begins[:], owner)
            for group, known in enumerate(pages.groups):
                place, end = sent.places[group], begins[group] + len(known)
                new = [0] * (RECORD * (end - place))
                new[::RECORD] = [group] * (end - place)
                new[1::RECORD], new[2::RECORD] = range(place, end), known[place - begins[group] :]
                found += new
                sent.places[group] = end
        self.behind = waiting
        return found

    def write(self, pages: Sequence[int]) -> None:
        """Send :meth:`new_pages` to the tables."""
        groups, places, numbers = pages[::RECORD], pages[1::RECORD], pages[2::RECORD]
        for group in set(groups):
            mine = [number == group for number in groups] if groups.count(group) < len(groups) else itertools.repeat(1)
            self._write(self.tables[group], array("i", compress(places, mine)), array("i", compress(numbers, mine)))

    def _write(self, table: torch.Tensor, places: array[int], numbers: array[int]) -> None:
        """One copy and one launch."""
        n = len(places)
        if self._landing.shape[0] < 2 * n:
            self._landing = lasting(1 << (2 * n - 1).bit_length(), dtype=torch.int32, device=table.device)
        self._staging.send(torch.frombuffer(places + numbers, dtype=torch.int32), self._landing)
        table.view(-1).index_put_((self._landing[:n],), self._landing[n : 2 * n])

"""The pages of each request, in a row of the tables that is its own as long as it runs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from ....kernels.staging import Staging, lasting
from ..tables import Ledger


class Rows(Ledger):
    """A :class:`.Ledger` of which only the new pages go to the device: the second runner's batches change their order
    in each step, and the tables of :class:`.Ledger` are copied whole.
    """

    def __init__(self, max_requests: int, widths: Sequence[int], device: torch.device):
        super().__init__(max_requests, widths, device)
        self._free = list(range(max_requests))[::-1]
        self._row_of: dict[str, int] = {}
        self._sent: dict[str, tuple[int, list[int]]] = {}  # version of its pages, and how many of each group
        self._changed: dict[str, None] = {}
        self._staging = Staging(device)
        self._landing = lasting(0, dtype=torch.int32, device=device)

    def take(self, scheduled: Any) -> None:
        """Apply a ``SchedulerOutput``; requests that were preempted give back their rows, too."""
        for request in (*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())):
            self._requests.pop(request, None)
            self._sent.pop(request, None)
            self._changed.pop(request, None)
            row = self._row_of.pop(request, None)
            if row is not None:
                self._free.append(row)
        super().take(scheduled)
        self._changed.update(dict.fromkeys(new.req_id for new in scheduled.scheduled_new_reqs))
        cached = scheduled.scheduled_cached_reqs
        pages = zip(cached.req_ids, cached.new_block_ids, strict=True)
        self._changed.update(dict.fromkeys(request for request, more in pages if more is not None))

    def rows_of(self, requests: Sequence[str]) -> list[int]:
        """The row of each request; its new pages are sent to the device."""
        for request in requests:
            if request not in self._row_of:
                self._row_of[request] = self._free.pop()
        self._send([request for request in self._changed if request in self._row_of])
        return [self._row_of[request] for request in requests]

    def _send(self, requests: Sequence[str]) -> None:
        places = [array("i") for _ in self.tables]
        numbers = [array("i") for _ in self.tables]
        for request in requests:
            del self._changed[request]
            pages, row = self._requests[request], self._row_of[request]
            version, shown = self._sent.get(request, (-1, []))
            if version != pages.version:
                shown = [0] * len(self.tables)
            for group, known in enumerate(pages.groups):
                first = row * self.tables[group].shape[1]
                places[group].extend(range(first + shown[group], first + len(known)))
                numbers[group].extend(known[shown[group] :])
                shown[group] = len(known)
            self._sent[request] = pages.version, shown
        for table, place, number in zip(self.tables, places, numbers, strict=True):
            if place:
                self._write(table, place, number)

    def _write(self, table: torch.Tensor, places: array[int], numbers: array[int]) -> None:
        """One copy and one launch."""
        n = len(places)
        if self._landing.shape[0] < 2 * n:
            self._landing = lasting(1 << (2 * n - 1).bit_length(), dtype=torch.int32, device=table.device)
        self._staging.send(torch.frombuffer(places + numbers, dtype=torch.int32), self._landing)
        table.view(-1).index_put_((self._landing[:n],), self._landing[n : 2 * n])

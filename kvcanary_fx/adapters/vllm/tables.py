"""The pages of each request, from the scheduler's messages.

The worker's own block table is fed from the same messages; attention reads it, and it is the one to check.  So this
ledger is built independently from the messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch


@dataclasses.dataclass
class _Row:
    """The current contents of a row of the tables."""

    request: str = ""
    version: int = -1
    shown: list[int] = dataclasses.field(default_factory=list)  # pages of each group


@dataclasses.dataclass
class _Pages:
    """A request's pages, a list for each group; a new version each time they are replaced rather than extended."""

    groups: list[list[int]]
    version: int


class Ledger:
    """The pages of all requests, and the request table of each group for the current batch.

    Attributes:
        tables: int32 ``[max_requests, width]`` for each group, row i for the i-th request of the batch.
    """

    def __init__(self, max_requests: int, widths: Sequence[int], device: torch.device):
        self.tables = [torch.zeros(max_requests, width, dtype=torch.int32, device=device) for width in widths]
        host = device.type == "cpu"
        self._host = [t if host else torch.zeros(t.shape, dtype=torch.int32, device="cpu") for t in self.tables]
        self._requests: dict[str, _Pages] = {}
        self._rows = [_Row() for _ in range(max_requests)]
        self._versions = 0

    def take(self, scheduled: Any) -> None:
        """Apply a ``SchedulerOutput``: requests that ended, began, were resumed or got more pages."""
        for request in scheduled.finished_req_ids:
            self._requests.pop(request, None)
        for new in scheduled.scheduled_new_reqs:
            self._replace(new.req_id, new.block_ids)
        cached = scheduled.scheduled_cached_reqs
        if not any(cached.new_block_ids):  # few requests of a step get pages
            return
        for request, pages in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if pages is not None:
                (self._replace if request in cached.resumed_req_ids else self._extend)(request, pages)

    def pages(self, request: str, group: int) -> Sequence[int]:
        """Those of a request in one group, in their order."""
        known = self._requests.get(request)
        return () if known is None else known.groups[group]

    def show(self, requests: Sequence[str]) -> None:
        """Set row i of each table to the pages of ``requests[i]``."""
        for number, request in enumerate(requests):
            row, pages = self._rows[number], self._requests[request]
            if (row.request, row.version) != (request, pages.version):
                self._rows[number] = row = _Row(request, pages.version, [0] * len(self.tables))
            for group, known in enumerate(pages.groups):
                shown = row.shown[group]
                if shown < len(known):
                    self._host[group][number, shown : len(known)] = torch.tensor(known[shown:], dtype=torch.int32)
                    row.shown[group] = len(known)
        for table, host in zip(self.tables, self._host, strict=True):
            if table is not host:
                table[: len(requests)].copy_(host[: len(requests)])

    def in_flight(
        self, scheduled: Any, page_sizes: Sequence[int], taken: Collection[tuple[int, str | None]] = ()
    ) -> tuple[list[set[int]], bool]:
        """The pages of each group that one request writes in this forward, and another takes up or reads as its prefix.

        vLLM lists a page in its prefix cache when it plans to fill it: a request of the same step may take it up, and
        reads what the same forward has just written.  Or it takes it up, and waits for what a KV connector loads behind
        it.

        Args:
            scheduled: the ``SchedulerOutput``, already applied.
            page_sizes: tokens of a page of each group.
            taken: pages that requests have taken up since the last forward, each with its request.

        Returns:
            these pages, and whether one of them is read in this forward.
        """
        cached, counts = scheduled.scheduled_cached_reqs, scheduled.num_scheduled_tokens
        joins = any(new.num_computed_tokens for new in scheduled.scheduled_new_reqs)
        if not (taken or joins or cached.resumed_req_ids):
            return [set() for _ in page_sizes], False
        stored = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        stored.update({new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs})
        joined = {new.req_id for new in scheduled.scheduled_new_reqs} | set(cached.resumed_req_ids)
        joined.update(request for _, request in taken if request is not None)
        joined = {request for request in joined if stored.get(request)}
        waiting = {page for page, _ in taken}
        if not (joined or waiting):
            return [set() for _ in page_sizes], False
        found, are_read = [], False
        for group, size in enumerate(page_sizes):
            written = set()
            for request, count in counts.items():
                first, last = stored[request] // size, (stored[request] + count - 1) // size
                written.update(self._requests[request].groups[group][first : last + 1])
            read = {page for r in joined for page in self._requests[r].groups[group][: stored[r] // size]}
            written.discard(0)  # page 0 stands for none
            found.append(written & (read | waiting))
            are_read = are_read or not written.isdisjoint(read)
        return found, are_read

    def _extend(self, request: str, pages: Sequence[Sequence[int]]) -> None:
        for known, more in zip(self._requests[request].groups, pages, strict=True):
            known.extend(more)

    def _replace(self, request: str, pages: Sequence[Sequence[int]]) -> None:
        self._versions += 1
        self._requests[request] = _Pages([list(group) for group in pages], self._versions)

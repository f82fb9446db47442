"""The block allocator: a free list of pages and a count of references to each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class PageAllocator:
    """Hands out pages ``1 .. pages - 1``; page 0 takes padding.

    Attributes:
        free: the free pages; the last one is the next to go.
        refs: references to each page.
        watchers: canary pools (:class:`kvcanary_fx.EnginePool`) that are told; none with the canary off.
    """

    def __init__(self, pages: int, page_size: int):
        self.page_size = page_size
        self.free = list(range(pages - 1, 0, -1))
        self.refs = [0] * pages
        self.watchers: list[Any] = []

    def take(self, count: int, owner: str) -> list[int]:
        """``count`` free pages; there must be so many."""
        taken = [self.free.pop() for _ in range(count)]
        for page in taken:
            self.refs[page] = 1
        for pool in self._told(taken):
            pool.allocate(self.slots(taken), owner=owner)  # canary
        return taken

    def share(self, pages: list[int], owner: str | None) -> None:
        """One more reference to each page."""
        for page in pages:
            self.refs[page] += 1
        for pool in self._told(pages):
            pool.share(self.slots(pages), owner=owner)  # canary

    def drop(self, pages: list[int], owner: str | None) -> list[int]:
        """One reference less to each page; those that became free."""
        for pool in self._told(pages):
            pool.release(self.slots(pages), owner=owner)  # canary
        freed = []
        for page in pages:
            self.refs[page] -= 1
            if self.refs[page] == 0:
                self.free.append(page)
                freed.append(page)
        return freed

    def _told(self, pages: list[int]) -> list[Any]:
        """Who is told about ``pages``; nobody if there are none."""
        return self.watchers if pages else []

    def slots(self, pages: Iterable[int]) -> torch.Tensor:
        """The slots of pages, int64 ``[len(pages) * page_size]`` on the host."""
        first = torch.tensor(list(pages), dtype=torch.int64).view(-1, 1) * self.page_size
        return (first + torch.arange(self.page_size)).flatten()

"""Pages of requests in both index spaces, and the tables that the kernels read."""

from __future__ import annotations

import torch
from allocator import PageAllocator
from config import EngineConfig
from history import History
from tensors import upload
from workload import Request


class Memory:
    """The allocator, the request table, and the map into the window group's own index space.

    Attributes:
        table: int32 ``[rows, columns]``, pages of each request; row 0 is for padding.
        window: allocator of the window group, None without one.
        window_page: the window group's page for each page, 0 where there is none.
        slot_map: int64 ``[slots]``, the same for slots: what the kernels and the canary read.
        history: the requests' own tokens; only the canary asks.
    """

    def __init__(self, config: EngineConfig):
        self.config, self.page = config, config.page
        self.full = PageAllocator(config.pages, config.page)
        self.table = torch.zeros(config.max_running + 1, config.columns, dtype=torch.int32, device=config.device)
        self.rows = list(range(config.max_running, 0, -1))
        self.window = PageAllocator(config.window_pages, config.page) if config.window else None
        self.window_page = [0] * config.pages
        self.slot_map = torch.zeros(config.pages * config.page, dtype=torch.int64, device=config.device)
        self.history = History(config)

    # ---- a request's pages

    def missing(self, request: Request, length: int) -> tuple[int, int]:
        """Pages that a request lacks for ``length`` positions, in the full and in the window group."""
        columns = range(len(request.pages), -(-length // self.page))
        return len(columns), sum(self._in_window(request, c) for c in columns) if self.window else 0

    def fits(self, missing: tuple[int, int]) -> bool:
        return missing[0] <= len(self.full.free) and (not self.window or missing[1] <= len(self.window.free))

    def grow(self, request: Request, length: int) -> None:
        """Give a request the pages for ``length`` positions."""
        pages = self.full.take(self.missing(request, length)[0], request.id)
        if self.window:
            inside = [p for c, p in enumerate(pages, len(request.pages)) if self._in_window(request, c)]
            self._map(inside, self.window.take(len(inside), request.id))
        self._append(request, pages)

    def reserve(self, request: Request, length: int) -> None:
        """The same, if so many pages are free."""
        missing = self.missing(request, length)
        if missing[0] and length <= self.config.width and self.fits(missing):
            self.grow(request, length)

    def adopt(self, request: Request, pages: list[int]) -> None:
        """Give a request pages of the prefix cache."""
        self.share(pages, request.id)
        self._append(request, pages)

    def slide(self, request: Request) -> None:
        """Free the window group's pages that the request no longer sees, if nobody else may."""
        behind = request.pages[: self.live_from(request.stored) // self.page]
        self._unmap([p for p in behind if self.window_page[p] and self.full.refs[p] == 1], request.id)

    def leave(self, request: Request) -> list[int]:
        """Take a request's row and hand back its pages, which still count as referenced."""
        pages, request.pages = request.pages, []
        if request.row:
            self.table[request.row] = 0
            self.rows.append(request.row)
        request.row = 0
        return pages

    # ---- references

    def share(self, pages: list[int], owner: str | None) -> None:
        self.full.share(pages, owner)
        if self.window:
            self.window.share([self.window_page[p] for p in pages if self.window_page[p]], owner)

    def drop(self, pages: list[int], owner: str | None) -> None:
        """One reference less, in both groups; a page that becomes free has no window page any more."""
        mapped = [p for p in pages if self.window_page[p]]
        last = [p for p in mapped if self.full.refs[p] == 1]
        if self.window:
            self.window.drop([self.window_page[p] for p in mapped if self.full.refs[p] != 1], owner)
        self._unmap(last, owner)
        self.full.drop(pages, owner)

    # ---- addresses

    def slots(self, request: Request, start: int, stop: int) -> list[int]:
        """Slots of positions ``start .. stop - 1``."""
        return [request.pages[p // self.page] * self.page + p % self.page for p in range(start, stop)]

    def slot_tensor(self, request: Request, start: int, stop: int) -> torch.Tensor:
        """The same as int64 ``[stop - start]`` on the device."""
        first = start // self.page
        slots = self._on_device(request.pages[first : -(-stop // self.page)])
        return slots[start - first * self.page :][: stop - start]

    def live_from(self, stored: int) -> int:
        """The first position that the window group still needs."""
        return max(0, stored - self.config.window + 1) if self.config.window else 0

    def usable(self, pages: list[int]) -> list[int]:
        """The longest head of cached pages whose window, at its end, is still there."""
        count = len(pages)
        while self.window and count:
            needed = pages[self.live_from(count * self.page) // self.page : count]
            if all(self.window_page[p] for p in needed):
                break
            count -= 1
        return pages[:count]

    def _in_window(self, request: Request, column: int) -> bool:
        return (column + 1) * self.page > self.live_from(request.stored)

    def _append(self, request: Request, pages: list[int]) -> None:
        if pages:
            at = slice(len(request.pages), len(request.pages) + len(pages))
            self.table[request.row, at] = upload(pages, self.config.device).to(torch.int32)
            request.pages += pages

    def _map(self, pages: list[int], window_pages: list[int]) -> None:
        for page, window_page in zip(pages, window_pages, strict=True):
            self.window_page[page] = window_page
        if pages:
            self.slot_map[self._on_device(pages)] = self._on_device(window_pages)

    def _unmap(self, pages: list[int], owner: str | None) -> None:
        if self.window and pages:
            self.window.drop([self.window_page[p] for p in pages], owner)
            for page in pages:
                self.window_page[page] = 0
            self.slot_map[self._on_device(pages)] = 0

    def _on_device(self, pages: list[int]) -> torch.Tensor:
        """The slots of pages of either group."""
        return self.full.slots(pages).to(self.config.device, non_blocking=True)

"""Host off-load: the KV of a request leaves the pool and comes back, copied by a worker, with its shadow.

The worker stands for a second stream.  What it reads or writes must stay allocated until :meth:`HostPool.join`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from kv_store import Group


@dataclasses.dataclass
class Part:
    """One group's KV of a request.

    Attributes:
        start: the first position of the part; a sliding-window group keeps only the last ones.
        rows: the bytes, uint8 ``[positions, row_bytes]`` for each tensor of each layer.
        shadow: who is in the slots and what their bytes must be (:class:`kvcanary_fx.ShadowSlice`), or None.
    """

    start: int
    rows: list[torch.Tensor]
    shadow: Any = None


@dataclasses.dataclass
class SavedKV:
    """The KV of the first ``length`` positions of a request, by the name of the group."""

    length: int
    parts: dict[str, Part]


@dataclasses.dataclass
class Store:
    """A group and where a request's slots are in it.

    Attributes:
        locate: from a request and its length to the first position that is kept, and the slots from there on.
        pool: the group's canary pool (:class:`kvcanary_fx.EnginePool`), None with the canary off.
    """

    group: Group
    locate: Callable[[Any, int], tuple[int, torch.Tensor]]
    pool: Any = None


def gather(group: Group, slots: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of slots, uint8 ``[n, row_bytes]`` for each tensor."""
    return [_bytes_of(t)[slots] for layer in group.layers for t in layer]


def scatter(group: Group, slots: torch.Tensor, rows: list[torch.Tensor]) -> None:
    """Put back what :func:`gather` took."""
    for tensor, saved in zip((t for layer in group.layers for t in layer), rows, strict=True):
        _bytes_of(tensor)[slots] = saved


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(1).view(torch.uint8)


class HostPool:
    """Copies on the worker, in order.

    Attributes:
        saves, loads: requests copied so far.
    """

    def __init__(self, stores: list[Store]):
        self.stores = stores
        self.worker = ThreadPoolExecutor(1)
        self.pending: list[tuple[Future[Any], Callable[[Any], None]]] = []
        self.saves = self.loads = 0

    def save(self, request: Any, done: Callable[[SavedKV], None]) -> None:
        """Start to copy a request's KV to the host; ``done`` runs in :meth:`join`."""
        saved = SavedKV(request.stored, {})
        jobs = []
        for store in self.stores:
            start, slots = store.locate(request, request.stored)
            shadow = store.pool.export(slots) if store.pool is not None else None  # canary
            part = saved.parts[store.group.name] = Part(start, [], shadow)
            jobs.append((store.group, slots, part))

        def copy() -> SavedKV:
            for group, slots, part in jobs:
                part.rows = gather(group, slots)
            return saved

        self.saves += 1
        self.pending.append((self.worker.submit(copy), done))

    def load(self, request: Any, done: Callable[[], None], lost: bool = False) -> None:
        """Start to bring a request's saved KV back; in :meth:`join` it goes to its slots, then ``done`` runs.

        The worker copies to a staging buffer, not into the pool: a forward that runs meanwhile may hold a copy
        of the pool and write all of it back, as graphs compiled with ``aot_eager`` do.
        """
        saved: SavedKV = request.saved
        targets = [(s, s.locate(request, saved.length)[1], saved.parts[s.group.name]) for s in self.stores]

        def copy() -> list[list[torch.Tensor]]:
            return [[rows.clone() for rows in part.rows] for _, _, part in targets]

        def arrive(staged: list[list[torch.Tensor]]) -> None:
            for (store, slots, part), rows in zip(targets, staged, strict=True):
                if not lost:
                    scatter(store.group, slots, rows)
                if store.pool is not None:
                    store.pool.import_(part.shadow, slots)  # canary
            done()

        self.loads += 1
        self.pending.append((self.worker.submit(copy), arrive))

    def join(self) -> None:
        """Wait for the copies: from here on the pool may be read, and what was saved may be freed."""
        pending, self.pending = self.pending, []
        for future, done in pending:
            done(future.result())

    def close(self) -> None:
        self.worker.shutdown()

"""Host off-load: the KV of a request leaves the pool and comes back, copied beside the forwards, with its shadow.

What a copy reads or writes must stay allocated until :meth:`HostPool.join`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from copies import Ticket, make_copier
from kv_store import Group


@dataclasses.dataclass
class Part:
    """One group's KV of a request.

    Attributes:
        start: the first position of the part; a sliding-window group keeps only the last ones.
        rows: the bytes, uint8 ``[positions, row_bytes]`` on the host for each tensor of each layer.
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


def bytes_of(group: Group) -> list[torch.Tensor]:
    """The tensors of a group as bytes, uint8 ``[slots, row_bytes]``."""
    return [t.flatten(1).view(torch.uint8) for layer in group.layers for t in layer]


def host_rows(group: Group, count: int, pinned: bool) -> list[torch.Tensor]:
    """Host memory for ``count`` slots of each tensor."""
    shapes = [(count, t.shape[1]) for t in bytes_of(group)]
    return [torch.empty(shape, dtype=torch.uint8, pin_memory=pinned) for shape in shapes]


class HostPool:
    """Copies in order, of what the forwards before have written.

    Attributes:
        saves, loads: requests copied so far.
    """

    def __init__(self, stores: list[Store], device: str):
        self.stores, self.device = stores, device
        self.copier = make_copier(device)
        self.pending: list[tuple[Ticket, Callable[[], None]]] = []
        self.saves = self.loads = 0

    def save(self, request: Any, done: Callable[[SavedKV], None]) -> None:
        """Start to copy a request's KV to the host; ``done`` runs in :meth:`join`."""
        saved = SavedKV(request.stored, {})
        jobs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for store in self.stores:
            start, slots = store.locate(request, request.stored)
            shadow = store.pool.export(slots) if store.pool is not None else None  # canary
            rows = host_rows(store.group, len(slots), self.copier.pinned)
            saved.parts[store.group.name] = Part(start, rows, shadow)
            jobs += [(tensor, slots, to) for tensor, to in zip(bytes_of(store.group), rows, strict=True)]

        def copy() -> None:
            for tensor, slots, to in jobs:
                to.copy_(tensor[slots], non_blocking=True)

        self.saves += 1
        self.pending.append((self.copier.start(copy), lambda: done(saved)))

    def load(self, request: Any, done: Callable[[], None], lost: bool = False) -> None:
        """Start to bring a request's saved KV back; in :meth:`join` it goes to its slots, then ``done`` runs.

        The copy goes to a staging buffer, not into the pool: a forward that runs meanwhile may hold a copy of the
        pool and write all of it back, as graphs compiled with ``aot_eager`` do.
        """
        saved: SavedKV = request.saved
        targets = [(s, s.locate(request, saved.length)[1], saved.parts[s.group.name]) for s in self.stores]
        staged = [[torch.empty_like(rows, device=self.device) for rows in part.rows] for _, _, part in targets]

        def copy() -> None:
            for (_, _, part), buffers in zip(targets, staged, strict=True):
                for rows, buffer in zip(part.rows, buffers, strict=True):
                    buffer.copy_(rows, non_blocking=True)

        def arrive() -> None:
            for (store, slots, part), buffers in zip(targets, staged, strict=True):
                for tensor, rows in zip(bytes_of(store.group), buffers, strict=True):
                    if not lost:
                        tensor[slots] = rows
                if store.pool is not None:
                    store.pool.import_(part.shadow, slots)  # canary
            done()

        self.loads += 1
        self.pending.append((self.copier.start(copy), arrive))

    def join(self) -> None:
        """Wait for the copies: from here on the pool may be read, and what was saved may be freed."""
        pending, self.pending = self.pending, []
        for ticket, done in pending:
            ticket.wait()
            done()

    def forget(self) -> None:
        """Let the copies end, and nothing follow from them."""
        pending, self.pending = self.pending, []
        for ticket, _ in pending:
            ticket.wait()

    def close(self) -> None:
        self.copier.close()

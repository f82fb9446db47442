"""K and V of layers that have written, held until one launch records them all."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .content.layer import LayerRecord, Written
from .ops import held_kernels_for
from .slots.space import RequestPlan

#: Bytes of memory that are held at most; a model's profiling run has seen many times as much.
LIMIT = 256 << 20


class Held:
    """For forwards whose layers run from Python, and whose K and V nothing overwrites: not those of a CUDA graph."""

    def __init__(self, records: Iterable[LayerRecord], limit: int = LIMIT):
        """
        Args:
            records: of all layers.
            limit: bytes.
        """
        by_pool: dict[int, list[LayerRecord]] = {}
        for record in records:
            if record.writes:
                by_pool.setdefault(record.space.space_id, []).append(record)
        self._together = {
            number: held_kernels_for(mine[0].gate.device).HeldRecords(mine) for number, mine in by_pool.items()
        }
        self._waiting: dict[int, tuple[RequestPlan, list[Written]]] = {}  # by pool
        self._bytes, self._limit = 0, limit

    def take(
        self, record: LayerRecord, plan: RequestPlan, key: torch.Tensor | None, value: torch.Tensor | None
    ) -> None:
        """A layer has written; arguments as of :meth:`.LayerRecord.record`."""
        number = record.space.space_id
        known = self._waiting.get(number)
        if known is None or known[0] is not plan:
            self.flush()
            known = self._waiting[number] = plan, []
        known[1].append(Written(record, key, value))
        self._bytes += sum(t.untyped_storage().nbytes() for t in (key, value) if t is not None)
        if self._bytes > self._limit:
            self.flush()

    def flush(self) -> None:
        """Record what is held, in the current stream."""
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        for number, (plan, held) in waiting.items():
            self._together[number](plan, held)

    def drop(self) -> None:
        """The forward raised: nothing of it is recorded."""
        self._waiting, self._bytes = {}, 0

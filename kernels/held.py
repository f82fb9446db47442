"""K and V of layers that have written, held until one launch records them all."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .content.layer import HeldRecords, LayerRecord, Written
from .slots.space import RequestPlan

#: Bytes of memory that are held at most, V with the product that it is a part of: 290 tokens of an 8B model.  Its
#: engine planned for thousands.
LIMIT = 128 << 20


class Held:
    """For forwards whose layers run from Python, and whose K and V nothing overwrites: not those of a CUDA graph."""

    def __init__(self, together: Mapping[int, HeldRecords], limit: int = LIMIT):
        """
        Args:
            together: what records the layers of a pool, by the number of its slot space.
            limit: bytes.
        """
        self._together = together
        self._waiting: dict[int, tuple[RequestPlan, dict[int, Written]]] = {}  # by pool, and there by the record's id
        self._bytes, self._limit = 0, limit
        self._each = 0  # bytes of a layer

    def take(
        self, record: LayerRecord, plan: RequestPlan, key: torch.Tensor | None, value: torch.Tensor | None
    ) -> None:
        """A layer has written, again perhaps; arguments as of :meth:`.LayerRecord.record`."""
        number = record.space.space_id
        known = self._waiting.get(number)
        if known is not None and known[0] is not plan:
            self.flush()
            known = None
        if known is None:
            known = self._waiting[number] = plan, {}
            self._each = sum(t.untyped_storage().nbytes() for t in (key, value) if t is not None)  # layers are alike
        known[1][id(record)] = Written(record, key, value)
        self._bytes += self._each
        if self._bytes > self._limit:
            self.flush()

    def flush(self) -> None:
        """Record what is held, in the current stream."""
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        for number, (plan, held) in waiting.items():
            self._together[number](plan, list(held.values()))

    def drop(self) -> None:
        """The forward raised: nothing of it is recorded."""
        self._waiting, self._bytes = {}, 0

"""Layers that note what they wrote, between which nothing else of the canary runs."""

from __future__ import annotations

import torch

from .context import ForwardContext
from .layer_ops import record_in


class Deferred:
    """Layers of a forward that have written, noted by the ops around attention and taken in together.

    Between two layers of a model that runs from Python, each of our functions is code that the host does not have in
    its caches: what takes 5 us in a loop took 55 there (8B, H100).  So an op appends to a list, and no more.

    Attributes:
        written: ``(layer, key, value)``, not yet taken in.
        room: once so many are noted, :meth:`take_in` is due.
        taken: names of the layers that were.
    """

    def __init__(self, context: ForwardContext):
        """
        Args:
            context: of the forward, with what holds its layers.
        """
        assert context.held is not None
        self._context, self._held = context, context.held
        self.written: list[tuple[str, torch.Tensor | None, torch.Tensor | None]] = []
        self.taken: set[str] = set()
        self.room = self._held.room
        self._held.deferred = self.take_in

    def take_in(self) -> None:
        """Do for each what :func:`.layer_ops.record_in` does."""
        written, self.written = self.written, []
        context, held, taken = self._context, self._held, self.taken
        layers, plans = context.layers, context.requests
        for layer, key, value in written:
            record = layers.get(layer)
            if record is None:  # other groups of a model may not be guarded
                continue
            taken.add(layer)
            plan = plans.get(record.space.space_id) if record.writes else None
            if plan is None or plan.real_slots is None:
                record_in(context, key, value, record.gate.device, layer)
            else:
                held.take(record, plan, key, value)
        self.room = held.room

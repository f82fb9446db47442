"""Layers that note what they wrote, between which nothing else of the canary runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from .context import ForwardContext
from .held import NamedLayers, records_of
from .layer_ops import record_in

#: A layer as an op was given it, K and V.
_Noted: TypeAlias = "tuple[Any, torch.Tensor | None, torch.Tensor | None]"


class Deferred:
    """Layers of a forward that have written, noted by the ops around attention and taken in together.

    Between two layers of a model that runs from Python, each of our functions is code that the host does not have in
    its caches: on a CPU core, what takes 5 us in a loop took 36 with other work in between that empties them.  So an op
    appends to a list, and no more.

    Attributes:
        written: ``(layer, key, value)``, not yet taken in; the layer as the op was given it.
        room: once so many are noted, :meth:`take_in` is due.
    """

    def __init__(self, context: ForwardContext, name_of: Callable[[Any], str], taken: set[str], first: _Noted):
        """
        Args:
            context: of the forward, with what holds its layers.
            name_of: the name of what an op was given as its layer.
            taken: gets the names of layers that were taken in.
            first: the first layer, which has written.
        """
        assert context.held is not None
        self._context, self._held = context, context.held
        self._name_of, self._taken = name_of, taken
        self.written: list[_Noted] = [first]
        if self._held.deferred is not None:  # what was noted elsewhere is still to be recorded
            self._held.deferred()
        self._held.expect(first[1], first[2])
        self.room = self._held.room
        self._held.deferred = self.take_in
        if self.room == 1:
            self.take_in()

    def take_in(self) -> None:
        """Do for each what :func:`.layer_ops.record_in` does."""
        written, self.written = self.written, []
        if written and not self._take_all(written):
            self._take_each(written)
        self.room = self._held.room

    def _take_all(self, written: Sequence[_Noted]) -> bool:
        """Where the layers are those of a forward before, with few functions; False: nothing was done."""
        held, layers = self._held, self._context.layers
        given, keys, values = map(list, zip(*written, strict=True))
        known = held.named
        if known is None or known.given != given or known.layers is not layers:
            names = [self._name_of(each) for each in given]
            known = held.named = NamedLayers(given, names, layers, records_of(names, layers))
        if not held.take_all(known.records, self._context.requests, keys, values):
            return False
        self._taken.update(known.names)
        return True

    def _take_each(self, written: Sequence[_Noted]) -> None:
        context, held = self._context, self._held
        layers, plans = context.layers, context.requests
        for given, key, value in written:
            layer = self._name_of(given)
            record = layers.get(layer)
            if record is None:  # other groups of a model may not be guarded
                continue
            self._taken.add(layer)
            plan = plans.get(record.space.space_id) if record.writes else None
            if plan is None or plan.real_slots is None:
                record_in(context, key, value, record.gate.device, layer)
            else:
                held.take(record, plan, key, value)

"""The checks of the layers of compiled graphs whose ops are for all layers at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..kernels.context import ForwardContext
from ..kernels.layers_together import LayersTogether
from ..kernels.ops import held_kernels_for, pool_kernels_for
from .forward import only_read
from .guarded_pool import Pools


class GraphLayers:
    """Made once for each graph, and kept as long as the session."""

    def __init__(self, pools: Pools):
        self._pools = pools
        self._known: dict[tuple[int, ...], LayersTogether] = {}  # by the gates of a graph

    def together(self, context: ForwardContext, layers: Sequence[str]) -> LayersTogether:
        """The checks of a graph's layers.  Not for the first time while a CUDA graph is captured.

        Args:
            context: of the graph.

        Raises:
            UnknownLayerError: no pool has one of the layers.
        """
        key = tuple(id(gate) for gate in context.gates.values())
        known = self._known.get(key)
        if known is None:
            compared = {
                pool.space.space_id: None if pool.declared.layout.once else functools.partial(only_read, pool)
                for pool in self._pools.values()
            }
            records = self._pools.layer_records(context.gates)
            (device,) = context.gates
            kernels = pool_kernels_for(device), held_kernels_for(device)
            known = self._known[key] = LayersTogether(layers, records, compared, context.tables, kernels)
        return known

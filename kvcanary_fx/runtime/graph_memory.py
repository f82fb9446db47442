"""What a compiled graph has of its own on its devices, besides the shadows of its caches.

Captured graphs hold it by its address, so it lives as long as the graph's binding, whatever the caches of a call.
"""

from __future__ import annotations

import torch

from ..kernels import side_stream
from ..kernels.buffers import Gate
from ..kernels.content.layer_tables import LayerTables
from ..passes.graph_plan import GraphPlan

#: Tensors of a layer whose attention is opaque, at most, as far as the tables have room for them.
HALVES = 4


class GraphMemory:
    """The memory of one graph.

    Attributes:
        states: the graph's last arguments, int32 ``[1]`` on each device.
        gates: int64 ``[len(Gate)]``, by device.
        sides: streams for checks beside the model, by device, if there may be any.
        tables: what launches over all layers are told of them, by device, if there are such.
    """

    def __init__(self, plan: GraphPlan):
        with torch.inference_mode(False):
            self.states = [torch.zeros(1, dtype=torch.int32, device=d) for d in plan.devices]
            self.gates = {d: torch.zeros(len(Gate), dtype=torch.int64, device=d) for d in plan.devices}
        self.sides = {d: side_stream.SideStream(d) for d in plan.devices} if plan.halves_beside else {}
        self.tables: dict[torch.device, LayerTables] = {}
        if plan.layers_at_once:
            halves = max(len(plan.sites), HALVES * plan.layers_at_once)
            self.tables = {d: LayerTables(d, halves) for d in plan.devices}

    def make_room(self) -> None:
        """Between two calls: have memory for the captures to come."""
        for tables in self.tables.values():
            tables.make_room()

"""The checks around the layers of an engine whose attention runs in no compiled graph.

::

    layers = EagerLayers(session)
    with session.step(batch), session.forward():
        ...
        layers.verify("model.layers.0.self_attn")
        attention(...)
        layers.record("model.layers.0.self_attn", key, value, slots)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .context import ForwardContext, forward_context
from .errors import UnknownLayerError
from .kernels.buffers import Gate
from .kernels.layer_ops import LayerHalf
from .kernels.ops import kernels_for, request_kernels_for

if TYPE_CHECKING:
    from .engine_forward import Forward
    from .engine_session import EngineSession


class EagerLayers:
    """Runs the ops that guard opaque attention, called by an engine instead of a graph.

    Attributes:
        running: whether a forward of the session is running; outside of one there is no plan to check against.
    """

    def __init__(self, session: EngineSession):
        self._session = session
        devices = dict.fromkeys(pool.declared.device for pool in session.pools.values())
        self._gates = {d: torch.zeros(len(Gate), dtype=torch.int64, device=d) for d in devices}
        self._layers: dict[str, tuple[LayerHalf, ...]] = {}
        for pool in session.pools.values():
            self._layers.update(pool.layer_halves(self._gates[pool.declared.device]))
        #: What the ops claim to mutate in a graph; here it only says on which device they run.
        self._state = {d: torch.zeros(1, dtype=torch.int32, device=d) for d in devices}

        session.eager_layers = tuple(self._layers)
        self._begun: Forward | None = None

    @property
    def running(self) -> bool:
        return self._session._forward is not None

    def verify(self, layer: str) -> None:
        """Before a layer's attention: compare the bytes of the slots that the forward reads with their digests.

        Raises:
            UnknownLayerError: no pool has a layer of this name.
        """
        state = self._state_of(layer)
        self._begin()
        with forward_context(self._context()):
            torch.ops.kvcanary.verify_at(state, [], state, layer)

    def record(
        self,
        layer: str,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
    ) -> None:
        """After a layer's write: fingerprint the slots that the forward was planned to write.

        Args:
            key, value: what was written, ``[n, ...]`` in the pool's type, one row per token in the order of the
                batch; more rows are padding.  None leaves out the operand check.
            slots: integer ``[n]``, the slots that the write received.  None leaves out the index check.

        Raises:
            UnknownLayerError: no pool has a layer of this name.
        """
        state = self._state_of(layer)
        with forward_context(self._context()):
            if slots is not None:
                self._check_received(layer, slots)
            torch.ops.kvcanary.record_at(state, key, value, state, layer)

    def _begin(self) -> None:
        """Count a forward when its first layer comes, as a graph's first op does: reports have the number."""
        running = self._session._forward
        if running is not None and running is not self._begun:
            self._begun = running
            for device, gate in self._gates.items():
                kernels_for(device).begin(self._session.controls(device).words, gate)

    def _check_received(self, layer: str, slots: torch.Tensor) -> None:
        """Are they the planned ones?  Told once a layer, not for each of its tensors."""
        site = self._layers[layer][0].site
        running = self._session._forward
        plan = None if running is None or site.space is None else running.plans.get(site.space.space_id)
        if plan is not None and site.space is not None:
            kernels = request_kernels_for(slots.device)
            kernels.check_received(site.space, plan, slots.to(torch.int64).reshape(-1), site.half_id)

    def _state_of(self, layer: str) -> torch.Tensor:
        if layer not in self._layers:
            raise UnknownLayerError(layer, list(self._layers))
        return self._state[self._layers[layer][0].view.device]

    def _context(self) -> ForwardContext:
        running = self._session._forward
        return ForwardContext(
            sites=(),
            plans=(),
            identities={},
            controls=self._session.controls.by_device,
            gates=self._gates,
            requests=running.plans if running is not None else {},
            layers=self._layers,
        )

"""Checks of an engine's layers where no graph of ``session.backend`` makes them.

An engine that compiles by itself puts ops of its own around attention, whose bodies are
:func:`~.kernels.layer_ops.verify_layer` and :func:`~.kernels.layer_ops.record_layer`, and lets them find the forward::

    checks = LayerChecks(session)
    with session.step(batch), session.forward(), checks.publish():
        model(...)

One whose attention runs in no graph at all calls the checks itself::

    layers = EagerLayers(session)
    with session.step(batch), session.forward():
        ...
        layers.verify("model.layers.0.self_attn")
        attention(...)
        layers.record("model.layers.0.self_attn", key, value, slots)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ..errors import SessionStateError, UnknownLayerError
from ..kernels.buffers import Gate
from ..kernels.context import ForwardContext, LayerHalf, forward_context
from ..kernels.layer_ops import record_layer, verify_layer
from ..kernels.ops import kernels_for, request_kernels_for

if TYPE_CHECKING:
    from .forward import Forward
    from .session import EngineSession


class LayerChecks:
    """What the checks around attention need of a session, forward after forward.

    Attributes:
        gates: int64 ``[len(Gate)]`` for each device that a pool is on.
        running: whether a forward of the session is running; outside of one there is no plan to check against.
    """

    def __init__(self, session: EngineSession):
        self._session = session
        devices = dict.fromkeys(pool.declared.device for pool in session.pools.values())
        self.gates = {d: torch.zeros(len(Gate), dtype=torch.int64, device=d) for d in devices}
        self._layers = session._layers_of(self.gates)
        session.eager_layers = tuple(self._layers)

    @property
    def running(self) -> bool:
        return self._session._forward is not None

    @contextlib.contextmanager
    def publish(self) -> Iterator[None]:
        """Around the model, within ``session.forward(...)``.

        Raises:
            SessionStateError: no forward is running.
        """
        if not self.running:
            raise SessionStateError("publish() outside forward(): with session.step(batch), session.forward(): first")
        self._begin()
        with forward_context(self._context()):
            yield

    def _begin(self) -> None:
        """Count a forward, as a graph's first op does: reports have the number."""
        for device, gate in self.gates.items():
            kernels_for(device).begin(self._session.controls(device).words, gate)

    def _context(self) -> ForwardContext:
        running = self._session._forward
        return ForwardContext(
            sites=(),
            plans=(),
            identities={},
            controls=self._session.controls.by_device,
            gates=self.gates,
            requests=running.plans if running is not None else {},
            layers=self._layers,
        )


class EagerLayers(LayerChecks):
    """Runs the checks of layers when an engine says so."""

    def __init__(self, session: EngineSession):
        super().__init__(session)
        self._begun: Forward | None = None

    def verify(self, layer: str) -> None:
        """Before a layer's attention: compare the bytes of the slots that the forward reads with their digests.

        Raises:
            UnknownLayerError: no pool has a layer of this name.
        """
        halves, running = self._halves(layer), self._session._forward
        if running is not None and running is not self._begun:  # its first layer
            self._begun = running
            self._begin()
        with forward_context(self._context()):
            verify_layer(halves[0].view.device, layer)

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
        halves = self._halves(layer)
        with forward_context(self._context()):
            if slots is not None:
                self._check_received(halves[0], slots)
            record_layer(key, value, halves[0].view.device, layer)

    def _check_received(self, half: LayerHalf, slots: torch.Tensor) -> None:
        """Are they the planned ones?  Told once a layer, not for each of its tensors."""
        site, running = half.site, self._session._forward
        plan = None if running is None or site.space is None else running.plans.get(site.space.space_id)
        if plan is not None and site.space is not None:
            kernels = request_kernels_for(slots.device)
            kernels.check_received(site.space, plan, slots.to(torch.int64).reshape(-1), site.half_id)

    def _halves(self, layer: str) -> tuple[LayerHalf, ...]:
        if layer not in self._layers:
            raise UnknownLayerError(layer, list(self._layers))
        return self._layers[layer]

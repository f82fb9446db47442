"""Checks of an engine's layers in graphs that ``session.backend`` did not compile.

An engine that compiles by itself puts ops of its own around attention, whose bodies are
:func:`~.kernels.layer_ops.verify_layer` and :func:`~.kernels.layer_ops.record_layer`.  They look up the forward's plans
and the layers here, as those of a guarded graph do in the context of its call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .context import ForwardContext, forward_context
from .errors import SessionStateError
from .kernels.buffers import Gate

if TYPE_CHECKING:
    from .engine_session import EngineSession


class LayerChecks:
    """What the ops around attention need of a session, forward after forward.

    Attributes:
        gates: int64 ``[len(Gate)]`` for each device that a pool is on.
    """

    def __init__(self, session: EngineSession):
        self._session = session
        devices = {pool.declared.device for pool in session.pools.values()}
        self.gates = {d: torch.zeros(len(Gate), dtype=torch.int64, device=d) for d in devices}

    @contextlib.contextmanager
    def publish(self) -> Iterator[None]:
        """Around the model, within ``session.forward(...)``.

        Raises:
            SessionStateError: no forward is running.
        """
        running = self._session._forward
        if running is None:
            raise SessionStateError("publish() outside forward(): with session.step(batch), session.forward(): first")
        for gate in self.gates.values():
            gate[Gate.STEP] += 1
        context = ForwardContext(
            sites=(),
            plans=(),
            identities={},
            controls={device: self._session.controls(device) for device in self.gates},
            gates=self.gates,
            requests=running.plans,
            layers=self._session._layers_of(self.gates),
        )
        with forward_context(context):
            yield

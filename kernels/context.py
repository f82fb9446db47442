"""The ForwardContext: data that the canary ops of one forward look up, because a graph cannot carry it.

The ops in a compiled graph hold a site number and tensors.  Everything else (the shadow, the ring, the
layout) is found through the context published for this forward.  It is a ``ContextVar``, so threads do
not see each other's, and leaving a context restores the one before it, so a draft model may run inside
its target.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import MissingContextError

if TYPE_CHECKING:
    from .buffers import IdentityBuffers, Site
    from .content.layer import LayerRecord
    from .content.layer_tables import LayerTables
    from .held import Held
    from .layers_together import LayersTogether
    from .ring import Control
    from .side_stream import SideStream
    from .slots.space import RequestPlan
    from .writes.plan import WritePlan


@dataclasses.dataclass(frozen=True)
class ForwardContext:
    """References for one call of one guarded graph.  Holds no data of the batch.

    Attributes:
        sites: what the kernels need, one entry per site number of the graph.
        plans: the graph's writes, by write number.
        identities: who is in each slot, by site number; only sites that lead a slot space have one.
        controls: the violation ring of each device in use.
        gates: the graph's own step counter, by device.
        abort: called on the CPU when an index is out of range, before the write runs; raises.
        requests: what the forward of an engine is to read and write, by the number of the slot space.
        layers: what the checks of an engine's layers need, by the layer's name.
        joins: the graph has joins, where the model waits for work beside it; without joins, the checks of a layer wait
            for those of the one before.
        sides: the stream on which the checks of layers run, by device; in the model's own stream where there is none.
        halves_beside: the graph lets its checks around writes run beside the model, where it is captured.
        tables: what launches over all layers are told of them, by device; none where each layer has its own.
        compared: the bytes of all layers have been compared already, before the model.
        held: takes what the layers wrote, which is recorded when the model has run; None: each layer records.
        together: the checks of all layers of a graph whose ops are for all; None elsewhere.
    """

    sites: tuple[Site, ...]
    plans: tuple[WritePlan, ...]
    identities: dict[int, IdentityBuffers]
    controls: dict[torch.device, Control]
    gates: dict[torch.device, torch.Tensor]
    abort: Callable[[], None] | None = None
    requests: Mapping[int, RequestPlan] = dataclasses.field(default_factory=dict)
    layers: Mapping[str, LayerRecord] = dataclasses.field(default_factory=dict)
    joins: bool = False
    sides: Mapping[torch.device, SideStream] = dataclasses.field(default_factory=dict)
    halves_beside: bool = False
    tables: Mapping[torch.device, LayerTables] = dataclasses.field(default_factory=dict)
    compared: bool = False
    held: Held | None = None
    together: LayersTogether | None = None


_CONTEXT: contextvars.ContextVar[ForwardContext | None] = contextvars.ContextVar("kvcanary_forward", default=None)


@contextlib.contextmanager
def forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Publish ``context`` in this thread until the block ends, then restore what was there before."""
    token = publish(context)
    try:
        yield context
    finally:
        withdraw(token)


#: :func:`forward_context` where a generator is too slow: ``withdraw(publish(context))``.
publish, withdraw = _CONTEXT.set, _CONTEXT.reset


@contextlib.contextmanager
def override_forward_context(**fields: Any) -> Iterator[ForwardContext]:
    """Change some fields of the context for an inner scope, such as the pools of a draft; the outer one stays.

    Raises:
        MissingContextError: no guarded forward is running here.
        TypeError: a field that does not exist.
    """
    with forward_context(dataclasses.replace(get_forward_context(), **fields)) as inner:
        yield inner


def get_forward_context() -> ForwardContext:
    """The context of the forward that is running in this thread.

    Raises:
        MissingContextError: no guarded forward is running here.
    """
    context = _CONTEXT.get()
    if context is None:
        raise MissingContextError()
    return context


def has_forward_context() -> bool:
    """Whether a guarded forward is running in this thread."""
    return _CONTEXT.get() is not None


def current_context() -> ForwardContext | None:
    """The context of the forward that is running in this thread, if there is one."""
    return _CONTEXT.get()

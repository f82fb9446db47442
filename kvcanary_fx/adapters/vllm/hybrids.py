"""The guard of a model with running states beside attention: Mamba, short convolutions, linear attention.

States have a session of their own, so that attention is guarded as it is without them: their bytes are compared in
each step, since the step replaces them (so not under a budget), and pools that share storage report blocks one by one.

Around a forward::

    compare                            # the state of each request that has one, in all layers at once
    vllm.short_conv(..., layer_name)   # its implementation, with a call behind it: fingerprints of this layer's states
    ...
    fingerprints of the layers that were not seen

The calls are in the implementations of vLLM's own ops, which graphs call, too: they need no pass.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform

from ...engine.layers import EagerLayers
from ...engine.session import EngineSession
from .breakable import break_capture
from .guard import Guard
from .ops import name_of
from .pools import Group
from .settings import VllmSettings
from .state_groups import StateGroup

log = logging.getLogger("kvcanary")


class States:
    """The states of one model runner.

    Attributes:
        session: of their pools.
        groups: the KV cache groups that they are in.
        recorded_in_ops: layers that were fingerprinted behind their op, in all forwards.
    """

    def __init__(self, session: EngineSession, groups: Sequence[StateGroup]):
        self.session, self.groups = session, groups
        self.recorded_in_ops = 0
        self._layers = EagerLayers(session)
        self._left: dict[str, None] = {}  # layers of the running forward that were not seen

    @contextlib.contextmanager
    def forward(self, batch: Mapping[str, Any], metadata: Any) -> Iterator[None]:
        """Around the model.

        Args:
            batch: of the forward, as the session of attention has it.
            metadata: by the layer's name, what its op gets; anything else says nothing.

        Raises:
            KVCacheViolation: mode ``raise``, and a check failed.
        """
        # the request table says where states are, and no state is another request's prefix
        slots = torch.zeros(len(batch["input_ids"]), dtype=torch.int64, device=batch["input_ids"].device)
        with self.session.step({**batch, "slots": slots, "in_flight": False}), self.session.forward():
            self._layers.begin()
            if isinstance(metadata, dict):
                self._check_places(metadata, len(batch["request_ids"]))
            self._left = {name: None for group in self.groups for name in group.layers}
            running = _RUNNING.set(self)
            try:
                yield
            finally:
                _RUNNING.reset(running)
            for name in self._left:
                self._layers.record(name)

    def ran(self, layer: str) -> None:
        """The op of a layer has run."""
        if layer in self._left:
            del self._left[layer]
            self.recorded_in_ops += 1
            self._layers.record(layer)

    def _check_places(self, metadata: Mapping[str, Any], count: int) -> None:
        """Compare the blocks that the ops get with the scheduler's."""
        for group in self.groups:
            layer = next(iter(group.layers))
            given = blocks_of(metadata.get(layer), count)
            if given is not None:
                self._layers.check_received(layer, given)


def blocks_of(metadata: Any, count: int) -> torch.Tensor | None:
    """Where the op of a layer finds the state of each request of the batch: integer ``[count]``.

    Args:
        metadata: of the layer, whose requests are in the order of the batch, those that decode first.

    Returns:
        None if the metadata does not say it of all requests.
    """
    for names in (("state_indices_tensor_d", "state_indices_tensor_p"), ("non_spec_state_indices_tensor",)):
        parts = [part for part in (getattr(metadata, name, None) for name in names) if part is not None]
        columns = [part[:, 0] if part.dim() == 2 else part for part in parts]
        if columns and sum(len(column) for column in columns) >= count:
            return (columns[0] if len(columns) == 1 else torch.cat(columns))[:count].contiguous()
    return None


class GuardOfHybrid(Guard):
    """A model runner under guard, with its states.

    Attributes:
        states: their part.
    """

    def __init__(
        self,
        runner: Any,
        settings: VllmSettings,
        self_test: bool,
        groups: list[Group],
        unguarded: Mapping[str, str],
        drafts: list[Group],
        states: Sequence[StateGroup],
    ):
        """As :class:`.Guard`, with the groups of states."""
        self._state_groups = states
        guarded = dict.fromkeys((group.name for group in states), "")
        super().__init__(runner, settings, self_test, groups, {**unguarded, **guarded}, drafts)
        for group in states:
            self.reactions.page_sizes[group.number] = 1  # a slot is a block
        hook_ops(type(runner.compilation_config.static_forward_context[n]) for g in states for n in g.layers)
        kept = sum(len(layer) for group in states for layer in group.layers.values())
        shown = ", ".join(group.name for group in states)
        log.info("kvcanary.vllm guarded beside them: states, %s, %d halves, every byte in each step", shown, kept)

    def _install(self, allocations: bool) -> EngineSession:
        # a fixed share is of attention's bytes; and no stream of their own
        options: dict[str, Any] = dict(budget=None, verify_fraction=None, placement="inline")
        session = self._session_of(self._state_groups, allocations, **options)
        self.states = States(session, self._state_groups)
        return super()._install(allocations)

    @property
    def sessions(self) -> list[EngineSession]:
        """The sessions of attention, and that of the states."""
        return [*super().sessions, self.states.session]

    @contextlib.contextmanager
    def forward(self, runner: Any, input_ids: torch.Tensor | None, positions: torch.Tensor | None) -> Iterator[None]:
        with super().forward(runner, input_ids, positions):
            with self.states.forward(self.batch, get_forward_context().attn_metadata):
                yield
            if self.settings.contains:
                self.states.session.drain()


def hook_ops(layers: Iterable[type]) -> None:
    """Let the ops of some layers tell when a layer has run.

    They are the functions of the layers' modules, and of vLLM's modules for such layers, that are ops of vLLM and are
    given a layer's name.  A layer whose op is somewhere else is fingerprinted when the model has run.
    """
    modules = dict.fromkeys(cls.__module__ for layer in layers for cls in layer.__mro__)
    package = MambaBase.__module__.rpartition(".")[0]
    modules.update(dict.fromkeys(name for name in sys.modules if name.startswith(f"{package}.")))
    for module in modules:
        for name, original in list(vars(sys.modules[module]).items()):
            if name in _HOOKED or getattr(original, "__module__", None) != module or not hasattr(torch.ops.vllm, name):
                continue
            parameters = list(inspect.signature(original).parameters)
            if "layer_name" in parameters:
                _HOOKED.add(name)
                told = break_capture(_told(original, parameters.index("layer_name")))
                _OVERRIDES.impl(name, told, current_platform.dispatch_key, allow_override=True)


def _told(original: Callable[..., Any], place: int) -> Callable[..., Any]:
    """The implementation of an op, with a call behind it.

    Args:
        place: of the layer's name among its arguments.
    """

    @functools.wraps(original)
    def told(*args: Any, **kwargs: Any) -> Any:
        made, states = original(*args, **kwargs), _RUNNING.get()
        if states is not None:
            states.ran(name_of(kwargs["layer_name"] if "layer_name" in kwargs else args[place]))
        return made

    return told


_RUNNING: contextvars.ContextVar[States | None] = contextvars.ContextVar("kvcanary_vllm_states", default=None)
_HOOKED: set[str] = set()  # ops by name
_OVERRIDES = torch.library.Library("vllm", "IMPL")

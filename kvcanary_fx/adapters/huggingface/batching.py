"""Continuous batching over a PagedAttentionCache: an engine's session for each batch processor.

The cache's ``update`` writes K and V, and transformers keeps it out of compiled graphs, because functionalising views
of one tensor copies that tensor in every layer.  So the checks of a layer run around ``update``, in eager, whether or
not the rest of the model is compiled.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._dynamo import OptimizedModule

from ...config import CanaryConfig
from ...engine.layers import EagerLayers
from ...engine.session import EngineSession
from ...errors import CanaryError, UnguardedForwardError
from ...install import install_canary
from ...kernels.held import Held
from ...runtime.stack_room import with_stack_room
from ..hooks import Parameter, hook
from . import paged_cache
from .groups import Group
from .rows import RequestRows

log = logging.getLogger("kvcanary")

#: The arguments of a call.
_Call: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"


class GuardedManager:
    """A ContinuousBatchingManager whose batches are guarded.

    Attributes:
        session: of the manager's current or last processor; None before the first.
    """

    def __init__(self, manager: Any, config: CanaryConfig, install: dict[str, Any], before: Callable[[Any], None]):
        """
        Args:
            before: called with a processor whose batch is prepared, before the check.
        """
        self._manager, self._config, self._install, self._before = manager, config, install, before
        self._processor: GuardedProcessor | None = None
        _turn_off_what_hides_slots(manager.continuous_batching_config)
        hook(manager, "_create_batch_processor", self._create)
        if hasattr(manager, "_run_generation_loop"):
            hook(manager, "_run_generation_loop", self._run)

    @property
    def of(self) -> Any:
        """transformers' manager."""
        return self._manager

    @property
    def session(self) -> EngineSession | None:
        return self._processor.session if self._processor is not None else None

    def _create(self, original: Callable[[], Any]) -> Any:
        processor = original()
        if self._processor is None or self._processor.processor is not processor:
            self._processor = GuardedProcessor(
                processor, self._manager.model, self._config, self._install, self._before
            )
        return processor

    def _run(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """The loop of the manager's thread, whose steps call each layer of the model."""
        with_stack_room(original)(*args, **kwargs)

    def raise_what_ended_it(self) -> None:
        """Raise the violation that ended the manager's loop: transformers only keeps its text in the requests' results.

        Raises:
            KVCacheViolation, CoverageError: mode ``raise``, and a check failed in a batch, or while blocks were freed.
        """
        fatal = self._manager.background_thread_status.fatal_error
        if isinstance(fatal, CanaryError):
            raise fatal
        if self.session is not None and self._config.mode == "raise":
            self.session.check()


class GuardedProcessor:
    """A ContinuousBatchProcessor with a session over its cache.

    Attributes:
        processor: transformers' object.
        session: guards its pools, one per attention type.
    """

    def __init__(
        self,
        processor: Any,
        model: Any,
        config: CanaryConfig,
        install: dict[str, Any],
        before: Callable[[Any], None],
    ):
        self.processor, self._model, self._before = processor, model, before
        cache, names = processor.cache, attention_names(model)
        requests = processor.cb_config.max_requests_per_batch
        self._groups = paged_cache.groups_of(cache, requests, lambda i: names.get(i, f"layers.{i}"))
        session = install_canary(*[g.pool() for g in self._groups], config=config, **install)
        assert session is not None  # with mode="off" none of this is set up
        self.session: EngineSession = session
        self._layers = EagerLayers(session)
        self._rows = RequestRows(self._groups, requests)
        self._layer = {number: _Layer.of(group, number) for group in self._groups for number in group.layers}
        self._holds = _runs_from_python(model, processor.cb_config)
        life = paged_cache.watch_blocks(cache, [(group, session.pools[group.name]) for group in self._groups])
        life.watch_offloading(processor.offloading_manager)
        self._warming_up = False
        self._noted: _Noted | None = None  # what layers of the running batch wrote, where it is held
        self._planned: dict[int, int] = {}  # where the indices are that the running batch writes by, by group
        hook(processor, "warmup", self._warmup)
        hook(processor, "_generation_step", self._step)
        at = {name: Parameter(cache.update, name) for name in inspect.signature(cache.update).parameters}
        self._key, self._value, self._number = at["key_states"], at["value_states"], at["layer_idx"]
        self._indices = at.get("write_index") or at["kwargs"]  # from 5.18 on among the others of attention
        self._of_kwargs = "write_index" not in at
        plain = getattr(cache.update, "_torchdynamo_orig_callable", None)
        if plain is not None:  # what is around it keeps it out of graphs
            cache.update = types.MethodType(plain, cache)
        hook(cache, "update", self._update)
        cache.update = torch.compiler.disable(cache.update)
        session.mark_ready()

    def _warmup(self, original: Callable[..., Any], model: Any) -> None:
        self._warming_up = True
        try:
            original(model)
        finally:
            self._warming_up = False

    def _step(self, original: Callable[..., Any], model: Any) -> None:
        """One batch: check what it is about to read and write, then run the model."""
        self._before(self.processor)
        layers = self._layers
        with self._in_its_stream(), self.session.step(self._batch()), self.session.forward():
            self._check_reads()
            if not self._holds:
                layers.begin()
                original(model)
                return
            with layers.holding(_by_token):
                layers.begin()
                noted = self._noted = _Noted(self._record_all, layers.held)
                try:
                    original(model)
                finally:
                    self._noted = None
                noted.take_in()

    def _in_its_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Where the model runs: what is checked around it comes before and after it."""
        stream = self.processor.inputs_and_outputs.compute_stream
        if stream is None or stream.device.type != "cuda":
            return contextlib.nullcontext()
        stream.wait_stream(torch.cuda.current_stream(stream.device))  # which prepared the batch
        return torch.cuda.stream(stream)  # type: ignore[no-any-return,no-untyped-call]

    def _batch(self) -> dict[str, Any]:
        """The prepared batch in the session's form; fills the request tables."""
        io = self.processor.inputs_and_outputs
        states = [future.state for future in io.requests_in_batch]
        added = [future.query_length for future in io.requests_in_batch]
        rows, lengths = self._rows.fill(states)
        total = sum(added)
        for group in self._groups:
            self._planned[group.index] = io.write_index_storage[group.index].data_ptr()
        return {
            "input_ids": io.input_ids[:total],
            "positions": io.position_ids[:total],
            "request_rows": rows,
            "request_ids": [state.request_id for state in states],
            # preparing the batch has advanced each request
            "prefix_lens": [s.position_offset - n for s, n in zip(states, added, strict=True)],
            "extend_lens": added,
            "history": self._rows.history,
            "history_lens": lengths,
            "history_by_row": True,
        } | {g.field: g.slots_of(io.write_index_storage[g.index, :total]) for g in self._groups}

    def _check_reads(self) -> None:
        """Compare the indices that attention gathers by with the block tables; not for a ring, whose order differs."""
        io = self.processor.inputs_and_outputs
        if io.max_kv_read == 0:
            return
        longest = max(future.state.position_offset for future in io.requests_in_batch)
        for group in self._groups:
            if group.window is None:
                index = io.read_index_storage[group.index, : io.true_read_sizes[group.index]]
                self.session.check_indices(index, longest, group.name, group.page, group.stride)

    def _update(
        self,
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's write and read, between the checks of its slots."""
        noted = self._noted
        if noted is not None:
            attended: tuple[torch.Tensor, torch.Tensor] = original(*args, **kwargs)
            noted.calls.append((args, kwargs))
            if len(noted.calls) == noted.room:
                noted.take_in()
            return attended
        if not self._layers.running:
            if not self._warming_up:
                why = "transformers ran a batch that it had not prepared before: please report it, with its version"
                self.session.report_lost(UnguardedForwardError(type(self._model).__name__, self._names(), why))
            return original(*args, **kwargs)  # type: ignore[no-any-return]
        attended = original(*args, **kwargs)
        self._record(args, kwargs)
        return attended

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Behind a layer's write: note or check its slots.

        Args:
            args, kwargs: of the write.
        """
        layer, layers = self._layer[self._number.of(args, kwargs)], self._layers
        (written,) = self._written_by([(args, kwargs)])
        known = not layer.last and self._as_planned(layer.group, written)
        key, value = self._key.of(args, kwargs), self._value.of(args, kwargs)
        if not self._holds:
            key, value = _by_token(key), _by_token(value)
        layers.record(layer.name, key, value, None if known else layer.group.slots_of(written[layer.group.index]))

    def _record_all(self, calls: Sequence[_Call]) -> None:
        """:meth:`_record` for each of some writes; at once for those of which only K and V are to be noted."""
        layers = [self._layer[number] for number in self._number.of_all(calls)]
        inner = [layer for layer in layers if not layer.last]
        of_inner = [call for call, layer in zip(calls, layers, strict=True) if not layer.last]
        if inner and self._all_as_planned(inner, of_inner):
            names = tuple([layer.name for layer in inner])
            self._layers.record_all(names, self._key.of_all(of_inner), self._value.of_all(of_inner))
            calls = [call for call, layer in zip(calls, layers, strict=True) if layer.last]
        for args, kwargs in calls:
            self._record(args, kwargs)

    def _written_by(self, calls: Sequence[_Call]) -> list[Any]:
        """The indices that each write was given, of all groups."""
        given = self._indices.of_all(calls)
        return [each["write_index"] for each in given] if self._of_kwargs else given

    def _all_as_planned(self, layers: Sequence[_Layer], calls: Sequence[_Call]) -> bool:
        """Whether the layers are of one group, and their writes were all given the batch's own indices."""
        written, group = self._written_by(calls), layers[0].group
        alike = len(set(map(id, written))) == 1 and all(layer.group is group for layer in layers)
        return alike and self._as_planned(group, written[0])

    def _as_planned(self, group: Group, written: Any) -> bool:
        """Whether these are the batch's: all layers of a group get one tensor.  Whoever changes it in place is found by
        the last of them, whose indices are compared."""
        return bool(written[group.index].data_ptr() == self._planned[group.index])

    def _names(self) -> list[str]:
        return [name for group in self._groups for name in group.layers.values()]


def _by_token(given: torch.Tensor) -> torch.Tensor:
    """K or V, ``[1, heads, tokens, head_dim]``, token by token."""
    return given.permute(2, 0, 1, 3)


class _Noted:
    """Calls of the cache's update in one batch, which are looked at together when the model has run.

    Between two layers of a model that runs from Python each of our functions is code that the host does not have in
    its caches: see :class:`~kvcanary_fx.kernels.deferred.Deferred`.

    Attributes:
        calls: arguments of those that are not yet looked at.
        room: once there are so many, :meth:`take_in` is due.
    """

    def __init__(self, record: Callable[[Sequence[_Call]], None], held: Held):
        self._record, self._held = record, held
        self.calls: list[_Call] = []
        self.room = 1  # its K and V tell how many can be held

    def take_in(self) -> None:
        """Record what was noted."""
        calls, self.calls = self.calls, []
        self._record(calls)
        self.room = self._held.room


class _Layer(NamedTuple):
    """A layer of the model.

    Attributes:
        last: of its group.
    """

    name: str
    group: Group
    last: bool

    @classmethod
    def of(cls, group: Group, number: int) -> _Layer:
        return cls(group.layers[number], group, number == max(group.layers))


def _runs_from_python(model: Any, config: Any) -> bool:
    """Whether nothing of the model is compiled: else K and V may be memory of a graph, which its next replay writes."""
    if config.varlen_compile_config is not None:
        return False
    return not any(
        isinstance(module, OptimizedModule)
        or (module is not model and module._compiled_call_impl is not None)
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def attention_names(model: Any) -> dict[int, str]:
    """The path of each layer's attention module, by the layer's number."""
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        number = getattr(module, "layer_idx", None)
        if isinstance(number, int) and hasattr(module, "is_causal"):
            found.setdefault(number, path)
    return found


def _turn_off_what_hides_slots(config: Any) -> None:
    """Turn off the modes of continuous batching in which the canary could not see what is read and written."""
    hiding = {
        "CUDA graphs": any(config.cuda_graph_booleans),
        "asynchronous batching": bool(config.use_async_batching),
        "the decode fast path": bool(config.max_blocks_per_request),
    }
    off = [name for name, on in hiding.items() if on]
    if off:
        log.warning(
            "kvcanary.huggingface %s turned off in guarded batches: the canary checks the slots of a batch from the "
            "host, around each layer's cache update",
            " and ".join(off),
        )
    config.use_cuda_graph, config.use_async_batching = (False, False), False
    config.max_blocks_per_request, config.decode_compile_config = 0, None

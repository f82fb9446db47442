"""Checks of an engine's layers where no graph of ``session.backend`` makes them.

An engine with its own compiler puts its own ops around attention, whose bodies are
:func:`~.kernels.layer_ops.verify_layer` and :func:`~.kernels.layer_ops.record_layer`, and lets them find the forward::

    checks = LayerChecks(session)
    with session.step(batch), session.forward(), checks.publish():
        model(...)

An engine whose attention runs outside any graph calls the checks itself::

    layers = EagerLayers(session)
    with session.step(batch), session.forward():
        ...
        layers.verify("model.layers.0.self_attn")
        attention(...)
        layers.record("model.layers.0.self_attn", key, value, slots)

Either way the bytes of what the forward reads are compared in all layers at once, before the first, in one launch a
pool: what a forward reads is known before it runs, and launching from Python for each layer took 1.0 ms per forward of
32 layers (H200).  With ``placement="side"`` the model goes on beside it, unless the forward writes to what
it reads (rings, states, requests that read what others write).

What a layer wrote is fingerprinted after its attention, in the model's stream, or that of all layers in one launch when
the model has run, if K and V are held until then.  It runs beside the model only in a forward that is captured whole,
its end included: elsewhere K and V may be memory of a CUDA graph, which its next replay overwrites.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import SessionStateError, UnknownLayerError
from ..kernels.buffers import Gate
from ..kernels.content.layer import HeldRecords, LayerRecord
from ..kernels.context import ForwardContext, forward_context
from ..kernels.held import Held, limit_on, records_of
from ..kernels.layer_ops import record_in, verify_in
from ..kernels.ops import held_kernels_for, kernels_for, request_kernels_for
from ..kernels.ring import Word
from ..kernels.side_stream import ForkInGraph, capturing, meets_at
from ..runtime.pace import Sample
from .kept_forward import KeptForward, Reads, keep
from .kept_step import GoingOn, KeptStep
from .operands import received

if TYPE_CHECKING:
    from .forward import Forward
    from .session import EngineSession


class LayerChecks:
    """What the checks around attention need from a session in each forward.

    Attributes:
        gates: int64 ``[len(Gate)]`` for each device that a pool is on.
        running: whether a forward of the session is running; without one there is no plan to check against.
    """

    def __init__(self, session: EngineSession):
        self._session, self._steps = session, session._stepping
        devices = dict.fromkeys(pool.declared.device for pool in session.pools.values())
        self.gates = {d: torch.zeros(len(Gate), dtype=torch.int64, device=d) for d in devices}
        self._layers = session.pools.layer_records(self.gates)
        session.eager_layers = tuple(self._layers)
        self._unsettled = False  # the device was not told what captured layers were given
        self._held_in: dict[tuple[int, int], int] = {}  # layers that wrote in a forward, by its requests and tokens
        self._before: ForkInGraph | None = None  # the checks before the model, in the capture that runs
        self._writes = 0  # layers that said so, of the model that is being captured
        self._say_writes: set[tuple[int, int]] = set()  # models all of whose layers do, by their requests and tokens
        self._short = all(map(session.config.checks_at_once, devices))  # these are: not all bytes are compared

    @functools.cached_property
    def held(self) -> Held:
        """What the layers of a forward wrote, where it is recorded when the model has run."""
        return Held(_together(self._layers.values()), min(map(limit_on, self.gates)), self._wait_for_before)

    @property
    def running(self) -> bool:
        return self._steps.running is not None

    @contextlib.contextmanager
    def publish(self, hold: bool = False) -> Iterator[None]:
        """Around the model, within ``session.forward(...)``.

        Args:
            hold: record all layers in one launch when the model has run.  Only where its layers run from Python, and
                nothing overwrites their K and V: these are held until then, 128 MiB at most, or a 160th of a GPU's
                memory.  If pieces of the model are CUDA graphs, only where :meth:`captured` held them, too.

        Raises:
            SessionStateError: no forward is running.
        """
        running = self._steps.running
        if running is None:
            raise SessionStateError("publish() outside forward(): with session.step(batch), session.forward(): first")
        self._begin(running)
        self._settle()
        with self._published(self._context(running), hold):
            yield

    @contextlib.contextmanager
    def _published(self, context: ForwardContext, hold: bool) -> Iterator[None]:
        if not hold:
            with forward_context(context):
                yield
            return
        with forward_context(dataclasses.replace(context, held=self.held)):
            try:
                yield
            except BaseException:
                self.held.drop()
                raise
            self.held.flush()

    def about_to_write(self) -> None:
        """Within :meth:`captured`: a layer is about to write K and V.

        Optional.  If all layers of a model say so, what comes ``first`` in its graph (:meth:`keep`) runs beside the
        model until its first layer writes: three kernels or four in a row, 9 us of a decode step when they are empty,
        and 22 when blocks go from hand to hand (H200).
        """
        self._writes += 1
        if self._before is not None:
            self._before.join_first()

    def _wait_for_before(self) -> None:
        """In a capture: what follows needs the checks before the model, see :meth:`captured`."""
        if self._before is not None:
            self._before.join()

    def _settle(self) -> None:
        """Tell the device what captured layers were given, before a graph of theirs is replayed."""
        if self._unsettled and not capturing():
            self.held.settle()
            self._unsettled = False

    def reserve(self, requests: int, tokens: int) -> None:
        """Outside a forward: plan to read and write nothing, and from here on never move the step's inputs.

        Call it before a graph is captured, and before one is replayed for a batch that is not to be checked.

        Raises:
            StepInputError: more than the session's ``max_requests`` or ``max_tokens``.
        """
        self._steps.padded(requests, tokens)

    @contextlib.contextmanager
    def captured(
        self,
        requests: int,
        tokens: int,
        beside: bool = True,
        hold: bool = False,
        before: KeptForward | None = None,
    ) -> Iterator[None]:
        """Around a model that is captured into a CUDA graph, if each replay is to be inside a forward of its own.

        The graph has the checks of the layers only, unless ``before`` is given.  They look at the plan of the forward
        that replays it, whose other checks run before and after the replay: their number does not depend on the number
        of layers, and a graph that is captured for a padded batch serves every smaller one.  Call :meth:`reserve`
        first::

            checks.reserve(requests, tokens)
            with torch.cuda.graph(graph), checks.captured(requests, tokens):
                model(...)
            with session.step(batch), session.forward(), checks.publish():
                graph.replay()

        Args:
            requests, tokens: of the padded batch.
            beside: the checks may run beside the model, as ``placement`` says; not where the model is captured in
                pieces, whose ends would have to wait for them.
            hold: as of :meth:`publish`; what the layers wrote is recorded beside what the model does after its last
                attention.  The graphs' memory has room for what is held.
                Run the model once like this before it is captured, as for any graph: the first time makes tables, and
                tells which attention is the last.  In a capture without them each layer records.
            before: of at least so many requests and tokens: its checks before the model are in the graph, beside the
                model, if the forward writes to nothing that is compared, and so is what comes first, if the layers
                say when they write (:meth:`about_to_write`).  The records come after them.  *Each* replay
                then takes in a batch, see :meth:`keep`; it is one of :meth:`kept` with ``in_graph``, or its live
                counts say that there is no forward.  Only for a model that is captured whole.

        Raises:
            SessionStateError: the checks of ``before`` cannot be in a graph.
        """
        context = self._context(self._steps.padded(requests, tokens))
        hold = hold and ("held" in vars(self) or not capturing())
        sides = self._steps.sides if beside else {}
        self._writes = 0
        if before is not None and capturing():
            self._before = self._fork(before, (requests, tokens) in self._say_writes)
        if hold:
            self._unsettled = True
            side = next(iter(sides.values())) if len(sides) == 1 and capturing() else None
            layers = self._held_in.get((requests, tokens), 0)
            self.held.begin(layers, side, meets_at(layers) if self._short else 0)
        else:
            self._wait_for_before()
        try:
            with self._published(dataclasses.replace(context, sides={} if hold else sides), hold):
                yield
            if hold and not capturing():
                self._held_in[requests, tokens] = self.held.taken
                say = self._say_writes.add if 0 < self._writes == self.held.taken else self._say_writes.discard
                say((requests, tokens))
        finally:
            if hold:
                self.held.begin()
            self._steps.join()  # the graph ends with the checks of its last layer
            self._wait_for_before()  # which a model without layers of ours has not waited for
            self._before = None

    def _fork(self, before: KeptForward, says_writes: bool = False) -> ForkInGraph | None:
        """Launch the checks before the model: beside it, if there is something to wait for.

        Args:
            says_writes: the model says when its layers write, and waits there for what comes first.
        """
        inside, device = self._require_inside(before), next(iter(self.gates))
        beside, first = before.beside and device in self._steps.sides, before.first
        if first is not None and not (beside and says_writes):
            first()
            first = None
        if beside:
            return ForkInGraph(device, inside, first)
        inside()
        return None

    def _require_inside(self, kept: KeptForward) -> Callable[[], None]:
        """What launches the checks before the model in a graph of it.

        Raises:
            SessionStateError: they cannot be in one.
        """
        if kept.inside is None:
            raise SessionStateError(
                "the checks before this model cannot be in its graph: keep(...) had no live=, or bytes are compared "
                "after each forward (verify_after). Give live=, or do without captured(before=) and kept(in_graph=True)"
            )
        return kept.inside

    def keep(
        self,
        requests: int,
        tokens: int,
        take_in: Callable[[], None],
        reads: Sequence[Reads] = (),
        live: torch.Tensor | None = None,
        first: Callable[[], None] | None = None,
    ) -> KeptForward:
        """Capture what is checked around the model, for batches that are on the device.

        Call :meth:`reserve` first.  Not for batches with a history, or in flight (:class:`.Batch`): those go into
        ``session.step``.

        Args:
            requests, tokens: of the largest batch.
            take_in: launches what fills every step input, ``session.inputs.buffer(name)``, their counts, and
                :meth:`clock`.
            reads: as :meth:`.EngineSession.check_reads` takes them.
            live: int64 ``[3]``, for :meth:`captured` with ``before``: ``take_in`` writes the counts there, too, or, for
                a replay of the model's graph that is no forward, -1 requests there and nothing else.
            first: launches what comes before all of this, and before the model: what :meth:`.SlotEvents.in_step` gave.
                Steps leave calls of the pool to it, and ``send`` of :meth:`kept` asks whether there are any.

        Raises:
            StepInputError: more than the session's ``max_requests`` or ``max_tokens``.
        """
        running = self._steps.padded(requests, tokens)
        return keep(
            self._steps.pools_by_space,
            running,
            self._context(running),
            self._session.config,
            take_in,
            begin=functools.partial(self._begin, live=live),
            join=lambda: self._steps.join(all=True),
            reads=reads,
            live=live,
            first=first,
        )

    def clock(self) -> torch.Tensor:
        """int64 ``[1]`` on the device of the pools: the number of the step that is running, times 2**32."""
        (control,) = self._session.controls.by_device.values()
        return control.words[Word.FORWARD : Word.FORWARD + 1]

    def kept(
        self,
        kept: KeptForward,
        send: Callable[[int], None],
        requests: int,
        tokens: int,
        hold: bool = False,
        in_graph: bool = False,
        stored: float = 0,
    ) -> KeptStep:
        """A step of the engine with one forward, in the place of ``session.step``, ``session.forward`` and
        :meth:`publish`: around the model.  Violations wait until somebody reads them.

        What is returned may be entered again for the next step, if it differs in nothing that was given here but the
        tokens stored, and no graph was captured in between.

        Args:
            send: gives the device what ``take_in`` needs, given the number of the step.
            requests, tokens: how many it has.
            hold: as of :meth:`publish`.
            in_graph: the model is a graph that was captured in :meth:`captured` with ``before``: it launches all
                checks itself.
            stored: about how many tokens the batch has stored before; 0 if nobody knows.

        Raises:
            SessionStateError: the checks cannot be in a graph of the model; or, when it is entered, a step is already
                running, or the session is closed.
        """
        if in_graph:
            self._require_inside(kept)
        self._settle()
        held = self.held if hold else None
        return KeptStep(self._steps, kept, send, (requests, tokens), self._measure, held, in_graph, stored)

    def going_on(self) -> GoingOn | None:
        """For an engine whose steps with all checks in a graph wait for the host: what it may do in the place of one
        step of :meth:`kept` with ``in_graph``, if its batch differs from the last one's in its tokens and their places
        alone, nothing else of the session ran in between, and no op of ours runs from Python in it.

        Such a step begins where the steps are not closed and no thread is in one.  The engine adds 1 to those that have
        begun and to those that are done, sends what the allocators did, and takes one off those that pass; where
        :meth:`.Pace.passes` would say no, it calls ``look``.  There is no function of ours for this: each one that is
        called in a step is one more that the host does not have in its caches, 2 us of a step of 1.5 ms (1B, H200).

        Returns:
            None: something else is to be done in such steps.
        """
        if not self._steps.may_go_on():
            return None
        pace = self._session.pace
        return GoingOn(self._steps, None if pace is None else pace.passing, self._measure)

    def _measure(self, stored: float) -> Sample | None:
        """A step begins: what measures it, if it is to be measured."""
        session, pace = self._session, self._session.pace
        if pace is None or not self._steps.ready or pace.passes("step", stored):
            return None
        return pace.begin("step", *session.weight, stored)

    def _begin(self, running: Forward, live: torch.Tensor | None = None) -> None:
        """Count a forward, as a graph's first op does, for the number in reports.  Compare what it reads.

        Args:
            live: its counts, where it may be none.
        """
        for device, gate in self.gates.items():
            kernels_for(device).begin(self._session.controls(device).words, gate, live)
        self._steps.check_layers(running)

    def _context(self, running: Forward | None, held: Held | None = None) -> ForwardContext:
        whole = running is not None and running.captured
        return ForwardContext(
            sites=(),
            plans=(),
            identities={},
            controls=self._session.controls.by_device,
            gates=self.gates,
            requests=running.plans if running is not None else {},
            layers=self._layers,
            sides=self._steps.sides if whole else {},
            compared=True,
            held=held,
        )


def _together(records: Iterable[LayerRecord]) -> dict[int, HeldRecords]:
    """What records the layers of each pool at once, by the number of its slot space."""
    by_pool: dict[int, list[LayerRecord]] = {}
    for record in records:
        if record.writes:
            by_pool.setdefault(record.space.space_id, []).append(record)
    return {number: held_kernels_for(mine[0].gate.device).HeldRecords(mine) for number, mine in by_pool.items()}


class EagerLayers(LayerChecks):
    """Runs the checks of layers when the engine calls them.

    In a step but outside ``session.forward()`` that is an error, which mode ``log`` reports once.  In a warm-up, and
    outside of steps, nothing is checked.
    """

    def __init__(self, session: EngineSession):
        super().__init__(session)
        self._begun: Forward | None = None
        self._outside = self._here = self._context(None)
        self._received: dict[Any, Any] = {}  # of the running forward, where its plans do not keep it
        self._holding = False
        self._operands = session.given.operands
        self._records_of: dict[tuple[str, ...], list[LayerRecord] | None] = {}  # the layers of each :meth:`record_all`

    @contextlib.contextmanager
    def holding(self, shaped: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Iterator[None]:
        """Around the model, within ``session.forward(...)``: record all layers in one launch when it has run.

        Where :meth:`publish` may hold what they wrote.

        Args:
            shaped: makes a view of K or V as :meth:`record` takes it, of what it is given instead.
        """
        self._holding = True
        self.held.take_as(shaped)
        self._operands.take_as(shaped)
        try:
            yield
        except BaseException:
            self.held.drop()
            raise
        finally:
            self._holding = False
            self._operands.take_as(None)
        self.held.flush()

    def begin(self) -> None:
        """The model is about to run: :meth:`verify` of its first layer."""
        self._running()

    def verify(self, layer: str) -> None:
        """Call it before a layer's attention.  The first call of a forward compares the bytes that it reads, in all
        layers.

        Raises:
            SessionStateError: mode ``raise``, and the step that is running has no forward; so in each of these methods.
            UnknownLayerError: no pool has a layer of this name.
        """
        verify_in(self._running(), self._device_of(layer), layer)

    def record(
        self,
        layer: str,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
    ) -> None:
        """Call it after a layer's write: fingerprints the slots that the forward planned to write.

        Args:
            key, value: what was written, ``[n, ...]`` in the pool's type, one row per token in the order of the
                batch; more rows are padding.  None, or another type, leaves out the operand check: the session's
                summary says how often.
            slots: integer ``[n]``, the slots that the write received.  None leaves out the index check.

        Raises:
            UnknownLayerError: no pool has a layer of this name.
            EngineError: K or V has fewer rows than the forward has tokens, or other rows than the pool; ``slots`` are
                no tensor of integers.
        """
        record, context = self._layers.get(layer), self._running()
        if slots is not None and record is not None:
            self._check_received(context, record, slots)
        plan = context.requests.get(record.space.space_id) if record is not None and record.writes else None
        if record is None or plan is None or plan.real_slots is None:
            if context.held is None or record is None or not record.writes:
                record_in(context, key, value, self._device_of(layer), layer)
            return
        self._operands.look(layer, record, plan, key, value)
        if context.held is None:
            record_in(context, key, value, record.gate.device, layer)
        else:
            context.held.take(record, plan, key, value)

    def record_all(
        self,
        layers: tuple[str, ...],
        keys: Sequence[torch.Tensor | None],
        values: Sequence[torch.Tensor | None],
    ) -> None:
        """:meth:`record` for each of some layers, when all of them have written, without ``slots``.

        With few functions, if the layers are those of an earlier call: see
        :class:`~kvcanary_fx.kernels.deferred.Deferred`.

        Args:
            keys, values: of each layer.

        Raises:
            UnknownLayerError: no pool has a layer of this name.
            EngineError: as of :meth:`record`.
        """
        context = self._running()
        if layers not in self._records_of:
            self._records_of[layers] = records_of(layers, self._layers)
        held, records = context.held, self._records_of[layers]
        if held is not None and held.take_all(records, context.requests, keys, values):
            assert records is not None
            plan = context.requests[records[0].space.space_id]
            self._operands.look_at_all(layers, records, plan, keys, values)
            return
        for layer, key, value in zip(layers, keys, values, strict=True):
            self.record(layer, key, value)

    def check_received(self, layer: str, slots: torch.Tensor) -> None:
        """The index check of :meth:`record`, before the layer writes.

        Args:
            slots: integer ``[n]``, or, of a pool whose slots stand for several tokens, one for each slot that the
                forward writes.

        Raises:
            UnknownLayerError: no pool has a layer of this name.
            EngineError: ``slots`` are no tensor of integers.
        """
        context, record = self._running(), self._layers.get(layer)
        if record is None:
            raise UnknownLayerError(layer, list(self._layers))
        self._check_received(context, record, slots)

    def _running(self) -> ForwardContext:
        """The context of the forward that is running, which begins with its first layer."""
        running = self._steps.running
        if running is None:
            self._require_no_step()
            return self._outside
        if running is not self._begun:
            self._begun, self._here = running, self._context(running, self.held if self._holding else None)
            self._received = {}
            self._begin(running)
        return self._here

    def _require_no_step(self) -> None:
        """No forward is running.  Outside of steps an engine's model may run all the same, for a profile or for a rank
        that is idle; in one it is a forward that was not announced: 200 such steps of a decode, with a changed byte and
        a freed slot among them, had told nothing.

        Raises:
            SessionStateError: mode ``raise``, and a step is running.
        """
        error = self._steps.outside_forward() if self._steps.open else None
        if error is not None:
            self._session.report_lost(error)

    def _check_received(self, context: ForwardContext, record: LayerRecord, slots: torch.Tensor) -> None:
        """Are they the planned ones?  Reported once per layer, not for each of its tensors."""
        number = record.space.space_id
        plan = context.requests.get(number)
        given = received(slots, plan)
        if plan is None or given is None:
            return
        kept = plan.launches if plan.launches is not None else self._received  # a plan that comes again binds it once
        check = kept.get(("received", number))
        if check is None:
            kernels = request_kernels_for(record.gate.device)
            check = kept["received", number] = kernels.ReceivedCheck(record.space, plan)
        side = context.sides.get(record.gate.device)
        if side is not None:
            side.start()
            side.hold(given)
        check(given, record.halves[0].site.half_id, side.stream if side is not None else None)

    def _device_of(self, layer: str) -> torch.device:
        record = self._layers.get(layer)
        if record is None:
            raise UnknownLayerError(layer, list(self._layers))
        return record.gate.device

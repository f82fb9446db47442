"""Binding a rewritten graph to the caches of one call.

A graph knows its sites by number.  Each call may have other caches (a new ``StaticCache``, another model's), so before
each call the sites are bound to the halves of its tensors.  The binding of the last call is kept: usually nothing has
changed.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..config import CanaryConfig
from ..kernels.buffers import Count, Gate, HalfBuffers, IdentityBuffers, Part, Site
from ..kernels.checks import Check, bits_of
from ..kernels.content.digest import coefficients
from ..kernels.context import ForwardContext
from ..kernels.ring import Control, Word
from ..passes.graph_plan import GraphPlan, SitePlan
from .bound_call import BoundCall as BoundCall
from .companions import ONE_LAYER, Call
from .graph_memory import GraphMemory
from .pool_half import PoolHalf
from .reading import Seen, seen_halves
from .registry import Line, PoolRegistry, Storage
from .returned import Lines, ReturnedCaches
from .steady import SteadyCall

#: Caches that one graph keeps a binding for.
MAX_BINDINGS = 1024


class GraphBinding:
    """One compiled graph at run time: its counters, and the binding of its last call.

    Attributes:
        key: its ``id``, which is asked once: each call of ``id`` is an audit event, and filelock has a hook for these.
    """

    def __init__(self, plan: GraphPlan, config: CanaryConfig, registry: PoolRegistry, controls: Controls):
        self.plan, self._config, self._registry, self._controls = plan, config, registry, controls
        self.key = id(self)
        self._memory = GraphMemory(plan)
        self.states, self.gates = self._memory.states, self._memory.gates
        self.counters: list[torch.Tensor] = []
        self._of_engine: list[set[int]] = []  # of each site, the halves of an engine's pools that it was bound to
        self._traffic, self._entries = threading.Lock(), [0, 0]  # calls begun, calls ended
        self.forgiven = 0  # ops that failed calls did not run
        self.unsettled = False  # a call failed, and the ops it did not run are not forgiven yet
        self._failed = 0
        self._arguments = sorted({s.argument for s in plan.sites if s.output is None})
        self._returned = sorted({s.argument for s in plan.sites if s.output is not None})
        self._lines: dict[tuple[Any, ...], Lines] = {}
        self._bound: dict[tuple[Any, ...], BoundCall] = {}
        self._steady: dict[int, SteadyCall] = {}  # by the number of the first cache that the call is given
        self._generation = registry.generation
        self._before: Callable[[], object] | None = None

    def before_first_call(self, wait: Callable[[], object]) -> None:
        """Call ``wait`` before the graph is bound to the caches of a call for the first time."""
        self._before = wait

    def begin(self) -> None:
        """A call begins, in any thread."""
        with self._traffic:
            self._entries[0] += 1

    def end(self) -> None:
        """A call ends, successfully or not."""
        with self._traffic:
            self._entries[1] += 1

    def calls(self) -> tuple[int, int]:
        """``(begun, ended)`` so far.  Equal, no thread is in the graph."""
        with self._traffic:
            begun, ended = self._entries
        return begun, ended

    def missing_checks(self) -> list[str]:
        """Names of the checks that ran less often than the graph did."""
        steps = self.progress()[0] - self._failed
        missing = [] if steps > 0 else ["begin"]
        for site, counters in zip(self.plan.sites, self.counters, strict=True):
            counts = counters.tolist()
            if site.verified and counts[Count.VERIFY_RUNS] < steps:
                missing.append(f"verify {site.name}")
            if site.kind != "read" and counts[Count.RECORD_RUNS] < steps:
                missing.append(f"record {site.name}")
        return missing or ["identify"]

    def record_runs(self) -> dict[int, int]:
        """How often the writes of each half of an engine's pools were recorded here, by its id; waits for the device.

        Where one site serves several halves in turn, it is said of each how often it was any of them.
        """
        if not any(self._of_engine):
            return {}
        runs: dict[int, int] = {}
        counted = _on_host([c[Count.RECORD_RUNS] for c in list(self.counters)])
        for column, ids in zip(counted, list(self._of_engine), strict=False):  # another thread may bind more of them
            for number in list(ids):
                runs[number] = runs.get(number, 0) + column
        return runs

    def steady(self, args: Sequence[Any]) -> SteadyCall | None:
        """The earlier call with the same tensors, if nothing has written to them since; None: check everything."""
        if not self._arguments or self._generation != self._registry.generation:
            return None
        last = self._steady.get(id(args[self._arguments[0]]))
        return last if last is not None and last.fits(args) else None

    def keep(self, call: BoundCall, args: Sequence[Any]) -> None:
        """Reuse ``call`` for the same tensors; it has run, and its writes are counted."""
        if not self._arguments or call.returned is not None or self._registry.shadows_copied:
            return
        if len(self._steady) >= MAX_BINDINGS:
            self._steady.clear()
        self._steady[id(args[self._arguments[0]])] = SteadyCall(call, self._arguments, args)

    def _drop(self) -> None:
        self._bound.clear()
        self._steady.clear()

    def bind(self, args: Sequence[Any], capturing: bool, abort: Callable[[], None] | None) -> BoundCall:
        """The sites bound to the tensors in ``args``.

        One graph may serve several caches in turn, such as the layers of a model that compiles each layer
        by itself, so bindings are kept until a cache among them dies.
        """
        wait = self._before
        if wait is not None:
            wait()
            self._before = None
        if self._generation != self._registry.generation or len(self._bound) >= MAX_BINDINGS:
            self._drop()
        key = (capturing, *[_identity(args[i]) for i in self._arguments])
        line = None
        if self._returned:  # another tensor each time
            line = self._line(args)
            key = (*key, id(line), *[_geometry(args[i]) for i in self._returned])
        call = self._bound.get(key)
        if call is None:
            before = self._registry.generation
            with torch.inference_mode(False):  # its memory is also written outside that mode
                call = self._bind(args, capturing, abort, line)
            if self._registry.generation != before:  # other calls of this graph may be bound to a dropped half
                self._drop()
            self._bound[key], self._generation = call, self._registry.generation
        return call

    def forgive_failure(self) -> None:
        """The caller's call ends in an exception: the ops it did not reach do not count as missing."""
        self._failed += 1
        self.unsettled = True  # if a second Ctrl-C interrupts what follows, the next call does it
        self.settle(inside=1)

    def settle(self, inside: int = 0) -> None:
        """Forgive the ops that failed calls did not run, once no other call is inside the graph.

        Args:
            inside: calls that are to count as ended, the caller's own.
        """
        if not self.unsettled:
            return
        calls = begun, ended = self.calls()
        if begun != ended + inside:
            return
        steps, ran = self.progress()
        if self.calls() == calls:
            self.forgiven, self.unsettled = steps * self.plan.ops - ran, False

    def progress(self) -> tuple[int, int]:
        """``(calls, ops that ran)`` so far; waits for the device."""
        gates = [g.tolist() for g in self.gates.values()]
        return max(g[Gate.STEP] for g in gates), sum(g[Gate.OPS] for g in gates)

    def _line(self, args: Sequence[Any]) -> Line:
        """The working halves for the caches that a call returns."""
        geometry = tuple(_geometry(args[i]) for i in self._returned)
        lines = self._lines.get(geometry)
        with torch.inference_mode(False):
            if lines is None:
                numbers = _layer_numbers(self.plan)
                plans = [(s, n) for s, n in zip(self.plan.sites, numbers, strict=True) if s.output is not None]
                lines = self._lines[geometry] = Lines(plans, self._registry, args)
            return lines.of(args)

    def _bind(
        self, args: Sequence[Any], capturing: bool, abort: Callable[[], None] | None, line: Line | None
    ) -> BoundCall:
        halves, seen = self._halves(args, line)
        storages: dict[int, tuple[Storage, int, str]] = {}
        written: set[int] = set()
        for site in self.plan.sites:
            if site.output is None:
                storage = self._registry.storage_of(args[site.argument])
                storages.setdefault(id(storage), (storage, site.argument, site.pool))
                written |= {id(storage)} if site.kind != "read" else set()
        identities = self._group(halves)
        self._memory.make_room()
        context = ForwardContext(
            sites=tuple(self._site(i, half, capturing, seen.get(i, [])) for i, half in enumerate(halves)),
            plans=tuple(self.plan.writes),
            identities=identities,
            controls={d: self._controls(d) for d in self.plan.devices},
            gates=self.gates,
            abort=abort,
            joins=self.plan.joins,
            sides=self._memory.sides,
            halves_beside=self.plan.halves_beside,
            tables=self._memory.tables,
        )
        coming_back = [site for site in self.plan.sites if site.output is not None]
        returned = None if line is None else ReturnedCaches(coming_back, line, self._registry, args)
        return BoundCall(
            context=context,
            halves=tuple(halves),
            storages=tuple(storages.values()),
            opaque=bool(self.plan.attention),
            together=tuple(a.layer for a in self.plan.attention if a.layer) if self.plan.layers_at_once else (),
            returned=returned,
            written=frozenset(written),
            seen=tuple(other for some in seen.values() for other, *_ in some),
            layer=self._layer(halves),
        )

    def _layer(self, halves: Sequence[PoolHalf]) -> Call | None:
        """The call by what it records, if that may be one layer."""
        recorded = [(half, site) for half, site in zip(halves, self.plan.sites, strict=True) if half.kind == "kv"]
        recorded = [(half, site) for half, site in recorded if half.space is None]
        named = {(site.layer, site.label) for _, site in recorded}  # heads that are written one by one are one half
        if not 0 < len(named) <= ONE_LAYER:
            return None
        both = len(recorded) == 1 and recorded[0][1].both
        recorded.sort(key=lambda one: one[0].layer_number)  # V of a layer before K of the next, however returned
        return Call(
            graph=self.key,
            halves=tuple(half.id for half, _ in recorded),
            frame=self.plan.frame,
            place=min(half.order for half, _ in recorded),
            both=both,
            heads=len(recorded) // len(named),
            pools=tuple(site.pool for _, site in recorded),
        )

    def _halves(self, args: Sequence[Any], line: Line | None) -> tuple[list[PoolHalf], dict[int, list[Seen]]]:
        """The half of each site, and by site what other graphs record in what it reads."""
        halves: dict[int, PoolHalf] = {}
        mine: dict[int, list[PoolHalf]] = {}  # by argument, in place
        numbers = _layer_numbers(self.plan)
        working = iter(() if line is None else line.halves)
        for i, site in enumerate(self.plan.sites):
            if site.output is not None:
                halves[i] = next(working)
            elif site.kind != "read" or self._registry.storage_of(args[site.argument]).declared:
                storage = self._registry.storage_of(args[site.argument])
                halves[i] = self._registry.half_of(storage, site.view(args), site, numbers[i])
                mine.setdefault(site.argument, []).append(halves[i])
        ids = {half.id for some in mine.values() for half in some}
        for argument, some in mine.items():
            self._registry.recut(self._registry.storage_of(args[argument]), args[argument], some, ids)
        seen: dict[int, list[Seen]] = {}
        for i, site in enumerate(self.plan.sites):
            if i not in halves:
                storage = self._registry.storage_of(args[site.argument])
                storage.watched = True
                seen[i] = seen_halves(storage, site, args, ids)
                if seen[i] or not site.slot_axes:
                    halves[i] = self._registry.without_slots(site.view(args), site)
                else:
                    halves[i] = self._registry.half_of(storage, site.view(args), site, numbers[i])
        return [halves[i] for i in range(len(self.plan.sites))], seen

    def _group(self, halves: list[PoolHalf]) -> dict[int, IdentityBuffers]:
        """Link the halves of each slot space; the identity buffers of the sites that lead one."""
        spaces: dict[tuple[Any, ...], dict[int, int]] = {}
        for half in halves:
            spaces.setdefault(_space(half), {})[half.id] = half.layer_number
        identities: dict[int, IdentityBuffers] = {}
        for i, (site, half) in enumerate(zip(self.plan.sites, halves, strict=True)):
            half.peers = {**half.peers, **spaces[_space(half)]}
            half.beside |= self._written_beside(site, half, halves)
            if site.leads:
                if half.identity is None:
                    half.identity = IdentityBuffers.allocate(half.place.layout.slots, half.buffers.digest.device)
                identities[i] = half.identity
        return identities

    def _written_beside(self, site: SitePlan, half: PoolHalf, halves: Sequence[PoolHalf]) -> set[int]:
        """Ids of what the graph writes of a layer of which it only reads a half, as behind a break between K and V."""
        if half.kind != "read":
            return set()
        shape = (half.place.layout.slots, half.place.layout.positions)
        pairs = zip(self.plan.sites, halves, strict=True)
        mine = [h for s, h in pairs if h.kind == "kv" and s.layer == site.layer]
        return {h.id for h in mine if (h.place.layout.slots, h.place.layout.positions) == shape}

    def _site(self, number: int, half: PoolHalf, capturing: bool, seen: Sequence[Seen]) -> Site:
        device = half.buffers.digest.device
        if number == len(self.counters):
            self.counters.append(torch.zeros(len(Count), dtype=torch.int64, device=device))
            self._of_engine.append(set())
        if half.space is not None:
            self._of_engine[number].add(half.id)
        site = self.plan.sites[number]
        if site.whole and half.buffers.baseline is None:
            half.buffers.baseline = torch.zeros(half.place.layout.slots, dtype=torch.int32, device=device)
        own = self._site_of(number, half, half.buffers, capturing)
        parts = (
            Part(self._site_of(number, other, buffers, capturing), strides, ahead)
            for other, buffers, ahead, strides in seen
        )
        return dataclasses.replace(own, parts=tuple(parts))

    def _site_of(self, number: int, half: PoolHalf, buffers: HalfBuffers, capturing: bool) -> Site:
        """What a site needs to work on a half."""
        device, layout, site = half.buffers.digest.device, half.place.layout, self.plan.sites[number]
        control = self._controls(device)
        # all memory the ops keep is made here, never inside an op: that may run in a CUDA graph's own pool
        self._controls.reserve_stamps(device, layout.slots)
        coefficients(layout.words, device)
        return Site(
            layout=layout,
            half=buffers,
            control=control,
            gate=self.gates[device],
            counters=self.counters[number],
            half_id=half.id,
            seed1=half.seeds[0],
            seed2=half.seeds[1],
            checks=Check(0) if capturing and site.output is not None else check_mask(self._config),
            verify_every=self._config.verify_every_on(device) if site.foreseen else 1,
            lenient=capturing and half.space is None,
            space=half.space,
            watched=half.kind == "read" and layout.slots > 0,
        )


def _on_host(counts: Sequence[torch.Tensor]) -> list[int]:
    """Numbers of one or several devices, int64 ``[]`` each, in few copies."""
    if len({count.device for count in counts}) > 1:
        return [int(count) for count in counts]
    found: list[int] = torch.stack(list(counts)).tolist()
    return found


class Controls:
    """The control block of each device, made on first use, by whichever thread binds a graph first.

    Seen: two threads made one each, and the sites of one graph held that which nobody read.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self.every = 1  # what Word.EVERY is to say on each of them
        self.by_device: dict[torch.device, Control] = {}
        self._outgrown: list[torch.Tensor] = []  # captured graphs may hold their addresses
        self._making = threading.Lock()

    def __call__(self, device: torch.device) -> Control:
        known = self.by_device.get(device)
        if known is not None:
            return known
        with self._making:
            if device not in self.by_device:
                control = Control.allocate(self._capacity, device)
                control.words[Word.EVERY] = self.every
                self.by_device[device] = control
            return self.by_device[device]

    def reserve_stamps(self, device: torch.device, slots: int) -> None:
        """Make room to stamp ``slots`` slots."""
        control = self(device)
        with self._making:
            if control.stamps.shape[1] < slots:
                self._outgrown.append(control.stamps)
                control.stamps = torch.full((2, slots), -1, dtype=torch.int64, device=device)


def check_mask(config: CanaryConfig) -> Check:
    """The configured checks as bits."""
    return bits_of(config.checks)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What must be equal for a binding to stay valid."""
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What must be equal for a working shadow to be reused."""
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)


def _space(half: PoolHalf) -> tuple[Any, ...]:
    """The slot space of a half: halves of one space number their slots alike."""
    layout = half.place.layout
    return (half.buffers.digest.device, layout.slots, layout.positions, half.kind)


def _layer_numbers(plan: GraphPlan) -> list[int]:
    """A number for the layer of each site: the one in its path, else its place among the layers."""
    order = {layer: i for i, layer in enumerate(dict.fromkeys(s.layer for s in plan.sites))}
    return [order[s.layer] if s.number is None else s.number for s in plan.sites]

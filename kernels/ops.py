"""The canary ops: schemas, fakes, and the step from a graph's arguments to a kernel.

The KV tensors are read-only arguments: declared mutated, a stacked pool is copied whole around every op.
Every op mutates ``state`` instead, a small tensor that is an input of the graph.  An op without a mutated
argument is dropped by AOTAutograd, and the shared ``state`` is what keeps the ops of all layers in order.
All other memory is found through the ForwardContext.

``kvcanary::begin(state)``
    once per graph, first: counts the step.
``kvcanary::verify(kv, value, index, extent, state, site, write)``
    before the first access of a half: checks the content of recorded slots; with ``write >= 0`` also the
    bounds of the write to come, whose index tensors and slice bounds are ``index`` and ``extent``.  Its
    operand ``value`` is not looked at: taking it makes Inductor store it once, before the write.  Otherwise
    Inductor may compute it twice, in the write's kernel and for ``record``, and the last bits may differ.
``kvcanary::record(kv, value, index, extent, positions, state, site, write)``
    after a write: fingerprints the slots written and compares them with ``value``, the operand.
``kvcanary::verify_halves(kv, value, index, extent, state, site, write)`` and
``kvcanary::record_halves(kv, value, index, extent, positions, state, site, write)``
    the same for K and V of a layer, where both are written at the same indices; ``write`` is never negative.
``kvcanary::verify_layers(kv, index, extent, apart, state, site, write)`` and
``kvcanary::record_layers(kv, value, index, extent, apart, positions, state, site, write)``
    the same for K and V of all layers of a graph, in front of its first write and behind its last; with ``apart`` the
    first axis of each index tensor is that of the layers.
``kvcanary::observe(kv, state, site)`` and ``kvcanary::record_changed(kv, state, site)``
    around a write that cannot be read in the graph: fingerprint what changed in between.  In an engine's pool, slots
    that this forward does not write must not change.
``kvcanary::watch(kv, state, site)``
    before the first read of a half that the graph does not write: checks the content of recorded slots.  Where no
    graph writes the half, slots seen for the first time are fingerprinted as they are.
``kvcanary::identify(tokens, positions, index, extent, state, site, write)``
    stores who is in each slot, and checks that positions continue.
``kvcanary::join(held, state)``
    last in a graph: waits for ops that work beside the model and read ``held``, since a CUDA graph cannot end before.
``kvcanary::index_put_(kv, value, index, extent, site, write)``
    the write itself, for ``rewrite_writes``: mutates ``kv`` and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from .buffers import Count, RowState, Site
from .checks import Check, Phase
from .content import cpu
from .content import layer as layer_records
from .content import pool as pool_bytes
from .context import ForwardContext, get_forward_context
from .counting import count_op
from .host_time import timed
from .side_stream import capturing
from .slots import checks as request_checks
from .slots.checks import planned_slots, taken_of
from .slots.identity import name_slots
from .slots.positions import last_of_rows, per_row
from .slots.space import RequestPlan
from .turns import taking_turns
from .writes.plan import Resolved, WritePlan

NAMESPACE = "kvcanary"

SCHEMAS = {
    "begin": "(Tensor(a!) state) -> ()",
    "verify": (
        "(Tensor kv, Tensor? value, Tensor[] index, SymInt[] extent, Tensor(a!) state, int site, int write) -> ()"
    ),
    "record": (
        "(Tensor kv, Tensor? value, Tensor[] index, SymInt[] extent, Tensor? positions, Tensor(a!) state, "
        "int site, int write) -> ()"
    ),
    "verify_halves": (
        "(Tensor[] kv, Tensor?[] value, Tensor[] index, SymInt[] extent, Tensor(a!) state, int[] site, "
        "int[] write) -> ()"
    ),
    "record_halves": (
        "(Tensor[] kv, Tensor?[] value, Tensor[] index, SymInt[] extent, Tensor? positions, Tensor(a!) state, "
        "int[] site, int[] write) -> ()"
    ),
    "verify_layers": (
        "(Tensor[] kv, Tensor[] index, SymInt[] extent, bool apart, Tensor(a!) state, int[] site, int[] write) -> ()"
    ),
    "record_layers": (
        "(Tensor[] kv, Tensor?[] value, Tensor[] index, SymInt[] extent, bool apart, Tensor? positions, "
        "Tensor(a!) state, int[] site, int[] write) -> ()"
    ),
    "observe": "(Tensor kv, Tensor(a!) state, int site) -> ()",
    "record_changed": "(Tensor kv, Tensor(a!) state, int site) -> ()",
    "watch": "(Tensor kv, Tensor(a!) state, int site) -> ()",
    "identify": (
        "(Tensor tokens, Tensor? positions, Tensor[] index, SymInt[] extent, Tensor(a!) state, int site, "
        "int write) -> ()"
    ),
    "join": "(Tensor[] held, Tensor(a!) state) -> ()",
    "index_put_": "(Tensor(a!) kv, Tensor value, Tensor[] index, SymInt[] extent, int site, int write) -> ()",
}


@functools.cache
def _gpu_module(name: str) -> ModuleType:
    """A module that needs Triton.  To ask for one that is imported already takes the host 1 us, for each op of a layer
    and each check of a step."""
    return importlib.import_module(name, __package__)


def import_gpu_kernels() -> None:
    """Import what the first call of a compiled graph needs on a GPU, if this process sees one; no context is made.

    Else it is part of that call: 0.2 to 0.3 s on a CPU core that is otherwise idle.  Triton reads the source of each
    kernel when its module is imported, and imports Gluon, of which it knows tensor descriptors, in the first launch.
    """
    if torch.version.cuda is None or not torch.cuda.device_count():  # NVML is asked
        return
    with contextlib.suppress(Exception):  # without Triton, or with one that fails: the first launch says so
        _gpu_module(".content.gpu")
        importlib.import_module("triton.experimental.gluon.nvidia.hopper")


def kernels_for(device: torch.device) -> ModuleType:
    """The implementation of the checks for a device; Triton is imported only when a GPU needs it."""
    return _gpu_module(".content.gpu") if device.type == "cuda" else cpu


def request_kernels_for(device: torch.device) -> ModuleType:
    """The implementation of the identity checks for a device."""
    return _gpu_module(".slots.gpu") if device.type == "cuda" else request_checks


def pool_kernels_for(device: torch.device) -> ModuleType:
    """The implementation of the checks that take all tensors of an engine's pool at once."""
    return _gpu_module(".content.gpu_pool") if device.type == "cuda" else pool_bytes


def life_kernels_for(device: torch.device) -> ModuleType | None:
    """The kernels that apply many allocator calls at once; None where :mod:`.slots.life` applies each immediately."""
    return _gpu_module(".slots.gpu_life") if device.type == "cuda" else None


def parked_kernels_for(device: torch.device) -> ModuleType | None:
    """The kernel that copies what is known of pages; None where :mod:`kvcanary_fx.engine.parked` does without."""
    return _gpu_module(".slots.gpu_parked") if device.type == "cuda" else None


def layer_kernels_for(device: torch.device) -> ModuleType:
    """The implementation of a layer's record, with all halves of the layer at once."""
    return _gpu_module(".content.gpu_layer") if device.type == "cuda" else layer_records


def held_kernels_for(device: torch.device) -> ModuleType:
    """The implementation of the record of several layers at once."""
    return _gpu_module(".content.gpu_held") if device.type == "cuda" else layer_records


def _begin(state: torch.Tensor) -> None:
    context = get_forward_context()
    control = context.controls[state.device]
    kernels_for(state.device).begin(control.words, context.gates[state.device])


def _verify(
    kv: torch.Tensor,
    value: torch.Tensor | None,
    index: list[torch.Tensor],
    extent: list[int],
    state: torch.Tensor,
    site: int,
    write: int,
) -> None:
    if write >= 0:
        _verify_before_write([kv], index, extent, [site], [write])
        return
    context = get_forward_context()
    here = context.sites[site]
    kernels_for(kv.device).verify(here, kv, None, 1, in_flight=_in_flight(context, here))


def _verify_halves(
    kv: list[torch.Tensor],
    values: list[torch.Tensor | None],
    index: list[torch.Tensor],
    extent: list[int],
    state: torch.Tensor,
    sites: list[int],
    writes: list[int],
) -> None:
    _verify_before_write(kv, index, extent, sites, writes)


def _verify_before_write(
    kv: list[torch.Tensor], index: list[torch.Tensor], extent: list[int], sites: list[int], writes: list[int]
) -> None:
    """Check the halves of a layer before a write that goes to the same slots of each."""
    context, kernels = get_forward_context(), kernels_for(kv[0].device)
    halves, plans = [context.sites[site] for site in sites], [context.plans[write] for write in writes]
    layout, plan, ops = halves[0].layout, plans[0], 1
    if context.abort is None and kernels.verify_write(halves, kv, plans, index, extent):
        return
    resolved = kernels.resolve(plan, layout, index, extent, kv[0].device)
    first = None if plan.covers_all else kernels.first_positions(layout, resolved.slots)
    for here, view, its in zip(halves, kv, plans, strict=True):
        _check_bounds(context, here, its, resolved, kernels, Phase.PRE)
        in_flight, own_rows = _in_flight(context, here), its.own_rows
        kernels.verify(here, view, first, ops, coming=its.write_id, in_flight=in_flight, own_rows=own_rows)
        ops = 0


def _verify_layers(
    kv: list[torch.Tensor],
    index: list[torch.Tensor],
    extent: list[int],
    apart: bool,
    state: torch.Tensor,
    sites: list[int],
    writes: list[int],
) -> None:
    context, device = get_forward_context(), state.device
    tables = context.tables.get(device)
    if tables is not None and context.abort is None:
        halves, plans = [context.sites[site] for site in sites], [context.plans[write] for write in writes]
        if kernels_for(device).verify_layers(halves, kv, plans, index, extent, apart, tables):
            return
    for at in _layers(kv):
        _verify_before_write(kv[at], _index_of(at, index, apart), extent, sites[at], writes[at])


def _layers(kv: Sequence[torch.Tensor]) -> Iterator[slice]:
    """The halves of each layer, K and V."""
    return (slice(at, at + 2) for at in range(0, len(kv), 2))


def _index_of(at: slice, index: list[torch.Tensor], apart: bool) -> list[torch.Tensor]:
    return [tensor[at.start // 2] for tensor in index] if apart else index


def _in_flight(context: ForwardContext, site: Site) -> bool:
    """Whether some request of the forward reads what another one writes in it."""
    plan = context.requests.get(site.space.space_id) if site.space is not None else None
    return plan is not None and plan.in_flight


def _check_bounds(
    context: ForwardContext, site: Site, plan: WritePlan, resolved: Resolved, kernels: ModuleType, phase: Phase
) -> None:
    if plan.covers_all:
        return
    kernels.check_plan(site, resolved.slots, resolved.raw, plan.write_id, phase)
    if context.abort is not None and bool((resolved.slots != resolved.raw).any()):
        context.abort()  # on the CPU, stop before the write reaches memory


def _record(
    kv: torch.Tensor,
    value: torch.Tensor | None,
    index: list[torch.Tensor],
    extent: list[int],
    positions: torch.Tensor | None,
    state: torch.Tensor,
    site: int,
    write: int,
) -> None:
    _record_written([kv], [value], index, extent, positions, [site], [write])


def _record_halves(
    kv: list[torch.Tensor],
    values: list[torch.Tensor | None],
    index: list[torch.Tensor],
    extent: list[int],
    positions: torch.Tensor | None,
    state: torch.Tensor,
    sites: list[int],
    writes: list[int],
) -> None:
    _record_written(kv, values, index, extent, positions, sites, writes)


def _record_layers(
    kv: list[torch.Tensor],
    values: list[torch.Tensor | None],
    index: list[torch.Tensor],
    extent: list[int],
    apart: bool,
    positions: torch.Tensor | None,
    state: torch.Tensor,
    sites: list[int],
    writes: list[int],
) -> None:
    context, device = get_forward_context(), state.device
    kernels, tables = kernels_for(device), context.tables.get(device)
    if tables is not None and context.abort is None:
        halves, plans = [context.sites[site] for site in sites], [context.plans[write] for write in writes]
        positions = _on(device, positions)
        if kernels.record_layers(halves, kv, values, plans, index, extent, apart, positions, tables):
            return
    for at in _layers(kv):
        its = _index_of(at, index, apart)
        _mark_again(kv[at][-1], its, extent, sites[at][-1], writes[at][-1])
        _record_written(kv[at], values[at], its, extent, positions, sites[at], writes[at])


def _mark_again(kv: torch.Tensor, index: list[torch.Tensor], extent: list[int], site: int, write: int) -> None:
    """Mark where a layer wrote: the marks of one layer are those of the next, and all layers have written."""
    context, kernels = get_forward_context(), kernels_for(kv.device)
    here, plan = context.sites[site], context.plans[write]
    resolved = kernels.resolve(plan, here.layout, index, extent, kv.device)
    quiet = dataclasses.replace(here, checks=here.checks & ~Check.BOUNDS)
    here.control.stamps.index_fill_(1, resolved.slots.clamp(min=0), 0)
    kernels.check_plan(quiet, resolved.slots, resolved.raw, plan.write_id, Phase.PRE)


def _record_written(
    kv: list[torch.Tensor],
    values: Sequence[torch.Tensor | None],
    index: list[torch.Tensor],
    extent: list[int],
    positions: torch.Tensor | None,
    sites: list[int],
    writes: list[int],
) -> None:
    """Fingerprint what a write left in the same slots of the halves of a layer."""
    context, kernels, device = get_forward_context(), kernels_for(kv[0].device), kv[0].device
    halves, plans = [context.sites[site] for site in sites], [context.plans[write] for write in writes]
    layout, plan, ops, positions = halves[0].layout, plans[0], 1, _on(device, positions)
    if plan.ahead and kernels.record_write(halves, kv, values, plans, index, extent, positions):
        return
    resolved = kernels.resolve(plan, layout, index, extent, device)
    last = last_of_rows(positions, layout.rows, resolved.slots.shape[0]) if layout.has_rows else None
    moved = None
    if plan.covers_all:
        moved = extent[-1] if extent else 0
    for here, view, value in zip(halves, kv, values, strict=True):
        requests = _receive(context, here, view, plan, resolved, kernels)
        rows = plan.rows(here.layout, value, resolved) if value is not None and here.checks & Check.OPERAND else None
        # the slots have the stamps of the last half's write
        kernels.record(
            here, view, resolved.slots, rows, plans[-1].write_id, last, moved, ops=ops, planned=requests is not None
        )
        ops = 0


def _receive(
    context: ForwardContext, here: Site, kv: torch.Tensor, plan: WritePlan, resolved: Resolved, kernels: ModuleType
) -> RequestPlan | None:
    """Check the slots that a write received; what an engine planned to write."""
    if not plan.ahead:
        _check_bounds(context, here, plan, resolved, kernels, Phase.POST)
        if here.layout.has_rows and not plan.covers_all:  # verify did not know where the row goes on
            kernels.adopt(here, kv, kernels.first_positions(here.layout, resolved.slots))
    requests = context.requests.get(here.space.space_id) if here.space is not None else None
    if here.space is not None and requests is not None:
        received = taken_of(requests, resolved.slots)
        request_kernels_for(kv.device).check_received(here.space, requests, received, here.half_id)
    return requests


def _observe(kv: torch.Tensor, state: torch.Tensor, site: int) -> None:
    context = get_forward_context()
    here, kernels = context.sites[site], kernels_for(kv.device)
    kernels.verify(here, kv, None, ops=1, in_flight=_in_flight(context, here))
    kernels.snapshot(here, kv)


def _record_changed(kv: torch.Tensor, state: torch.Tensor, site: int) -> None:
    context = get_forward_context()
    here = context.sites[site]
    requests = context.requests.get(here.space.space_id) if here.space is not None else None
    planned = planned_slots(here.space, requests) if here.space is not None and requests is not None else None
    kernels_for(kv.device).record_changed(here, kv, planned)
    count_op(here.gate)


def _watch(kv: torch.Tensor, state: torch.Tensor, site: int) -> None:
    context = get_forward_context()
    here, kernels = context.sites[site], kernels_for(kv.device)
    for part in here.parts:
        kernels.verify(part.site, part.of(kv), None)
    if here.layout.slots == 0:  # a placeholder for its parts
        here.counters[Count.VERIFY_RUNS : Count.VERIFY_RUNS + 1].add_(1)
        count_op(here.gate)
        return
    first = None
    if here.watched and here.layout.has_rows:
        # every slot is old: a row ends after its last slot, and the write to come "continues" there
        rows, positions = here.half.rows, here.layout.positions
        rows[:, RowState.NEXT].fill_(positions)
        first = torch.full((here.layout.rows,), positions, dtype=torch.int32, device=kv.device)
    kernels.verify(here, kv, first, ops=1, in_flight=_in_flight(context, here))
    if here.watched and not here.layout.has_rows:
        _take_as_found(here, kv, kernels)


def _take_as_found(here: Site, kv: torch.Tensor, kernels: ModuleType) -> None:
    """Fingerprint the unrecorded slots: a cache without rows has no row's end to adopt up to."""
    every = torch.arange(here.layout.slots, device=kv.device)
    fresh = torch.where(here.half.digest[0] == 0, every, -1)
    quiet = dataclasses.replace(here, checks=here.checks & ~Check.POISON)  # it may be uninitialised memory
    kernels.record(quiet, kv, fresh, None, 0, None, None)
    taken = (fresh >= 0).sum()
    here.counters[Count.ADOPTED] += taken
    here.counters[Count.RECORDED] -= taken


def _identify(
    tokens: torch.Tensor,
    positions: torch.Tensor | None,
    index: list[torch.Tensor],
    extent: list[int],
    state: torch.Tensor,
    site: int,
    write: int,
) -> None:
    context, device = get_forward_context(), state.device
    here, plan = context.sites[site], context.plans[write]
    if not tokens.numel():  # a step without tokens
        count_op(here.gate)
        return
    kernels = kernels_for(device)
    identity = context.identities.get(site)
    tokens, positions = tokens.to(device), _on(device, positions)
    if identity is not None and kernels.identify_write(here, identity, plan, index, extent, tokens, positions):
        return
    slots = kernels.resolve(plan, here.layout, index, extent, device).slots
    if identity is not None and tokens.numel() == slots.numel():
        if here.layout.has_rows and tokens.dim() == 2:
            given = per_row(positions, *tokens.shape)
            slots = slots.view(tokens.shape)
            given = slots % here.layout.positions if given is None else given.to(torch.int64)
            kernels.identify(here, identity, slots, tokens.to(torch.int64), given)
        else:
            name_slots(identity, slots, tokens, positions)
    count_op(here.gate)


def _beside_the_model(body: Callable[..., None]) -> Callable[..., None]:
    """The body of an op whose last arguments are ``state, site, write``, on the side stream if the graph allows it and
    is being captured: launched one by one, forks cost more than they save."""

    @functools.wraps(body)
    def run(*args: Any) -> None:
        context, device = get_forward_context(), args[-3].device
        side = context.sides.get(device) if context.halves_beside else None
        with side.fork() if side is not None and capturing(device) else contextlib.nullcontext():
            body(*args)

    return run


def _on(device: torch.device, positions: torch.Tensor | None) -> torch.Tensor | None:
    """Positions on the cache's device: a model with layers on several devices has them on one."""
    return None if positions is None else positions.to(device)


def _index_put_(
    kv: torch.Tensor, value: torch.Tensor, index: list[torch.Tensor], extent: list[int], site: int, write: int
) -> None:
    context = get_forward_context()
    layout, plan = context.sites[site].layout, context.plans[write]
    resolved = plan.resolve(layout, index, extent, kv.device)
    rows = plan.rows(layout, value, resolved)
    target = layout.slots_first(kv)
    if layout.two_axes:
        target[resolved.slots // layout.positions, resolved.slots % layout.positions] = rows
    else:
        target[resolved.slots] = rows


def _join(held: list[torch.Tensor], state: torch.Tensor) -> None:
    join_side(state.device)


def join_side(device: torch.device) -> None:
    """Make the model wait for the work beside it on a device, if there can be any."""
    side = get_forward_context().sides.get(device)
    if side is not None:
        side.join()


_BODIES: dict[str, Callable[..., None]] = {
    "begin": _begin,
    "join": _join,
    "verify": _verify,
    "record": _record,
    "verify_halves": _beside_the_model(_verify_halves),
    "record_halves": _beside_the_model(_record_halves),
    "verify_layers": _beside_the_model(_verify_layers),
    "record_layers": _beside_the_model(_record_layers),
    "observe": _observe,
    "record_changed": _record_changed,
    "watch": _watch,
    "identify": _beside_the_model(_identify),
    "index_put_": _index_put_,
}


def _register() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, schema in SCHEMAS.items():
        # our kernels read any strides, so Inductor need not copy an argument to restore the eager ones
        library.define(name + schema, tags=(torch.Tag.flexible_layout,))
        library.impl(name, taking_turns(_BODIES[name]), "CPU")
        library.impl(name, timed(_BODIES[name]), "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _no_output, lib=library)
    return library


def _no_output(*args: object) -> None:
    return None


_LIBRARY = _register()

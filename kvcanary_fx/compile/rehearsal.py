"""The first launches of a graph on a GPU, compiled while the inner backend compiles the graph.

Compiled one after the other in its first call, the kernels of a decode step took 1.6 s (one core, Triton 3.6).  Which
variants it launches is known once the passes have run: shapes and strides are in the graph, all else in the plan.  So
its ops run within :func:`.compile_ahead`, which launches nothing, on memory of their own.  What lies otherwise after
all, since Inductor may choose other strides, is compiled when it is launched.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor

from ..config import CanaryConfig
from ..kernels.buffers import Site
from ..kernels.compile_ahead import InBackground, compiles_for
from ..kernels.context import ForwardContext
from ..kernels.ops import kernels_for
from ..passes.axis_flow import hint
from ..passes.graph_plan import GraphPlan
from ..passes.names import function_name
from ..passes.state_inputs import is_canary
from ..runtime.binding import Controls, GraphBinding
from ..runtime.registry import PoolRegistry

#: Whether several threads may parse source, as Triton does.  Seen on Python 3.11.7: "SystemError: AST constructor
#: recursion depth mismatch", whichever thread it hits (CPython's gh-106905).
PARSES_IN_THREADS = sys.version_info >= (3, 11, 9)

#: Devices whose launch of ``begin`` was compiled.
_BEGUN: set[torch.device] = set()

#: Ops whose launches can be foreseen, and which of their arguments say so; site and write, the last two, always do.
_FORESEEN = {
    "verify": slice(2, 4),
    "verify_halves": slice(2, 4),
    "record": slice(1, 5),
    "record_halves": slice(1, 5),
    "verify_layers": slice(1, 4),
    "record_layers": slice(1, 6),
    "identify": slice(0, 4),
}


def rehearse(
    gm: fx.GraphModule, example_inputs: Sequence[Any], plan: GraphPlan, config: CanaryConfig
) -> InBackground | None:
    """Begin to compile what the first call of a graph launches; None if nothing is compiled for it before."""
    devices = [device for device in plan.devices if compiles_for(device)]
    caches = [example_inputs[site.argument] for site in plan.sites]
    if not devices or not caches or not PARSES_IN_THREADS:
        return None
    if any(isinstance(cache, FakeTensor) for cache in caches) or any(site.output is not None for site in plan.sites):
        return None  # nobody has the memory that the first call will be given
    rehearsal, ahead = _Rehearsal(gm, example_inputs, plan, config), InBackground()
    for device in devices:
        ahead.compile(functools.partial(rehearsal.run, device), device)
    return ahead


class _Rehearsal:
    """The ops of one graph whose launches can be foreseen.

    It is made before the inner backend edits the graph, of which it keeps nothing.
    """

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], plan: GraphPlan, config: CanaryConfig):
        self._plan, self._config = plan, config
        self._args = [hint(a) if isinstance(a, torch.SymInt) else a for a in example_inputs]
        places = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        self._ops = [op for node in gm.graph.nodes if is_canary(node) and (op := _op_of(node, places)) is not None]

    def run(self, device: torch.device) -> None:
        """Make the launches on a device, once for the ops that differ in nothing that a kernel is compiled for."""
        config = self._config
        # shadows of its own: a session shall not know of caches before they are used
        shadows = PoolRegistry(config.planes, unseen=True)
        binding = GraphBinding(self._plan, config, shadows, Controls(config.ring_capacity))
        context = binding.bind(self._args, capturing=False, abort=None).context
        if device not in _BEGUN:  # again, it would be launched: that launch is bound for all graphs
            _BEGUN.add(device)
            kernels_for(device).begin(context.controls[device].words, context.gates[device])
        made: set[Any] = set()
        for op in self._ops:
            sites = [context.sites[number] for number in op.sites]
            if sites[0].gate.device == device:
                given = [_map(argument, self._memory_of) for argument in op.given]
                alike = op.alike(sites, given, context)
                if alike not in made:
                    made.add(alike)
                    self._make(op, sites, given, context)

    def _make(self, op: _Op, sites: Sequence[Site], given: list[Any], context: ForwardContext) -> None:
        kernels, plans = kernels_for(sites[0].gate.device), [context.plans[write] for write in op.writes]
        views = [self._plan.sites[number].view(self._args) for number in op.sites]
        tables = context.tables.get(sites[0].gate.device)
        if op.name == "verify_layers":
            kernels.verify_layers(sites, views, plans, *given, tables)
        elif op.name == "record_layers":
            values, *rest = given
            kernels.record_layers(sites, views, values, plans, *rest, tables)
        elif op.name.startswith("verify"):
            kernels.verify_write(sites, views, plans, *given)
        elif op.name.startswith("record"):
            values, *rest = given
            kernels.record_write(sites, views, _each(values), plans, *rest)
        else:
            tokens, positions, index, extent = given
            identity, device = context.identities[op.sites[0]], sites[0].gate.device
            if not kernels.identify_write(sites[0], identity, plans[0], index, extent, tokens, positions):
                kernels.resolve(plans[0], sites[0].layout, index, extent, device)  # the rest is PyTorch's

    def _memory_of(self, argument: Any) -> Any:
        if isinstance(argument, _Input):
            return self._args[argument.place]
        return argument.made() if isinstance(argument, _Form) else argument


@dataclasses.dataclass(frozen=True)
class _Form:
    """How a tensor lies in memory that the graph computes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def made(self) -> torch.Tensor:
        """Memory of this form."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        memory = torch.empty(self.offset + last + 1, dtype=self.dtype, device=self.device)
        return memory.as_strided(self.shape, self.strides, self.offset)


@dataclasses.dataclass(frozen=True)
class _Input:
    """An argument of the graph."""

    place: int


@dataclasses.dataclass(frozen=True)
class _Op:
    """One op of a graph.

    Attributes:
        given: those of its arguments that :data:`_FORESEEN` names, with a form or an input for each node.
    """

    name: str
    sites: Sequence[int]
    writes: Sequence[int]
    given: list[Any]

    def alike(self, sites: Sequence[Site], given: list[Any], context: ForwardContext) -> tuple[Any, ...]:
        """What is equal for ops that launch the same variants."""
        traits = [(s.layout, s.checks, s.verify_every, s.lenient, s.half.baseline is None) for s in sites]
        plans = [dataclasses.replace(context.plans[write], write_id=0) for write in self.writes]
        return (self.name, *traits, *plans, _hashable(_map(given, _placed)))


class _UnknownError(Exception):
    """Of a node that a pass inserted the graph does not say what it computes."""


def _op_of(node: fx.Node, places: dict[fx.Node, int]) -> _Op | None:
    """A canary op; None where its launches cannot be foreseen."""
    name = function_name(node)
    if name not in _FORESEEN or min(_each(node.args[-1])) < 0:
        return None
    try:
        given = fx.map_arg(list(node.args[_FORESEEN[name]]), lambda n: _foreseen(n, places))
    except _UnknownError:
        return None
    return _Op(name, _each(node.args[-2]), _each(node.args[-1]), given)


def _foreseen(node: fx.Node, places: dict[fx.Node, int]) -> Any:
    """What stands for the value of a node."""
    if node in places:
        return _Input(places[node])
    value = node.meta.get("example_value")
    if isinstance(value, (int, torch.SymInt)):
        return _number(value)
    if not isinstance(value, torch.Tensor):
        raise _UnknownError
    shape, strides = (tuple(map(_number, of)) for of in (value.shape, value.stride()))
    return _Form(shape, strides, _number(value.storage_offset()), value.dtype, value.device)


def _number(size: int | torch.SymInt) -> int:
    known = hint(size)
    if known is None:  # it depends on data
        raise _UnknownError
    return known


def _each(one_or_more: Any) -> list[Any]:
    return list(one_or_more) if isinstance(one_or_more, (list, tuple)) else [one_or_more]


def _map(argument: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(argument, (list, tuple)):
        return [_map(part, function) for part in argument]
    return function(argument)


def _placed(argument: Any) -> Any:
    """How a tensor lies in memory, as far as kernels are compiled for it."""
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.dtype, argument.device, argument.shape, argument.stride(), argument.data_ptr() & 15


def _hashable(argument: Any) -> Any:
    return tuple(map(_hashable, argument)) if isinstance(argument, list) else argument

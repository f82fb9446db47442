"""What the passes decided about one graph: the runtime binds it, reports and ``explain`` print it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import fx

from ..kernels.writes.plan import WritePlan

#: What a half holds: tokens that the graph writes, one running state per sequence, or tokens that it only reads.
Kind = Literal["kv", "state", "read"]


class ViewOf:
    """Recomputes a view of a pool from the graph's arguments.

    It keeps calls, not nodes: the inner backend edits the graph it is given.  (A GraphModule per half would
    do as well, and cost 10 ms of compile time each.)
    """

    def __init__(self, nodes: Sequence[fx.Node], result: fx.Node, index: tuple[Any, ...], places: dict[fx.Node, int]):
        """
        Args:
            nodes: the nodes that ``result`` is computed from, placeholders included, in graph order.
            index: a constant index applied to ``result``, or ().
            places: the graph argument of each placeholder.
        """
        self._inputs = [(n.name, places[n]) for n in nodes if n.op == "placeholder"]
        self._calls: list[tuple[Any, ...]] = [
            (n.name, n.op, n.target, *pytree.tree_map_only(fx.Node, lambda m: _Value(m.name), (n.args, n.kwargs)))
            for n in nodes
            if n.op != "placeholder"
        ]
        self._result, self._index = result.name, index

    def __call__(self, args: Sequence[Any]) -> torch.Tensor:
        values: dict[str, Any] = {name: args[place] for name, place in self._inputs}
        for name, op, target, *arguments in self._calls:
            given, named = pytree.tree_map_only(_Value, lambda v: values[v.name], arguments)
            if op == "call_method":
                values[name] = getattr(given[0], target)(*given[1:], **named)
            else:
                values[name] = target(*given, **named)
        view: torch.Tensor = values[self._result]
        return view[self._index] if self._index else view


@dataclasses.dataclass(frozen=True)
class _Value:
    """Stands for the value of a node."""

    name: str


@dataclasses.dataclass(frozen=True)
class SitePlan:
    """One guarded half of one graph.

    Attributes:
        layer, label, pool: names for people, ``model.layers.3.self_attn``, ``K``, ``past.layers[3].keys``.
        number: the layer's number in its path, or None.
        argument: index of the graph argument that holds the pool.
        view: from the graph's arguments to the view whose slots are guarded.
        slot_axes: axes of that view that number slots.
        paged: the first of two slot axes numbers pages, not sequences.
        both: the graph's attention reads it as K and as V.
        heads: how many indices of the first of two slot axes a sequence has: its heads, where a view merges them.
        part: the half is a part of its input (K and V, or all layers, in one tensor), or is written in several parts.
        opaque: why the slots and operand of a write are unknown, or None.
        has_operand: what is written is compared with what was meant.
        verified: old bytes are checked; false where the graph overwrites them unseen.
        leads: this site stores who is in each slot, for all halves of its slot space.
        writes: how each write looks in the graph, ``index_copy_``.
        kind: what the half holds.
        output: the output of the graph that is this cache in the next call, where it is returned and not written.
        whole: a write reaches every slot, or one may.
        foreseen: the slots that the graph writes are known before the first access.
        reads: of a site that only reads, the elements ``[low, high)`` from the view's first on that the graph reads;
            None for all.  Without ``slot_axes`` only what other graphs record there is checked.
    """

    layer: str
    label: str
    pool: str
    number: int | None
    argument: int
    view: ViewOf
    slot_axes: tuple[int, ...]
    paged: bool
    part: bool
    opaque: str | None
    has_operand: bool
    verified: bool
    leads: bool
    writes: tuple[str, ...]
    kind: Kind = "kv"
    output: int | None = None
    whole: bool = False
    foreseen: bool = True
    heads: int = 1
    both: bool = False
    reads: tuple[tuple[int, int], ...] | None = None

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.label}"


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """One opaque attention op under guard.

    Attributes:
        op: its qualified name.
        layer: the layer's name, or None where it is an input of the graph.
        has_operand: what is written is compared with what was meant.
    """

    op: str
    layer: str | None
    has_operand: bool


@dataclasses.dataclass
class GraphPlan:
    """Filled by the passes, in order.

    Attributes:
        name: where the graph comes from, ``graph 0/0 (forward, model.py:12)``.
        frame: Dynamo's number of the frame that it comes from, -1 if unknown.
        sites: guarded halves; the position is the site number in the graph's ops.
        writes: the plans of the readable writes; the position is the write number.
        attention: opaque attention ops under guard.
        devices: devices that have a site, in the order of the ``state`` arguments appended to the graph.
        ops: canary ops that each call of the graph runs, joins aside.
        joins: the graph ends with a join, see :mod:`.join_side_streams`.
        halves_beside: its checks may run beside the model, see :mod:`.halves_beside`.
        layers_at_once: layers whose checks are those of one op, see :mod:`.layers_at_once`.
        unguarded: inputs that the graph writes or replaces and we do not guard, each with the reason.
        functional: caches that are rebuilt by ``cat`` instead of written in place.
        born: caches that the graph itself creates, so that they are no input of it.
        chain_off: why the chain check does not run, or None.
        written_by: the node of each readable write, by write number.
        rewritten: writes replaced by our own in-place op.
        pool_bytes: sizes of the guarded views, for the lint.
        seconds: time each pass took.
    """

    name: str
    frame: int = -1
    sites: list[SitePlan] = dataclasses.field(default_factory=list)
    writes: list[WritePlan] = dataclasses.field(default_factory=list)
    attention: list[AttentionPlan] = dataclasses.field(default_factory=list)
    devices: list[torch.device] = dataclasses.field(default_factory=list)
    ops: int = 0
    joins: bool = False
    halves_beside: bool = False
    layers_at_once: int = 0
    unguarded: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    functional: list[str] = dataclasses.field(default_factory=list)
    born: list[str] = dataclasses.field(default_factory=list)
    chain_off: str | None = "no KV write in the graph"
    written_by: dict[int, fx.Node] = dataclasses.field(default_factory=dict, repr=False)
    rewritten: int = 0
    pool_bytes: list[int] = dataclasses.field(default_factory=list)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def guarded(self) -> bool:
        return bool(self.sites or self.attention)

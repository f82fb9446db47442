"""Insert the canary ops around every KV write.

Before::

    index_copy_: "f32[2, 2, 11, 8]" = keys.index_copy_(2, cache_position, k_embed)
    attn = scaled_dot_product_attention(q, keys, values)

After (``state`` is a new input; one begin per graph, two ops per half)::

    begin = torch.ops.kvcanary.begin(state)
    verify = torch.ops.kvcanary.verify(keys, k_embed, [cache_position], [], state, 0, 0)
    index_copy_: "f32[2, 2, 11, 8]" = keys.index_copy_(2, cache_position, k_embed)
    record = torch.ops.kvcanary.record(keys, k_embed, [cache_position], [], None, state, 0, 0)
    attn = scaled_dot_product_attention(q, keys, values)

A cache that the graph only reads, such as an encoder's for cross-attention, gets one op, ``watch(keys, state, 4)``.

The ops return nothing and survive dead-code elimination because they mutate ``state``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..kernels.writes.plan import Select
from .accesses import Accesses, trace_accesses
from .axis_flow import hint
from .destinations import Region
from .early_values import EarlyValues
from .graph_plan import GraphPlan, SitePlan, ViewOf
from .guarded_halves import halves_to_guard
from .halves import DeclaredAxes, Half, ReadableWrite, Sum
from .join_halves import count_alike, join_halves
from .names import function_name
from .only_read import Recorded
from .state_inputs import is_canary, state_input
from .states import ancestors
from .token_inputs import TokenInputs, find_token_inputs
from .writes import KVWrite


def insert_canaries(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    plan: GraphPlan,
    chain: bool,
    pools_in: Callable[[Any], int] = lambda _: 0,
    recorded: Recorded | None = None,
    declared_axes: DeclaredAxes = lambda _given, _view: None,
) -> fx.GraphModule:
    """Guard every KV write of ``gm``, in place, and fill ``plan``.

    A graph that already has canaries is unchanged.

    Args:
        chain: insert the chain check where the graph shows token ids.
        pools_in: how many pools an engine is known to keep in an example input.
        recorded: whether another graph of the session records an example input; None to ignore what this graph only
            reads.
        declared_axes: the slot axes of a view of an example input, where an engine declared it.
    """
    if any(is_canary(n) for n in gm.graph.nodes):
        return gm
    found = trace_accesses(gm, example_inputs)
    halves = halves_to_guard(gm, found, example_inputs, plan, pools_in, recorded, declared_axes)
    if halves:
        _Inserter(gm, found, plan, chain).guard(halves)
        gm.graph.lint()
        gm.recompile()
    return gm


class _Inserter:
    """Edits one graph.  Nodes are compared by their order before the edit."""

    def __init__(self, gm: fx.GraphModule, found: Accesses, plan: GraphPlan, chain: bool):
        self.gm, self.graph, self.found, self.plan = gm, gm.graph, found, plan
        self.places = {n: i for i, n in enumerate(self.graph.find_nodes(op="placeholder"))}
        self.order = {n: i for i, n in enumerate(self.graph.nodes)}
        self.tokens = find_token_inputs(gm, found) if chain else TokenInputs(None, None, "it is switched off")
        self.early = EarlyValues(gm.graph, found, self.order)
        self.casts: set[fx.Node] = set()  # operands in their pool's dtype
        self.tails: dict[fx.Node, fx.Node] = {}  # the last op inserted after a write
        self.led: set[tuple[Any, ...]] = set()  # slot spaces that have an identify op

    def guard(self, halves: list[Half]) -> None:
        count_alike(halves)
        for half in halves:
            self._state_for(half)
        for half in halves:
            self._guard(half)
        join_halves(self.graph, self.plan, halves)
        self.plan.ops = sum(is_canary(n) for n in self.graph.nodes)
        self.plan.chain_off = self._why_no_chain()

    def _why_no_chain(self) -> str | None:
        if any(s.leads and len(s.slot_axes) == 2 and not s.paged for s in self.plan.sites):
            return None
        return self.tokens.missing or "no cache here keeps one sequence per row, so predecessors are unknown"

    def _state_for(self, half: Half) -> fx.Node:
        return state_input(self.gm, self.plan, self.found.values[half.root].device)

    def _call(self, op: str, *args: Any) -> fx.Node:
        return self.graph.call_function(getattr(torch.ops.kvcanary, op).default, args)

    def _guard(self, half: Half) -> None:
        """Insert the ops of a half: a check in front of its first access, and a record behind each write."""
        site, state, first = len(self.plan.sites), self._state_for(half), half.first_access.node
        ahead, others = self._number_writes(half)
        with self.graph.inserting_before(first):
            view = self._view(half.region, first)
            self._check(site, half, view, ahead, state)
            leads = ahead is not None and self._identify(site, half, ahead, first, state)
        for other in others:
            with self.graph.inserting_before(other.write.node):
                index, extent = self._operands(other)
                self._call("verify", view, other.value, index, extent, state, site, other.plan.write_id)
        for readable in half.readable:
            with self._after(readable.write.node):
                self._record(site, readable, self._made(readable.write, half.region, view), state)
        for hidden in half.opaque:
            with self._after(hidden.node):
                self._call("record_changed", self._made(hidden, half.region, view), state, site)
        self.plan.sites.append(self._site_plan(half, leads))
        if half.output is None:  # a returned cache does not exist yet
            self.plan.pool_bytes.append(_bytes_of(half))

    def _number_writes(self, half: Half) -> tuple[ReadableWrite | None, list[ReadableWrite]]:
        """Give each write of a half its plan and its operand.

        Returns:
            The first write, if the check in front of the half can have its slots; and with it, in a loop over
            sequences, those that have checks of their own.
        """
        for readable in half.readable:
            self._match_dtype(readable.write, half.dtype)
        half.readable = [self._apart(r) for r in half.readable]
        ahead = None if half.opaque else self._known_before(half, half.first_access.node)
        others = self._to_other_rows(half, ahead)
        each = bool(others) and _are_all_rows([r for r in (ahead, *others) if r is not None], half)
        half.readable = [self._numbered(r, r is ahead or r in others, each) for r in half.readable]
        known = [r for r in half.readable if r.plan.ahead]
        return next(iter(known), None), known[1:]

    def _check(self, site: int, half: Half, view: fx.Node, ahead: ReadableWrite | None, state: fx.Node) -> None:
        """Insert what compares a half before its first access; nothing if the graph overwrites it unseen."""
        first = half.first_access.node
        if half.kind == "read":
            self._call("watch", view, state, site)
        elif half.opaque:
            self._call("observe", view, state, site)
        elif half.reads_old and ahead is None:
            self._call("verify", view, None, [], [], state, site, -1)
        elif half.reads_old and ahead is not None:
            value = ahead.value if ahead.write.node is first else None
            index, extent = self._operands(ahead, first)
            self._call("verify", view, value, index, extent, state, site, ahead.plan.write_id)

    def _match_dtype(self, write: KVWrite, dtype: torch.dtype) -> None:
        """Make the cast of a write's operand to the pool's dtype a node, which write and record share.

        Seen under Inductor: a write of bf16 into fp8 is computed from the unrounded float32, so that the slot
        differs from bf16 rounded to fp8.  A custom op may scale as it casts: its operand says nothing.
        """
        if write.value is None or write.value in self.casts or self.found.values[write.value].dtype == dtype:
            return
        if write.flat is not None or write.value not in write.node.all_input_nodes:
            write.value = None
            return
        with self.graph.inserting_before(write.node):
            cast = self.graph.call_method("to", (write.value, dtype))
        write.node.replace_input_with(write.value, cast)
        write.value = cast
        self.casts.add(cast)

    def _apart(self, readable: ReadableWrite) -> ReadableWrite:
        """Make the half's part of an operand a node, where K and V are written at once; or its axes in the half's
        order.
        """
        value = readable.write.value
        if value is None or not (readable.part or readable.turned):
            return readable
        with self.graph.inserting_before(readable.write.node):
            if readable.part:
                own = self.graph.call_function(operator.getitem, (value, readable.part))
            else:
                own = self.graph.call_method("permute", (value, readable.turned))
        return dataclasses.replace(readable, own_value=own)

    def _known_before(self, half: Half, first: fx.Node) -> ReadableWrite | None:
        """The half's first write, if its slots can be computed before ``first``."""
        if not half.readable or not half.reads_old:
            return None
        write = min(half.readable, key=lambda r: self.order[r.write.node])
        return write if self.early.possible((*write.index, *_nodes_in(write.extent)), first) else None

    def _to_other_rows(self, half: Half, ahead: ReadableWrite | None) -> list[ReadableWrite]:
        """The writes of a loop over sequences: each of them shows how far its own sequence goes, and no other."""
        if ahead is None or len(half.slot_axes) != 2 or half.paged:
            return []
        rows = {id(r): _constant_row(r) for r in half.readable}
        seen = {rows[id(ahead)]}
        fresh = []
        for readable in half.readable:
            if rows[id(readable)] is not None and None not in seen and rows[id(readable)] not in seen:
                seen.add(rows[id(readable)])
                fresh.append(readable)
        return fresh

    def _numbered(self, readable: ReadableWrite, ahead: bool, own_rows: bool) -> ReadableWrite:
        plan = dataclasses.replace(readable.plan, write_id=len(self.plan.writes), ahead=ahead, own_rows=own_rows)
        self.plan.writes.append(plan)
        if readable.write.made is None:
            self.plan.written_by[plan.write_id] = readable.write.node
        return dataclasses.replace(readable, plan=plan)

    def _view(self, region: Region, before: fx.Node) -> fx.Node:
        """The region's view as a node usable at the insertion point, recomputed if it is made later."""
        node = region.node
        if self.order[node] >= self.order[before]:
            copies: dict[fx.Node, fx.Node] = {}
            for part in sorted(ancestors(node), key=self.order.__getitem__):
                late = self.order[part] >= self.order[before]
                copies[part] = self.graph.node_copy(part, copies.__getitem__) if late else part
            node = copies[node]
        return self.graph.call_function(operator.getitem, (node, region.index)) if region.index else node

    def _made(self, write: KVWrite, region: Region, view: fx.Node) -> fx.Node:
        """The half as the write leaves it: the view it had before, or that of the tensor that the write made."""
        if write.made is None:
            return view
        return self.graph.call_function(operator.getitem, (write.made, region.index)) if region.index else write.made

    def _operands(self, readable: ReadableWrite, before: fx.Node | None = None) -> tuple[list[fx.Node], list[Any]]:
        """The ``index`` and ``extent`` arguments of the ops for one write, where the graph has it or before a node."""
        at = (lambda n: n) if before is None else (lambda n: self.early.of(n, before))
        extent = [
            self._sum(fx.map_arg((e.a, e.b), at)) if isinstance(e, Sum) else fx.map_arg(e, at) for e in readable.extent
        ]
        if readable.plan.covers_all and not readable.stays and self._is_batched(self.tokens.tokens):
            extent.append(self._token_count(self.tokens.tokens))
        return [at(n) for n in readable.index], extent

    def _is_batched(self, tokens: fx.Node | None) -> bool:
        return tokens is not None and self.found.values[tokens].dim() == 2

    def _sum(self, terms: tuple[Any, Any]) -> Any:
        if all(isinstance(term, int) for term in terms):
            return sum(terms)
        return self.graph.call_function(operator.add, terms)

    def _token_count(self, tokens: fx.Node | None) -> Any:
        assert tokens is not None
        count = self.found.values[tokens].shape[1]
        return count if isinstance(count, int) else self.graph.call_method("size", (tokens, 1))

    def _identify(self, site: int, half: Half, ahead: ReadableWrite, first: fx.Node, state: fx.Node) -> bool:
        """Insert the identity op for the half's slot space, once; whether this site got it."""
        space = (self.found.values[half.root].device, *(str(half.shape[a]) for a in half.slot_axes))
        if self.tokens.tokens is None or ahead.plan.covers_all or space in self.led:
            return False
        self.led.add(space)
        index, extent = self._operands(ahead, first)
        tokens, positions = self.tokens.tokens, self.tokens.positions
        self._call("identify", tokens, positions, index, extent, state, site, ahead.plan.write_id)
        return True

    def _record(self, site: int, readable: ReadableWrite, view: fx.Node, state: fx.Node) -> None:
        index, extent = self._operands(readable)
        positions = None if readable.stays else self.tokens.positions  # the newest token is not in the last slot
        self._call("record", view, readable.value, index, extent, positions, state, site, readable.plan.write_id)

    @contextlib.contextmanager
    def _after(self, node: fx.Node) -> Iterator[None]:
        """Insert after a write and after ops already inserted there."""
        following = self.tails.get(node, node).next
        with self.graph.inserting_before(following):
            yield
        self.tails[node] = following.prev

    def _site_plan(self, half: Half, leads: bool) -> SitePlan:
        region = half.region
        nodes = sorted(ancestors(region.node), key=self.order.__getitem__)
        whole = bool(half.opaque) or any(r.plan.covers_all for r in half.readable)
        argument = next(n for n in nodes if n.op == "placeholder" and self.found.root_of(n) is half.root)
        return SitePlan(
            layer=half.layer,
            label=half.label,
            pool=half.pool,
            number=half.number,
            argument=self.places[argument],
            view=ViewOf(nodes, region.node, region.index, self.places),
            slot_axes=half.slot_axes,
            paged=half.paged,
            heads=half.heads,
            both=half.read_as == "KV",
            part=len(half.readable) > 1 or not _is_whole(half, self.found),
            opaque=half.opaque[0].opaque if half.opaque else None,
            has_operand=any(r.write.value is not None for r in half.readable),
            verified=bool(half.opaque) or half.reads_old,
            leads=leads,
            writes=tuple(dict.fromkeys(function_name(n) for n in half.nodes_written)),
            kind=half.kind,
            output=half.output,
            whole=whole,
            foreseen=not whole and all(r.plan.ahead for r in half.readable),
            reads=half.reads,
        )


def _constant_row(readable: ReadableWrite) -> tuple[Any, ...] | None:
    """The sequences that a write goes to, if they are constants: the first numbers of its extent."""
    kind = readable.plan.selectors[0].kind
    count = {Select.INT: 1, Select.RANGE: 2}.get(kind, 0)
    row = tuple(readable.extent[:count])
    return row if row and all(isinstance(x, int) for x in row) else None


def _are_all_rows(first: list[ReadableWrite], half: Half) -> bool:
    """Whether the first writes to constant sequences go to all that a half has, and no other write goes elsewhere."""
    rows: set[int] = set()
    for readable in first:
        row = _constant_row(readable) or ()
        rows |= set(row) if len(row) == 1 else set(range(*row))
    count = half.shape[half.slot_axes[0]]
    constant = all(_constant_row(r) is not None for r in half.readable)
    return constant and isinstance(count, int) and rows == set(range(count))


def _nodes_in(extent: list[Any]) -> list[fx.Node]:
    flat = [x for e in extent for x in ((e.a, e.b) if isinstance(e, Sum) else (e,))]
    return [x for x in flat if isinstance(x, fx.Node)]


def _is_whole(half: Half, found: Accesses) -> bool:
    """Whether a half is all of its input, and not K, V or a layer in a larger tensor."""
    whole = found.values[half.root].numel()
    part = math.prod(half.shape)
    return bool(isinstance(whole, int) and isinstance(part, int) and whole == part) or str(whole) == str(part)


def _bytes_of(half: Half) -> int:
    """Size of the half; symbolic sizes by their hint."""
    total = half.dtype.itemsize
    for size in half.shape:
        total *= hint(size) or 1
    return total

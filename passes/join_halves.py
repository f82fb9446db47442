"""Check the K and the V of a layer with one op before their writes and one after, where both go to the same slots.

On a GPU an op is a launch, whose latency counts in a captured decode step.

Before::

    verify = torch.ops.kvcanary.verify(keys, k, [position], [], state, 0, 0)
    index_copy_ = keys.index_copy_(2, position, k)
    record = torch.ops.kvcanary.record(keys, k, [position], [], None, state, 0, 0)
    verify_1 = torch.ops.kvcanary.verify(values, v, [position], [], state, 1, 1)
    index_copy__1 = values.index_copy_(2, position, v)
    record_1 = torch.ops.kvcanary.record(values, v, [position], [], None, state, 1, 1)

After::

    verify_halves = torch.ops.kvcanary.verify_halves([keys, values], [k, v], [position], [], state, [0, 1], [0, 1])
    index_copy_ = keys.index_copy_(2, position, k)
    index_copy__1 = values.index_copy_(2, position, v)
    record_halves = torch.ops.kvcanary.record_halves(
        [keys, values], [k, v], [position], [], None, state, [0, 1], [0, 1]
    )
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from .axis_flow import hint
from .dynamo_contract import marked_dynamic
from .early_values import PURE
from .graph_plan import GraphPlan
from .halves import Half
from .names import function_name
from .state_inputs import is_canary


@dataclasses.dataclass(frozen=True)
class _Checks:
    """The only verify and the only record of a half."""

    site: int
    verify: fx.Node
    record: fx.Node


def count_alike(halves: Sequence[Half]) -> None:
    """Guard the graph on the K and the V of a layer having as many slots, where they have in this call.

    Seen in transformers' static caches: from the second length on Dynamo makes the size of V symbolic and not that of
    K, which no longer shows that they are alike.  Sizes that were marked as dynamic stay so.
    """
    first: dict[str, Half] = {}
    for half in (h for h in halves if h.kind == "kv" and not marked_dynamic(h.root)):
        other = first.setdefault(half.layer, half)
        if half.slot_axes == other.slot_axes:
            for size, wanted in ((half.shape[axis], other.shape[axis]) for axis in half.slot_axes):
                if str(size) != str(wanted) and hint(size) is not None and hint(size) == hint(wanted):
                    bool(size == wanted)  # the comparison installs the guard


def join_halves(graph: fx.Graph, plan: GraphPlan, halves: Sequence[Half]) -> None:
    """Join the ops of two halves of a layer, in place.

    Args:
        halves: by site.
    """
    checks = {c.site: c for c in _checks(graph)}
    for site in sorted(checks):
        first, second = checks[site], checks.get(site + 1)
        if second is None or first.verify not in graph.nodes or not _same_slots(halves[site], halves[site + 1]):
            continue
        if _same_write(first, second, plan) and _may_join(graph, first, second, plan):
            _join(graph, first, second)


def _checks(graph: fx.Graph) -> list[_Checks]:
    found: dict[int, list[list[fx.Node]]] = {}
    for node in graph.nodes:
        for which, op in enumerate((torch.ops.kvcanary.verify.default, torch.ops.kvcanary.record.default)):
            if node.target is op:
                found.setdefault(node.args[-2], [[], []])[which].append(node)
    return [_Checks(site, v[0], r[0]) for site, (v, r) in found.items() if len(v) == len(r) == 1]


def _same_slots(a: Half, b: Half) -> bool:
    """Whether two halves are of one layer, in tensors of their own, and number their slots alike."""
    if a.root is b.root or (a.layer, a.kind) != (b.layer, "kv") or a.output is not None or b.output is not None:
        return False
    if a.opaque or b.opaque or (a.slot_axes, a.paged, len(a.shape)) != (b.slot_axes, b.paged, len(b.shape)):
        return False
    return all(str(a.shape[axis]) == str(b.shape[axis]) for axis in a.slot_axes)


def _same_write(a: _Checks, b: _Checks, plan: GraphPlan) -> bool:
    """Whether both halves are written at the same indices, known before the write."""
    write, other = a.record.args[-1], b.record.args[-1]
    if a.verify.args[-1] != write or b.verify.args[-1] != other:
        return False
    one, two = plan.writes[write], plan.writes[other]  # type: ignore[index]
    if not one.ahead or one.covers_all or dataclasses.replace(one, write_id=two.write_id) != two:
        return False
    checked, recorded = a.verify.args[2:-2], a.record.args[2:-2]
    return checked == b.verify.args[2:-2] and recorded == b.record.args[2:-2] and checked[:2] == recorded[:2]


def _may_join(graph: fx.Graph, a: _Checks, b: _Checks, plan: GraphPlan) -> bool:
    """Whether the second half can be checked before the first is written, and the first recorded after the second."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    if any(order[node] > order[a.verify] for node in b.verify.all_input_nodes):
        return False
    writes = {plan.written_by.get(c.record.args[-1]) for c in (a, b)}  # type: ignore[arg-type]
    between = list(graph.nodes)[order[a.verify] + 1 : order[b.record]]
    return None not in writes and all(node in writes or _is_harmless(node) for node in between)


def _is_harmless(node: fx.Node) -> bool:
    """A check, or an op that writes to nothing."""
    return is_canary(node) or function_name(node) in PURE


def _join(graph: fx.Graph, a: _Checks, b: _Checks) -> None:
    for op, at, one, two in (
        (torch.ops.kvcanary.verify_halves.default, a.verify, a.verify, b.verify),
        (torch.ops.kvcanary.record_halves.default, b.record, a.record, b.record),
    ):
        with graph.inserting_before(at):
            pairs = [[x, y] for x, y in zip(one.args, two.args, strict=True)]
            graph.call_function(op, (*pairs[:2], *one.args[2:-2], *pairs[-2:]))
        graph.erase_node(one)
        graph.erase_node(two)

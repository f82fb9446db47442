"""Which halves of a graph's inputs are to be guarded, and why the others are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from .accesses import Accesses
from .attention_reads import AttentionReads
from .functional_cache import REPLACED, WRAPPED, caches_born_inside, passed_on, replaced_caches, wrapped_caches
from .graph_plan import GraphPlan
from .halves import DeclaredAxes, Half, find_halves, halves_of_returned
from .labels import name_halves
from .names import source_name
from .only_read import Recorded, find_only_read, find_read_besides
from .returned_caches import find_returned


def halves_to_guard(
    gm: fx.GraphModule,
    found: Accesses,
    example_inputs: Sequence[Any],
    plan: GraphPlan,
    pools_in: Callable[[Any], int],
    recorded: Recorded | None,
    declared_axes: DeclaredAxes,
) -> list[Half]:
    """The halves that ops are inserted for: written in place, returned, or only read; named if their slots are known.

    What is not guarded goes into ``plan``, with the reason.  The arguments are those of
    :func:`~.insert_canaries.insert_canaries`.
    """
    places = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}

    def given(root: fx.Node) -> Any:
        return example_inputs[places[root]]

    returned = find_returned(gm, found) if recorded is not None else []
    updated = {write.made: cache.root for cache in returned for write in cache.writes if write.made is not None}
    reads = AttentionReads(found, updated)
    halves, rejected = find_halves(
        found, reads, lambda root: pools_in(given(root)), lambda root, view: declared_axes(given(root), view)
    )
    halves += halves_of_returned(returned, found, reads)
    replaced = replaced_caches(gm, found, [r.root for r in returned])
    gone = passed_on(gm, replaced, reads)
    if recorded is not None:
        others = [*plan.functional, *(source_name(r.root) for r in returned)]
        others += [source_name(n) for n in gone if not recorded(given(n))]
        only_read = find_only_read(found, reads, given, recorded, others)
        besides = find_read_besides(found, halves, given, recorded)
        halves, rejected = halves + only_read[0] + besides, rejected + only_read[1]
    name_halves([h for h in halves if h.slot_axes], found)
    plan.unguarded = [(source_name(r.root), r.why) for r in rejected]
    stays = {h.root for h in halves} - set(gone)  # what attention computes of keys may have their shape
    named = [source_name(n) for n in replaced if n not in stays]
    plan.unguarded += [(name, REPLACED) for name in named if name not in plan.functional]
    plan.unguarded += [(source_name(n), WRAPPED) for n in wrapped_caches(gm, example_inputs)]
    plan.born = [n.name for n in caches_born_inside(gm, found)]
    return halves

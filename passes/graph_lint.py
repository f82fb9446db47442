"""Rules that every rewritten graph obeys; a broken one is a bug of ours, found at compile time."""

from __future__ import annotations

from torch import fx

from .graph_plan import GraphPlan
from .state_inputs import STATE, is_canary


class BrokenGraphError(AssertionError):
    """A pass left a graph that breaks a rule."""

    def __init__(self, graph: str, after: str, rule: str):
        super().__init__(f"{graph}, after pass {after}: {rule}. This is a bug in kvcanary_fx; please report it.")


def check_canary_rules(gm: fx.GraphModule, plan: GraphPlan, after: str) -> None:
    """Check the graph's canaries.

    * every op but ``index_put_`` threads one of the state inputs;
    * the first op of a state is its ``begin``;
    * every record comes after the verify of its write, and after the site's, if it has one.

    Raises:
        BrokenGraphError: naming the pass and the rule.
    """
    begun: set[fx.Node] = set()
    recorded: set[tuple[str, object]] = set()
    for node in gm.graph.nodes:
        if not is_canary(node):
            continue
        op = node.target._schema.name.split("::")[-1]
        if op == "index_put_":
            continue
        state = _argument(node, "state")
        if not isinstance(state, fx.Node) or not state.name.startswith(STATE):
            raise BrokenGraphError(plan.name, after, f"{node.name} does not thread a state input")
        if (op == "begin") == (state in begun):
            raise BrokenGraphError(plan.name, after, f"{node.name} is out of order with its graph's begin")
        begun.add(state)
        if op in ("record", "record_halves", "record_layers"):
            recorded |= {(name, number) for name in ("site", "write") for number in _numbers(node, name)}
        if op in ("verify", "verify_halves", "verify_layers") and not _checked(node).isdisjoint(recorded):
            raise BrokenGraphError(plan.name, after, f"{node.name} checks a half after it was recorded")


def _checked(node: fx.Node) -> set[tuple[str, object]]:
    """The writes that a verify must precede: one of several to each of its halves, or all of them."""
    pairs = zip(_numbers(node, "site"), _numbers(node, "write"), strict=True)
    return {("site", site) if write == -1 else ("write", write) for site, write in pairs}


def _numbers(node: fx.Node, name: str) -> list[object]:
    """Of one half, or of several."""
    number = _argument(node, name)
    return list(number) if isinstance(number, (list, tuple)) else [number]


def _argument(node: fx.Node, name: str) -> object:
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return node.args[names.index(name)]

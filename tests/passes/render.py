"""A graph as short, stable text for golden tests."""

from __future__ import annotations

from typing import Any

from torch import fx

from kvcanary_fx.passes.names import function_name, source_name


def render(gm: fx.GraphModule, keep: tuple[str, ...] = ()) -> str:
    """One line per call; inputs by the name the user gave them, sizes and types left out.

    Args:
        keep: show only calls of these functions (and the canaries), for graphs whose rest is PyTorch's own.
    """
    lines = []
    for node in gm.graph.nodes:
        if node.op.startswith("call"):
            if keep and function_name(node) not in keep and "canary" not in _function(node):
                continue
            arguments = [argument_text(a) for a in node.args] + [
                f"{k}={argument_text(v)}" for k, v in node.kwargs.items()
            ]
            lines.append(f"{node.name} = {_function(node)}({', '.join(arguments)})")
    return "\n".join(lines)


def _function(node: fx.Node) -> str:
    text = str(node.target)
    return "canary." + function_name(node) if text.startswith("kvcanary.") else function_name(node)


def arguments_text(node: fx.Node) -> str:
    """The arguments of a call."""
    given = [argument_text(a) for a in node.args] + [f"{k}={argument_text(v)}" for k, v in node.kwargs.items()]
    return ", ".join(given)


def argument_text(x: Any) -> str:
    """An argument of a call: inputs as the user calls them, other values by the node's name."""
    if isinstance(x, fx.Node):
        if x.op == "placeholder":
            return "state" if x.name.startswith("kvcanary_state") else source_name(x)
        return "<graph>" if x.op == "get_attr" else x.name
    if isinstance(x, tuple | list):
        inside = ", ".join(argument_text(i) for i in x)
        return f"({inside})" if isinstance(x, tuple) else f"[{inside}]"
    if isinstance(x, slice):
        return ":" if x == slice(None) else f"{argument_text(x.start)}:{argument_text(x.stop)}"
    return "..." if x is Ellipsis else str(x)

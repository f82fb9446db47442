"""A rewritten graph as documentation: the model's source lines, and under each what stands in the graph for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from render import argument_text, arguments_text
from torch import fx

from kvcanary_fx.passes.graph_plan import GraphPlan
from kvcanary_fx.passes.names import function_name

#: Arguments that a reader can do without: the order of the ops, and numbers that a comment says in words.
_UNSAID = ("state", "site", "write", "output")


def documented(gm: fx.GraphModule, plan: GraphPlan, keep: tuple[str, ...] = (), frame: int = 0) -> str:
    """The calls of a graph, one a line, each piece under the line of the model that it stands for.

    Canary ops have their arguments by name and their half as a comment.  A piece without a canary is the model's line
    alone, and so is one that looks like another above it, but for V instead of K.

    Args:
        keep: show only calls of these functions (and the canaries), for graphs whose rest is PyTorch's own.
        frame: which line a call came from: 0 that of the outermost function, -1 that of the innermost.
    """
    lines, seen = [], set()
    for source, nodes in _pieces(gm, frame):
        shown = [n for n in nodes if not keep or function_name(n) in keep or _is_canary(n)]
        calls = [_call(node, plan) for node in shown]
        if not calls:
            continue
        shape = _shape(calls)
        alike, untouched = shape in seen and len(calls) > 1, source and not any(map(_is_canary, shown))
        seen.add(shape)
        lines += [f"# {source}" + ("  (alike)" if alike and not untouched else "")] if source else []
        lines += [] if alike or untouched else calls
    return "\n".join(lines)


def _pieces(gm: fx.GraphModule, frame: int) -> Iterator[tuple[str, list[fx.Node]]]:
    """Calls that belong to one line of the model, in order.  A record, and a write in the place of
    the model's, belong to the line above them; what else has no line of its own to the one below."""
    source, waiting = "", []
    piece: list[fx.Node] = []
    for node in gm.graph.nodes:
        if not node.op.startswith("call"):
            continue
        line = _source_line(node, frame)
        if line is None:
            waiting.append(node)
            written = any(function_name(n) == "index_put_" for n in waiting)
            if not piece or (function_name(node).startswith("record") and (written or len(waiting) == 1)):
                piece, waiting = [*piece, *waiting], []
            continue
        if line != source:
            if piece:
                yield source, piece
            source, piece = line, []
        piece += [*waiting, node]
        waiting = []
    yield source, [*piece, *waiting]


def _source_line(node: fx.Node, frame: int) -> str | None:
    """The line of the model's code that a call came from, in one of the functions on the stack."""
    trace = node.stack_trace
    found = re.findall(r"^ {4}(\S.*)$", trace, re.MULTILINE) if trace else []
    return found[frame] if found else None


def _call(node: fx.Node, plan: GraphPlan) -> str:
    result = f"{node.name} = " if node.users else ""
    if not _is_canary(node):
        return f"{result}{function_name(node)}({arguments_text(node)})"
    names = [a.name for a in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    said = [(n, v) for n, v in given.items() if n not in _UNSAID and v is not None and v != []]
    texts = [argument_text(v) if i == 0 else f"{n}={argument_text(v)}" for i, (n, v) in enumerate(said)]
    half = f"  # {plan.sites[given['site']].label}" if isinstance(given.get("site"), int) else ""
    return f"{result}{function_name(node)}({', '.join(texts)}){half}"


def _is_canary(node: fx.Node) -> bool:
    return str(node.target).startswith("kvcanary.")


def _shape(calls: Sequence[str]) -> str:
    """What two pieces have in common that differ in K and V only."""
    text = "\n".join(calls)
    text = re.sub(r"_\d+\b", "", text)
    return re.sub(r"\b(?:vc|kc)\b", "c", re.sub(r"\b[kv]\b", "x", re.sub(r"# [KV]\b", "#", text)))

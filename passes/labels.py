"""Names for people: which layer a half belongs to, whether it is K or V, what the pool is called."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from torch import fx

from .halves import Half

_KEY = re.compile(r"key|(^|[._])k([._\d\[]|$)|k_?(cache|pool|buf)|(cache|pool)_?k", re.IGNORECASE)
_VALUE = re.compile(r"value|(^|[._])v([._\d\[]|$)|v_?(cache|pool|buf)|(cache|pool)_?v", re.IGNORECASE)


def source_name(placeholder: fx.Node) -> str:
    """The Python expression an input came from, ``past_key_values.layers[0].keys``; else the node's name."""
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name
    if not isinstance(name, str):
        return placeholder.name
    name = re.sub(r"^L\['kwargs'\]\['(\w+)'\]", r"\1", name)
    name = re.sub(r"^L\['(\w+)'\]", r"\1", name)
    name = re.sub(r"\._(?:modules|buffers|parameters)\['(\w+)'\]", r".\1", name)
    return re.sub(r"\['(\w+)'\]", r".\1", name).removeprefix("self.")


def module_path(node: fx.Node) -> str:
    """The innermost module that a node ran in, ``model.layers.3.self_attn``; empty outside modules."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        text = re.sub(r"^L\['(\w+)'\]", r"\1", str(path))
        text = re.sub(r"\._modules\['(\w+)'\]", r".\1", text)
        text = re.sub(r"\['?(\w+)'?\]", r".\1", text)
        text = text.removeprefix("self").removeprefix(".")
        if text:
            return text
    return ""


def layer_number(path: str) -> int | None:
    """The first number in a layer's path."""
    found = re.search(r"(?<![A-Za-z])\d+", path)
    return int(found.group()) if found else None


def name_halves(halves: list[Half]) -> None:
    """Set ``layer``, ``label`` and ``pool`` of every half of a graph."""
    for half in halves:
        half.pool = _pool_name(half)
        half.layer = _layer(half)
    crowded = _crowded(halves)
    for half in halves:
        if half.layer in crowded or not half.layer:
            half.layer = half.pool
    for layer in {h.layer for h in halves}:
        _label([h for h in halves if h.layer == layer])


def _layer(half: Half) -> str:
    return module_path(half.nodes_written[0]) if half.nodes_written else ""


def _crowded(halves: list[Half]) -> set[str]:
    """Module paths that hold more than one layer's halves: a loop over layers in one forward."""
    counts = Counter(h.layer for h in halves)
    return {layer for layer, n in counts.items() if n > 2}


def _pool_name(half: Half) -> str:
    region = half.region
    base = region.node
    index = [i for i in region.index if i != slice(None)]
    steps: list[str] = [f"[{i}]" for i in index if isinstance(i, int)]
    while base.op != "placeholder" and base.args and isinstance(base.args[0], fx.Node):
        picked = base.args[1] if base.op == "call_function" and len(base.args) > 1 else None
        if isinstance(picked, int):
            steps.insert(0, f"[{picked}]")
        base = base.args[0]
    return source_name(base) + "".join(steps)


def _label(halves: list[Half]) -> None:
    """K and V by name where the names say it, else by order: a layer writes K first."""
    if len(halves) == 1:
        halves[0].label = _named(halves[0].pool) or "KV"
        return
    names = [_named(h.pool) for h in halves]
    if None not in names and len(set(names)) == len(names):
        for half, name in zip(halves, names, strict=True):
            half.label = name or ""
    elif len(halves) == 2:
        halves[0].label, halves[1].label = "K", "V"
    else:
        for i, half in enumerate(halves):
            half.label = f"half{i}"


def _named(pool: str) -> str | None:
    last = pool.rsplit(".", 1)[-1]
    for text in (last, pool):
        key, value = bool(_KEY.search(text)), bool(_VALUE.search(text))
        if key != value:
            return "K" if key else "V"
    return None

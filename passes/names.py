"""Names for people: what an input is called in the user's code, which module a node ran in."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

#: Parts of names that KV pools have.
_HINTS = re.compile(r"cache|kv|key|value|pool|latent|past|(^|[._])[kv]c?($|[._\d\[])", re.IGNORECASE)
_KEY = re.compile(r"key|(^|_)k(c|v?cache|pool|buf(fer)?)?($|_|\d)", re.IGNORECASE)
_VALUE = re.compile(r"value|(^|_)v(c|cache|pool|buf(fer)?)?($|_|\d)", re.IGNORECASE)

#: What recurrent and convolution states are called.
_STATE = re.compile(r"(^|_)(conv|recurrent|ssm|rnn|lru|wkv)(_|\d|$)", re.IGNORECASE)


def function_name(node: fx.Node) -> str:
    """The plain name of what a node calls: ``"index_copy_"`` for the method, the function and the aten op."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).split("::")[-1]
    if isinstance(target, str):
        return target
    return getattr(target, "__name__", str(target))


def source_name(placeholder: fx.Node) -> str:
    """The Python expression an input came from, ``cache.layers[0].keys``; else the node's name."""
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name
    if not isinstance(name, str):
        return placeholder.name
    name = re.sub(r"^L\['kwargs'\]\['(\w+)'\]", r"\1", name)
    name = re.sub(r"^L\['args'\]\[0\](?=\._(?:modules|buffers|parameters))", "self", name)  # behind a decorator
    name = re.sub(r"^[LG]\['(\w+)'\]", r"\1", name)
    name = re.sub(r"\._(?:modules|buffers|parameters)\['(\w+)'\]", r".\1", name)
    return re.sub(r"\['(\w+)'\]", r".\1", name).removeprefix("self.")


def module_path(node: fx.Node) -> str:
    """The innermost module that a node ran in, ``model.layers.3.self_attn``; empty outside modules."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        text = re.sub(r"^L\['args'\]\[0\]", "self", str(path))  # a method behind a decorator
        text = re.sub(r"^[LG]\['(\w+)'\]", r"\1", text)
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


def has_kv_name(name: str) -> bool:
    """Whether an input is called like a KV cache."""
    return _HINTS.search(name) is not None


def state_named(pool: str) -> str | None:
    """``"conv"`` or ``"state"`` if the last part of the pool's name says that it is a running state."""
    last = re.sub(r"\[\d+\]", "", pool.split(".")[-1])
    if _STATE.search(last) is None:
        return None
    return "conv" if "conv" in last.lower() else "state"


def half_named(pool: str) -> str | None:
    """``"K"`` or ``"V"`` if the pool's name says so: its last part, or else any part of it."""
    parts = [re.sub(r"\[\d+\]", "", part) for part in pool.split(".")]
    for part in reversed(parts):
        key, value = bool(_KEY.search(part)), bool(_VALUE.search(part))
        if key != value:
            return "K" if key else "V"
    return None

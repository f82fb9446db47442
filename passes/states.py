"""Telling a running state from a KV cache: recurrent and convolution states, rewritten as a whole each step.

Before and after, in a decode step of a Mamba layer (``ssm``: ``[B, heads, dim, N]``)::

    new = ssm * decay + update
    copy_ = ssm.copy_(new)

    verify = torch.ops.kvcanary.verify(ssm, None, [], [], state, 0, 0)
    new = ssm * decay + update
    copy_ = ssm.copy_(new)
    record = torch.ops.kvcanary.record(ssm, new, [], [], None, state, 0, 0)

No axis of such a tensor counts tokens.  A slot is the state of one sequence: one index of the first axis.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx

from .accesses import Accesses, extent_of
from .names import function_name, half_named, source_name, state_named
from .selection import Full
from .writes import KVWrite

#: Ops that compute a new state from the old one.  A KV cache is moved and filled, never computed with.
_ARITHMETIC = re.compile(r"i?(mul|add|sub|div)_?|multiply|truediv|lerp|addcmul|matmul|bmm|einsum|exp")


def is_running_state(root: fx.Node, writes: Sequence[KVWrite], found: Accesses) -> bool:
    """Whether a half that is written as a whole is a state, and not a rolling window of tokens.

    A name decides where there is one: ``conv_states`` and ``recurrent_states`` are states, ``keys`` and
    ``values`` are not.  Otherwise a state shifts along its last axis (a convolution's taps), which in a KV
    cache holds the elements of a token, or is computed from its old value.
    """
    if not all(_is_whole(w) for w in writes):
        return False
    name = source_name(root)
    if state_named(name) is not None:
        return True
    if half_named(name.split(".")[-1]) is not None:
        return False
    last = found.values[root].dim() - 1
    axes = [rolled_axis(w.value, last + 1) for w in writes if w.value is not None]
    if any(axis is not None for axis in axes):
        return all(axis in (None, last) for axis in axes)
    return any(_is_computed_from_itself(w, root, found) for w in writes)


def _is_whole(write: KVWrite) -> bool:
    """Whether a write puts a computed tensor over all of its half."""
    if write.opaque is not None or write.fill or write.value is None or write.half is not None:
        return False
    readable = write.flat is None and write.grid is None and write.selection is not None
    return readable and all(isinstance(p, Full) for p in write.selection or ())


def _is_computed_from_itself(write: KVWrite, root: fx.Node, found: Accesses) -> bool:
    """Whether what is written is computed from what the half held, and not from another half of the same input, as
    where attention reads the layer below."""
    mine = extent_of(found.values[write.region])

    def apart(node: fx.Node) -> bool:
        view = node is not root and found.root_of(node) is root
        return view and not extent_of(found.values[node]).overlaps(mine)

    return write.value is not None and _is_computed_from(write.value, root, apart)


def _is_computed_from(value: fx.Node, root: fx.Node, left_out: Callable[[fx.Node], bool] = lambda _: False) -> bool:
    """Whether there is arithmetic on a path from ``root`` to ``value``."""
    above = [n for n in ancestors(value) if not left_out(n)]
    reached, grown = {root}, True
    while grown:
        fresh = {n for n in above if n not in reached and any(i in reached for i in n.all_input_nodes)}
        grown = bool(fresh)
        reached |= fresh
    return any(n.op != "placeholder" and _ARITHMETIC.fullmatch(function_name(n)) for n in reached)


def rolled_axis(value: fx.Node, ndim: int) -> int | None:
    """The axis of the nearest ``roll`` or ``cat`` that ``value`` comes from."""
    frontier = [value]
    for _ in range(6):
        for node in frontier:
            name = function_name(node)
            if node.op in ("call_function", "call_method") and name in ("roll", "cat", "concat"):
                place = 2 if name == "roll" else 1
                axis = node.args[place] if len(node.args) > place else node.kwargs.get("dims", node.kwargs.get("dim"))
                axis = axis[0] if isinstance(axis, tuple | list) and axis else axis
                return axis % ndim if isinstance(axis, int) else None
        frontier = [n for node in frontier for n in node.all_input_nodes if n.op != "placeholder"]
    return None


#: Where ops that move or update the slots of a whole cache have their axis among the arguments.
_AXIS_PLACES = {
    **dict.fromkeys(("roll", "slice_scatter", "select_scatter"), 2),
    **dict.fromkeys(("cat", "concat", "index_copy", "scatter", "index_add"), 1),
}


def updated_axis(value: fx.Node, whole: torch.Tensor) -> int | None:
    """The axis of the nearest op that moves or updates what ``value`` comes from, all of a half like ``whole``."""
    frontier = [value]
    for _ in range(6):
        for node in frontier:
            place, made = _AXIS_PLACES.get(function_name(node)), node.meta.get("example_value")
            if place is None or not isinstance(made, torch.Tensor) or str(made.shape) != str(whole.shape):
                continue
            default = None if function_name(node) == "roll" else 0
            axis = node.kwargs.get("dims", node.kwargs.get("dim", default))
            axis = node.args[place] if len(node.args) > place else axis
            axis = axis[0] if isinstance(axis, tuple | list) and axis else axis
            return axis % whole.dim() if isinstance(axis, int) else None
        frontier = [n for node in frontier for n in node.all_input_nodes if n.op != "placeholder"]
    return None


def ancestors(node: fx.Node) -> Iterator[fx.Node]:
    """Every node that ``node`` is computed from, itself first."""
    seen, stack = {node}, [node]
    while stack:
        current = stack.pop()
        yield current
        fresh = [n for n in current.all_input_nodes if n not in seen]
        seen.update(fresh)
        stack.extend(fresh)

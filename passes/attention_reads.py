"""How a graph's attention reads a cache: which axis counts tokens, which one sequences, and whether it is K or V.

A name or a shape may mislead: ``[B, S, H, D]`` looks like ``[B, H, S, D]``, and a cache of two sequences like K and V
in one tensor.  Attention's use of a cache decides: the scores of K are normalised along its tokens, and V is summed
along its tokens with those weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx

from ..kernels.writes.layout import POOL_DTYPES
from .accesses import Accesses
from .axis_flow import NO_AXIS, Axis, Source, argument, dims_of, follow, index, passes_on
from .names import function_name
from .states import ancestors


@dataclasses.dataclass(frozen=True)
class Read:
    """One attention reading one input as K or as V.

    Attributes:
        source: the input, and which part of it.
        half: what it is read as.
        tokens: the axes of the input that count tokens: one, or two that were merged (pages and their slots).
        rows: the axes of the input that count sequences; None where the attention does not show it.
        attention: the node that stands for the attention: its softmax, or all of it.
    """

    source: Source
    half: Literal["K", "V"]
    tokens: Axis
    rows: Axis | None
    attention: fx.Node


@dataclasses.dataclass(frozen=True)
class SlotAxes:
    """The axes of a view that count slots: of sequences, if the view has one before its tokens', and of tokens."""

    axes: tuple[int, ...]
    paged: bool


class AttentionReads:
    """What the attention in one graph reads of the graph's inputs."""

    def __init__(self, found: Accesses, updated: Mapping[fx.Node, fx.Node] | None = None):
        """
        Args:
            updated: values that are an input with some slots written, in whatever way, each with the input.
        """
        self.reads: list[Read] = []
        self._values = found.values
        self._sources: dict[fx.Node, list[Source]] = {}
        self._weights: dict[fx.Node, fx.Node] = {}  # probabilities -> the softmax that made them
        for node, value in found.values.items():
            if node.op == "placeholder":
                self._sources[node] = _input(node, value)
            elif updated is not None and node in updated:
                self._sources[node] = self._sources.get(updated[node], [])
            elif node.op.startswith("call"):
                self._visit(node)

    def source_of(self, node: fx.Node, constant: Sequence[Any] = ()) -> Source | None:
        """The part of an input that ``node[constant]`` is; None if its axes cannot be followed."""
        sources = self._sources.get(node, [])
        if len(sources) != 1:
            return None
        return index(sources[0], constant, self._values) if constant else sources[0]

    def holds(self, node: fx.Node, whole: fx.Node) -> bool:
        """Whether a value is made of an input without attention in between."""
        return any(s.input is whole for s in self._sources.get(node, ()))

    def stays_in(self, node: fx.Node, part: Source, axes: Sequence[int]) -> bool:
        """Whether a value is made of the input of ``part``, with the indices along its ``axes`` as they were."""
        own = NO_AXIS.union(*(part.axes[a] for a in axes))
        return any(s.input is part.input and not s.moved & own for s in self._sources.get(node, ()))

    def of(self, part: Source | None) -> list[Read]:
        """The reads that involve a part of an input."""
        return [] if part is None else [r for r in self.reads if part.may_share(r.source)]

    def half_of(self, part: Source | None) -> str | None:
        """``"K"``, ``"V"`` or ``"KV"``, what attention reads it as; None if no attention does."""
        return "".join(sorted({r.half for r in self.of(part)})) or None

    def slot_axes(self, part: Source | None) -> SlotAxes | None:
        """The slot axes of a part of an input, in its own axes; None if its reads do not show them, or not the same."""
        reads = self.of(part)
        tokens, rows = {r.tokens for r in reads}, {r.rows for r in reads if r.rows}
        if part is None or len(tokens) != 1 or len(rows) > 1:
            return None
        (counted,) = tokens
        places = [i for i, own in enumerate(part.axes) if own and own <= counted]
        if NO_AXIS.union(*(part.axes[i] for i in places)) != counted or places[-1] == len(part.axes) - 1:
            return None
        if len(places) > 1:
            return SlotAxes(tuple(places), paged=True) if places == [places[0], places[0] + 1] else None
        row = next((i for i, own in enumerate(part.axes) if own in rows), 0 if len(part.axes) >= 3 else places[0])
        return SlotAxes((row, *places) if row < places[0] else tuple(places), paged=False)

    def is_row_axis(self, part: Source | None, axis: int) -> bool:
        """Whether an axis of a part counts sequences, though the graph picks them one by one with constants.

        An axis of heads does not: a write to one head is not a write of a slot, so its operand could not be checked,
        and other changes of the slot would count as written.
        """
        if part is None or len(part.axes[axis]) != 1:
            return False
        (own,) = part.axes[axis]
        reads = self.of(part)
        if any(r.rows == frozenset([own]) for r in reads):
            return True
        picked = [r for r in reads if own in r.source.picked]
        if not picked or len(picked) != len(reads) or len({r.half for r in reads}) != 1 or any(r.rows for r in reads):
            return False
        only = self._values[part.input].shape[own] == 1 and not any(r.tokens & r.source.moved for r in picked)
        several = only or len({r.source.picked[own] for r in picked}) > 1  # slots picked by a table have no rows
        return several and not any(_follows(a, b, own) for a in picked for b in picked)

    def is_token_axis(self, part: Source | None, axis: int) -> bool:
        """Whether all attention that reads a part sums along an axis of it."""
        reads = self.of(part)
        own = NO_AXIS if part is None else part.axes[axis]
        return bool(reads) and bool(own) and all(own <= r.tokens for r in reads)

    def is_kv_axis(self, part: Source | None, axis: int) -> bool | None:
        """Whether an axis holds K and V; None if no read of the part shows it."""
        reads = self.of(part)
        if part is None or not reads or len(part.axes[axis]) != 1:
            return None
        (own,) = part.axes[axis]
        halves: dict[Any, set[str]] = {}
        for read in reads:
            halves.setdefault(read.source.picked.get(own), set()).add(read.half)
        return halves in ({0: {"K"}, 1: {"V"}}, {0: {"V"}, 1: {"K"}})

    def _visit(self, node: fx.Node) -> None:
        name = function_name(node)
        if name in _FUSED:
            self._fused(node)
        elif name in _SOFTMAX:
            self._softmax(node)
        elif name in _PRODUCTS:
            self._product(node)
        elif name == "einsum":
            self._einsum(node)
        else:
            self._move(node)

    def _move(self, node: fx.Node) -> None:
        operands = node.all_input_nodes
        weights = next((self._weights[o] for o in operands if o in self._weights), None)
        sources: dict[fx.Node, Source] = {}
        for operand in operands:
            for source in self._sources.get(operand, ()):
                made = follow(node, operand, source, self._values)
                if made is not None and source.input not in sources:
                    if function_name(node) in ("sum",) and source.weights is not None:
                        self._summed(source, made)
                    made = made if weights is None else dataclasses.replace(made, weights=weights)
                    sources[source.input] = made
        if sources:
            self._sources[node] = list(sources.values())
        elif weights is not None and passes_on(node):
            self._weights[node] = weights

    def _summed(self, before: Source, after: Source) -> None:
        """``(probabilities * V).sum(tokens)``."""
        gone = NO_AXIS.union(*before.axes) - NO_AXIS.union(*after.axes)
        if gone and before.weights is not None:
            self._note(before, "V", gone, before.weights)

    def _softmax(self, node: fx.Node) -> None:
        self._weights[node] = node
        scores = node.all_input_nodes[0]
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        for source in self._sources.get(scores, ()):
            if isinstance(dim, int) and -len(source.axes) <= dim < len(source.axes) and source.axes[dim]:
                self._note(source, "K", source.axes[dim], node)

    def _fused(self, node: fx.Node) -> None:
        operands = [argument(node, 1, "key"), argument(node, 2, "value")]
        for half, operand in zip("KV", operands, strict=True):
            for source in self._sources.get(operand, ()) if isinstance(operand, fx.Node) else ():
                if len(source.axes) >= 2 and source.axes[-2]:
                    self._note(source, "K" if half == "K" else "V", source.axes[-2], node)

    def _product(self, node: fx.Node) -> None:
        """A matrix product: of queries and K, or of probabilities and V."""
        operands = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, fx.Node)][:2]
        if len(operands) != 2:
            return
        dims = dims_of(self._values.get(node))
        made = []
        for operand, other, (summed, left) in zip(operands, reversed(operands), ((-1, -2), (-2, -1)), strict=True):
            for source in self._sources.get(operand, ()):
                if len(source.axes) < 2:
                    continue
                if other in self._weights:
                    if source.axes[summed]:
                        self._note(source, "V", source.axes[summed], self._weights[other])
                    continue
                pair = (source.axes[left], NO_AXIS) if left == -2 else (NO_AXIS, source.axes[left])
                batch = (NO_AXIS,) * (dims - len(source.axes)) + source.axes[:-2]
                if len(batch) == dims - 2:
                    made.append(source.along(*batch, *pair))
        self._sources[node] = made

    def _einsum(self, node: fx.Node) -> None:
        letters = _letters(node)
        operands = node.args[1:]
        if letters is None or len(operands) != 2:
            return
        made = []
        for own, operand, other, rest in zip(letters[:2], operands, reversed(operands), letters[1::-1], strict=True):
            if not isinstance(operand, fx.Node) or not isinstance(other, fx.Node):
                continue
            for source in self._sources.get(operand, ()):
                if len(source.axes) != len(own):
                    continue
                along = dict(zip(own, source.axes, strict=True))
                summed = [along[c] for c in own if c not in letters[2] and c in rest]
                if other in self._weights:
                    if len(summed) == 1 and summed[0]:
                        self._note(source, "V", summed[0], self._weights[other])
                    continue
                made.append(source.along(*(along.get(c, NO_AXIS) for c in letters[2])))
        self._sources[node] = made

    def _note(self, source: Source, half: Literal["K", "V"], tokens: Axis, attention: fx.Node) -> None:
        rows = source.axes[0] if len(source.axes) >= 4 and not source.axes[0] & tokens else None
        self.reads.append(Read(source, half, tokens, rows, attention))


def _follows(later: Read, earlier: Read, axis: int) -> bool:
    """Whether one attention is computed from another that reads another index of ``axis``: a later layer."""
    if later.source.picked[axis] == earlier.source.picked[axis]:
        return False
    return earlier.attention in ancestors(later.attention)


_FUSED = ("scaled_dot_product_attention", "flex_attention")
_SOFTMAX = ("softmax", "_softmax", "_safe_softmax")
_PRODUCTS = ("matmul", "bmm", "__matmul__")


def _input(node: fx.Node, value: Any) -> list[Source]:
    if not isinstance(value, torch.Tensor) or value.dtype not in POOL_DTYPES or value.dim() < 2:
        return []
    return [Source(node, tuple(frozenset([axis]) for axis in range(value.dim())))]


def _letters(node: fx.Node) -> list[str] | None:
    """The letters of an einsum: of both operands, and of the result."""
    equation = node.args[0]
    if not isinstance(equation, str) or "..." in equation or "->" not in equation:
        return None
    parts = equation.replace(" ", "").replace("->", ",").split(",")
    return parts if len(parts) == 3 else None

"""What a half is called in reports: the input that holds it, and the constant index that picks it there.

``kv[1, 0]``, ``kv.select(0, 1).narrow(0, 0, 1)`` and ``kv.unbind(0)[1].chunk(2)[0]`` are the same place, and have one
name: ``kv[1][0]``.
"""

from __future__ import annotations

import dataclasses
import re

from torch import fx

from .accesses import Accesses
from .attention_reads import AttentionReads
from .names import source_name

#: One index of an axis, or a range of them.
Part = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class PoolName:
    """A part of an input.

    Attributes:
        input: the expression in the user's code.
        parts: for each axis of the input ``(start, stop)``, or None for all of it, or where that is not known.
    """

    input: str = ""
    parts: tuple[Part | None, ...] = ()

    def __str__(self) -> str:
        shown = [_shown(part) for part in self.parts]
        while shown and shown[-1] == ":":
            shown.pop()
        if all(":" not in one for one in shown):
            return self.input + "".join(f"[{one}]" for one in shown)
        if len(shown) == len(self.parts) > 2 and set(shown[:-1]) == {":"}:
            return f"{self.input}[..., {shown[-1]}]"
        return f"{self.input}[{', '.join(shown)}]"

    def common(self, other: PoolName) -> PoolName:
        """What two parts of one input are parts of."""
        pairs = zip(self.parts, other.parts, strict=False)
        return PoolName(self.input, tuple(mine if mine == theirs else None for mine, theirs in pairs))

    def holds(self, other: PoolName) -> bool:
        """Whether another part lies in this one, or in part."""
        pairs = zip(self.parts, other.parts, strict=False)
        apart = (mine is not None and theirs is not None and not _overlap(mine, theirs) for mine, theirs in pairs)
        return self.input == other.input and not any(apart)

    @property
    def order(self) -> tuple[tuple[int, str | int], ...]:
        """Sorts names as people do: ``layers[2]`` before ``layers[10]``."""
        pieces = re.split(r"(\d+)", str(self))
        return tuple((1, int(piece)) if piece.isdigit() else (0, piece) for piece in pieces)


def _shown(part: Part | None) -> str:
    if part is None:
        return ":"
    start, stop = part
    return str(start) if stop == start + 1 else f"{start}:{stop}"


def _overlap(a: Part, b: Part) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def pool_name(
    root: fx.Node, node: fx.Node, index: tuple[object, ...], found: Accesses, reads: AttentionReads
) -> PoolName:
    """What ``node[index]`` is called, a view in the storage of the input ``root``."""
    source = reads.source_of(node, index)
    while source is None and node.op != "placeholder" and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]  # a view with unknown axes, such as as_strided: use its base
        source = reads.source_of(node)
    given = root if source is None else source.input  # several inputs may share a storage
    chosen = {axis: (start, stop) for axis, start, stop in source.ranges} if source is not None else {}
    return PoolName(source_name(given), tuple(chosen.get(axis) for axis in range(found.values[given].dim())))

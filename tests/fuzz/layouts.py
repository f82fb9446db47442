"""Where K and V of a token lie in memory: families of one half, and packings of halves and layers into tensors.

A *half* is the K or the V of one layer.  Its family says which axes number sequences and tokens, its packing how the
halves share the tensors that a program allocates.  A *cell* is one token of one sequence in one half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

PAGE = 4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large a program's caches are: ``length`` tokens of ``batch`` sequences in ``layers`` layers."""

    layers: int
    batch: int
    heads: int
    length: int
    dim: int

    @property
    def pages(self) -> int:
        """Pages of a pool: two more than the cells need."""
        return -(-self.batch * self.length // PAGE) + 2

    @property
    def slots(self) -> int:
        return self.pages * PAGE


@dataclasses.dataclass(frozen=True)
class Family:
    """The axes of one half.

    Attributes:
        shape: of a half with rows of ``d`` elements a head.
        place: code: K of new tokens, ``{}`` of ``[B, H, T, D]``, as the half has it (a pool: ``[B * T, ...]``).
        read: code: the half ``{}`` as ``[B, H, S, D]``; of a pool, as ``[slots, H, D]``.
        axis: numbers tokens; in a pool slots, or pages.
        batch: numbers sequences; None in a pool, whose slots a table gives to the sequences.
        within: numbers the slots in a page.
    """

    name: str
    shape: Callable[[Sizes, int], tuple[int, ...]]
    place: str
    read: str
    axis: int
    batch: int | None = None
    within: int | None = None

    @property
    def pool(self) -> bool:
        return self.batch is None


_TOKENS = "{}.transpose(1, 2).flatten(0, 1)"

_ALL = (
    Family("bhsd", lambda z, d: (z.batch, z.heads, z.length, d), "{}", "{}", 2, 0),
    Family("bshd", lambda z, d: (z.batch, z.length, z.heads, d), "{}.transpose(1, 2)", "{}.transpose(1, 2)", 1, 0),
    Family(
        "sbhd", lambda z, d: (z.length, z.batch, z.heads, d), "{}.permute(2, 0, 1, 3)", "{}.permute(1, 2, 0, 3)", 0, 1
    ),
    Family(
        "bsf",
        lambda z, d: (z.batch, z.length, z.heads * d),
        "{}.transpose(1, 2).flatten(2)",
        "{}.unflatten(2, (HEADS, -1)).transpose(1, 2)",
        1,
        0,
    ),
    Family("flat", lambda z, d: (z.slots, z.heads, d), _TOKENS, "{}", 0),
    Family("flatf", lambda z, d: (z.slots, z.heads * d), _TOKENS + ".flatten(1)", "{}.unflatten(1, (HEADS, -1))", 0),
    Family("paged", lambda z, d: (z.pages, PAGE, z.heads, d), _TOKENS, "{}.flatten(0, 1)", 0, None, 1),
    Family("hnd", lambda z, d: (z.pages, z.heads, PAGE, d), _TOKENS, "{}.transpose(1, 2).flatten(0, 1)", 0, None, 2),
)
FAMILIES = {family.name: family for family in _ALL}

#: How halves share tensors: a tensor each; K and V in one, on an axis of their own in front, behind the first, or side
#: by side in a row; or all layers in one tensor.
PACKINGS = ("pair", "kv0", "kv1", "joint", "layers", "layers_kv", "kv_layers")
OF_ALL_LAYERS = ("layers", "layers_kv", "kv_layers")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A family in a packing.

    Attributes:
        latent: MLA: one head, the second half holds the rope part, of half the size.
    """

    family: str
    packing: str
    latent: bool = False

    def __str__(self) -> str:
        return f"{'mla ' * self.latent}{self.family}/{self.packing}"

    @property
    def of(self) -> Family:
        return FAMILIES[self.family]

    def half_dim(self, sizes: Sizes, half: int) -> int:
        return sizes.dim // 2 if self.latent and half else sizes.dim

    def allocate(self, sizes: Sizes, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """New tensors: a list for each layer, or one for all."""
        shapes = [self.of.shape(sizes, self.half_dim(sizes, half)) for half in range(2)]
        shape, n = shapes[0], sizes.layers
        made = {
            "pair": [shapes] * n,
            "kv0": [[(2, *shape)]] * n,
            "kv1": [[(shape[0], 2, *shape[1:])]] * n,
            "joint": [[(*shape[:-1], 2 * shape[-1])]] * n,
            "layers": [[(n, *s) for s in shapes]],
            "layers_kv": [[(n, 2, *shape)]],
            "kv_layers": [[(2, n, *shape)]],
        }[self.packing]
        return [[torch.zeros(s).to(dtype) for s in one] for one in made]

    def half(self, tensors: Sequence[Sequence[torch.Tensor]], layer: int, half: int) -> torch.Tensor:
        """The view of one half."""
        mine = tensors[0 if self.packing in OF_ALL_LAYERS else layer]
        if self.packing == "pair":
            return mine[half]
        if self.packing == "kv0":
            return mine[0][half]
        if self.packing == "kv1":
            return mine[0][:, half]
        if self.packing == "joint":
            return mine[0].chunk(2, -1)[half]
        if self.packing == "layers":
            return mine[half][layer]
        return mine[0][layer, half] if self.packing == "layers_kv" else mine[0][half, layer]

    def cells(self, half: torch.Tensor, table: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """The bytes of a half by cell: uint8 ``[B, S, n]``, a copy."""
        seen = eval(self.of.read.format("half"), {"half": half, "HEADS": sizes.heads})
        if self.of.pool:
            seen = seen[table].transpose(1, 2)
        return seen.transpose(1, 2).flatten(2).contiguous().view(torch.uint8)

    def cell(self, half: torch.Tensor, table: torch.Tensor, sizes: Sizes, row: int, position: int) -> torch.Tensor:
        """One cell, as a view ``[H, D]`` (``[H * D]`` where the family has no heads)."""
        of = self.of
        if not of.pool:
            assert of.batch is not None
            first, second = sorted(((of.batch, row), (of.axis, position)))
            return half.select(second[0], second[1]).select(first[0], first[1])
        slot = int(table[row, position])
        if of.within is None:
            return half[slot]
        return half[slot // PAGE].select(of.within - 1, slot % PAGE)

    def slot_numbers(self, table: torch.Tensor, sizes: Sizes, row: int, position: int, rows: bool) -> set[int]:
        """The slot numbers that a report may give to a cell."""
        if self.of.pool:
            return {int(table[row, position])}
        if not rows:  # a position of all sequences, or one of each
            return {position, position * sizes.batch + row, row * sizes.length + position}
        return {row * sizes.length + position}

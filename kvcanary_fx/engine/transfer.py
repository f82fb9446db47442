"""The shadow of slots on the move: it travels with their bytes, and proves at the other end that they arrived."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import EngineError
from ..kernels.slots.chain import mix_tensor
from ..kernels.slots.space import MARKS, SlotSpace

#: Types of pools that hold any bytes, whatever those are at the other end.
_RAW = (torch.uint8, torch.int8)


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor of a pool, as far as the digests of its rows depend on it.

    Attributes:
        layer, half: their names in reports.
        seeds: what the digests of its rows start from, from the number of the layer and the place in it.
        row_bytes: bytes of a slot.
        dtype: of the pool.
    """

    layer: str
    half: str
    seeds: tuple[int, int]
    row_bytes: int
    dtype: torch.dtype

    def holds(self, other: Part) -> bool:
        """Whether the bytes of a row of ``other`` are those of a row of this one."""
        same = self.dtype == other.dtype or self.dtype in _RAW or other.dtype in _RAW
        return same and self.row_bytes == other.row_bytes

    def __str__(self) -> str:
        return f"{self.half} of {self.layer} ({self.row_bytes} bytes of {str(self.dtype).removeprefix('torch.')})"


@dataclasses.dataclass(frozen=True)
class ShadowSlice:
    """Identity and content digests of n slots, in order.

    Attributes:
        tokens, positions: int32 ``[n]``.
        chain: int64 ``[n]``.
        marks: int32 ``[n]``, which slots hold a token, and which of those nobody named, or was rejected.
        digests: int32 ``[tensors, planes, n]``; 0 where nothing was recorded.
        parts: what each of the tensors is.
        exact: the bytes at the other end are to be the same ones; False: they are taken as they are.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    chain: torch.Tensor
    marks: torch.Tensor
    digests: torch.Tensor
    parts: tuple[Part, ...]
    exact: bool = True

    @classmethod
    def take(cls, space: SlotSpace, digests: torch.Tensor, slots: torch.Tensor, parts: tuple[Part, ...]) -> ShadowSlice:
        """A copy of what is known about ``slots`` (int64 ``[n]``); nothing is of those that do not exist."""
        outside = (slots < 0) | (slots >= space.slots)
        at = torch.where(outside, space.nowhere, slots)
        marks = torch.where(outside, 0, space.flags[at] & int(MARKS))
        content = digests[:, :, at.clamp(max=space.slots - 1)].masked_fill(outside, 0)
        return cls(space.tokens[at], space.positions[at], space.chain[at], marks, content, parts)

    def to(self, device: torch.device | str) -> ShadowSlice:
        """The same on another device, such as the host that holds the bytes meanwhile."""
        tensors: dict[str, Any] = {n: t.to(device) for n, t in vars(self).items() if isinstance(t, torch.Tensor)}
        return dataclasses.replace(self, **tensors)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, which: slice | torch.Tensor) -> ShadowSlice:
        """Part of the slots, such as one page."""
        tensors: dict[str, Any] = {n: t[..., which] for n, t in vars(self).items() if isinstance(t, torch.Tensor)}
        return dataclasses.replace(self, **tensors)

    def of_slots(self, known: torch.Tensor) -> ShadowSlice:
        """The same without the digests of slots of which nothing is known, bool ``[n]``."""
        return dataclasses.replace(self, digests=self.digests.masked_fill(~known, 0))

    def of_layers(self, names: Sequence[str]) -> ShadowSlice:
        """The shadow of some layers, such as those that one stage of a pipeline sends.

        Raises:
            EngineError: a layer that the shadow does not have.
        """
        missing = [name for name in names if name not in {part.layer for part in self.parts}]
        if missing:
            raise EngineError(f"the shadow has no layer {missing[0]!r}: it has {sorted({p.layer for p in self.parts})}")
        return self._of([i for i, part in enumerate(self.parts) if part.layer in names])

    def without_bytes(self) -> ShadowSlice:
        """Who is in the slots alone, for a transfer that changes bytes: heads cut for other ranks, another dtype.

        ``import_`` then takes the bytes as they are, and checks them from there on.
        """
        return dataclasses.replace(self, exact=False)

    def fitted(self, slots: int, parts: Sequence[Part], planes: int, pool: str) -> ShadowSlice:
        """The shadow of a pool's tensors, out of one that has those or more.

        Args:
            slots: how many slots it is to be laid over.
            parts: the pool's.
            planes: of the pool's digests.

        Raises:
            EngineError: naming what differs.
        """
        if len(self) != slots:
            raise EngineError(f"the shadow is of {len(self)} slots, and was given {slots} slots of pool {pool!r}")
        if not self.exact:
            return self
        if self.digests.shape[1] != planes:
            raise EngineError(
                f"the shadow has digests of {32 * self.digests.shape[1]} bits, pool {pool!r} of {32 * planes}: both "
                "ends need the same setting digest_bits"
            )
        places = [self._place_of(part, pool) for part in parts]
        return self if places == list(range(len(self.parts))) else self._of(places)

    def _place_of(self, part: Part, pool: str) -> int:
        found = [i for i, theirs in enumerate(self.parts) if theirs.seeds == part.seeds]
        if len(found) != 1:
            raise EngineError(
                f"the shadow has no {part} of pool {pool!r}; it has {', '.join(map(str, self.parts))}. A layer goes by "
                "the number in its name: give both ends layer_names with the layers' numbers in the whole model"
            )
        theirs = self.parts[found[0]]
        if not part.holds(theirs):
            raise EngineError(
                f"the shadow has {theirs}, pool {pool!r} has {part}: the bytes cannot be the same ones. Where the "
                "transfer converts or cuts them, import_(shadow.without_bytes(), slots) takes them as they arrived"
            )
        return found[0]

    def _of(self, places: list[int]) -> ShadowSlice:
        return dataclasses.replace(self, digests=self.digests[places], parts=tuple(self.parts[i] for i in places))

    def identity_digest(self) -> int:
        """64 bits over who is in the slots, in order; the same on every rank that holds the same tokens."""
        place = torch.arange(len(self), device=self.tokens.device)
        mixed = mix_tensor(self.chain + self.tokens.to(torch.int64), self.positions.to(torch.int64) + place)
        return int(mixed.sum())

    def content_digest(self) -> int:
        """64 bits over the bytes of the slots, in order; the same where the same bytes were written."""
        tensors, planes, n = self.digests.shape
        place = torch.arange(tensors * planes * n, device=self.digests.device)
        return int(mix_tensor(self.digests.reshape(-1).to(torch.int64), place).sum())

"""The shadow of slots on the move: it travels with their bytes, and proves at the other end that they arrived."""

from __future__ import annotations

import dataclasses

import torch

from .errors import EngineError
from .kernels.chain import mix_tensor
from .kernels.slot_space import MARKS, SlotSpace


@dataclasses.dataclass(frozen=True)
class ShadowSlice:
    """Identity and content digests of n slots, in order.

    Attributes:
        tokens, positions: int32 ``[n]``.
        chain: int64 ``[n]``.
        marks: int32 ``[n]``, which slots hold a token, and which of those nobody named, or was rejected.
        digests: int32 ``[tensors, planes, n]``; 0 where nothing was recorded.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    chain: torch.Tensor
    marks: torch.Tensor
    digests: torch.Tensor

    @classmethod
    def take(cls, space: SlotSpace, digests: torch.Tensor, slots: torch.Tensor) -> ShadowSlice:
        """A copy of what is known about ``slots`` (int64 ``[n]``); nothing is of those that do not exist."""
        outside = (slots < 0) | (slots >= space.slots)
        at = torch.where(outside, space.nowhere, slots)
        marks = torch.where(outside, 0, space.flags[at] & int(MARKS))
        content = digests[:, :, at.clamp(max=space.slots - 1)].masked_fill(outside, 0)
        return cls(space.tokens[at], space.positions[at], space.chain[at], marks, content)

    def to(self, device: torch.device | str) -> ShadowSlice:
        """The same on another device, such as the host that holds the bytes meanwhile."""
        return ShadowSlice(*(getattr(self, f.name).to(device) for f in dataclasses.fields(self)))

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, which: slice | torch.Tensor) -> ShadowSlice:
        """Part of the slots, such as one page."""
        return ShadowSlice(
            self.tokens[which], self.positions[which], self.chain[which], self.marks[which], self.digests[:, :, which]
        )

    def require(self, slots: int, digests: torch.Tensor, pool: str) -> None:
        """Check that the slice fits into a pool.

        Raises:
            EngineError: naming what differs.
        """
        if len(self) != slots:
            raise EngineError(f"import_ got the shadow of {len(self)} slots and {slots} slots of pool {pool!r}")
        if self.digests.shape[:2] != digests.shape[:2]:
            mine, theirs = list(digests.shape[:2]), list(self.digests.shape[:2])
            raise EngineError(
                f"the shadow has [tensors, digest planes] {theirs}, pool {pool!r} has {mine}: both ends need the same "
                "layers and the same setting digest_bits"
            )

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

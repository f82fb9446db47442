"""Marks the slots of drafted tokens that the target rejected: who reads one before it is rewritten reads no prefix.

Who was rejected is known on the device alone, and the next step is launched before the host hears of it.  So it is not
:meth:`.EnginePool.reject`, whose slots the host names, but one launch for all pools.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....kernels.slots.space import Column, Flag, SlotSpace
from ....kernels.writes.geometry import on_device

#: Drafted tokens of a program.
BLOCK = 256


def naive(
    spaces: Sequence[SlotSpace],
    groups: Sequence[int],
    mapping: torch.Tensor,
    starts: torch.Tensor,
    rejected: torch.Tensor,
) -> None:
    """Plain code, the reference.

    Args:
        groups: the number of each space's KV cache group.
        mapping: int64 ``[all groups, >= n]``, the slots of the batch's tokens.
        starts: integer ``[bs + 1]``, where each request's tokens begin.
        rejected: integer ``[bs]``, how many of its last tokens were rejected.
    """
    ends, counts = starts[1:].tolist(), rejected.tolist()
    rows = [end - 1 - back for end, count in zip(ends, counts, strict=False) for back in range(count)]
    for space, group in zip(spaces, groups, strict=True):
        for slot in mapping[group, rows].tolist():
            if 0 <= slot < space.slots and int(space.flags[slot]) & Flag.WRITTEN:
                space.flags[slot] |= int(Flag.REJECTED)


class Rejected:
    """What a runner with drafts does after each step."""

    def __init__(self, spaces: Sequence[SlotSpace], groups: Sequence[int], mapping: torch.Tensor, drafts: int):
        """
        Args:
            groups: the number of each space's KV cache group.
            mapping: int64 ``[all groups, tokens]``, at an address that never changes.
            drafts: tokens that are drafted for a request, at most.
        """
        self._spaces, self._groups, self._mapping, self._drafts = list(spaces), list(groups), mapping, drafts
        words = [(space.block.data_ptr(), space.slots, g) for space, g in zip(spaces, groups, strict=True)]
        self._words = torch.tensor(words, dtype=torch.int64, device="cpu").to(mapping.device)

    def mark(self, starts: torch.Tensor, rejected: torch.Tensor) -> None:
        """Of a batch, in the current stream; arguments as of :func:`naive`."""
        if self._mapping.is_cuda:
            self.launch(starts, rejected)
        else:
            naive(self._spaces, self._groups, self._mapping, starts, rejected)

    def launch(self, starts: torch.Tensor, rejected: torch.Tensor) -> None:
        """The Triton kernel."""
        from .triton_rejected import rejected_kernel

        requests = rejected.shape[0]
        with on_device(self._mapping):
            rejected_kernel[(-(-requests * self._drafts // BLOCK),)](
                starts,
                rejected,
                requests,
                self._mapping,
                self._mapping.stride(0),
                self._words,
                DRAFTS=self._drafts,
                GROUPS=len(self._groups),
                COLUMNS=self._spaces[0].block.shape[1],
                FLAGS=int(Column.FLAGS),
                WRITTEN=int(Flag.WRITTEN),
                REJECTED=int(Flag.REJECTED),
                BLOCK=BLOCK,
            )

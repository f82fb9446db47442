"""Marks the slots of drafted tokens that the target rejected: who reads one before it is rewritten reads no prefix.

Who was rejected is known on the device alone, and the next step is launched before the host hears of it.  So it is not
:meth:`.EnginePool.reject`, whose slots the host names, but one launch for all pools.  The layers of a draft have no
digests for these slots: guesses are written there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ....kernels.compile_ahead import launch_or_compile
from ....kernels.slots.space import Column, Flag, SlotSpace
from ....kernels.writes.geometry import on_device

#: Drafted tokens of a program.
BLOCK = 256


class Marked(NamedTuple):
    """One pool.

    Attributes:
        slots: int64 ``[>= n]``, of the batch's tokens, at an address that never changes.
        digests: int32 ``[slots]`` each, those of the layers of a draft.
    """

    space: SlotSpace
    slots: torch.Tensor
    digests: list[torch.Tensor]


def naive(pools: Sequence[Marked], starts: torch.Tensor, rejected: torch.Tensor) -> None:
    """Plain code, the reference.

    Args:
        starts: integer ``[> bs]``, where each request's tokens begin.
        rejected: integer ``[bs]``, how many of its last tokens were rejected.
    """
    ends, counts = starts[1:].tolist(), rejected.tolist()
    rows = [end - 1 - back for end, count in zip(ends, counts, strict=False) for back in range(count)]
    for space, slots, digests in pools:
        for slot in slots[rows].tolist():
            if 0 <= slot < space.slots and int(space.flags[slot]) & Flag.WRITTEN:
                space.flags[slot] |= int(Flag.REJECTED)
                for digest in digests:
                    digest[slot] = 0


class Rejected:
    """What a runner with drafts does after each step."""

    def __init__(self, pools: Sequence[Marked], drafts: int):
        """
        Args:
            drafts: tokens that are drafted for a request, at most.
        """
        self._pools, self._drafts = list(pools), drafts
        self._most = max((len(pool.digests) for pool in pools), default=0)
        words: list[int] = []
        for space, slots, digests in pools:
            rows = [digest.data_ptr() for digest in digests]
            words += [space.block.data_ptr(), space.slots, slots.data_ptr(), len(rows)]
            words += rows + [0] * (self._most - len(rows))
        self._words = torch.tensor(words, dtype=torch.int64, device="cpu").to(pools[0].slots.device)

    def mark(self, starts: torch.Tensor, rejected: torch.Tensor) -> None:
        """Of a batch, in the current stream; arguments as of :func:`naive`."""
        if self._words.is_cuda:
            self.launch(starts, rejected)
        else:
            naive(self._pools, starts, rejected)

    def launch(self, starts: torch.Tensor, rejected: torch.Tensor) -> None:
        """The Triton kernel."""
        from .triton_rejected import rejected_kernel

        requests = rejected.shape[0]
        with on_device(self._words):
            launch_or_compile(
                rejected_kernel,
                (-(-requests * self._drafts // BLOCK),),
                starts,
                rejected,
                requests,
                self._words,
                self._most,
                DRAFTS=self._drafts,
                POOLS=len(self._pools),
                COLUMNS=self._pools[0].space.block.shape[1],
                FLAGS=int(Column.FLAGS),
                WRITTEN=int(Flag.WRITTEN),
                REJECTED=int(Flag.REJECTED),
                BLOCK=BLOCK,
            )

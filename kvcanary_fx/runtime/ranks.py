"""What the ranks of one model tell each other about the budget: a word for each of them, in memory shared on a host.

Ranks of tensor parallelism wait for each other in each layer, so a step takes as long as its slowest rank does, and
what a faster one would save by comparing less is lost.  A collective would agree on one share, but it waits.  Here each
rank writes the N that it needs into a file in memory, and takes the largest that it finds there.

The ranks agree on the name of the file through the store of ``torch.distributed``: one round trip in a process's life.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import weakref
from pathlib import Path

import torch.distributed as dist

from ..reports.summary import log
from .shared_file import agreed_name, open_shared, path_of

#: Bytes of a rank's word: its budget in millionths in the upper half, the N that it needs in the lower one, or
#: 0 there if it is not known yet.  A rank that is not there has 0 in both.  One word, so that no reader sees a half.
WORD = 8

_KEY = "kvcanary/budget"
_numbers = itertools.count()


def next_number() -> int:
    """The number of a session with a budget, in this process; those of one number belong together in all ranks."""
    return next(_numbers)


class Ranks:
    """The words of all ranks of this host, for one session.

    Attributes:
        largest: N that another rank needs; 1 if none has said so.
        slowest: the number of that rank.
    """

    def __init__(self, path: Path, rank: int, world: int):
        """
        Args:
            path: of the file; made by the first rank that comes.

        Raises:
            OSError: the file can be neither made nor opened.
        """
        self._rank = rank
        self._memory = open_shared(path, world * WORD)
        self._seen = bytes(world * WORD)
        self._budget = 0
        self.largest, self.slowest = 1, rank
        weakref.finalize(self, _leave, self._memory, rank, path, os.getpid())

    def tell(self, budget: float, every: int) -> None:
        """This rank needs N = ``every`` to keep to a budget; 0 if that is not known.  Looks at the others as well."""
        self._budget = round(budget * 1e6)
        _write(self._memory, self._rank, self._budget << 32 | every)
        self._look()

    def news(self) -> bool:
        """Whether another rank has written since :meth:`tell` or :meth:`changed`; 0.2 us."""
        return self._memory[:] != self._seen

    def changed(self) -> bool:
        """As :meth:`news`, which is told in :attr:`largest` from here on."""
        if not self.news():
            return False
        self._look()
        return True

    def _look(self) -> None:
        self._seen = self._memory[:]
        self.largest, self.slowest = 1, self._rank
        for rank, word in enumerate(memoryview(self._seen).cast("Q")):
            budget, every = word >> 32, word & 0xFFFFFFFF
            if rank != self._rank and budget == self._budget and every > self.largest:
                self.largest, self.slowest = every, rank


def join(number: int) -> Ranks | None:
    """The other ranks of a session; None if there are none, or they cannot be reached.

    Args:
        number: of the session, from :func:`next_number`.
    """
    world = dist.get_world_size()
    if world < 2:
        return None
    try:
        return Ranks(path_of(f"{agreed_name(_KEY)}-{number}"), dist.get_rank(), world)
    except (RuntimeError, OSError, ValueError, AttributeError) as e:
        log.info("kvcanary.budget each rank keeps to it by itself: %s", e)
        return None


def _write(memory: mmap.mmap, rank: int, word: int) -> None:
    with memoryview(memory) as whole, whole.cast("Q") as words:
        words[rank] = word


def _leave(memory: mmap.mmap, rank: int, path: Path, process: int) -> None:
    """A rank ends: it holds up nobody any more; the last one removes the file."""
    if os.getpid() != process:  # a fork of it
        return
    _write(memory, rank, 0)
    if not any(memory[:]):
        with contextlib.suppress(OSError):
            path.unlink()

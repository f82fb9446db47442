"""What the ranks of an engine find, told to the one whose outputs reach the scheduler.

vLLM takes the output of one rank, the first of the last pipeline stage, and drops the others': a verdict that travels
with one of these is lost.  Seen: damage in the second rank's part of a block was logged there, and the request went on
with it.  So such a rank writes its verdict into a file in memory, which the first one reads where it attaches its own.

Ranks on other hosts share no memory: what they find is logged there, and the guard says so when it is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...runtime.shared_file import agreed_name, open_shared, path_of
from .verdict import Verdict

log = logging.getLogger("kvcanary")

#: Two words for each rank: the number of its last verdict, and of its last one that was read.
_WORDS, _WORD = 2, 8

#: Bytes for the length and the text of a rank's verdict; memory that nobody writes to takes none.
ROOM = 1 << 20


class RankVerdicts:
    """The verdicts of the ranks of one engine on one host.

    Attributes:
        reads: this is the rank whose outputs are read.
    """

    def __init__(self, path: Path, rank: int, world: int, reads: bool):
        """
        Args:
            path: of the file; made by the first rank that comes.

        Raises:
            OSError: it can be neither made nor opened.
        """
        self.reads = reads
        self._path, self._rank, self._world = path, rank, world
        self._heads = world * _WORDS * _WORD
        self._memory = open_shared(path, self._heads + world * ROOM)
        self._seen = self._memory[: self._heads]
        self._pending: Verdict | None = None  # told, and not known to be read
        weakref.finalize(self, _remove, path, os.getpid())

    def remove(self) -> None:
        """Remove the file: this process is about to end, and others have theirs open."""
        _remove(self._path, os.getpid())

    def tell(self, verdict: Verdict) -> None:
        """Another rank is to read this verdict, and those that it has not read yet."""
        number, read = _head(self._memory, self._rank)
        if self._pending is not None and read != number:
            verdict = self._pending.joined(verdict)
        self._pending = verdict
        text = verdict.as_json()
        if len(text) > ROOM - _WORD:  # then all requests are concerned
            text = dataclasses.replace(verdict, damaged={}, doubtful={}, everyone=True).as_json()
        at = self._heads + self._rank * ROOM
        self._memory[at + _WORD : at + _WORD + len(text)] = text
        self._memory[at : at + _WORD] = len(text).to_bytes(_WORD, "little")
        _write(self._memory, self._rank, 0, number + 1)  # last: the reader looks at this

    def news(self) -> bool:
        """Whether another rank has told something since the last :meth:`read`; 0.2 us."""
        return self._memory[: self._heads] != self._seen

    def read(self) -> Verdict | None:
        """What the other ranks have told since the last call, as one."""
        found: Verdict | None = None
        heads = bytearray(self._memory[: self._heads])  # what is told from here on is news
        for rank in range(self._world):
            number, read = _head(heads, rank)
            if rank == self._rank or number == read:
                continue
            at = self._heads + rank * ROOM
            length = int.from_bytes(self._memory[at : at + _WORD], "little")
            with contextlib.suppress(ValueError):  # it is being written again: the next call reads it
                told = Verdict.from_json(self._memory[at + _WORD : at + _WORD + length])
                found = told if found is None else found.joined(told)
                for words in (self._memory, heads):
                    _write(words, rank, 1, number)
        self._seen = bytes(heads)
        return found


def _head(heads: mmap.mmap | bytearray, rank: int) -> tuple[int, int]:
    at = rank * _WORDS * _WORD
    words = heads[at : at + _WORDS * _WORD]
    return int.from_bytes(words[:_WORD], "little"), int.from_bytes(words[_WORD:], "little")


def _write(heads: mmap.mmap | bytearray, rank: int, place: int, number: int) -> None:
    end = (rank + 1) * _WORDS * _WORD
    with memoryview(heads)[:end] as part, part.cast("Q") as words:
        words[rank * _WORDS + place] = number  # at once, so that no reader sees a half


#: By the name of the file.  They stay as long as the process: others have the file open when a guard is made anew.
_JOINED: dict[str, RankVerdicts] = {}


def join(config: Any) -> RankVerdicts | None:
    """The ranks of this engine; None if there is one, or they cannot be reached, which is logged.

    Args:
        config: vLLM's ``ParallelConfig``.
    """
    if config.world_size < 2:
        return None
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    reads = bool(get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0)
    try:
        if getattr(config, "nnodes", 1) > 1:
            raise OSError("the engine has ranks on several hosts")
        key = f"kvcanary/verdicts/{config.data_parallel_rank}"
        name = agreed_name(key)
        if name not in _JOINED:
            _JOINED[name] = RankVerdicts(path_of(name), dist.get_rank(), dist.get_world_size(), reads)
            joined = dist.distributed_c10d._get_default_store().add(f"{key}/joined", 1)
            if joined == config.world_size:  # vLLM may kill its ranks, which then remove nothing
                _JOINED[name].remove()
        return _JOINED[name]
    except (RuntimeError, OSError, ValueError, AttributeError) as e:
        log.warning("kvcanary.vllm what other ranks than the first find is logged there, and contains nothing: %s", e)
        return None


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # no fork of it
        with contextlib.suppress(OSError):
            path.unlink()

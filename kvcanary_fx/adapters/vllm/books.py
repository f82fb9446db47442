"""Whose each block of vLLM's block pool is, told to the session.

A block counts one reference for each request that has it.  A full block whose requests have all ended stays in vLLM's
prefix cache: it then belongs to the cache, with one reference, until a request takes it up again or it is handed out
anew.  So a block that is freed while a request still reads it is found either way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...engine.guarded_pool import EnginePool
    from ...engine.session import EngineSession

#: Who a block belongs to that no request has and the prefix cache keeps.
CACHE = "the prefix cache of vLLM"


class Books:
    """What the canary knows of the blocks of one block pool, beside the references that its session counts.

    Args:
        sessions: the sessions of the target and of its draft, as far as there are any.

    Attributes:
        group: the group that each block was handed out to.
        idle: blocks that belong to the prefix cache.
    """

    def __init__(self, sessions: Callable[[], Sequence[EngineSession]]):
        self._sessions = sessions
        self.group: dict[int, int] = {}
        self.idle: set[int] = set()
        self._pending: list[tuple[int, str | None]] = []  # taken up since the last forward, by whom
        self._shared_later: list[tuple[int, str | None]] = []

    def apply(self, events: Iterable[tuple[Any, ...]]) -> None:
        """Take in what a scheduler wrote down, in order."""
        for name, run in itertools.groupby(events, lambda event: event[0]):
            calls = [arguments for _, *arguments in run]
            if name == "taken":  # a GPU is told of what was released before it is told who gets it: once for all
                self._evict(block for ids, *_ in calls for block in ids)
            for arguments in calls:
                getattr(self, name)(*arguments)

    def taken(self, ids: Sequence[int], request: str | None, group: int) -> None:
        """Blocks were handed out anew."""
        self._evict(ids)
        self.group.update(dict.fromkeys(ids, group))
        self._each(ids, lambda pool, pages: pool.allocate(**pages, owner=request))

    def _evict(self, ids: Iterable[int]) -> None:
        """The prefix cache lets go of those of the blocks that it has."""
        kept = [block for block in dict.fromkeys(ids) if block in self.idle]
        self._each(kept, lambda pool, pages: pool.release(**pages, owner=CACHE))
        self.idle.difference_update(kept)

    def touched(self, ids: Sequence[int], request: str | None) -> None:
        """A request takes up blocks that it found in the prefix cache; the session is told at the next forward."""
        self._pending += [(block, request) for block in ids]

    def settle(self, in_flight: Sequence[set[int]]) -> None:
        """A forward begins: tell what was taken up.

        Args:
            in_flight: for each group the blocks that the forward writes and another request reads.  Those are shared
                when it has ended: while it runs, nobody may write a shared slot, and all who take part may read.
        """
        pending, self._pending = self._pending, []
        for block, request in pending:
            group = self.group.get(block)
            if group is not None and block in in_flight[group]:
                self._each([block], lambda pool, pages: pool.hand_over(**pages))
                self._shared_later.append((block, request))
            else:
                self._take_up(block, request)

    def after_forward(self) -> None:
        """A forward ended: share what it wrote for several requests."""
        later, self._shared_later = self._shared_later, []
        for block, request in later:
            self._take_up(block, request)

    def _take_up(self, block: int, request: str | None) -> None:
        if block in self.idle:
            self.idle.discard(block)
            self._each([block], lambda pool, pages: pool.hand_over(**pages, owner=request))
        else:
            self._each([block], lambda pool, pages: pool.share(**pages, owner=request))

    def freed(self, given: Sequence[tuple[int, bool]], request: str | None) -> None:
        """A request lets go of blocks.

        Args:
            given: ``(id, whether the prefix cache keeps it as its only owner)``.
        """
        gone = {block for block, _ in given}
        for block, taker in [p for p in self._pending if p[0] in gone]:
            self._take_up(block, taker)
        self._pending = [p for p in self._pending if p[0] not in gone]
        kept = [i for i, keeps in given if keeps]
        self._each(kept, lambda pool, pages: pool.hand_over(**pages, owner=CACHE))
        self.idle.update(block for block in kept if block in self.group)
        left = [i for i, keeps in given if not keeps]
        self._each(left, lambda pool, pages: pool.release(**pages, owner=request))
        self.idle.difference_update(left)

    def filled_elsewhere(self, ids: Sequence[int]) -> None:
        """Blocks will be filled by a KV connector, whose writes are not guarded, in a draft's layers as well."""
        for kind in ("group", "draft"):
            self._each(ids, lambda pool, pages: pool.forget(**pages), kind)

    def _each(
        self, blocks: Iterable[int], tell: Callable[[EnginePool, dict[str, Any]], None], kind: str = "group"
    ) -> None:
        """Tell each guarded group's pool about its blocks, by the arguments that the pool's methods take."""
        by_group: dict[int, list[int]] = {}
        for block in blocks:
            by_group.setdefault(self.group.get(block, -1), []).append(block)
        pools = {name: pool for session in self._sessions() for name, pool in session.pools.items()}
        for group, some in by_group.items():
            pool = pools.get(f"{kind}{group}")
            if pool is not None:
                tell(pool, dict(slots=some, page_size=pool.declared.table_page_size))

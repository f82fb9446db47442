"""Reports to the session who owns each block of vLLM's block pool.

A block has one reference for each request that uses it.  A full block whose requests have all ended stays in vLLM's
prefix cache: it then belongs to the cache, with one reference, until a request takes it up again or it is handed out
to another.  So a block that is freed while a request still reads it is found in both cases.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from ...engine.parked import ParkedShadows
from ...engine.stacks import told, told_now
from ...kernels.slots.events import Event
from .journal import FREED, TAKEN
from .loaded import Arriving, Loads
from .offloaded import Arrived, Offloaded, shadow_of

if TYPE_CHECKING:
    from ...engine.guarded_pool import EnginePool
    from ...engine.session import EngineSession
    from .tables import Ledger

#: Owner of a block that no request uses and that the prefix cache keeps.
CACHE = "the prefix cache of vLLM"

_ALLOCATE, _RELEASE, _HAND_OVER = Event.ALLOCATE, Event.RELEASE, Event.HAND_OVER


class _Taken(NamedTuple):
    """A block that a request took up, and the scheduler's stack."""

    block: int
    request: str | None
    stack: tuple[str, ...]


#: What happened to blocks, as :meth:`.EnginePool.tell_now` takes it.
_Call: TypeAlias = tuple[Event, list[int], str | None]


_NONE: frozenset[int] = frozenset()


class _Some:
    """Events of one group's blocks, for its pool to be told of at once.

    Attributes:
        events: those that happened.
        calls: what the pool is told.
        new: blocks whose group is to be noted.
        evicted: those that the prefix cache gives up; ``kept``, that it gets; ``left``, that are nobody's.
    """

    __slots__ = "calls", "events", "evicted", "kept", "left", "new"  # made in steps that wait for the host

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.calls: list[_Call] = []
        self.new: list[int] = []
        self.evicted = self.kept = self.left = _NONE


class Books:
    """What the canary knows about the blocks of one block pool, besides the references that its session counts.

    Args:
        sessions: the sessions of the target and of its draft, if there are any.

    Attributes:
        group: the KV cache group of each block.
        idle: blocks that belong to the prefix cache.
        loads: what KV connectors are filling.
        offloaded: what they have stored.
    """

    def __init__(self, sessions: Callable[[], Sequence[EngineSession]]):
        self._sessions = sessions
        self.group: dict[int, int] = {}
        self.idle: set[int] = set()
        self.loads, self.offloaded = Loads(), Offloaded()
        self._to_accept: list[Callable[[], None]] = []  # what the running forward is the first to read
        self._groups: set[int] = set()  # all that there were
        self._pool_of: dict[int, tuple[EnginePool, int]] = {}  # by group, of those whose blocks were handed out
        self._seen: list[EngineSession] = []  # whose pools are known
        self._pools: dict[str, tuple[EnginePool, int]] = {}  # by name, with the tokens of a block
        self._pending: list[_Taken] = []  # since the last forward
        self._shared_later: list[_Taken] = []

    @property
    def pending(self) -> bool:
        """Whether requests have taken up blocks since the last forward."""
        return bool(self._pending)

    @property
    def taken_up(self) -> list[tuple[int, str | None]]:
        """These blocks, each with its request."""
        return [(taken.block, taken.request) for taken in self._pending]

    def apply(self, events: Sequence[tuple[Any, ...]], stacks: Sequence[tuple[str, ...]] = ()) -> None:
        """Apply a scheduler's journal, in order.

        Args:
            stacks: the scheduler's of each event; none: they are not kept.
        """
        if not stacks:
            self._apply(events)
            return
        for stack, run in itertools.groupby(zip(events, stacks, strict=True), lambda pair: pair[1]):
            with told(stack):
                self._apply([event for event, _ in run])

    def _apply(self, events: Sequence[tuple[Any, ...]]) -> None:
        for event in events:
            getattr(self, event[0])(*event[1:])

    def taken(self, blocks: Sequence[int], requests: Sequence[str | None], lengths: Sequence[int], group: int) -> None:
        """Blocks were handed out, by calls in a row.

        Args:
            blocks: of all calls, one after the other.
            requests, lengths: of each call, its request and the number of its blocks.
            group: the KV cache group of all.
        """
        self._evict(blocks)  # the releases come before the new owners
        self._note_group(blocks, group)
        known = self._known_pools().get(f"group{group}")
        if known is not None:
            self._pool_of[group] = known
            pool, page_size = known
            of_each = iter(blocks)
            given = [(list(itertools.islice(of_each, n)), r) for r, n in zip(requests, lengths, strict=True)]
            pool.allocate_each(given, page_size, written_in_step=True)

    def tell_now(self, events: Sequence[tuple[Any, ...]], into_step: bool = True) -> Sequence[tuple[Any, ...]]:
        """:meth:`apply`, as long as all that happened is that requests got blocks or gave them up: in a step that waits
        for the host, with few functions and no queue.

        Once its prefix cache is full, each block that a server hands out is one that the cache gives up: while such
        steps were queued and begun anew, what comes before the model took 115 of the 1,770 ms of a run (1B, 256
        requests, H200).  In a hybrid, whose requests get and give up blocks of each group, it was 122 of 1,252.

        Args:
            into_step: as of :meth:`.EnginePool.tell_now`.

        Returns:
            the events with which nothing was done, in their order.
        """
        if len(events) == 1 and events[0][0] == TAKEN and self._tell_taken(events[0], into_step):
            return events[1:]  # as in most of such steps
        left = events
        while left:
            rest = self._tell_some(left, into_step)
            if len(rest) == len(left):
                break
            left = rest
        return left

    def _tell_taken(self, event: tuple[Any, ...], into_step: bool) -> bool:
        """Tell a group's pool at once of blocks that were handed out, where that is all that happened; whether it was
        done.  What :meth:`_tell_some` does, with fewer functions and objects."""
        _, blocks, requests, lengths, group = event
        known = self._pool_of.get(group)
        if known is None:
            return False
        given_up: Sequence[int] = ()
        cached = self.idle.intersection(blocks)
        if cached:
            given_up = blocks if len(cached) == len(blocks) else [block for block in blocks if block in cached]
            if len(cached) < len(given_up) or not self._all_of(given_up, group):
                return False  # handed out twice, or what the cache has of another group
        if not known[0].tell_handed_out(given_up, CACHE, blocks, requests, lengths, known[1], into_step):
            return False
        if cached:
            self.idle -= cached
        if len(cached) < len(blocks):  # else all were of this group already
            self._note_group(blocks, group)
        return True

    def note_handed_out(self, blocks: Sequence[int]) -> None:
        """Blocks of the only group were handed out, and the device hears of it elsewhere.

        Args:
            blocks: all or none of them were the prefix cache's.
        """
        if self.idle.isdisjoint(blocks):
            self.group.update(dict.fromkeys(blocks, *self._groups))
        else:
            self.idle.difference_update(blocks)

    def _tell_some(self, events: Sequence[tuple[Any, ...]], into_step: bool) -> Sequence[tuple[Any, ...]]:
        """Tell each group's pool at once of the first events; those with which nothing was done.

        Nothing is noted here before a pool has been told, so an event that needs what one before it changes is for the
        next call.
        """
        of_group: dict[int, _Some] = {}
        n = 0
        for event in events:
            some = self._add_taken(of_group, event) if event[0] == TAKEN else self._add_freed(of_group, event)
            if some is None:
                break
            some.events.append(event)
            n += 1
        left: list[tuple[Any, ...]] = []
        for group, some in of_group.items():
            known = self._pool_of.get(group)
            if known is None or not known[0].tell_now(some.calls, known[1], into_step):
                left += some.events
                continue
            if some.evicted:
                self.idle -= some.evicted
            if some.kept:
                self.idle |= some.kept
            if some.new:
                self._note_group(some.new, group)
        if not left:
            return events[n:]
        undone = {id(event) for event in left}
        return [event for event in events[:n] if id(event) in undone] + list(events[n:])

    def _add_taken(self, of_group: dict[int, _Some], event: tuple[Any, ...]) -> _Some | None:
        """Add the calls of an event of :meth:`taken`; None: there is something odd about it."""
        _, blocks, requests, lengths, group = event
        for of, some in of_group.items():
            if not some.kept.isdisjoint(blocks) or (of != group and not some.left.isdisjoint(blocks)):
                return None  # given up a moment ago, by another group's pool, or to the cache
        some = of_group.get(group) or _Some()
        cached = self.idle.intersection(blocks)
        if cached:
            # in a full cache each of them is one that the cache gives up
            given_up = blocks if len(cached) == len(blocks) else [block for block in blocks if block in cached]
            odd = len(cached) < len(given_up) or not self._all_of(given_up, group)
            if odd or (of_group and any(not one.evicted.isdisjoint(cached) for one in of_group.values())):
                return None  # handed out twice, or what the cache has of another group: for :meth:`apply`
            some.calls.append((_RELEASE, given_up, CACHE))
            some.evicted |= cached
        if len(cached) < len(blocks):  # else all were of this group already
            some.new += blocks
        begin = 0
        for i, request in enumerate(requests):
            end = begin + lengths[i]
            some.calls.append((_ALLOCATE, blocks[begin:end], request))
            begin = end
        of_group[group] = some
        return some

    def _add_freed(self, of_group: dict[int, _Some], event: tuple[Any, ...]) -> _Some | None:
        """Add the calls of an event of :meth:`freed`; None: it is another event, or not all that is to be looked at."""
        if event[0] != FREED or self._pending:
            return None
        _, kept, left, request = event
        group = self._group_that_gives_up(kept, left)
        if group is None or any(
            not {*one.new}.isdisjoint((*kept, *left)) for of, one in of_group.items() if of != group
        ):
            return None  # of another group, since an event before this one
        some = of_group.setdefault(group, _Some())
        if kept:
            some.calls.append((_HAND_OVER, kept, CACHE))
            some.kept = some.kept.union(kept)
        if left:
            some.calls.append((_RELEASE, left, request))
            some.left = some.left.union(left)
        return some

    def _group_that_gives_up(self, kept: Sequence[int], left: Sequence[int]) -> int | None:
        """The group of the blocks that a request gives up; None if they are of several, or odd."""
        if not self.idle.isdisjoint(left):
            return None
        if len(self._groups) == 1:
            known, (group,) = self.group.keys(), self._groups
            return None if len(known & kept) < len(kept) or len(known & left) < len(left) else group
        groups = set(map(self.group.get, (*kept, *left)))
        twice = len(set(kept)) < len(kept) or len(set(left)) < len(left)
        return groups.pop() if len(groups) == 1 and not twice else None

    def _note_group(self, blocks: Sequence[int], group: int) -> None:
        self.group.update(dict.fromkeys(blocks, group))
        self._groups.add(group)

    def _all_of(self, blocks: Sequence[int], group: int) -> bool:
        """Whether blocks that were handed out before were all of a group."""
        return (len(self._groups) == 1 and group in self._groups) or all(
            self.group.get(block) == group for block in blocks
        )

    def _evict(self, ids: Sequence[int]) -> None:
        """The prefix cache gives up those of the blocks that it holds."""
        if self.idle.isdisjoint(ids):
            return
        kept = [block for block in dict.fromkeys(ids) if block in self.idle]
        self._each(kept, lambda pool, pages: pool.release(**pages, owner=CACHE))
        self.idle.difference_update(kept)

    def touched(self, ids: Sequence[int], request: str | None) -> None:
        """A request takes up blocks that it found in the prefix cache; the session gets this at the next forward."""
        self._pending += [_Taken(block, request, told_now()) for block in ids]

    def settle(self, in_flight: Sequence[set[int]]) -> None:
        """A forward begins: report which blocks were taken up.

        Args:
            in_flight: for each group the blocks that the forward writes and another request takes up.  Those are
                shared after it: while it runs, nobody may write a shared slot, and all requests involved may read.
        """
        pending, self._pending = self._pending, []
        now: list[_Taken] = []
        for taken in pending:
            group = self.group.get(taken.block)
            if group is not None and taken.block in in_flight[group]:
                self._take_up(now)
                now = []
                with told(taken.stack):
                    self._each([taken.block], lambda pool, pages: pool.hand_over(**pages))
                self._shared_later.append(taken)
            else:
                now.append(taken)
        self._take_up(now)

    def after_forward(self) -> None:
        """A forward ended, or raised: share what it wrote for several requests."""
        self._to_accept.clear()
        if self._shared_later:
            later, self._shared_later = self._shared_later, []
            self._take_up(later)

    def _take_up(self, taken: Iterable[_Taken]) -> None:
        """Requests take up blocks, in order; neighbours that are alike are one call."""
        run: list[int] = []
        kind: tuple[bool, str | None, tuple[str, ...]] = (False, None, ())
        for block, request, stack in taken:
            this = block in self.idle, request, stack
            if run and (this != kind or block in run):
                self._take_up_alike(run, *kind)
                run = []
            run.append(block)
            kind = this
            self.idle.discard(block)
        if run:
            self._take_up_alike(run, *kind)

    def _take_up_alike(self, blocks: Sequence[int], idle: bool, request: str | None, stack: tuple[str, ...]) -> None:
        with told(stack):
            if idle:
                self._each(blocks, lambda pool, pages: pool.hand_over(**pages, owner=request))
            else:
                self._each(blocks, lambda pool, pages: pool.share(**pages, owner=request))

    def freed(self, kept: Sequence[int], left: Sequence[int], request: str | None) -> None:
        """A request gives up blocks.

        Args:
            kept: those that the prefix cache keeps as their only owner; ``left``, all others.
        """
        if self._pending:
            gone = {*kept, *left}
            self._take_up([taken for taken in self._pending if taken.block in gone])
            self._pending = [taken for taken in self._pending if taken.block not in gone]
        self._each(kept, lambda pool, pages: pool.hand_over(**pages, owner=CACHE))
        self.idle.update(self.group.keys() & kept)
        self._each(left, lambda pool, pages: pool.release(**pages, owner=request))
        self.idle.difference_update(left)

    def copied(self, source: int, copy: int, request: str | None) -> None:
        """A block is copied to a request's, before the next forward: a prefix that it takes up ends inside of it."""
        for pool, page_size in self.pools_of(copy):
            pool.copy([source], [copy], request, page_size)

    def filled_elsewhere(self, ids: Sequence[int], request: str, places: Sequence[int], end: int) -> None:
        """Blocks will be filled by a KV connector, whose writes are not guarded, also in a draft's layers.

        Args:
            places: where each block is in the request's table.
            end: tokens of that table up to the last one that is loaded.
        """
        self._forget(ids)
        self.loads.expect(request, ids, places, end)

    def announce_loaded(
        self,
        scheduled: Any,
        ledger: Ledger,
        namespaces: Mapping[str, int],
        mark: Callable[[str, torch.Tensor], None],
    ) -> None:
        """A forward begins: it is the first to read what connectors load for some of its requests.

        Args:
            scheduled: the ``SchedulerOutput`` of its step.
            ledger: has the pages of its requests.
            namespaces: by the request's id, if not 0.
            mark: replaces, in a request's tokens from position 0 on (int64 ``[n]``), what stands for no tokens.
        """
        of_request: dict[str, Mapping[int, Arrived]] = {}
        for load in self.loads.arriving(scheduled):
            request, first = load.request, load.blocks[0]
            pages = ledger.pages(request, self.group.get(first, 0))
            history = None if load.tokens is None else torch.tensor(load.tokens[: load.end], dtype=torch.int64)
            if history is not None:
                mark(request, history)
            if request not in of_request:
                of_request[request] = self.offloaded.arrived(request)
            for pool, page_size in self.pools_of(first):
                if history is None or pool.name.startswith("draft"):  # whose layers may have other tokens there
                    slots, _ = load.slots(pages, page_size)
                    self._to_accept.append(functools.partial(pool.adopt, slots, owner=request))
                else:
                    namespace, stored = namespaces.get(request, 0), of_request[request]
                    self._announce(pool, page_size, load, pages, history, namespace, stored)

    def _announce(
        self,
        pool: EnginePool,
        page_size: int,
        load: Arriving,
        pages: Sequence[int],
        history: torch.Tensor,
        namespace: int,
        stored: Mapping[int, Arrived],
    ) -> None:
        """Tell the pool what arrives for which tokens, and what was stored of it, where that is known."""
        of_pool = {block for block in load.blocks if block in stored and stored[block].pool == pool.name}
        for known, part in load.parts(of_pool):
            slots, positions = part.slots(pages, page_size)
            if known and slots.numel():
                shadow = shadow_of(slots, stored, pool, page_size)
                accept = pool.expect(slots, shadow, history, positions, namespace, load.request)
            else:
                pool.announce(slots, history, positions, namespace, load.request)
                accept = functools.partial(pool.accept, slots)
            self._to_accept.append(accept)

    def prepare_for_connectors(self) -> None:
        """Compile now what accepts a loaded block and keeps what is known of a stored one, and not in the step that is
        the first to have one."""
        for pool, page_size in self._known_pools().values():
            pool.content.fingerprint(torch.full((1,), -1, dtype=torch.int64, device=pool.declared.device))
            ParkedShadows(pool, page_size).put(["a block"], [1])

    def begin_step(self, scheduled: Any) -> None:
        """A step begins, and nothing of its message was applied: keep what is known of blocks that connectors store.

        Args:
            scheduled: the ``SchedulerOutput``.
        """
        pools = self._known_pools()
        self.offloaded.step(scheduled, lambda block: pools.get(f"group{self.group.get(block)}"))

    def accept_loaded(self) -> None:
        """This forward ended: what it has read is there."""
        for accept in self._to_accept:
            accept()

    def _forget(self, ids: Sequence[int]) -> None:
        for kind in ("group", "draft"):
            self._each(ids, lambda pool, pages: pool.forget(**pages), kind)

    def all_gone(self) -> None:
        """The memory of all blocks is given back: what is stored in them is there no more, whoever has them."""
        self._forget(list(self.group))
        self.loads.clear()
        self.offloaded.all_gone()

    def pools_of(self, block: int) -> list[tuple[EnginePool, int]]:
        """The guarded pools that a block is in, each with the tokens of a block: the target's first, then a draft's."""
        pools, group = self._known_pools(), self.group.get(block)
        return [pools[name] for name in (f"group{group}", f"draft{group}") if name in pools]

    def _each(
        self, blocks: Sequence[int], tell: Callable[[EnginePool, dict[str, Any]], None], kind: str = "group"
    ) -> None:
        """Call ``tell`` with each guarded group's pool and its blocks, as arguments of the pool's methods."""
        if not blocks:
            return
        pools, of_each = self._known_pools(), list(map(self.group.get, blocks))
        alike = of_each.count(of_each[0]) == len(of_each)  # as in most models, which have one group
        for group in of_each[:1] if alike else set(of_each):
            known = pools.get(f"{kind}{group}")
            if known is not None:
                some = blocks if alike else [block for block, of in zip(blocks, of_each, strict=True) if of == group]
                tell(known[0], dict(slots=some, page_size=known[1]))

    def _known_pools(self) -> dict[str, tuple[EnginePool, int]]:
        """The guarded pools by name, each with the tokens of a block."""
        sessions = self._sessions()
        if sessions != self._seen:
            self._seen = list(sessions)
            self._pool_of.clear()
            named = [item for session in sessions for item in session.pools.items()]
            self._pools = {name: (pool, pool.declared.table_page_size) for name, pool in named}
        return self._pools

"""Allocator calls as a replay: what a step's calls launch comes again, at addresses that stay."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..kernels.bound_launch import BoundLaunch
from ..kernels.checks import Phase
from ..kernels.compile_ahead import compiling_ahead
from ..kernels.handed import BLOCK, Part
from ..kernels.replay import Replayed
from ..kernels.slots.event_ring import CALLS, PAGES, EventRing
from ..kernels.slots.events import COLUMNS, Due, Events
from ..kernels.staging import lasting
from ..kernels.triton_handed import scatter_from_kernel
from ..kernels.waiting import Waiting
from .pool_content import PoolContent


class Apply(Protocol):
    """:class:`.gpu_life.Apply`."""

    def __call__(
        self,
        events: Events,
        imported: torch.Tensor | None,
        gone: torch.Tensor | None,
        counts: torch.Tensor | None,
    ) -> None: ...

    def renew(self, events: Events, imported: torch.Tensor | None, counts: torch.Tensor | None) -> None: ...


#: Pages that a replay has room for; calls that name fewer take the first that is large enough.
ROOMS = 64, 512, PAGES

#: Pages, at most, of calls that are applied in the launches of a step.
IN_STEP = 512

#: Slots, at most: to look at what they hold takes memory.
SLOTS = 1 << 16

#: Numbers of a place, at most, that travel along: a graph is captured for each size of their launch.
ALONG = 4 * BLOCK

#: The first room, and words of all calls that there is room for.
_FEW, _WORDS = ROOMS[0], CALLS * COLUMNS


class KeptCalls:
    """Applies calls of one pool that name few pages.

    In place of a copy, an event and two launches: a launch alone took as long of the host as a replay (H200).

    Calls that come just before a step may need no replay of their own: what :meth:`in_step` launches is captured with
    the step's, and takes what waits for it.

    Attributes:
        most: calls that there is room for.
        waits: the replay of calls that nothing was launched for yet, until somebody does (:meth:`settle`) or leaves
            them to the launches of the next step (:meth:`.SlotEvents.claim`).
    """

    most = CALLS

    def __init__(self, device: torch.device, apply: Apply, content: PoolContent, waiting: Waiting | None = None):
        """
        Args:
            waiting: numbers that are brought to their places by the same replay.
        """
        self._device, self._apply, self._content, self._waiting = device, apply, content, waiting
        self._ring: EventRing | None = None
        self._runs: dict[tuple[object, ...], tuple[Callable[[], None], Replayed]] = {}
        self._plain: dict[tuple[int, int, bool], Replayed] = {}  # of calls alone: room, page size, whether they release
        self.waits: torch.cuda.CUDAGraph | None = None
        self._step_size = 0  # slots of a page of the calls that a step takes; 0: it takes none

    def takes(self, calls: int, pages: int, page_size: int) -> bool:
        """Whether there is room for so many."""
        return calls <= CALLS and pages <= ROOMS[-1] and _room(pages) * page_size <= SLOTS

    def in_step(self, due: Due, page_size: int) -> Callable[[], None] | None:
        """What launches calls with a step, if some wait for it and were claimed; None: their pages are too large.

        Args:
            due: says so to the device.
            page_size: of all of them.
        """
        if not self.takes(1, IN_STEP, page_size):
            return None
        if self._ring is None:
            self._ring = EventRing(self._device)
        self._step_size = page_size
        return self._run(self._ring, IN_STEP, page_size, True, None, due)

    def settle(self) -> None:
        """Launch the calls that wait for a step."""
        graph, self.waits = self.waits, None
        if graph is not None:
            graph.replay()

    def apply(
        self,
        rows: Sequence[int],
        parts: Sequence[Part],
        pages: int,
        page_size: int,
        released: bool,
        into_step: bool = False,
    ) -> bool:
        """Launch what calls do, on the current stream; False: the device is too far behind, and nothing was launched.

        Args:
            rows: :class:`.EventRow` after :class:`.EventRow`, as many as :meth:`takes`; so many ``pages`` as well, the
                ``parts`` one after the other.
            released: a call among them may free slots, whose bytes are compared.
            into_step: let them wait for the step that is about to begin, if it can take them.

        Raises:
            struct.error: one of them is no whole number of 64 bits; nothing was launched.
        """
        room = _room(pages)
        if self._ring is None:
            self._ring = EventRing(self._device)
        # while kernels are compiled ahead no launch takes an entry, and the caller compiles what it does instead, too
        ahead, waiting = compiling_ahead(), self._waiting
        put = None if ahead or waiting is None else waiting.held()
        if put is not None and put.grid[1] * BLOCK > ALONG:
            put = None
        if not ahead and not self._ring.offer(rows, parts, pages, page_size, 0 if put is None else put.at):
            return False
        imported, grid = self._content.imported, None if put is None else put.grid
        form = room, page_size, released, None if imported is None else imported.data_ptr(), grid
        known = self._runs.get(form)
        if known is None:
            known = self._runs[form] = self._run(self._ring, room, page_size, released, grid), Replayed(self._device)
            if imported is None and grid is None:
                self._plain[room, page_size, released] = known[1]
        run, replayed = known
        alone = imported is None and put is None
        if into_step and alone and replayed.graph is not None and self._step_takes(pages, page_size):
            self.waits = replayed.graph
        elif replayed.graph is not None:
            replayed.graph.replay()
        else:
            replayed(run)
        if put is not None and waiting is not None:
            waiting.sent()
        return not ahead

    def tell_now(
        self, rows: Sequence[int], pages: Sequence[int], page_size: int, released: bool, into_step: bool = True
    ) -> bool:
        """:meth:`apply` of few calls, where that is a replay by now and no numbers wait to travel along.

        Returns:
            False: nothing was launched.
        """
        ring, n = self._ring, len(pages)
        if ring is None or n > PAGES or len(rows) > _WORDS or self._content.imported is not None:
            return False
        known = self._plain.get((_FEW if n <= _FEW else _room(n), page_size, released))
        if known is None or known.graph is None:
            return False
        if self.waits is not None:  # those before, which another offer would leave without memory
            self.settle()
        if not ring.offer_few(rows, pages, page_size):
            return False
        if into_step and n <= IN_STEP and page_size == self._step_size:  # see :meth:`_step_takes`
            self.waits = known.graph
        else:
            known.graph.replay()
        return True

    def _step_takes(self, pages: int, page_size: int) -> bool:
        """Whether what :meth:`in_step` launches has room for so many, if nothing else is to be done with them."""
        return pages <= IN_STEP and page_size == self._step_size

    def _run(
        self,
        ring: EventRing,
        room: int,
        page_size: int,
        released: bool,
        grid: tuple[int, int, int] | None,
        due: Due | None = None,
    ) -> Callable[[], None]:
        """What launches all that calls do, for at most so many pages.

        Args:
            grid: of the launch for numbers that travel along, behind the calls: they say which step it is.
            due: says whether there are any; None: there are.
        """
        content, imported, apply = self._content, self._content.imported, self._apply
        events = Events(ring.rows, ring.pages[:room], page_size)
        gone = lasting(3, events.slots, dtype=torch.int64, device=self._device) if released else None
        land = functools.partial(ring.land, room) if due is None else ring.lands_if_due(room, due, page_size)
        scatter = None
        if grid is not None:
            scatter = BoundLaunch(scatter_from_kernel, self._device, dict(at_ptr=ring.along, BLOCK=BLOCK), (), 4)

        def run() -> None:
            land()
            apply(events, imported, gone, ring.counts)
            if gone is not None:
                content.verify(gone[0], ring.slots, gone[1], Phase.LIFE, gone[2])
                apply.renew(events, imported, ring.counts)
            if grid is not None and scatter is not None:
                (scatter if scatter.ready else scatter.first)(grid, (), None)

        return run


def _room(pages: int) -> int:
    """The room that so many pages take."""
    return ROOMS[bisect_left(ROOMS, pages)]

"""Allocator calls of an engine, queued on the host until a device needs them: many calls, one copy and one launch.

Each call took about thirty small launches: 2,481 calls were 2.1 s of a vLLM decode of 3.7 s on an H200.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import EngineError
from ..kernels.checks import Phase
from ..kernels.ops import life_kernels_for
from ..kernels.side_stream import capturing
from ..kernels.slots import life as slot_life
from ..kernels.slots.events import COLUMNS, RENEWING, STACK_UNIT, Due, Event, EventRow, Events
from ..kernels.slots.space import SlotSpace
from ..kernels.staging import Staging, lasting
from .arguments import require_whole
from .pool_content import PoolContent
from .queued_calls import (
    Call,
    Pages,
    call_by_call,
    first_odd,
    how_many_fit,
    in_words,
    in_words_one_by_one,
    names_many,
    noted_at_once,
    numbers_of_all,
    one_behind_the_other,
    one_by_one,
    pages_of,
    rows_of,
)
from .request_ids import RequestId, RequestIds
from .slot_histories import SlotHistories

if TYPE_CHECKING:
    from ..kernels.waiting import Waiting
    from .kept_calls import KeptCalls

#: Limits of the queue: calls, and the pages and slots that they name.  A larger call is sent by itself.
CALLS, PAGES, SLOTS = 1024, 16384, 1 << 18

_LISTS = frozenset((list,))
_ALLOCATE, _FORGET, _RELEASE = Event.ALLOCATE, Event.FORGET, Event.RELEASE

#: Numbers of the rows of all calls.
ROWS = CALLS * COLUMNS

#: Numbers of calls and pages whose views are kept.
SHOWN = 256

#: Pages of a call that are looked at one by one on the host.
FEW = 64


class SlotEvents:
    """The allocator calls of one pool that its device does not have yet, in order.

    Attributes:
        histories: what slots went through.
        waiting: numbers that travel with the calls, set before the first; None: nothing does.
        raw: the address of the stream in which calls were sent last.
    """

    def __init__(self, space: SlotSpace, content: PoolContent, ids: RequestIds, stacks: int = 0):
        """
        Args:
            stacks: how many stacks of calls are kept.
        """
        # One attribute more than these 29, and a step's calls took 4 to 20 us longer: see Python's key-sharing dicts.
        self._space, self._content, self._ids = space, content, ids
        self._known_ids = ids.known
        self.histories = SlotHistories(space, ids, stacks)
        self._kernels = life_kernels_for(space.block.device)  # None: each call is done as it comes
        self._apply: Any = None
        self._kept: KeptCalls | None = None
        self.waiting: Waiting | None = None
        self._shown: dict[tuple[int, int, int], Events] = {}  # the views of so many calls and pages
        self._gone_shown: dict[int, tuple[torch.Tensor, ...]] = {}
        self._on_gpu = space.block.is_cuda
        self._stream: torch.cuda.Stream | None = None  # in which a flush was last
        self.raw = 0
        self._lock = threading.RLock()
        self._device = device = space.block.device
        self._staging = Staging(device)
        room = 0 if self._kernels is None else ROWS + PAGES
        self._words = lasting(room, dtype=torch.int64, device=device)
        self._given = lasting(0, dtype=torch.int64, device=device)  # pages that were named on the device
        self._gone = lasting(3, 0, dtype=torch.int64, device=device)
        # Always this list: most calls are appended without the lock, and a flush takes from its head what it has seen.
        self._calls: list[Call] = []
        self._page_size, self._most = 1, 0  # of the last call that was looked at; most pages of another
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._taken = 0  # pages in ``_given``
        self._at_once = self._noted = 0  # calls that were noted at once with others, and their pages
        self._freed: set[int] | None = set()  # pages that the first calls released; None: not known here
        self._looked = 0  # how many calls these are
        self._released = True  # pages, by calls behind those; who queues such a call says so next, without the lock

    @property
    def pending(self) -> bool:
        """Whether there are any."""
        return bool(self._calls)

    @property
    def queue(self) -> Sequence[Call]:
        """Those that wait: always this list, for whoever looks at it often."""
        return self._calls

    def add(self, event: Event, slots: Any, page_size: int, owner: RequestId | None = None) -> int:
        """Note a call; how many slots it names.

        Args:
            slots: as :meth:`.EnginePool.allocate` takes them.
            owner: the id that is named, if any.

        Raises:
            EngineError: slots or page_size are no integers, or a CUDA graph is being captured.
        """
        stacks, calls = self.histories.stacks, self._calls
        stack = 0 if stacks is None else stacks.number()
        try:
            # most calls, of which there are dozens in a step; with calls pending, flush() refuses to be captured.  The
            # other slots are looked at when the calls are sent
            if calls and page_size == self._page_size and type(slots) is list and type(slots[0]) is int:
                held, n = slots[:], len(slots)
                whose = 0 if owner is None else self._known_ids[owner]
                if n <= self._most and len(calls) < CALLS:
                    call = event + stack * STACK_UNIT if stack else event, held, whose, page_size
                    if event is _RELEASE:
                        calls.append(call)
                        self._released = True
                        return n * page_size
                    if (event is not _ALLOCATE and event is not _FORGET) or not self._may_be_freed(held):
                        calls.append(call)
                        return n * page_size
        except (IndexError, KeyError, TypeError):
            pass  # it names no slots, a request that is new, or something that is neither
        return self._add_looking(event, slots, page_size, self._ids.hash(owner), stack)

    def add_alike(
        self, event: Event, given: Sequence[tuple[Any, RequestId | None]], page_size: int, written_in_step: bool = False
    ) -> int | None:
        """Note calls of one kind behind another, in order, if there is nothing odd about any of them.

        Where requests fill a page in the same step, :meth:`add` took the host 17 us for each (vLLM on an H100).

        Args:
            given: slots and owner of each, as :meth:`add` takes them.
            written_in_step: as of :meth:`.EnginePool.allocate_each`.

        Returns:
            How many slots they name; None: none is noted, and each is for :meth:`add`.
        """
        calls, count = self._calls, len(given)
        if self.histories.stacks is not None or page_size != self._page_size or count > CALLS:
            return None
        if not count or len(calls) >= CALLS:
            return None if count else 0
        if not calls and self._on_gpu and torch.cuda.is_current_stream_capturing():
            return None  # the first call is refused
        noted = noted_at_once(event, given, self._noted, self._ids)
        if noted is None:
            return None
        pages, each = noted
        n, renewing = len(pages), event in RENEWING
        if n > self._most or (n > FEW * count and not written_in_step):
            return None
        with self._lock:
            if renewing and not written_in_step and self._were_freed(pages, n):
                return None  # the bytes of some must be compared before
            self._at_once += count
            self._noted += n
            calls.append((event, pages, each, page_size))
            if event is _RELEASE:
                self._released = True
        return page_size * n

    def tell_now(
        self, rows: list[int], pages: list[int], page_size: int, released: bool, into_step: bool = True
    ) -> bool:
        """Calls of which the device is told here and now, if nothing waits for it: no queue, few functions.

        Requests of a decode step fill a page now and then, and in a large batch one does in nearly every step: queued
        and sent, the first call of a step took 60 us, and 200 on a CPU core whose caches other work had emptied.

        Args:
            rows: :class:`.EventRow` after :class:`.EventRow`, of events.
            pages: of all calls; those that are allocated are written to in the next step at the earliest.
            released: some of them may be released, and their bytes are compared.
            into_step: with the launches of the next step, if these take them along; False: before anything else.

        Returns:
            False: nothing was done, and :meth:`add` takes them.
        """
        if self._kernels is None:
            return self._do_each(rows, pages, page_size)
        kept = self._kept
        if kept is None or self.histories.stacks is not None or not self._lock.acquire(False):
            return False  # with the lock another thread sends calls: violations are read
        try:
            last = self._stream
            if self._calls or (self._on_gpu and last is None):
                return False
            if last is not None and self.raw != torch._C._cuda_getCurrentRawStream(last.device_index):
                return False
            return kept.tell_now(rows, pages, page_size, released, into_step)
        finally:
            self._lock.release()

    def _do_each(self, rows: list[int], pages: list[int], page_size: int) -> bool:
        """Each call is done as it comes."""
        begins = rows[EventRow.BEGIN :: COLUMNS]
        events, owners = rows[EventRow.EVENT :: COLUMNS], rows[EventRow.OWNER :: COLUMNS]
        for event, begin, end, owner in zip(events, begins, [*begins[1:], len(pages)], owners, strict=True):
            self._add_looking(Event(event), pages[begin:end], page_size, owner, 0)
        return True

    def _add_looking(self, event: Event, slots: Any, page_size: int, owner: int, stack: int) -> int:
        """Note a call that is the first one, or another than most; send it, if it cannot wait."""
        if page_size != 1 and (type(page_size) is not int or page_size < 1):
            require_whole("page_size", page_size, 1, "slots")
        if self._on_gpu and not self.pending and torch.cuda.is_current_stream_capturing():
            raise EngineError(
                f"the allocator called {event.name.lower()}() while a CUDA graph is being captured: each replay would "
                "do it again. Call it outside of torch.cuda.graph()"
            )
        pages = pages_of(slots)
        n = len(pages)
        if n and not self._may_wait(n, page_size):
            self.flush()
            self._do(event, pages, page_size, owner, stack)
        elif n:
            with self._lock:
                self._make_room(event, n, page_size, pages)
                held: Pages = pages
                if isinstance(pages, torch.Tensor):
                    held = self._take(pages)
                elif type(slots) is list and n <= FEW:  # as those of most calls are held
                    held = slots[:]
                self._calls.append((event + stack * STACK_UNIT, held, owner, page_size))
                if event is _RELEASE:
                    self._released = True
        return n * page_size

    def _may_wait(self, n: int, page_size: int) -> bool:
        return self._kernels is not None and n <= PAGES and n * page_size <= SLOTS

    def _make_room(self, event: Event, n: int, page_size: int, pages: array[int] | torch.Tensor) -> None:
        """Send what has to be sent before a call of ``n`` pages."""
        if self._calls and (
            len(self._calls) >= CALLS
            or page_size != self._page_size
            or (isinstance(pages, torch.Tensor) and self._taken + n > PAGES)
            or (event in RENEWING and self._were_freed(pages))
        ):
            self.flush()
        self._page_size, self._most = page_size, min(PAGES, SLOTS // page_size)

    def _take(self, pages: torch.Tensor) -> torch.Tensor:
        """Pages of the device, where they stay as they are until the next flush: the engine may change its own."""
        if not self._given.shape[0]:
            self._given = lasting(PAGES, dtype=torch.int64, device=self._given.device)
        held = self._given[self._taken : self._taken + len(pages)]
        self._taken += len(pages)
        return held.copy_(pages)

    def _may_be_freed(self, pages: list[int]) -> bool:
        """Whether some of the pages may have been released; without the lock where no call has released any since the
        last look.

        A release in another thread that has not returned yet may be missed: nobody gets its pages before.
        """
        freed = self._freed
        if self._released or freed is None or len(pages) > FEW:
            with self._lock:
                return self._were_freed(pages)
        return not freed.isdisjoint(pages)

    def _were_freed(self, pages: Sequence[int] | torch.Tensor, few: int = FEW) -> bool:
        """Whether some of the pages may have been released: their bytes are compared before they get a new owner.

        Args:
            few: if there are more, it is not looked which.
        """
        self._released = False  # before the look: whoever releases pages behind it says so again
        new = self._calls[self._looked :]
        self._looked += len(new)
        if self.histories.stacks is None:
            released = [held for kind, held, _, _ in new if kind == _RELEASE]
        else:
            released = [held for kind, held, _, _ in new if kind % STACK_UNIT == _RELEASE]
        if released and self._freed is not None:
            if _on_device(released) or (max(map(len, released)) > FEW and names_many(new, FEW)):
                self._freed = None
            else:
                try:
                    self._freed.update(*released)
                except TypeError:  # some are no numbers, and their call is refused when it is sent
                    self._freed = None
        if self._freed is not None and not self._freed:
            return False
        if self._freed is None or isinstance(pages, torch.Tensor) or len(pages) > few:
            return True
        return not self._freed.isdisjoint(pages)

    def _do(self, event: Event, pages: array[int] | torch.Tensor, page_size: int, owner: int, stack: int) -> None:
        """Send one call by itself."""
        space = self._space
        given = pages if isinstance(pages, torch.Tensor) else torch.frombuffer(pages, dtype=torch.int64)
        slots = slots_in(given.to(device=space.block.device, dtype=torch.int64), page_size)
        freed = slot_life.apply_one(space, event, slots, owner, stack)
        if freed is not None:
            self._content.verify(freed[0], None, freed[1], Phase.LIFE)
        if event in RENEWING:
            self._content.forget(slots)

    def in_step(self, due: Due, page_size: int) -> Callable[[], None] | None:
        """What launches, with a step, the calls that wait for it; None: calls cannot wait, and are sent before it.

        Whoever captures it with the launches of all steps asks :meth:`claim` in each, and tells the device.

        Args:
            due: says to the device whether calls were claimed.
            page_size: slots of a page, in all of them.
        """
        if self._kernels is None or self.histories.stacks is not None:
            return None
        return self._kept_calls().in_step(due, page_size)

    def claim(self) -> bool:
        """A step begins that has what :meth:`in_step` launches in it: whether it is to launch calls."""
        kept = self._kept
        if kept is None or kept.waits is None:
            return False
        with self._lock:  # another thread may be about to launch them
            if self._calls:
                return False
            waited, kept.waits = kept.waits is not None, None
            return waited

    def claim_or_flush(self) -> bool:
        """A step begins that has what :meth:`in_step` launches in it, and launches nothing else of ours: :meth:`claim`,
        and send what cannot be claimed."""
        last, kept = self._stream, self._kept
        if last is not None and self.raw != torch._C._cuda_getCurrentRawStream(last.device_index):
            self._follow_the_last_flush()
        if not self._calls:
            if kept is None or kept.waits is None:
                return False  # most steps: one function
            with self._lock:  # as :meth:`claim` does
                if not self._calls and kept.waits is not None:
                    kept.waits = None
                    return True
        self.flush()
        return False

    def flush(self, into_step: bool = False) -> None:
        """Send the calls to the device.

        Args:
            into_step: those that a step can take wait for it, see :meth:`in_step`.

        Raises:
            EngineError: calls are queued, and a CUDA graph is being captured; or a call has a number that no slot can
                have, which is left out.
        """
        last = self._stream
        if last is not None and self.raw != torch._C._cuda_getCurrentRawStream(last.device_index):
            self._follow_the_last_flush()
        kept = self._kept
        if not self._calls and (into_step or kept is None or kept.waits is None):
            return
        if last is None and self._on_gpu:
            self._follow_the_last_flush()
        if capturing(self._device if self._on_gpu else None):
            raise EngineError(
                "a CUDA graph is being captured, and the device was not told yet what the allocator did before: call "
                "session.flush() before torch.cuda.graph()"
            )
        with self._lock:
            if kept is not None:
                kept.settle()
            while self._calls:
                if not self._send_few(into_step):
                    self._send(into_step)
                if self._calls and self._kept is not None:
                    self._kept.settle()
            self._begin_anew()

    def _follow_the_last_flush(self) -> None:
        """Let the current stream wait for the one of the last flush: what comes before a call, and the memory in which
        calls travel, must be done with.  Violations may be read in a thread with a stream of its own."""
        device = self._space.block.device
        if torch.cuda.is_current_stream_capturing():
            return  # nothing is sent
        with self._lock:
            current, last = torch.cuda.current_stream(device), self._stream
            if last is not None and last != current:
                current.wait_stream(last)
            self._stream, self.raw = current, current.cuda_stream

    def _send_few(self, into_step: bool) -> bool:
        """Send all calls, where they are few, as in most steps: they become numbers where the device reads them.

        Returns:
            False: nothing was sent.
        """
        kept, n, page_size = self._kept, len(self._calls), self._calls[0][3]
        most = n + self._at_once
        if kept is None or self.histories.stacks is not None or most > kept.most or most > CALLS:
            return False
        calls = self._calls[:n]
        words = in_words_one_by_one(calls) if most == n else in_words(calls)
        if words is None:
            return False
        rows, parts, pages, released = words
        if pages > PAGES or not kept.takes(most, pages, page_size):
            return False
        del self._calls[:n]
        try:
            if kept.apply(rows, parts, pages, page_size, released, into_step):
                return True
        except struct.error:
            pass  # a page that is no number: its call is found, and left out
        self._calls[:0] = calls
        return False

    def _send(self, into_step: bool) -> None:
        """Send the first calls, as many as fit into one launch; or, if these are few, let them wait for a step."""
        kinds, pages, owners, sizes = zip(*self._calls[:CALLS], strict=True)
        lengths, page_size = list(map(len, pages)), sizes[0]
        n, room = len(sizes), min(PAGES, SLOTS // page_size)
        if sum(lengths) > room or sizes.count(page_size) < n or n + self._at_once > CALLS:
            n = how_many_fit(lengths, owners, sizes, CALLS, room)
            kinds, pages, owners, lengths = kinds[:n], pages[:n], owners[:n], lengths[:n]
        numbers = self._numbers_of(pages, n)
        if numbers is None:
            return
        named, on_device = numbers
        del self._calls[:n]
        released = _RELEASE in kinds or any(kind % STACK_UNIT == _RELEASE for kind in kinds if kind > STACK_UNIT)
        rows = rows_of(*(call_by_call(kinds, owners, lengths) if self._at_once else (kinds, owners, lengths)))
        calls, kept = len(rows) // COLUMNS, self._kept_calls()
        few = kept.takes(calls, len(named), page_size) and not on_device
        if few and kept.apply(rows, [named], len(named), page_size, released, into_step):
            return
        self._staging.send(one_behind_the_other(rows, named), self._words)
        events = self._shown_events(calls, len(named), page_size)
        if on_device:
            parts = [events.entries[begin : begin + len(held)] for begin, held in on_device]
            torch._foreach_copy_(parts, [held for _, held in on_device])
        self._apply_all(events, released)

    def _kept_calls(self) -> KeptCalls:
        """Those that name few pages; made when first needed, as it takes memory."""
        if self._kept is None:
            from .kept_calls import KeptCalls  # only where there is Triton

            self._kept = KeptCalls(self._words.device, self._applier(), self._content, self.waiting)
        return self._kept

    def _applier(self) -> Any:
        if self._apply is None:
            assert self._kernels is not None
            self._apply = self._kernels.Apply(self._space, self._content.digests)
        return self._apply

    def _numbers_of(self, pages: Sequence[Pages], n: int) -> tuple[array[int], list[tuple[int, torch.Tensor]]] | None:
        """See :func:`.numbers_of_all`; None: the wrong call may be one of several that were noted at once, so that the
        first ``n`` entries of the queue have become a call each.

        Raises:
            EngineError: a number of more than 64 bits; its call is left out.
        """
        try:
            return numbers_of_all(pages)
        except (TypeError, OverflowError) as e:
            each = one_by_one(self._calls[:n])
            if len(each) > n:
                self._calls[:n] = each
                return None
            odd = first_odd(pages)
            del self._calls[odd]
            self._looked, self._released = 0, True  # others are in their places
            raise EngineError(
                f"slots are integers, and were given as {pages[odd]} ({e}). The allocator's call was left out: give "
                "whole numbers"
            ) from e

    def _shown_events(self, calls: int, n: int, page_size: int) -> Events:
        """So many calls and pages, where they are on the device."""
        form = calls, n, page_size
        events = self._shown.get(form)
        if events is None:
            if len(self._shown) >= SHOWN:
                self._shown.clear()
            first = calls * COLUMNS + calls % 2
            rows, pages = self._words[: calls * COLUMNS], self._words[first : first + n]
            events = self._shown[form] = Events(rows.view(calls, -1), pages, page_size)
        return events

    def _apply_all(self, events: Events, released: bool) -> None:
        """Launch what the calls do; the bytes of slots that they free are compared."""
        content, gone = self._content, self._room(events.slots) if released else None
        self._applier()(events, content.imported, gone)
        if gone is not None:
            slots, owners, positions = self._freed_in(events.slots)
            content.verify(slots, None, owners, Phase.LIFE, positions)
            self._applier().renew(events, content.imported)

    def _room(self, slots: int) -> torch.Tensor:
        """int64 ``[3, >= slots]``."""
        if self._gone.shape[1] < slots:
            room = 1 << (slots - 1).bit_length()
            self._gone = lasting(3, room, dtype=torch.int64, device=self._gone.device)
            self._gone_shown.clear()
        return self._gone

    def _freed_in(self, slots: int) -> tuple[torch.Tensor, ...]:
        """Of so many slots named, which were freed, whose they were, and the positions, int64 ``[slots]`` each."""
        shown = self._gone_shown.get(slots)
        if shown is None:
            if len(self._gone_shown) >= SHOWN:
                self._gone_shown.clear()
            shown = self._gone_shown[slots] = tuple(row[:slots] for row in self._gone)
        return shown


def _on_device(pages: Sequence[Pages]) -> bool:
    """Whether some are on the device; most are lists, which is known sooner than what else they are."""
    return not _LISTS.issuperset(map(type, pages)) and torch.Tensor in map(type, pages)


def slots_in(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """All slots of pages (int64 ``[n]``), page by page."""
    if page_size == 1:
        return pages
    return (pages.unsqueeze(1) * page_size + torch.arange(page_size, device=pages.device)).flatten()

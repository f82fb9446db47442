"""Allocator calls of an engine, queued on the host until a device needs them: many calls, one copy and one launch.

Each call took about thirty small launches: 2,481 calls were 2.1 s of a vLLM decode of 3.7 s on an H200.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import EngineError
from ..kernels.checks import Phase
from ..kernels.ops import life_kernels_for
from ..kernels.side_stream import capturing
from ..kernels.slots import life as slot_life
from ..kernels.slots.events import RENEWING, STACK_UNIT, Event, EventRow, Events
from ..kernels.slots.space import SlotSpace
from ..kernels.staging import Staging, lasting
from .arguments import integers, require_whole
from .gathered import numbers_of, plain_numbers
from .pool_content import PoolContent
from .request_ids import RequestIds
from .slot_histories import SlotHistories

#: Limits of the queue: calls, and the pages and slots that they name.  A larger call is sent by itself.
CALLS, PAGES, SLOTS = 1024, 16384, 1 << 18

_RELEASE = Event.RELEASE

#: Numbers of the rows of all calls.
ROWS = CALLS * len(EventRow)

#: Numbers of calls and pages whose views are kept.
SHOWN = 256

#: Pages of a call that are looked at one by one on the host.
FEW = 64


class SlotEvents:
    """The allocator calls of one pool that its device does not have yet, in order.

    Attributes:
        pending: whether there are any.
        histories: what slots went through.
    """

    def __init__(self, space: SlotSpace, content: PoolContent, ids: RequestIds, stacks: int = 0):
        """
        Args:
            stacks: how many stacks of calls are kept.
        """
        self._space, self._content = space, content
        self.histories = SlotHistories(space, ids, stacks)
        self._kernels = life_kernels_for(space.block.device)  # None: each call is done as it comes
        self._apply: Any = None
        self._shown: dict[tuple[int, int, int], Events] = {}  # the views of so many calls and pages
        self._gone_shown: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._on_gpu = space.block.is_cuda
        self._lock = threading.RLock()
        device = space.block.device
        self._staging = Staging(device)
        room = 0 if self._kernels is None else ROWS + PAGES
        self._words = lasting(room, dtype=torch.int64, device=device)
        self._given = lasting(0, dtype=torch.int64, device=device)  # pages that were named on the device
        self._gone = lasting(2, 0, dtype=torch.int64, device=device)
        self._reset()

    def _reset(self) -> None:
        self.pending, self._released = False, False
        self._freed: set[int] | None = set()  # pages that were released; None: not known here
        self._rows, self._pages, self._page_size = array("q"), array("q"), 1
        self._left = 0  # pages of the same size that can be queued before the next flush
        self._on_device: list[tuple[int, int]] = []  # parts of the pages that are in ``_given``

    def add(self, event: Event, slots: Any, page_size: int, owner: int) -> int:
        """Note a call; how many slots it names.

        Args:
            slots: as :meth:`.EnginePool.allocate` takes them.
            owner: hash of the id that is named, 0 for none.

        Raises:
            EngineError: slots or page_size are no integers, or a CUDA graph is being captured.
        """
        if page_size != 1 and (type(page_size) is not int or page_size < 1):
            require_whole("page_size", page_size, 1, "slots")
        # with calls pending, flush() refuses to be captured
        if self._on_gpu and not self.pending and torch.cuda.is_current_stream_capturing():
            raise EngineError(
                f"the allocator called {event.name.lower()}() while a CUDA graph is being captured: each replay would "
                "do it again. Call it outside of torch.cuda.graph()"
            )
        stack = 0 if self.histories.stacks is None else self.histories.stacks.number()
        if type(slots) is list and slots and type(slots[0]) is int:
            n = len(slots)
            with self._lock:
                if (
                    n > self._left
                    or page_size != self._page_size
                    or (self._released and event in RENEWING and self._were_freed(slots))
                ):
                    return self._add_pages(event, pages_of(slots), page_size, owner, stack)
                begin = len(self._pages)
                try:
                    self._pages.fromlist(slots)
                except (TypeError, OverflowError):  # pages_of says what is wrong
                    return self._add_pages(event, pages_of(slots), page_size, owner, stack)
                # as _note does: a call would be a tenth of it, and there are dozens in a step
                rows = self._rows
                rows.extend((event + stack * STACK_UNIT, begin, owner))
                self._left = self._left - n if len(rows) < ROWS else 0
                self.pending = True
                if event == _RELEASE:
                    self._released = True
                    if n > FEW:
                        self._freed = None
                    elif self._freed is not None:
                        self._freed.update(slots)
            return n * page_size
        return self._add_pages(event, pages_of(slots), page_size, owner, stack)

    def _add_pages(self, event: Event, pages: array[int] | torch.Tensor, page_size: int, owner: int, stack: int) -> int:
        """Note a call; send it, if it cannot wait."""
        n = len(pages)
        if n and not self._may_wait(n, page_size):
            self.flush()
            self._do(event, pages, page_size, owner, stack)
        elif n:
            with self._lock:
                known = pages if isinstance(pages, array) else None
                begin = self._make_room(event, n, page_size, known)
                if isinstance(pages, torch.Tensor):
                    if not self._given.shape[0]:
                        self._given = lasting(PAGES, dtype=torch.int64, device=self._given.device)
                    self._given[begin : begin + n].copy_(pages)  # now: the engine may change them
                    self._on_device.append((begin, begin + n))
                    pages = array("q", bytes(8 * n))
                self._pages.extend(pages)
                self._left = min(PAGES, SLOTS // page_size) - begin
                self._note(event, begin, owner, n, known, stack)
        return n * page_size

    def _may_wait(self, n: int, page_size: int) -> bool:
        return self._kernels is not None and n <= PAGES and n * page_size <= SLOTS

    def _make_room(self, event: Event, n: int, page_size: int, pages: Sequence[int] | None) -> int:
        """Send what has to be sent before a call of ``n`` pages; where these begin."""
        held = len(self._pages)
        if held and (
            held + n > PAGES
            or (held + n) * page_size > SLOTS
            or len(self._rows) >= ROWS
            or page_size != self._page_size
            or (self._released and event in RENEWING and self._were_freed(pages))
        ):
            self.flush()
            held = 0
        self._page_size = page_size
        return held

    def _were_freed(self, pages: Sequence[int] | None) -> bool:
        """Whether some of the pages may have been released: their bytes are compared before they get a new owner."""
        if self._freed is None or pages is None or len(pages) > FEW:
            return True
        return not self._freed.isdisjoint(pages)

    def _note(self, event: Event, begin: int, owner: int, n: int, pages: Sequence[int] | None, stack: int) -> None:
        self._rows.extend((event + stack * STACK_UNIT, begin, owner))
        self._left = self._left - n if len(self._rows) < ROWS else 0
        self.pending = True
        if event is Event.RELEASE:
            self._released = True
            if pages is None or n > FEW:
                self._freed = None
            elif self._freed is not None:
                self._freed.update(pages)

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

    def flush(self) -> None:
        """Send the calls to the device.

        Raises:
            EngineError: calls are queued, and a CUDA graph is being captured.
        """
        if not self.pending:
            return
        if capturing(self._space.block.device if self._space.block.is_cuda else None):
            raise EngineError(
                "a CUDA graph is being captured, and the device was not told yet what the allocator did before: call "
                "session.flush() before torch.cuda.graph()"
            )
        with self._lock:
            events, released = self._sent(), self._released
            gone = self._room(events.slots) if released else None
            self._reset()
            assert self._kernels is not None
            content = self._content
            if self._apply is None:
                self._apply = self._kernels.Apply(self._space, content.digests)
            self._apply(events, content.imported, gone)
            if gone is not None:
                slots, owners = self._freed_in(events.slots)
                content.verify(slots, None, owners, Phase.LIFE)

    def _sent(self) -> Events:
        """The calls on the device."""
        calls, n = len(self._rows) // len(EventRow), len(self._pages)
        if calls % 2:  # a kernel is compiled anew for pages that begin at another alignment
            self._rows.append(0)
        self._staging.send(torch.frombuffer(self._rows + self._pages, dtype=torch.int64), self._words)
        form = calls, n, self._page_size
        events = self._shown.get(form)
        if events is None:
            if len(self._shown) >= SHOWN:
                self._shown.clear()
            first = len(self._rows)
            rows, pages = self._words[: calls * len(EventRow)], self._words[first : first + n]
            events = self._shown[form] = Events(rows.view(calls, -1), pages, self._page_size)
        if self._on_device:
            parts = [slice(*part) for part in self._on_device]
            torch._foreach_copy_([events.entries[part] for part in parts], [self._given[part] for part in parts])
        return events

    def _room(self, slots: int) -> torch.Tensor:
        """int64 ``[2, >= slots]``."""
        if self._gone.shape[1] < slots:
            room = 1 << (slots - 1).bit_length()
            self._gone = lasting(2, room, dtype=torch.int64, device=self._gone.device)
            self._gone_shown.clear()
        return self._gone

    def _freed_in(self, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of so many slots named, which were freed and whose they were, int64 ``[slots]`` each."""
        shown = self._gone_shown.get(slots)
        if shown is None:
            if len(self._gone_shown) >= SHOWN:
                self._gone_shown.clear()
            shown = self._gone_shown[slots] = self._gone[0, :slots], self._gone[1, :slots]
        return shown


def pages_of(slots: Any) -> array[int] | torch.Tensor:
    """Whole numbers as they are queued: those of a device as integers ``[n]`` there, all others on the host.

    Raises:
        EngineError: they are no integers.
    """
    plain = plain_numbers(slots)
    if plain is not None:
        return plain
    if type(slots).__module__ == "numpy" and slots.dtype.kind == "i":
        listed = array("q")
        listed.frombytes(slots.astype("int64").tobytes())
        return listed
    given = integers(slots, "slots").reshape(-1)
    return numbers_of(given) if given.device.type == "cpu" else given


def slots_in(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """All slots of pages (int64 ``[n]``), page by page."""
    if page_size == 1:
        return pages
    return (pages.unsqueeze(1) * page_size + torch.arange(page_size, device=pages.device)).flatten()

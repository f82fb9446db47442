"""Python stacks of the allocator calls of an engine, for a report that says which line freed a slot.

A call is known by its code objects and where they stand: sixteen numbers, which are looked up.  Lines and names are
only worked out for a report.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from types import CodeType, FrameType

from ..kernels.slots.past import STACKS

#: Frames that tell calls apart, and those that a report shows.
DEPTH, SHOWN = 8, 6

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_Frames = list[tuple[CodeType, int]]

_TOLD: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("kvcanary_told_stack", default=())


def told(lines: tuple[str, ...]) -> contextlib.AbstractContextManager[None]:
    """The calls of the block were made elsewhere, with this stack: by an allocator in another process, say.

    Args:
        lines: as :meth:`CallStacks.lines` gives them there; none: nothing changes.
    """
    return _told(lines) if lines else contextlib.nullcontext()


@contextlib.contextmanager
def _told(lines: tuple[str, ...]) -> Iterator[None]:
    token = _TOLD.set(lines)
    try:
        yield
    finally:
        _TOLD.reset(token)


def told_now() -> tuple[str, ...]:
    """The lines of :func:`told`."""
    return _TOLD.get()


class CallStacks:
    """The last distinct stacks, by number."""

    def __init__(self, kept: int):
        """
        Args:
            kept: how many; the least recently seen one is forgotten first.
        """
        self._kept, self._made = kept, 0
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()
        self._frames: dict[int, _Frames] = {}  # code objects that are kept keep their addresses
        self._lines: dict[int, tuple[str, ...]] = {}
        self._lock = threading.Lock()

    def number(self) -> int:
        """The number of the stack of the call into the pool, at least 1; to be called by what a pool's method calls."""
        lines = _TOLD.get()
        if not lines:
            return self._number(sys._getframe(3))
        with self._lock:
            number = self._numbers.get(lines)
            if number is None:
                number = self._keep(lines)
                self._lines[number] = lines
            else:
                self._numbers.move_to_end(lines)
            return number

    def here(self) -> tuple[str, ...]:
        """The stack of the caller outside of this package, as :meth:`lines` gives it: the same object each time."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back
        return self.lines(self._number(frame)) if frame is not None else ()

    def _number(self, begin: FrameType) -> int:
        frame: FrameType | None = begin
        seen: list[int] = []
        for _ in range(DEPTH):
            if frame is None:
                break
            seen += (id(frame.f_code), frame.f_lasti)
            frame = frame.f_back
        key = tuple(seen)
        with self._lock:
            number = self._numbers.get(key)
            if number is None:
                number = self._keep(key)
                self._frames[number] = _frames(begin)
            else:
                self._numbers.move_to_end(key)
            return number

    def _keep(self, key: Hashable) -> int:
        if len(self._numbers) >= self._kept:
            _, oldest = self._numbers.popitem(last=False)
            self._frames.pop(oldest, None)
            self._lines.pop(oldest, None)
        self._made = self._made % (STACKS - 1) + 1
        self._numbers[key] = self._made
        return self._made

    def lines(self, number: int) -> tuple[str, ...]:
        """``scheduler.py:212 in free``, the innermost frame outside of this package first; empty if it is not kept."""
        with self._lock:
            known = self._lines.get(number)
            if known is None and number in self._frames:
                theirs = [f for f in self._frames[number] if not f[0].co_filename.startswith(_OURS)]
                known = tuple(f"{_short(c.co_filename)}:{_line(c, at)} in {c.co_qualname}" for c, at in theirs[:SHOWN])
                self._lines[number] = known
            return known or ()


def _frames(begin: FrameType) -> _Frames:
    frame: FrameType | None = begin
    frames: _Frames = []
    for _ in range(DEPTH):
        if frame is None:
            break
        frames.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return frames


def _line(code: CodeType, at: int) -> int:
    """The line of the instruction at an offset."""
    return next((line for begin, end, line in code.co_lines() if begin <= at < end and line), code.co_firstlineno)


def _short(path: str) -> str:
    """A file's path as it is imported, without where packages or projects lie on this machine."""
    roots = [os.path.join(root, "") for root in (*sys.path, os.getcwd()) if root]
    inside = [path[len(root) :] for root in roots if path.startswith(root)]
    return min(inside, key=len) if inside else os.path.basename(path)

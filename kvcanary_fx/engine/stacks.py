"""Python stacks of the allocator calls of an engine, for a report that says which line freed a slot.

A call is known by its code objects and where they stand: sixteen numbers, which are looked up.  Lines and names are
only worked out for a report.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from types import CodeType, FrameType

from ..kernels.slots.past import STACKS

#: Frames that tell calls apart, and those that a report shows.
DEPTH, SHOWN = 8, 6

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_Frames = list[tuple[CodeType, int]]


class CallStacks:
    """The last distinct stacks, by number."""

    def __init__(self, kept: int):
        """
        Args:
            kept: how many; the least recently seen one is forgotten first.
        """
        self._kept, self._made = kept, 0
        self._numbers: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._frames: dict[int, _Frames] = {}  # code objects that are kept keep their addresses
        self._lock = threading.Lock()

    def number(self) -> int:
        """The number of the stack of the call into the pool, at least 1; to be called by what a pool's method calls."""
        begin = sys._getframe(3)
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
                return self._keep(key, begin)
            self._numbers.move_to_end(key)
            return number

    def _keep(self, key: tuple[int, ...], begin: FrameType) -> int:
        if len(self._numbers) >= self._kept:
            _, oldest = self._numbers.popitem(last=False)
            self._frames.pop(oldest, None)
        self._made = self._made % (STACKS - 1) + 1
        frame: FrameType | None = begin
        frames: _Frames = []
        for _ in range(DEPTH):
            if frame is None:
                break
            frames.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        self._numbers[key], self._frames[self._made] = self._made, frames
        return self._made

    def lines(self, number: int) -> tuple[str, ...]:
        """``scheduler.py:212 in free``, the innermost frame outside of this package first; empty if it is not kept."""
        with self._lock:
            frames = self._frames.get(number, [])
        theirs = [f for f in frames if not f[0].co_filename.startswith(_OURS)]
        return tuple(f"{_short(c.co_filename)}:{_line(c, at)} in {c.co_qualname}" for c, at in theirs[:SHOWN])


def _line(code: CodeType, at: int) -> int:
    """The line of the instruction at an offset."""
    return next((line for begin, end, line in code.co_lines() if begin <= at < end and line), code.co_firstlineno)


def _short(path: str) -> str:
    """A file's path as it is imported, without where packages or projects lie on this machine."""
    roots = [os.path.join(root, "") for root in (*sys.path, os.getcwd()) if root]
    inside = [path[len(root) :] for root in roots if path.startswith(root)]
    return min(inside, key=len) if inside else os.path.basename(path)

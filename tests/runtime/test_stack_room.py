"""Calls below :func:`with_stack_room` do not wait for pieces of Python's stack."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from torch import fx

import kvcanary_fx
from kvcanary_fx.runtime.stack_room import CLAIMED, with_stack_room

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="frames are not kept in pieces")

DEPTHS = 400
"""Frames that fill more than one piece of 16 KiB."""


class Hashed:
    def __hash__(self) -> int:  # called from C, so its frame is one that may need a piece
        return 3


def _slowest(depth: int) -> float:
    """The most that ``hash`` takes on the way down, in the best of a few tries each, in us."""
    best, one = float("inf"), Hashed()
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(20):
            hash(one)
        best = min(best, (time.perf_counter() - begin) / 20 * 1e6)
    return max(best, _slowest(depth - 1)) if depth else best


def test_no_call_waits_for_a_piece_of_the_stack() -> None:
    bare = max(_slowest(DEPTHS) for _ in range(2))
    roomy = with_stack_room(_slowest)(DEPTHS)
    assert roomy < bare / 2, (roomy, bare)


def test_the_result_and_the_exception_are_those_of_the_function() -> None:
    assert with_stack_room(dict)([("a", 1)], b=2) == {"a": 1, "b": 2}
    with pytest.raises(ZeroDivisionError):
        with_stack_room(lambda: 1 // 0)()


def test_a_deep_recursion_still_raises() -> None:
    def deep() -> None:
        deep()

    with pytest.raises(RecursionError):
        with_stack_room(deep)()


@pytest.mark.parametrize("own", [True, False], ids=["a backend with its own session", "kvcanary_backend"])
def test_graphs_are_compiled_with_room(own: bool) -> None:
    claimed: list[int] = []

    def inner(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            claimed.append(frame.f_code.co_stacksize)
            frame = frame.f_back
        return gm.forward

    config = kvcanary_fx.CanaryConfig(inner=inner)
    backend = kvcanary_fx.CanaryBackend(config) if own else kvcanary_fx.kvcanary_backend
    options = None if own else {"kvcanary.inner": inner}
    torch.compile(lambda x: x + 1, backend=backend, options=options)(torch.zeros(2))
    assert claimed.count(CLAIMED) == 1

"""Functions whose calls do not cross the border of a piece of Python's stack.

CPython (since 3.11) keeps the frames of Python functions in pieces of 16 KiB.  A call that does not fit into the piece
takes a new one from the system and gives it back when it returns: 7 us and more, in place of 0.05.  Which call that is
depends on how deep the stack is.  Where it was one that Inductor's scheduler makes for each pair of kernels, a model of
32 layers took it 12 s; with room it takes 4 at any depth (torch 2.11, Python 3.11, a CPU core).
A guarded step of transformers' ``generate`` had 0 to 72 page faults by this, depending on how deep its caller was
(without the canary 0 to 13); with room it has none (a tiny Llama, Python 3.11).

A piece is as large as the frame that it is taken for, rounded up to a power of two.  So a function that claims a frame
of a little over half a mebibyte leaves a little under half a mebibyte behind it, which is more than a compilation
or a step needs.  Nothing is written to what is claimed: the system gives no memory for it.

Source: ``_PyThreadState_PushFrame`` and ``push_chunk`` in CPython's ``Python/pystate.c``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

CLAIMED = 66_000
"""Values of 8 bytes: 528,000 bytes, so that the piece is one of 1,048,576."""


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


_call_with_room = types.FunctionType(_call.__code__.replace(co_stacksize=CLAIMED), globals(), "_call_with_room")


def with_stack_room(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A decorator: calls of ``function`` have about 520,000 bytes of Python's stack in one piece.

    Not for what is called often: the piece itself is taken from the system and given back.
    """

    @functools.wraps(function)
    def roomy(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        result: _T = _call_with_room(function, args, kwargs)
        return result

    return roomy

"""Breakable CUDA graphs: vLLM's way to capture, in pieces, a model that it does not compile.

One capture drives the whole forward.  At an op that vLLM has decorated, such as attention, it ends the piece, runs the
op, keeps it, and begins the next piece; a replay runs pieces and kept ops in turn.  DeepSeek V3.2 and V4, Kimi and
other models have such graphs by default, and some dense ones do with ``VLLM_BATCH_INVARIANT``.

* vLLM decorates its ops when their modules are imported, if its configuration has asked for such graphs by then.  A
  plugin is loaded before there is a configuration, so what it imports is decorated in any case (:func:`ops_break`): the
  decorator does nothing where nothing is captured.  Without that, attention would be captured as it ran in the warm-up.
* What is kept must have our checks in it (:func:`break_capture`).
* K and V lie in the graphs' memory, which the next piece uses again (:func:`next_piece_overwrites`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from vllm import envs, forward_context
from vllm.compilation import breakable_cudagraph
from vllm.config import CUDAGraphMode

_VARIABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"

F = TypeVar("F", bound=Callable[..., Any])


@contextlib.contextmanager
def ops_break() -> Iterator[None]:
    """Within it, vLLM decorates the ops of the modules that are imported as if such graphs were asked for."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def break_capture(op: F) -> F:
    """``op``, at which such a capture ends a piece; it writes to tensors that it is given, and returns none."""
    with ops_break():
        made: F = breakable_cudagraph.eager_break_during_capture(op)
    return made


def next_piece_overwrites() -> bool:
    """Whether an op that runs from Python is kept between two pieces, and its arguments are gone after it."""
    if not envs.VLLM_USE_BREAKABLE_CUDAGRAPH or not forward_context.is_forward_context_available():
        return False
    return bool(forward_context.get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE)

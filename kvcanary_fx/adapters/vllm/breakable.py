"""Breakable CUDA graphs: vLLM's way to capture, in pieces, a model that it does not compile.

One capture drives the whole forward.  At an op that vLLM has decorated, such as attention, it ends the piece, runs the
op, keeps it, and begins the next piece; a replay runs pieces and kept ops in turn.  DeepSeek V3.2 and V4, Kimi and
other models have such graphs by default, and some dense ones do with ``VLLM_BATCH_INVARIANT``.

* The ops of modules that we import before vLLM has a configuration are decorated in any case (:mod:`.early_imports`).
* What is kept must have our checks in it (:func:`break_capture`).
* K and V lie in the graphs' memory, which the next piece uses again (:func:`next_piece_overwrites`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from vllm import envs, forward_context
from vllm.compilation import breakable_cudagraph
from vllm.config import CUDAGraphMode

from .early_imports import ops_break

F = TypeVar("F", bound=Callable[..., Any])


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

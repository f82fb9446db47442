"""Hashes of PyTorch's and Triton's sources, part of every name in their caches.

Inductor wants both in the first compilation of a process, one behind the other: 0.1 s for 600 files of PyTorch, 0.4 s
for Triton and its library.  Of Triton's nearly all is reading and hashing large blocks, which other threads need not
wait for: it is computed while Dynamo traces, for 1.8 s of a first call of 3 s with warm caches.  PyTorch's small files
took 1.1 to 1.8 s there, as a thread that asks for its turn behind each file waits for it (H200).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch._dynamo.callback

from ..kernels.compile_ahead import SHORT_TURNS, compiles_for
from ..passes.dynamo_calls import backend_at_work


class _NameOfTriton:
    """Triton's name, computed in a thread that is begun once."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Unless it was done."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=_compute, name="kvcanary names")
                self._thread.start()

    def wait(self) -> None:
        """Until the thread is done."""
        if self._thread is not None:
            self._thread.join()  # returns at once in a process that was forked meanwhile, which has no such thread


_NAME_OF_TRITON = _NameOfTriton()


def begin_with_dynamo() -> None:
    """From here on, have Triton's name computed while Dynamo traces the first graph for a backend of ours."""
    if _begin not in torch._dynamo.callback.callback_handler.start_callbacks:
        torch._dynamo.callback.on_compile_start(_begin)


def _begin(args: Any) -> None:
    """Called by Dynamo when it begins, whatever the backend is."""
    at_work = backend_at_work()
    if at_work is not None and getattr(at_work[0], "is_kvcanary", False) and _on_a_gpu():
        _NAME_OF_TRITON.begin()


def _on_a_gpu() -> bool:
    """Whether a graph is likely to be one for a GPU, which only its inputs would say."""
    return torch.cuda.is_initialized() and compiles_for(torch.device("cuda"))


@contextlib.contextmanager
def computing_names(inputs: Sequence[Any], inner: Any) -> Iterator[None]:
    """Have the names when the body is over, if a graph with these inputs is compiled for a GPU.

    They must be there before a kernel is compiled in another thread.  Seen (H200): two threads that compute one of them
    at a time, or one beside a thread that runs Python, wait for their turn behind every block that they read; Triton's
    took 1.1 s then, and PyTorch's 0.5.

    Args:
        inner: the backend that compiles the graph, as of :attr:`.CanaryConfig.inner`.
    """
    if not any(compiles_for(device) for device in {t.device for t in inputs if isinstance(t, torch.Tensor)}):
        yield
        return
    _NAME_OF_TRITON.begin()  # where Dynamo has not told us
    try:
        yield
        if inner == "inductor":
            name_of_torch()
    finally:
        _NAME_OF_TRITON.wait()


def _compute() -> None:
    with SHORT_TURNS, contextlib.suppress(Exception):  # who needs the name raises it again
        name_of_triton()


def name_of_triton() -> str:
    """A hash of all of Triton; computed once a process."""
    from triton.runtime.cache import triton_key

    name: str = triton_key()
    return name


def name_of_torch() -> None:
    """A hash of PyTorch's sources, if Inductor's cache is in use; computed once a process."""
    import torch._inductor.codecache
    import torch._inductor.config

    compute = getattr(torch._inductor.codecache, "torch_key", None)  # private; without it Inductor does so later
    if compute and torch._inductor.config.fx_graph_cache and not torch._inductor.config.force_disable_caches:
        compute()

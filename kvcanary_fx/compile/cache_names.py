"""Hashes of PyTorch's and Triton's sources, part of every name in their caches: computed while our passes run.

Inductor wants both in the first compilation of a process, one behind the other: 0.1 s for 600 files of PyTorch, 0.4 s
for Triton and its library.  Nearly all of it is reading and hashing, which other threads need not wait for, so the
passes (0.1 s) take none of the first call's 3 s with warm caches (H200).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..kernels.compile_ahead import SHORT_TURNS, compiles_for


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
    beside = threading.Thread(target=_compute_beside, name="kvcanary names")
    beside.start()
    try:
        yield
        if inner == "inductor":
            name_of_torch()
    finally:
        beside.join()


def _compute_beside() -> None:
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

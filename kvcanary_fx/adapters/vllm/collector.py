"""What Python's garbage collector has to look at while vLLM starts.

vLLM's modules and what they import are 620,000 objects, and ours and those that are imported with them 54,000 more.
None of them becomes garbage, yet an engine that starts has all of them looked at some ten times before it captures its
first graph: it asks for a collection around each look at the GPU's memory.  One took 0.35 to 0.5 s (8B, H200,
2026-11-30), of a warm start of 30 s.  Python's documentation has the remedy for processes that fork, ``gc.freeze``,
which vLLM calls, too, once it has started.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
from collections.abc import Iterator


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Around imports: the collection that they may set off, 0.3 s in one of 0.95, would find nothing."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


#: How vLLM names the processes that it starts anew.
_ITS_OWN = ("EngineCore", "VllmWorker", "ApiServer")


@functools.cache
def set_imports_aside() -> None:
    """In the processes that vLLM starts, no collection looks at what was imported by now, until vLLM unfreezes it.

    In the process that vLLM was imported in, as a script does with ``LLM``, nothing changes: what its user drops is
    collected.  What that forks begins with what was imported set aside.  A second call changes nothing.
    """
    if multiprocessing.current_process().name.startswith(_ITS_OWN):
        gc.freeze()
    else:
        os.register_at_fork(after_in_child=gc.freeze)

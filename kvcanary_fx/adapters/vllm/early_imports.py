"""Modules of vLLM that its plugins import before vLLM has a configuration."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

#: What asks for breakable CUDA graphs; vLLM's configuration sets it, too.
BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"


@contextlib.contextmanager
def ops_break() -> Iterator[None]:
    """Within it, vLLM decorates the ops of the modules that are imported as if breakable graphs were asked for.

    It does so when they are imported, if they were asked for by then.  Without that, attention would be captured as it
    ran in the warm-up.  The decorator does nothing where nothing is captured.
    """
    before = os.environ.get(BREAKABLE)
    os.environ[BREAKABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[BREAKABLE]
        else:
            os.environ[BREAKABLE] = before

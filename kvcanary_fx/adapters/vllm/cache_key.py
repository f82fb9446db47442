"""Keeps guarded and unguarded artifacts apart in vLLM's compile caches.

A warm ahead-of-time cache returns what was compiled before, and calls no backend: without our part in its key a
guarded run would silently get the unguarded graph, and the other way round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig

from .patching import wrap


def extend(key: str) -> None:
    """Fold ``key`` into the hash of vLLM's configuration, which is part of every key of its caches."""

    def compute_hash(original: Callable[..., str], *args: Any, **kwargs: Any) -> str:
        return hashlib.sha256(f"{original(*args, **kwargs)} {key}".encode()).hexdigest()[:10]

    wrap(VllmConfig, "compute_hash", compute_hash)

"""The static cache of one ``generate``, kept for the next.

A captured CUDA graph holds the addresses of a cache, and our checks in it those of the cache's shadow.
transformers makes a new cache in each call.  Without the canary it often gets the addresses of the last one; with
the shadow's tensors beside it, it does not: on an H100 each ``generate`` of 128 tokens recorded two graphs again, and
took half as long again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from ...runtime.session import CanarySession
from .caches import has_tensors


@dataclasses.dataclass(frozen=True)
class _Circumstances:
    """What a cache's tensors depend on besides its layers: if it differs, the kept tensors do not fit."""

    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None
    inference: bool

    @classmethod
    def now(cls, device: torch.device, dtype: torch.dtype) -> _Circumstances:
        cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        return cls(device, dtype, cast, torch.is_inference_mode_enabled())


class _Running(threading.local):
    """The caches of the calls of ``generate`` that the thread is in, each in its own list."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[Any, _Circumstances]]] = []


class KeptCache:
    """Keeps the cache of the last ``generate`` of one model."""

    def __init__(self, session: CanarySession):
        self._session = session
        #: one cache, or none while it is in use; pop gives it to one thread only
        self._free: list[tuple[Any, _Circumstances]] = []
        self._running = _Running()
        self._graphs = 0  # of the session, when the references to a cache were last counted

    def _compiled(self) -> bool:
        """Whether a graph was compiled since the last time that somebody asked."""
        before, self._graphs = self._graphs, len(self._session.plans)
        return before != self._graphs

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """One ``generate``: its cache is kept for the next one."""
        prepared: list[tuple[Any, _Circumstances]] = []
        self._running.calls.append(prepared)
        try:
            yield
            self._free[:] = prepared[-1:]
        finally:
            self._running.calls.pop()

    def instead_of(self, fresh: Any, batch: int, device: torch.device, dtype: torch.dtype) -> Any:
        """``fresh``, a cache without tensors, or the kept one, emptied, if it matches and is not in use.

        Args:
            batch: number of sequences.
            device, dtype: of the model.
        """
        if not self._running.calls:
            return fresh
        cache, made_for = fresh, _Circumstances.now(device, dtype)
        if self._free and not any(has_tensors(layer) for layer in fresh.layers):
            try:
                kept, before = self._free.pop()
            except IndexError:  # another thread took it
                kept, before = None, None
            if self._compiled() and (sys.getrefcount(kept) > _MINE or not _unshared(kept)):
                gc.collect()  # Dynamo leaves what it traced with in cycles: with a new cache, graphs are captured anew
            mine = before == made_for and sys.getrefcount(kept) <= _MINE
            if mine and _alike(kept, fresh, batch) and _unshared(kept):
                self._session.forget(*(tensor for layer in kept.layers for tensor in (layer.keys, layer.values)))
                kept.reset()
                cache = kept
        self._running.calls[-1].append((cache, made_for))
        return cache


#: References to an object that one variable holds, as ``sys.getrefcount`` counts them.
_MINE = 2


def _alike(kept: Any, fresh: Any, batch: int) -> bool:
    """Whether a cache has the layers that a new one would have."""
    if type(kept) is not type(fresh) or len(kept.layers) != len(fresh.layers):
        return False
    return all(
        type(mine) is type(other)
        and all(t is not None and t.shape[0] == batch for t in _halves(mine))  # not so where it has states instead
        and mine.max_cache_len == other.max_cache_len
        for mine, other in zip(kept.layers, fresh.layers, strict=True)
    )


def _halves(layer: Any) -> tuple[torch.Tensor | None, ...]:
    """K and V of a layer; None where it has states instead."""
    return getattr(layer, "keys", None), getattr(layer, "values", None)


def _unshared(kept: Any) -> bool:
    """Whether nothing else references a layer or a tensor of it, to read it later."""
    for layer in kept.layers:
        if sys.getrefcount(layer) > _MINE + 1:  # the list's
            return False
        for name in ("keys", "values"):
            tensor = getattr(layer, name, None)
            if tensor is not None and sys.getrefcount(tensor) > _MINE + 1:  # the layer's
                return False
    return True

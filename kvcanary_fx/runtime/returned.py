"""Caches that a graph returns instead of writing: their shadow goes along from the tensor given to the one returned.

Each tensor has a shadow of its own, so that a version of a cache may be used again: the same prompt, continued twice.
The ops work on the *working* shadow of a bound call, whose memory never moves: before a call it takes what is known of
the tensors given, after the call a copy of it is what is known of the tensors returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ..passes.graph_plan import SitePlan
from .pool_half import PoolHalf
from .registry import PoolRegistry, Shadow

#: Calls in a row with tensors that no call returned, until we say so.
PATIENCE = 3


@dataclasses.dataclass
class _Site:
    """One cache that comes back, and its working shadow."""

    plan: SitePlan
    half: PoolHalf
    given: int = 0  # tensors in a row that no call returned

    def memory(self) -> list[torch.Tensor]:
        """The working shadow."""
        buffers, identity = self.half.buffers, self.half.identity
        own = [] if identity is None else [identity.tokens, identity.positions, identity.chain]
        return [buffers.digest, buffers.rows, *own]

    def key(self, tensor: torch.Tensor) -> tuple[object, ...]:
        """What tells this half from others in a tensor's storage; digests of other seeds say nothing here."""
        place = self.half.place
        inside = place.offset - int(tensor.storage_offset()) * tensor.element_size()
        return (self.half.seeds, place.layout, inside, self.half.identity is not None)


class ReturnedCaches:
    """The caches of one bound call that its graph returns."""

    def __init__(self, sites: Sequence[tuple[SitePlan, PoolHalf]], registry: PoolRegistry, args: Sequence[Any]):
        """
        Args:
            sites: those of the graph with an output.
            args: the graph's arguments, of the shapes that all calls bound to this have.
        """
        self._registry = registry
        self._sites = [_Site(plan, half) for plan, half in sites]
        self._keys = [site.key(args[site.plan.argument]) for site in self._sites]

    def load(self, args: Sequence[Any]) -> bool:
        """Take what is known of the tensors given; whether something else may have written to one of them."""
        lenient, work, known = False, list[torch.Tensor](), list[torch.Tensor]()
        for site, key in zip(self._sites, self._keys, strict=True):
            tensor = args[site.plan.argument]
            storage = self._registry.known(tensor)
            shadow = None if storage is None else storage.shadows.get(key)
            if storage is None or shadow is None:
                site.given += 1
                site.half.forget()
            else:
                site.given = 0
                work += site.memory()
                known += shadow.memory
            version = None if tensor.is_inference() else tensor._version
            lenient |= shadow is None or storage is None or version is None or version != storage.version
        if work:
            torch._foreach_copy_(work, known)
        return lenient

    def store(self, outputs: Sequence[Any]) -> None:
        """What the call left in the working shadows is what is known of the tensors that it returned."""
        for site, key in zip(self._sites, self._keys, strict=True):
            assert site.plan.output is not None
            tensor = outputs[site.plan.output]
            storage = self._registry.storage_of(tensor)
            shadow = storage.shadows.get(key)
            if shadow is None:
                storage.shadows[key] = Shadow(site.half, [t.clone() for t in site.memory()])
            else:  # a graph that reads the tensor may be bound to this memory
                torch._foreach_copy_(shadow.memory, site.memory())
            storage.version = None if tensor.is_inference() else tensor._version

    def copied(self) -> list[str]:
        """Names of caches that are never given as they were returned, so that nothing is known of them."""
        return [site.plan.pool for site in self._sites if site.given == PATIENCE]

"""Caches that a graph returns instead of writing: their shadow moves from the tensor passed in to the one returned.

Each tensor has its own shadow, so that a version of a cache may be used again: the same prompt, continued twice. The
ops work on the *working* shadow of a bound call, whose memory never moves: before a call the shadow of the tensors
passed in is copied to it, after the call it is copied to that of the tensors returned.

Every cache that lives has a *line* of working shadows of its own, so that layers that share a graph are told apart; a
cache that no call has returned takes the line of one that is gone.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.writes.layout import SlotLayout
from ..passes.graph_plan import SitePlan
from .pool_half import Place, PoolHalf
from .registry import Line, PoolRegistry, ReturnedSite, Shadow, seeds_of

#: Calls in a row with tensors that no call returned, until a warning.
PATIENCE = 3


class Lines:
    """Which line of working shadows a call takes, of a graph with arguments of some shapes."""

    def __init__(self, plans: Sequence[tuple[SitePlan, int]], registry: PoolRegistry, args: Sequence[Any]):
        """
        Args:
            plans: the sites with an output, each with its layer's number.
        """
        self._registry = registry
        self._sites = [ReturnedSite(plan, _place(plan.view(args), plan), number) for plan, number in plans]
        inside = [site.place.offset - _first_byte(args[site.plan.argument]) for site in self._sites]
        self._keys = [
            [_key(seeds_of(site.plan, site.number), site.place.layout, first, named) for named in (True, False)]
            for site, first in zip(self._sites, inside, strict=True)
        ]

    def of(self, args: Sequence[Any]) -> Line:
        """The line of the call that returned one of the tensors passed in; else an unused one.

        Raises:
            CaptureError: there is none, and a CUDA graph is being captured.
        """
        named = [(s.place, s.number, s.plan.layer, s.plan.label, s.plan.pool) for s in self._sites]
        line_key = (threading.get_ident(), args[self._sites[0].plan.argument].device, *named)
        for site, keys in zip(self._sites, self._keys, strict=True):
            storage = self._registry.known(args[site.plan.argument])
            known = [] if storage is None else [storage.shadows[key] for key in keys if key in storage.shadows]
            for shadow in known:
                if shadow.line.key == line_key:
                    return shadow.line
        free = self._registry.free_line(line_key)
        return free or self._registry.new_line(line_key, [s.plan.view(args) for s in self._sites], self._sites)


def _place(view: torch.Tensor, plan: SitePlan) -> Place:
    layout = SlotLayout(tuple(view.shape), plan.slot_axes, view.dtype, plan.paged)
    return Place(int(view.storage_offset()) * view.element_size(), tuple(view.stride()), layout)


def _key(seeds: tuple[int, int], layout: SlotLayout, inside: int, named: bool) -> tuple[object, ...]:
    """Identifies a half in a tensor's storage; digests with other seeds cannot be compared.

    Args:
        inside: bytes from the tensor's first to the half's first.
        named: the identity of the slots is known.
    """
    return seeds, layout, inside, named


def _first_byte(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


@dataclasses.dataclass
class _Site:
    """One cache that comes back, and its working shadow."""

    plan: SitePlan
    half: PoolHalf
    inside: int  # bytes from the tensor's first to the half's first
    given: int = 0  # tensors in a row that no call returned

    def memory(self) -> list[torch.Tensor]:
        """The working shadow."""
        buffers, identity = self.half.buffers, self.half.identity
        own = [] if identity is None else [identity.tokens, identity.positions, identity.chain]
        return [buffers.digest, buffers.rows, *own]

    def key(self) -> tuple[object, ...]:
        """Identifies this half in a tensor's storage."""
        return _key(self.half.seeds, self.half.place.layout, self.inside, self.half.identity is not None)

    def place_in(self, tensor: torch.Tensor) -> Place:
        """Where the half is in a tensor that was returned, of the strides of the one that was given."""
        return dataclasses.replace(self.half.place, offset=_first_byte(tensor) + self.inside)


class ReturnedCaches:
    """The caches of one bound call that its graph returns."""

    def __init__(self, plans: Sequence[SitePlan], line: Line, registry: PoolRegistry, args: Sequence[Any]):
        """
        Args:
            plans: the sites of the graph with an output.
            args: the graph's arguments, of the shapes that all calls bound to this have.
        """
        self._registry, self._line = registry, line
        registry.copies_shadows()
        given = [args[plan.argument] for plan in plans]
        self._sites = [
            _Site(plan, half, half.place.offset - _first_byte(tensor))
            for plan, half, tensor in zip(plans, line.halves, given, strict=True)
        ]
        self._keys = [site.key() for site in self._sites]
        self._strides = [tensor.stride() for tensor in given]

    def load(self, args: Sequence[Any]) -> bool:
        """Load what is known of the tensors passed in; whether something else may have written to one of them."""
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
        """Store the working shadows as what is known of the tensors that the call returned."""
        for site, key, strides in zip(self._sites, self._keys, self._strides, strict=True):
            assert site.plan.output is not None
            tensor = outputs[site.plan.output]
            storage = self._registry.storage_of(tensor)
            shadow = storage.shadows.get(key)
            if shadow is None:
                storage.shadows[key] = Shadow(self._line, site.half, [t.clone() for t in site.memory()])
            else:  # a graph that reads the tensor may be bound to this memory
                torch._foreach_copy_(shadow.memory, site.memory())
                shadow.line, shadow.half = self._line, site.half
            same = tensor.stride() == strides
            site.half.latest = (storage.reference, site.place_in(tensor)) if same else None
            storage.version = None if tensor.is_inference() else tensor._version

    def copied(self) -> list[str]:
        """Names of caches that are never passed in as they were returned, so that nothing is known of them."""
        return [site.plan.pool for site in self._sites if site.given == PATIENCE]

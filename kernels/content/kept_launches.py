"""Launches that a site keeps, to make them again for tensors that lie in memory as those of an earlier call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ..bound_launch import BoundLaunch
from ..buffers import Site
from .gpu_layer import MOST_FORMS


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch with the tensors whose addresses change: which of a call's, and how many bytes behind its start."""

    bound: BoundLaunch
    grid: tuple[int, int, int]
    sources: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class _Kept:
    """The launches for one form of a call's tensors, the stamps that they were bound to, and the memory they need."""

    launches: list[Launch]
    stamps: torch.Tensor
    scratch: int


def seen(
    op: str, sites: Sequence[Site], tensors: Sequence[torch.Tensor | None], extent: Sequence[int]
) -> tuple[Any, ...]:
    """What must be equal for the launches of an op to be made again."""
    forms = [None if t is None else (t.dtype, t.device, t.shape, t.stride(), t.data_ptr() & 15) for t in tensors]
    return (op, *(site.half.baseline is None for site in sites), *forms, *extent)


def again(site: Site, form: tuple[Any, ...], tensors: Sequence[torch.Tensor | None]) -> bool:
    """Make the launches of an earlier call of this form, if there was one."""
    kept: _Kept | None = site.launches.get(form)
    if kept is None or kept.stamps is not site.control.stamps:
        return False
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    scratch = scratch_of(site, kept.scratch)
    if scratch is not None:
        addresses.append(scratch.data_ptr())
    for launch in kept.launches:
        launch.bound(launch.grid, [addresses[i] + behind for i, behind in launch.sources], None)
    return True


def scratch_of(site: Site, words: int) -> torch.Tensor | None:
    """int64 ``[words]``, which the launches of one call fill and read; None for no words."""
    return torch.empty(words, dtype=torch.int64, device=site.gate.device) if words else None


def first(
    bound: BoundLaunch,
    grid: tuple[int, int, int],
    given: Sequence[tuple[torch.Tensor, int]],
    tensors: Sequence[torch.Tensor | None],
) -> Launch | None:
    """Launch for the first time; None if an argument is a copy of its own, so that another call has another.

    Args:
        given: the changing arguments, each with the number of the call's tensor that it is a view of.
    """
    bound.first(grid, [tensor for tensor, _ in given], None)
    sources = []
    for view, i in given:
        whole = tensors[i]
        if whole is None or whole.untyped_storage()._cdata != view.untyped_storage()._cdata:
            return None
        sources.append((i, view.data_ptr() - whole.data_ptr()))
    return Launch(bound, grid, tuple(sources)) if bound.ready else None


def keep(site: Site, form: tuple[Any, ...], launches: Sequence[Launch | None], scratch: int = 0) -> None:
    """Keep launches for later calls, if they can be made again."""
    whole = [launch for launch in launches if launch is not None]
    if len(whole) < len(launches):
        return
    if len(site.launches) >= MOST_FORMS:
        site.launches.clear()
    site.launches[form] = _Kept(whole, site.control.stamps, scratch)

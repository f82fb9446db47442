"""Tensors of a few slots with the memory layout of a real pool's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine.pool_content import address_of

#: Identifies a run of slots: the storage, where the run begins, and the distance of its slots, in bytes.
_Run = tuple[int, int, int]


def scaled_down(layers: Sequence[Sequence[torch.Tensor]], first: int) -> list[list[torch.Tensor]]:
    """Zeros with another number of slots or pages in new memory; types, rows and strides are kept.

    Views side by side in one slot, such as K and V of one row, stay so; a tensor that two layers share is
    shared.  Memory between runs of slots in the real pool is left out.

    Args:
        layers: views ``[slots, ...]`` or ``[pages, page_size, ...]``.
        first: number of slots or pages of the new tensors.
    """
    runs: dict[_Run, list[torch.Tensor]] = {}
    for tensor in (tensor for layer in layers for tensor in layer):
        runs.setdefault(_run(tensor), []).append(tensor)
    memory = {run: _memory(tensors, first) for run, tensors in runs.items()}
    made: dict[tuple[object, ...], torch.Tensor] = {}
    for tensor in (tensor for layer in layers for tensor in layer):
        if address_of(tensor) not in made:
            made[address_of(tensor)] = _view(tensor, first, memory[_run(tensor)])
    return [[made[address_of(tensor)] for tensor in layer] for layer in layers]


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _run(tensor: torch.Tensor) -> _Run:
    step = tensor.stride(0) * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), _offset(tensor) - _offset(tensor) % max(step, 1), step


def _within(tensor: torch.Tensor) -> int:
    """Offset of a tensor in its run, in bytes."""
    return _offset(tensor) - _run(tensor)[1]


def _strides(tensor: torch.Tensor, first: int) -> list[int]:
    """Its strides with ``first`` slots or pages: strides of outer axes, such as heads, are adjusted."""
    slots, step = tensor.shape[0], tensor.stride(0)
    given = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride // slots * first if size > 1 and stride > step else stride for size, stride in given]


def _memory(tensors: Sequence[torch.Tensor], first: int) -> torch.UntypedStorage:
    ends = [0]
    for tensor in tensors:
        sizes = [first, *tensor.shape[1:]]
        last = sum((size - 1) * s for size, s in zip(sizes, _strides(tensor, first), strict=True))
        ends.append(_within(tensor) + (last + 1) * tensor.element_size())
    return torch.zeros(max(ends), dtype=torch.uint8, device=tensors[0].device).untyped_storage()


def _view(tensor: torch.Tensor, first: int, memory: torch.UntypedStorage) -> torch.Tensor:
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    start = _within(tensor) // tensor.element_size()
    return whole.set_(memory, start, (first, *tensor.shape[1:]), tuple(_strides(tensor, first)))

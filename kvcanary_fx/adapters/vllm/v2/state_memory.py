"""Where the states of layers are, and what is known of their blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ....kernels.buffers import Site
from ....kernels.slots.space import SlotSpace

#: 32-bit words of a state that a program digests, and those that it has in a tile.
CHUNK, TILE = 8192, 1024

#: Requests that the check of places looks at together.
PLACES = 256

#: Words before the requests of a step, and of a request before its blocks.
HEAD, OWNER_AND_POSITION = 1, 2


class StateHalf(NamedTuple):
    """One state of one layer.

    Attributes:
        view: ``[blocks, ...]``, see :func:`words_of`.
        group: which of the groups it is in, from 0.
    """

    site: Site
    view: torch.Tensor
    group: int


class StateTable(NamedTuple):
    """A group of states.

    Attributes:
        space: who has its blocks.
        table: int32 ``[>= bs, columns]``, what the model gets: the blocks of each request of the batch.
        planned: int32 ``[requests, columns]``, what the scheduler said: those of each request, in its own row.
        half_id: of its first state, for reports.
    """

    space: SlotSpace
    table: torch.Tensor
    planned: torch.Tensor
    half_id: int


class StepInputs(NamedTuple):
    """Of the running step: int64 ``[bs]`` each.

    Attributes:
        rows: of each request in the scheduler's tables.
        owners: the hashes of the requests.
        prefix_lens, extend_lens: tokens that each has stored, and that the forward adds.
    """

    rows: torch.Tensor
    owners: torch.Tensor
    prefix_lens: torch.Tensor
    extend_lens: torch.Tensor


def words_of(view: torch.Tensor) -> torch.Tensor | None:
    """The states of all blocks as int32 ``[blocks, words]``, in the same memory; None if they are no such rows."""
    size, elements = view.element_size(), view[0].numel()
    stride, start = view.stride(0) * size, view.storage_offset() * size
    if not view[0].is_contiguous() or elements * size % 4 or stride % 4 or start % 4:
        return None
    whole = torch.empty(0, dtype=torch.int32, device=view.device)
    return whole.set_(view.untyped_storage(), start // 4, (view.shape[0], elements * size // 4), (stride // 4, 1))

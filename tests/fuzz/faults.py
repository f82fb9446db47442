"""What goes wrong, and what legally happens, to the tensors of a cache from outside."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuzz.program import Event, Program

Tensors = Sequence[Sequence[torch.Tensor]]
_BITS = {4: torch.int32, 2: torch.int16, 1: torch.int8}


def apply_fault(program: Program, tensors: Tensors, table: torch.Tensor, event: Event, written: int) -> None:
    """Damage one token's K or V, or both.

    Args:
        written: how many positions of each sequence hold tokens.
    """
    z, layout = program.sizes, program.layout
    layer, row, half = event.layer % z.layers, event.row % z.batch, event.half % 2
    held = max(1, min(written, z.length))  # a window that rolls holds no more
    position = event.position % held
    other = (position + 1) % held

    def cell(which: int, at: int) -> torch.Tensor:
        found = layout.cell(layout.half(tensors, layer, which), table, z, row, at)
        return found if event.counted else found.data

    target = cell(half, position)
    if event.what == "flip":
        word = target.view(_BITS[target.element_size()])
        word[(0,) * word.dim()] ^= 1 << 3
    elif event.what == "zero":
        target.zero_()
    elif event.what == "copy":
        target.copy_(cell(half, other).clone())
    elif event.what == "head":
        target[0] = cell(half, other)[-1].clone()
    elif event.what == "swap" and not layout.latent:
        kept, twin = target.clone(), cell(1 - half, position)
        target.copy_(twin)
        twin.copy_(kept)


def zero_from(program: Program, tensors: Tensors, table: torch.Tensor, start: int) -> None:
    """Zero every cell from a position on."""
    z, layout = program.sizes, program.layout
    for mine in _halves(program, tensors):
        if layout.of.pool:
            for row in range(z.batch):
                for position in range(start, z.length):
                    layout.cell(mine, table, z, row, position).zero_()
        else:
            mine.narrow(layout.of.axis, start, z.length - start).zero_()


def reorder(program: Program, tensors: Tensors, table: torch.Tensor, order: list[int]) -> None:
    """Give each sequence what another one had, in place."""
    z, layout = program.sizes, program.layout
    index = torch.tensor(order)
    for mine in _halves(program, tensors):
        if layout.of.batch is not None:
            mine.copy_(mine.index_select(layout.of.batch, index))
            continue
        kept = mine.clone()
        for row in range(z.batch):
            for position in range(z.length):
                layout.cell(mine, table, z, row, position).copy_(layout.cell(kept, table, z, order[row], position))


def _halves(program: Program, tensors: Tensors) -> list[torch.Tensor]:
    return [program.layout.half(tensors, layer, half) for layer in range(program.sizes.layers) for half in range(2)]

"""How far each row of a cache was written, and which token position it starts at.  On a CPU."""

from __future__ import annotations

import torch

from ..buffers import RowState, Site
from ..ring import UNKNOWN
from .layout import SlotLayout

#: Slots of a write that are looked at one by one: a decode step's.  With torch's operations one of them took 200 of the
#: 490 us that recording a half of a layer took (a CPU core, under a profiler).
FEW = 16


def update_rows(site: Site, slots: torch.Tensor, last_position: torch.Tensor | None, moved: int | None) -> None:
    """Note a write in the rows it touched.

    Args:
        slots: int64 ``[n]``; -1 is skipped.
        last_position: int64 ``[rows]``, the token position of the last token of each row, if known.
        moved: None for a write at chosen slots; for a write of all slots (a window that rolls), the tokens
            it took in, 0 if unknown.
    """
    layout, rows = site.layout, site.half.rows
    if not layout.has_rows or slots.numel() == 0:
        return
    if moved is None and slots.numel() <= FEW:
        _update_few(rows, layout, slots.tolist(), last_position)
        return
    live = slots >= 0
    row = torch.where(live, slots // layout.positions, layout.rows)  # one extra row for skipped writes
    last = torch.full((layout.rows + 1,), -1, dtype=torch.int64, device=slots.device)
    last = last.scatter_reduce(0, row, slots % layout.positions, "amax")[:-1]
    length = torch.zeros(layout.rows + 1, dtype=torch.int64, device=slots.device)
    length = length.scatter_add(0, row, torch.ones_like(row))[:-1]
    old = rows.to(torch.int64)
    if last_position is not None:
        origin = last_position - last
    elif moved is None:
        origin = torch.zeros_like(last)
    else:
        end = old[:, RowState.ORIGIN] + old[:, RowState.NEXT] + moved
        known = (old[:, RowState.ORIGIN] != UNKNOWN) & (moved > 0)
        origin = torch.where(known, end - layout.positions, UNKNOWN)
    if moved is not None:
        length = torch.full_like(length, moved)
    fresh = torch.stack((last + 1, origin, length), dim=1).to(torch.int32)
    rows.copy_(torch.where((last >= 0).unsqueeze(1), fresh, rows))


def _update_few(rows: torch.Tensor, layout: SlotLayout, slots: list[int], last_position: torch.Tensor | None) -> None:
    last: dict[int, int] = {}
    length: dict[int, int] = {}
    for slot in slots:
        if slot >= 0:
            row, position = divmod(slot, layout.positions)
            last[row] = max(last.get(row, -1), position)
            length[row] = length.get(row, 0) + 1
    for row, position in last.items():
        origin = 0 if last_position is None else int(last_position[row]) - position
        rows[row] = torch.tensor((position + 1, origin, length[row])).to(rows.dtype)

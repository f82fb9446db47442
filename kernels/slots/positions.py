"""Reading a graph's position input, which comes as ``[B, T]``, ``[1, T]``, ``[T]`` or, in decode, ``[B]``."""

from __future__ import annotations

import torch


def per_row(positions: torch.Tensor | None, rows: int, tokens: int) -> torch.Tensor | None:
    """``positions`` as ``[rows, tokens]`` without a copy, or None if it cannot mean that.

    Args:
        rows: batch rows.
        tokens: tokens of each row in this step.
    """
    if positions is None or positions.dim() not in (1, 2):
        return None
    if positions.dim() == 1:
        if tokens == 1 and positions.shape[0] == rows:
            return positions.unsqueeze(1)
        positions = positions.unsqueeze(0)
    if positions.shape[1] != tokens or positions.shape[0] not in (1, rows):
        return None
    return positions.expand(rows, tokens)


def ends_of_rows(positions: torch.Tensor | None, rows: int, written: int) -> torch.Tensor | None:
    """The token position each row ends with: integer ``[rows]``, a view; None if that is unclear.

    Args:
        written: slots written in this step, over all rows; a rolling window writes more than it takes in,
            so its position input alone says how many tokens there are.
    """
    if positions is None or positions.dim() not in (1, 2) or not positions.numel() or rows == 0:
        return None
    tokens = positions.shape[-1] if positions.dim() == 2 else written // rows
    table = per_row(positions, rows, tokens)
    return None if table is None else table[:, -1]


def last_of_rows(positions: torch.Tensor | None, rows: int, written: int) -> torch.Tensor | None:
    """:func:`ends_of_rows` as int64."""
    ends = ends_of_rows(positions, rows, written)
    return None if ends is None else ends.to(torch.int64)

"""Counts the ops that ran, for the coverage check."""

from __future__ import annotations

import torch

from .buffers import Gate


def count_op(gate: torch.Tensor, ops: int = 1) -> None:
    """Count ops that ran; the kernels of the checks do it along with their work."""
    if ops:
        gate[Gate.OPS : Gate.OPS + 1].add_(ops)  # gate[i] += 1 would launch twice

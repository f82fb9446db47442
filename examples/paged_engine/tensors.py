"""Numbers from Python lists to a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def upload(values: Iterable[Any], device: str) -> torch.Tensor:
    """int64, as ``values`` are nested.  Pageable memory is read before the call returns, so it may go at once."""
    return torch.tensor(list(values), dtype=torch.int64).to(device, non_blocking=True)

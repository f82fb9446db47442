"""The requests' own tokens on the device, for the canary's token check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from config import EngineConfig
from tensors import upload
from workload import Request

if TYPE_CHECKING:
    from batching import Work


class History:
    """A row of tokens for each row of the request table; what is new is copied when the canary asks.

    Attributes:
        tokens: int64 ``[rows, width + 1]``; a request's last token may have no position yet.
        known: for each row the request that is in it, and how many of its tokens.
    """

    def __init__(self, config: EngineConfig):
        self.device = config.device
        self.tokens = torch.zeros(config.max_running + 1, config.width + 1, dtype=torch.int64, device=config.device)
        self.known: list[tuple[Request | None, int]] = [(None, 0)] * len(self.tokens)

    def of(self, work: list[Work]) -> torch.Tensor:
        """int64 ``[bs, longest]``: the tokens of each request, as the request says."""
        rows, columns, values = [], [], []
        for w in work:
            request, row = w.request, w.request.row
            who, count = self.known[row]
            start = min(count, w.start) if who is request else 0  # behind its stored tokens a request may change
            new = request.tail(start)
            rows += [row] * len(new)
            columns += range(start, start + len(new))
            values += new
            self.known[row] = (request, request.length)
        at_row, at_column, token = upload([rows, columns, values], self.device)
        self.tokens[at_row, at_column] = token
        longest = max(w.request.length for w in work)
        return self.tokens[upload([w.request.row for w in work], self.device), :longest]

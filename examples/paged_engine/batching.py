"""One forward as it is planned, and the padded tensors that the model gets."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch
from config import EngineConfig
from memory import Memory
from tensors import upload
from workload import Request


@dataclasses.dataclass
class Work:
    """What one request does in a forward: it adds ``tokens`` behind the ``start`` positions it has."""

    request: Request
    start: int
    tokens: list[int]

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class Plan:
    """A forward.  Its fields are those that the canary looks for in a batch (:class:`kvcanary_fx.Batch`).

    Attributes:
        work: request after request.
        input_ids, positions, slots: ``[n]``, one for each token.
        request_rows, prefix_lens, extend_lens, request_ids, namespaces: ``[bs]``.
        reads: for each group int64 ``[max_running, width]``, the slot of each position; made by :meth:`tensors`.
    """

    def __init__(self, work: list[Work], memory: Memory):
        self.work, self.memory = work, memory
        self.input_ids = [t for w in work for t in w.tokens]
        self.positions = [p for w in work for p in range(w.start, w.stop)]
        self.slots = [s for w in work for s in memory.slots(w.request, w.start, w.stop)]
        self.request_rows = [w.request.row for w in work]
        self.prefix_lens = [w.start for w in work]
        self.extend_lens = [len(w.tokens) for w in work]
        self.request_ids = [w.request.id for w in work]
        self.namespaces = [w.request.namespace for w in work]
        self.reads: list[torch.Tensor] = []

    @functools.cached_property
    def history(self) -> torch.Tensor:
        """int64 ``[bs, longest]``, what the requests themselves say their tokens are; only the canary asks."""
        return self.memory.history.of(self.work)

    @property
    def history_lens(self) -> list[int]:
        return [w.request.length for w in self.work]

    @functools.cached_property
    def lengths(self) -> torch.Tensor:
        """int64 ``[bs]``, positions that attention reads."""
        return upload([w.stop for w in self.work], self.memory.config.device)

    @property
    def ends(self) -> list[int]:
        """``[bs]``, where each request's tokens end."""
        return list(itertools.accumulate(self.extend_lens))

    def build_reads(self, config: EngineConfig) -> None:
        """The block tables of the groups, from the request table; padding requests read row 0."""
        rows = upload(self.request_rows + [0] * (config.max_running - len(self.work)), config.device)
        pages = self.memory.table[rows].to(torch.int64)
        full = (pages.unsqueeze(2) * config.page + torch.arange(config.page, device=config.device)).flatten(1)
        self.reads = [full, self.memory.slot_map[full]] if config.window else [full]

    def tensors(self, config: EngineConfig) -> Inputs:
        """The model's inputs, padded: padding tokens go to slot 0, at position 0 of row 0."""
        size = config.padded(len(self.input_ids))
        numbers = [i for i, w in enumerate(self.work) for _ in w.tokens]
        spaces = [w.request.namespace for w in self.work for _ in w.tokens]

        def pad(values: list[int], value: int = 0) -> torch.Tensor:
            return upload(values + [value] * (size - len(values)), config.device)

        slots = pad(self.slots)
        return Inputs(
            pad(self.input_ids),
            pad(self.positions),
            pad(spaces),
            pad(numbers, config.max_running - 1),
            [slots, self.memory.slot_map[slots]] if config.window else [slots],
            self.reads,
        )


@dataclasses.dataclass
class Inputs:
    """What a model gets besides its KV tensors.

    Attributes:
        ids, positions, namespaces: int64 ``[n]``.
        request: int64 ``[n]``, the number of each token's request in the batch.
        slots: for each group int64 ``[n]``, where the tokens' K and V go.
        reads: for each group int64 ``[bs, width]``, the slot of each position.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    namespaces: torch.Tensor
    request: torch.Tensor
    slots: list[torch.Tensor]
    reads: list[torch.Tensor]

    def args(self) -> tuple[torch.Tensor | list[torch.Tensor], ...]:
        return self.ids, self.positions, self.namespaces, self.request, self.slots, self.reads

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
    """What one request does in a forward: it adds ``tokens`` behind the ``start`` positions it has.

    ``tree`` says for each of the proposed ones, the last, which of them it follows; -1 for the last that is known.
    """

    request: Request
    start: int
    tokens: list[int]
    tree: list[int] = dataclasses.field(default_factory=list)

    @property
    def known(self) -> int:
        """How many of the tokens are the request's own; the others were proposed."""
        return len(self.tokens) - len(self.tree)

    @functools.cached_property
    def parents(self) -> list[int]:
        """For each token the place of the one that it follows, -1 for what was stored before."""
        return [*range(-1, self.known - 1), *(self.known + p for p in self.tree)]

    @functools.cached_property
    def depths(self) -> list[int]:
        """How far each token is from what was stored before."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    @functools.cached_property
    def branches(self) -> list[list[int]]:
        """The places along each way from the first token to a last one; the first way is the first places."""
        if self.tree == [*range(-1, len(self.tree) - 1)]:
            return [list(range(len(self.tokens)))]
        inner, ways = set(self.parents), []
        for leaf in (i for i in range(len(self.tokens)) if i not in inner):
            way = [leaf]
            while self.parents[way[0]] >= 0:
                way.insert(0, self.parents[way[0]])
            ways.append(way)
        return ways

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class Plan:
    """A forward.  Its fields are those that the canary looks for in a batch (:class:`kvcanary_fx.Batch`).

    Attributes:
        work: request after request.
        input_ids, positions, slots: ``[n]``, one for each token.
        parents: ``[n]``, :attr:`Work.parents`; None if there is no tree.
        request_rows, prefix_lens, extend_lens, request_ids, namespaces: ``[bs]``.
        reads: for each group int64 ``[views, width]``, the slot of each position: of each request, then of the further
            branches of trees; made by :meth:`build_reads`.
    """

    def __init__(self, work: list[Work], memory: Memory):
        self.work, self.memory = work, memory
        self.input_ids: list[int] | torch.Tensor = [t for w in work for t in w.tokens]
        self.positions = [w.start + d for w in work for d in w.depths]
        tree = any(len(w.branches) > 1 for w in work)
        self.parents = [p for w in work for p in w.parents] if tree else None
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
        further = [(w, way) for w in self.work for way in w.branches[1:]]
        rows = self.request_rows + [w.request.row for w, _ in further]
        full = block_table(self.memory.table, upload(rows + [0] * (config.views - len(rows)), config.device), config)
        for view, (work, way) in enumerate(further, len(self.work)):  # what a tree's mask hides is not in the table
            seen = upload([work.start + place for place in way], config.device)
            full[view, work.start : work.start + len(way)] = full[view, seen]
        self.reads = [full, self.memory.slot_map[full]] if config.window else [full]

    def _views(self) -> list[int]:
        """Which of the block tables each token reads."""
        numbers, further = [], len(self.work)
        for i, work in enumerate(self.work):
            views = dict.fromkeys(work.branches[0], i)
            for way in work.branches[1:]:
                views = dict.fromkeys(way, further) | views
                further += 1
            numbers += [views[place] for place in range(len(work.tokens))]
        return numbers

    def tensors(self, config: EngineConfig) -> Inputs:
        """The model's inputs, padded: padding tokens go to slot 0, at position 0 of row 0."""
        size = config.padded(len(self.input_ids))
        numbers = self._views()
        spaces = [w.request.namespace for w in self.work for _ in w.tokens]

        def pad(values: list[int] | torch.Tensor, value: int = 0) -> torch.Tensor:
            if isinstance(values, torch.Tensor):
                return torch.nn.functional.pad(values, (0, size - len(values)), value=value)
            return upload(values + [value] * (size - len(values)), config.device)

        slots = pad(self.slots)
        return Inputs(
            pad(self.input_ids),
            pad(self.positions),
            pad(spaces),
            pad(numbers, config.views - 1),
            [slots, self.memory.slot_map[slots]] if config.window else [slots],
            self.reads,
        )


@dataclasses.dataclass
class Inputs:
    """What a model gets besides its KV tensors.

    Attributes:
        ids, positions, namespaces: int64 ``[n]``.
        request: int64 ``[n]``, the number of each token's block table.
        slots: for each group int64 ``[n]``, where the tokens' K and V go.
        reads: for each group int64 ``[bs, width]``, the slot of each position.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    namespaces: torch.Tensor
    request: torch.Tensor
    slots: list[torch.Tensor]
    reads: list[torch.Tensor]


def block_table(table: torch.Tensor, rows: torch.Tensor, config: EngineConfig) -> torch.Tensor:
    """int64 ``[len(rows), width]``: the slot of each position, from pages in rows of a request table."""
    pages = table[rows].to(torch.int64)
    return (pages.unsqueeze(2) * config.page + torch.arange(config.page, device=table.device)).flatten(1)

"""An EAGLE-style draft: one layer that runs once for each token that it proposes in a row.

With ``topk`` above 1 it proposes a tree: several rows that part at the first token.  Each row is then written to
pages of its own, which a row of the draft's own request table lists behind the request's, and which are free again
when the draft is done.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from batching import Plan, Work, block_table
from config import EngineConfig
from draft import Draft
from draft_loop import Loop, LoopGraph
from faults import Faults
from memory import Memory
from offload import bytes_of
from tensors import upload
from workload import Request

import kvcanary_fx


@dataclasses.dataclass
class Branch:
    """One row of proposed tokens.

    Attributes:
        end: number of the request's last token in the forward that caught up.
        number: of the branch, among its request's.
        row: of the request table.
        steps: tokens to propose.
        pages: that it has for itself.
    """

    request: Request
    end: int
    number: int
    row: int
    steps: int
    pages: list[int]


class Eagle(Draft):
    """The draft; its only head runs ``max(1, steps - 1)`` times or so: once to catch up, then for each token but one.

    Attributes:
        table: the target's request table; with a tree its own: the target's rows, then those of the branches.
        graphs: with ``config.capture`` the loops over branches of equal length, by their steps.
    """

    def __init__(self, config: EngineConfig, memory: Memory, target: Any, settings: dict[str, Any]):
        table = memory.table
        if config.topk > 1:
            table = table.new_zeros(len(table) + config.views, config.columns)
        super().__init__(config, memory, target, settings, table)
        (self.head,) = self.heads
        self.graphs: dict[int, LoopGraph] = {}

    def propose(self, plan: Plan, steps: int, faults: Faults) -> None:
        if self.table is not self.memory.table:
            self.table[: len(self.memory.table)] = self.memory.table
        with kvcanary_fx.step(self.head.session):  # canary
            self._reject(plan)
            first = Plan(faults.on_catch_up(self._catch_up(plan)), self.memory)
            first.build_reads(self.config)
            hidden = self.head.hidden[upload(first.slots, self.config.device)]
            guesses, hidden = self.head.forward(0, first, first.tensors(self.config), hidden, faults)
            found = (self._branches(w.request, end, steps) for w, end in zip(first.work, first.ends, strict=True))
            branches = sorted(itertools.chain.from_iterable(found), key=lambda b: -b.steps)
            if branches:
                said = self._loop(branches, guesses, hidden, faults)
                self._hand_over(branches, said)

    def _reject(self, plan: Plan) -> None:
        """Mark what was guessed in the last step and is not what follows; catching up writes some of it anew."""
        for work in plan.work:
            request = work.request
            start = max(work.start, request.stored - 1)
            stop = min(request.guessed, len(request.pages) * self.config.page)
            self.head.reject(self.memory.slots(request, start, stop))
            request.guessed = 0

    def _branches(self, request: Request, end: int, steps: int) -> list[Branch]:
        """How a request goes on: as far as it wants to, and as there is room."""
        config, wanted = self.config, self._wanted(request, steps)
        if config.topk == 1:
            self.memory.reserve(request, request.stored + wanted - 1)
            wanted = min(wanted, len(request.pages) * config.page - request.stored + 1)
            return [Branch(request, end, 0, request.row, wanted, [])] if wanted else []
        wanted = min(wanted, (config.width - request.length) // config.topk)
        base = request.stored // config.page
        need = -(-(request.stored + wanted - 1) // config.page) - base
        if wanted > 1 and need * config.topk > len(self.memory.full.free):
            wanted, need = 1, 0
        if wanted <= 0:
            return []
        first = len(self.memory.table) + (request.row - 1) * config.topk
        pages = [self.memory.full.take(need, request.id) if wanted > 1 else [] for _ in range(config.topk)]
        found = [Branch(request, end, b, first + b, wanted, pages[b]) for b in range(config.topk)]
        for branch in found:
            self._fill_row(branch, base)
        return found

    def _fill_row(self, branch: Branch, base: int) -> None:
        """The branch's row: the request's full pages, then its own; what is in the request's last one is copied."""
        request, row = branch.request, self.table[branch.row]
        row.copy_(self.table[request.row])
        if not branch.pages:
            return
        row[base : base + len(branch.pages)] = upload(branch.pages, self.config.device).to(row.dtype)
        sources = self.memory.slot_tensor(request, base * self.config.page, request.stored)
        targets = self.memory.full.slots(branch.pages)[: len(sources)].to(sources.device)
        shadow = self.head.pool.export(sources) if self.head.pool is not None else None  # canary
        for tensor in bytes_of(self.head.group):
            tensor[targets] = tensor[sources]
        if self.head.pool is not None:
            self.head.pool.import_(shadow, targets)  # canary

    def _loop(
        self, branches: list[Branch], guesses: torch.Tensor, hidden: torch.Tensor, faults: Faults
    ) -> list[torch.Tensor]:
        """For each step the proposed tokens, int64 ``[active]``; nothing is read back from the device."""
        config, requests = self.config, [b.request for b in branches]
        ends, numbers = upload([[b.end - 1 for b in branches], [b.number for b in branches]], config.device)
        first, hidden = guesses[ends, numbers], hidden[ends]
        rows, starts, spaces = upload(
            [[b.row for b in branches], [r.stored for r in requests], [r.namespace for r in requests]], config.device
        )
        views = torch.nn.functional.pad(rows, (0, config.views - len(branches)))
        work = [Work(r, r.stored, []) for r in requests]
        loop = Loop(
            config, rows, starts, spaces, [r.id for r in requests], block_table(self.table, views, config),
            self.memory.history.of(work), upload([r.length for r in requests], config.device),
            [b.steps for b in branches],
        )  # fmt: skip
        if not config.capture or len(set(loop.steps)) > 1:
            return loop.run(self.head, first, hidden, faults)
        steps = loop.steps[0]
        if steps not in self.graphs:
            self.graphs[steps] = LoopGraph(self.head, config, steps, faults)
        return self.graphs[steps](loop, first, hidden)

    def _hand_over(self, branches: list[Branch], said: list[torch.Tensor]) -> None:
        """Give the requests what was proposed, and the branches' pages back."""
        columns = torch.cat(said).tolist()
        starts = [sum(len(s) for s in said[:i]) for i in range(len(said))]
        for number, branch in sorted(enumerate(branches), key=lambda b: b[1].number):
            request, count = branch.request, len(branch.request.proposed)
            request.proposed += [columns[start + number] for start in starts[: branch.steps]]
            request.tree += [-1, *range(count, count + branch.steps - 1)]
            if self.config.topk == 1:
                request.guessed = request.stored + branch.steps - 1
            self.memory.full.drop(branch.pages, request.id)

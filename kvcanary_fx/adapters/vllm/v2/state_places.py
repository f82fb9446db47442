"""Are the states of a batch where they are to be?

Everything that it takes is on the device: the runner's block tables, the scheduler's in the rows of :class:`.Rows`, and
the step inputs of attention's session.  So it is part of what is captured with the model, and takes the host nothing::

    column of a request     (tokens that it has after the forward - 1) // tokens of a block
    planned, given          the scheduler's table there, the runner's table there
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ....kernels.checks import Check, Phase, Why
from ....kernels.findings import Findings
from ....kernels.ring import Control, Word
from ....kernels.slots.space import REFERENCE
from .state_memory import StateTable, StepInputs


class StatePlaces:
    """Of one model runner.

    Args:
        page: tokens of a block; 0: a request has one state, in its first column.
        control: where violations go.
        checks: those that are on.
    """

    def __init__(self, tables: Sequence[StateTable], inputs: StepInputs, page: int, control: Control, checks: Check):
        self._tables, self._inputs, self._page = list(tables), inputs, page
        self._control, self._checks = control, checks

    def check(self, counts: torch.Tensor) -> None:
        """Before the model: is the state of each request where the scheduler said, and is the block the request's?
        Reports carry the step's number from here.

        Args:
            counts: int64 ``[3]``: requests, tokens and the number of the step; -1 requests: no step runs.
        """
        if counts.is_cuda:
            self._launch.check(counts)
            return
        requests, _, step = counts.tolist()
        if requests < 0:
            return
        self._control.words[Word.FORWARD] = step << 32
        for table in self._tables:
            self._check(requests, table)

    def _check(self, requests: int, table: StateTable) -> None:
        rows, owner, stored, added = (each[:requests] for each in self._inputs)
        column = (stored + added - 1) // self._page if self._page else torch.zeros_like(rows)
        there = column < min(table.planned.shape[1], table.table.shape[1])
        column = torch.where(there, column, 0)
        planned = table.planned[rows, column].to(torch.int64)
        given = table.table[:requests].gather(1, column.unsqueeze(1)).squeeze(1).to(torch.int64)
        space = table.space
        live = there & (planned > 0) & (planned < space.slots)
        at = torch.where(live, planned, 0)
        findings = Findings(live, self._checks)
        findings.add(Why.NOT_THE_PLANNED_SLOT, given != planned, planned, given)
        findings.report(self._control, table.half_id, Phase.PRE, at, request=owner)
        references, whose = space.flags[at], space.owners[at]
        free, shared = references < REFERENCE, references >= 2 * REFERENCE
        findings = Findings(live, self._checks)
        findings.add(Why.WRITE_AFTER_FREE, free, owner, 0)
        findings.add(Why.WRITE_SHARED, shared, owner, whose)
        foreign = (whose != 0) & (owner != 0) & (whose != owner)
        findings.add(Why.OVERWRITE, foreign & ~free & ~shared, owner, whose)
        findings.report(self._control, space.space_id, Phase.PRE, at, request=owner)

    @functools.cached_property
    def _launch(self) -> Any:
        """That of a GPU."""
        from .gpu_state_places import Launch

        return Launch(self._tables, self._inputs, self._page, self._control, self._checks)

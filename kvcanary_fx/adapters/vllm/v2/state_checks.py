"""Fingerprints of running states, and their comparison: some requests' states of all layers in a launch.

Which requests it is, and where their states are, the host says of each step, in one copy::

    number of the step
    owner, position, block of each group where the fingerprint is, block of each group with the bytes
    ...                               # requests to compare before the model, then those to fingerprint behind it

A fingerprint is the digest of a block, :mod:`kvcanary_fx.kernels.content.digest`, kept by block.  It is given up once
it was compared, as the step rewrites the state; but not if the runner has copied the state to another block since: then
the first one is the prefix cache's, and keeps its bytes.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ....kernels.buffers import Count, Site
from ....kernels.checks import Check, Phase, Why
from ....kernels.content.cpu import digest_words, packed
from ....kernels.findings import Findings
from ....kernels.ring import Control, Word
from ....kernels.slots.space import REFERENCE
from ....kernels.staging import Staging, lasting
from .state_memory import HEAD, OWNER_AND_POSITION, StateHalf, StateTable, words_of


class Moved(NamedTuple):
    """The state of a request.

    Attributes:
        position: of the last token in it.
        known: the block of each group whose fingerprint is of it.
        blocks: the block of each group that has its bytes now.
    """

    owner: int
    position: int
    known: Sequence[int]
    blocks: Sequence[int]


class StateChecks:
    """Of one model runner.

    Args:
        control: where violations go.
        most: requests of the largest batch.
        checks: those that are on.
    """

    def __init__(
        self, halves: Sequence[StateHalf], tables: Sequence[StateTable], control: Control, most: int, checks: Check
    ):
        self.halves, self.tables, self._control, self._checks = list(halves), list(tables), control, checks
        device = control.words.device
        self._words = [words_of(half.view) for half in halves]
        self._width = OWNER_AND_POSITION + 2 * len(tables)
        self._staging = Staging(device)
        self._most = most
        self.step = lasting(HEAD + 2 * most * self._width, dtype=torch.int64, device=device).zero_()
        self.batch = lasting(most * (2 + len(tables)), dtype=torch.int64, device=device).zero_()
        self._compared = self._recorded = 0

    def place(self, owners: Sequence[int], columns: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        """Another batch: where the state of each of its requests is to be.

        Args:
            columns: of the tables of all groups.
            blocks: of each request, by group; -1 if unknown.
        """
        said = array("q")
        for owner, column, found in zip(owners, columns, blocks, strict=True):
            said.extend((owner, column, *found))
        self._staging.send(said, self.batch)

    def begin(self, step: int, compared: Sequence[Moved], recorded: Sequence[Moved]) -> None:
        """A step begins: what :meth:`compare` and :meth:`record` are to look at.

        Args:
            step: its number.
            compared, recorded: at most as many as a batch has requests; more are left out.
        """
        compared, recorded = compared[: self._most], recorded[: self._most]  # an engine is not to end for want of room
        said = array("q", [step])
        for owner, position, known, blocks in (*compared, *recorded):
            said.extend((owner, position, *known, *blocks))
        self._staging.send(said, self.step)
        self._compared, self._recorded = len(compared), len(recorded)

    def check_places(self, requests: int) -> None:
        """Before the model: is each state of the batch where it is to be, and is the block its request's?  Reports
        carry the step's number from here."""
        if self.step.is_cuda:
            self.launches.check_places(requests)
            return
        self._control.words[Word.FORWARD] = self.step[0] << 32
        for number, table in enumerate(self.tables):
            self._check_places(requests, number, table)

    def _check_places(self, requests: int, number: int, table: StateTable) -> None:
        rows = self.batch.view(-1, 2 + len(self.tables))[:requests]
        owner, column, planned = rows[:, 0], rows[:, 1], rows[:, 2 + number]
        space = table.space
        live = (planned > 0) & (planned < space.slots)
        at = torch.where(live, planned, 0)
        given = table.table[:requests].gather(1, column.unsqueeze(1)).squeeze(1).to(torch.int64)
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

    def compare(self) -> None:
        """Before the model: are these states those that were fingerprinted?"""
        self._run(0, self._compared, compares=True)

    def record(self) -> None:
        """Behind the model: fingerprint these states."""
        self._run(self._compared, self._recorded, compares=False)

    def _run(self, first: int, count: int, compares: bool) -> None:
        if not count:
            return
        if self.step.is_cuda:
            self.launches.run(first, count, compares)
            return
        rows = self.step[HEAD:].view(-1, self._width)[first : first + count]
        for half, words in zip(self.halves, self._words, strict=True):
            assert words is not None
            known = rows[:, OWNER_AND_POSITION + half.group]
            blocks = rows[:, OWNER_AND_POSITION + len(self.tables) + half.group]
            site, digest = half.site, half.site.half.digest
            found = digest_words(words[blocks], (site.seed1, site.seed2), digest.shape[0])
            if compares:
                self._compare(site, rows, known, blocks, found)
            else:
                digest[:, blocks] = found
                site.counters[Count.RECORDED] += count

    def _compare(
        self, site: Site, rows: torch.Tensor, known: torch.Tensor, blocks: torch.Tensor, found: torch.Tensor
    ) -> None:
        stored = site.half.digest[:, known]
        recorded = stored[0] != 0
        findings = Findings(recorded, Check.CONTENT)
        findings.add(Check.CONTENT, (stored != found).any(0), packed(stored), packed(found))
        findings.report(self._control, site.half_id, Phase.PRE, blocks, rows[:, 1], rows[:, 0])
        site.half.digest[:, known[known == blocks]] = 0
        site.counters[Count.CHECKED] += recorded.sum()

    @functools.cached_property
    def launches(self) -> Any:
        """Those of a GPU."""
        from .gpu_state_checks import Launches

        return Launches(self.halves, self.tables, self._control, self._checks, self.step, self.batch, self._most)

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
from ....kernels.checks import Check, Phase
from ....kernels.content.cpu import digest_words, packed
from ....kernels.findings import Findings
from ....kernels.ring import Control, Word
from ....kernels.staging import Staging, lasting
from .state_memory import HEAD, OWNER_AND_POSITION, StateHalf, words_of


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
        groups: how many groups the halves are in.
        control: where violations go.
        most: requests of the largest batch.
    """

    def __init__(self, halves: Sequence[StateHalf], groups: int, control: Control, most: int):
        self.halves, self.groups, self._control = list(halves), groups, control
        device = control.words.device
        self._words = [words_of(half.view) for half in halves]
        self._width = OWNER_AND_POSITION + 2 * groups
        self._staging = Staging(device)
        self._most = most
        self.step = lasting(HEAD + 2 * most * self._width, dtype=torch.int64, device=device).zero_()
        self._compared = self._recorded = 0

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

    def compare(self) -> None:
        """Before the model: are these states those that were fingerprinted?  Reports carry the step's number from
        here."""
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
        if compares:
            self._control.words[Word.FORWARD] = self.step[0] << 32
        rows = self.step[HEAD:].view(-1, self._width)[first : first + count]
        for half, words in zip(self.halves, self._words, strict=True):
            assert words is not None
            known = rows[:, OWNER_AND_POSITION + half.group]
            blocks = rows[:, OWNER_AND_POSITION + self.groups + half.group]
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

        return Launches(self.halves, self.groups, self._control, self.step, self._most)

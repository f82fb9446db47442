"""Collecting what failed about each entry of a batch of checks, and appending it to the ring without a host sync."""

from __future__ import annotations

import torch

from .buffers import UNKNOWN, Check, Control, Phase, Ring, Word
from .slots.space import Why

#: A column of a report: one value for all entries, or one each.
Column = torch.Tensor | int


class Findings:
    """For each entry the most telling failure (the one added first), and the bits of all checks that failed."""

    def __init__(self, live: torch.Tensor, enabled: Check):
        """
        Args:
            live: bool, the entries to be checked; padding is not.
            enabled: checks that are on; the others find nothing.
        """
        self.live, self._enabled = live, enabled
        self.bits = torch.zeros(live.shape, dtype=torch.int64, device=live.device)
        self.why, self.stored, self.found = (torch.zeros_like(self.bits) for _ in range(3))

    def add(self, check: Check, why: Why, bad: torch.Tensor, stored: Column, found: Column) -> None:
        """Note a failed check of the entries where ``bad`` is set."""
        if not check & self._enabled:
            return
        bad = bad & self.live
        if not bad.is_cuda and not bool(bad.any()):  # as almost always; on a GPU asking would be a host sync
            return
        first = bad & (self.bits == 0)
        self.bits = self.bits | (bad.to(torch.int64) * int(check))
        self.why = torch.where(first, int(why), self.why)
        self.stored = torch.where(first, stored, self.stored)
        self.found = torch.where(first, found, self.found)

    def stop(self, broken: torch.Tensor) -> None:
        """Leave entries out of the checks to come: their slot cannot be looked at."""
        self.live = self.live & ~broken

    def report(
        self,
        control: Control,
        source: int,
        phase: Phase,
        slots: Column,
        position: Column = UNKNOWN,
        request: Column = 0,
        detail: Column = 0,
    ) -> None:
        """Append one ring row per entry that failed."""
        failed = self.bits != 0
        if not failed.is_cuda and not bool(failed.any()):
            return
        columns: dict[Ring, Column] = {
            Ring.HALF: source,
            Ring.CHECK: self.bits,
            Ring.PHASE: int(phase),
            Ring.SLOT: slots,
            Ring.ORIGIN: UNKNOWN,
            Ring.STORED: self.stored,
            Ring.FOUND: self.found,
            Ring.DETAIL: detail,
            Ring.REQUEST: request,
            Ring.POSITION: position,
            Ring.WHY: self.why,
        }
        append(control, failed, columns)


def append(control: Control, mask: torch.Tensor, columns: dict[Ring, Column]) -> None:
    """Append one ring row per entry of ``mask`` that is set; rows without room are counted and dropped."""
    given = {c: v for c, v in columns.items() if isinstance(v, torch.Tensor)}
    given = {c: v.expand(mask.shape).reshape(-1) for c, v in given.items()}
    mask = mask.reshape(-1)
    if not mask.is_cuda:
        # sizes that depend on data are free on the CPU, and usually there is nothing to report
        if not bool(mask.any()):
            return
        given = {c: v[mask] for c, v in given.items()}
        mask = mask[mask]
    rows = torch.zeros(mask.shape[0], len(Ring), dtype=torch.int64, device=mask.device)
    rows[:, Ring.STEP] = control.words[Word.STEP]
    rows[:, Ring.FORWARD] = control.words[Word.FORWARD]
    for column, value in {**columns, **given}.items():
        rows[:, column] = value
    number = control.words[Word.HEAD] + mask.cumsum(0) - 1
    keep = mask & (number - control.words[Word.DRAINED] < control.capacity)
    control.ring[torch.where(keep, number % control.capacity, control.capacity)] = rows
    control.words[Word.HEAD] += mask.sum()

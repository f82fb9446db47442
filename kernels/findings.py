"""Collects the failures of each entry of a batch of checks, and appends them to the ring without a host sync."""

from __future__ import annotations

import torch

from .checks import Check, Phase, Why, check_and_reason
from .ring import UNKNOWN, Control, Values, append


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

    def add(self, failure: Why | Check, bad: torch.Tensor, stored: Values, found: Values) -> None:
        """Note a failure of the entries where ``bad`` is set: a reason, or a check that needs none."""
        check, why = check_and_reason(failure)
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
        """Exclude entries from later checks: their slot cannot be read."""
        self.live = self.live & ~broken

    def report(
        self,
        control: Control,
        source: int,
        phase: Phase,
        slots: Values,
        position: Values = UNKNOWN,
        request: Values = 0,
        detail: Values = 0,
    ) -> None:
        """Append one ring row per entry that failed."""
        failed = self.bits != 0
        if not failed.is_cuda and not bool(failed.any()):
            return
        append(
            control,
            failed,
            half=source,
            check=self.bits,
            phase=phase,
            slot=slots,
            stored=self.stored,
            found=self.found,
            detail=detail,
            request=request,
            position=position,
            why=self.why,
        )

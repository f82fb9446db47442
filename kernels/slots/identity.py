"""The chain check and the record of who is in each slot.  Plain torch, free of host syncs."""

from __future__ import annotations

from typing import Protocol

import torch

from ..buffers import Gate, IdentityBuffers, RowState, Site
from ..checks import Check, Phase
from ..ring import UNKNOWN
from .chain import SEED, mix_tensor


class Report(Protocol):
    """Appends a ring row for every masked entry of the vectors."""

    def __call__(
        self,
        site: Site,
        phase: Phase,
        check: Check,
        mask: torch.Tensor,
        slots: torch.Tensor,
        stored: torch.Tensor,
        found: torch.Tensor,
        detail: torch.Tensor,
    ) -> None: ...


def identify_with(
    report: Report,
    site: Site,
    identity: IdentityBuffers,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Does a decoded token's position follow its predecessor's?  Then store who is in each slot.

    Only one-token steps that continue a row of one-token steps are checked, and only where nobody else may
    have written in between: padding makes the positions of a prompt legal in more ways than one.

    Args:
        slots, tokens, positions: int64 ``[B, T]``, in order within a row; a row with a slot of -1 is skipped.
    """
    layout, rows = site.layout, site.half.rows
    first = slots[:, 0].clamp(min=0)
    usable = (slots >= 0).all(1)
    row, index, before = first // layout.positions, first % layout.positions, (first - 1).clamp(min=0)
    known = identity.positions[before] != UNKNOWN
    follows = usable & (index > 0) & (index == rows[row, RowState.NEXT]) & known
    if site.checks & Check.CHAIN and slots.shape[1] == 1 and not site.lenient:
        expected = identity.positions[before].to(torch.int64) + 1
        bad = follows & (rows[row, RowState.LENGTH] == 1) & (positions[:, 0] != expected)
        bad &= site.gate[Gate.LENIENT_NOW] == 0
        report(site, Phase.PRE, Check.CHAIN, bad, first, expected, positions[:, 0], tokens[:, 0])
    start = torch.where(follows, identity.chain[before], SEED)
    chain = start.unsqueeze(1) + mix_tensor(tokens, positions).cumsum(1)
    # one entry beyond the slots takes what is skipped, so that no size depends on data
    place = torch.where(usable.unsqueeze(1), slots, layout.slots).reshape(-1)
    identity.tokens[place] = tokens.reshape(-1).to(torch.int32)
    identity.positions[place] = positions.reshape(-1).to(torch.int32)
    identity.chain[place] = chain.reshape(-1)


def name_slots(
    identity: IdentityBuffers, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor | None
) -> None:
    """Store who is in each slot of a pool without rows, where predecessors are unknown.

    Args:
        slots: int64 ``[n]``; -1 is skipped.
        tokens: int, n elements.
        positions: int, n elements in the same order; anything else is unknown.
    """
    place = torch.where(slots >= 0, slots, identity.tokens.shape[0] - 1)
    identity.tokens[place] = tokens.reshape(-1).to(torch.int32)
    if positions is not None and positions.numel() == slots.numel():
        identity.positions[place] = positions.reshape(-1).to(torch.int32)

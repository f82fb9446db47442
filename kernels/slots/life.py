"""What an engine's allocator does to slots: allocate, share, release; and slots that are filled from elsewhere.

Vectorised torch without host syncs.  Bit-equal to :mod:`.naive_life`.
"""

from __future__ import annotations

import torch

from ..checks import Phase, Why
from ..findings import Findings
from ..ring import UNKNOWN
from ..turns import taking_turns
from .chain import SEED, mix_tensor
from .checks import namespace_seed
from .events import Event
from .history import note
from .past import Kind
from .space import MARKS, REFERENCE, Flag, SlotSpace
from .tokens import kept_bits, repeats


@taking_turns
def apply_one(
    space: SlotSpace, event: Event, slots: torch.Tensor, owner: int, stack: int = 0
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """One call of an allocator, on any device.

    Args:
        slots: int64 ``[n]``.
        owner: hash of the id that is named, 0 for none.
        stack: number of the stack of the call, for the history; 0 for none.

    Returns:
        Of a release the slots that it made free, with -1 for the others, and whose they were; int64 ``[n]`` each.
    """
    if event is Event.RELEASE:
        at = torch.where((slots >= 0) & (slots < space.slots), slots, space.nowhere)
        owners, held = space.owners[at], space.flags[at] >= REFERENCE
        release(space, slots, owner, stack)
        gone = held & (space.flags[at] < REFERENCE) & ~repeats(at, space.nowhere)
        return torch.where(gone, at, -1), owners
    if event in _OWNED:
        _OWNED[event](space, slots, owner, stack)
    else:
        _OWNERLESS[event](space, slots, stack)
    return None


def allocate(space: SlotSpace, slots: torch.Tensor, owner: int, stack: int = 0) -> None:
    """Allocate free slots to an owner.  Their content is forgotten.

    Args:
        slots: int64 ``[n]``.
        owner: hash of the owner's id, 0 for anybody.
    """
    findings, at = _checked(space, slots)
    twice = repeats(at, space.nowhere)  # in this call, so whoever has it is the owner that is named
    taken = (space.flags[at] >= REFERENCE) | twice
    if space.owner_known:
        findings.add(Why.DOUBLE_ALLOCATE, taken, torch.where(twice, owner, space.owners[at]), owner)
    _report(findings, space, slots, at, owner)
    space.flags[at] = REFERENCE
    space.owners[at] = owner
    space.tokens[at] = -1
    space.positions[at] = UNKNOWN
    space.chain[at] = 0
    note(space, at, Kind.ALLOCATE, owner, stack)


def release(space: SlotSpace, slots: torch.Tensor, owner: int, stack: int = 0) -> None:
    """Drop one reference to each slot; a slot without references is free.

    Looks at the slots that are named alone, whatever the size of the pool.

    Args:
        slots: int64 ``[n]``.
        owner: hash of the id of the request that releases them, 0 if unknown.
    """
    findings, at = _checked(space, slots)
    flags, holder = space.flags[at], space.owners[at]
    free = (flags < REFERENCE) | (repeats(at, space.nowhere) & (flags < 2 * REFERENCE))
    if space.owner_known:
        stranger = (holder != 0) & (holder != owner) & (flags < 2 * REFERENCE) & (owner != 0)
        findings.add(Why.DOUBLE_FREE, free, holder, owner)
        findings.add(Why.FOREIGN_FREE, stranger & ~free, holder, owner)
    _report(findings, space, slots, at, owner)
    # after its owner's release, a shared slot has no particular owner
    leaves = (flags >= 2 * REFERENCE) & ((owner == 0) | (holder == owner))
    left = (flags // REFERENCE - _times_named(at)).clamp(min=0) * REFERENCE
    kept = torch.where(left > 0, flags % REFERENCE, 0)
    space.flags[at] = torch.where(at == space.nowhere, flags, left + kept)
    space.owners[at] = torch.where(leaves | (left == 0), 0, holder)
    note(space, at, Kind.RELEASE, owner, stack)


def _times_named(at: torch.Tensor) -> torch.Tensor:
    """int32 ``[n]``: how often each entry stands in the list."""
    ordered = at.sort().values
    last, first = (torch.searchsorted(ordered, at, right=right) for right in (True, False))
    return (last - first).to(torch.int32)


def share(space: SlotSpace, slots: torch.Tensor, owner: int, stack: int = 0) -> None:
    """Add one reference to each slot: a shared slot may be read by several requests and written by none.

    Args:
        slots: int64 ``[n]``.
        owner: hash of the id of the one that shares, for reports.
    """
    findings, at = _checked(space, slots)
    if space.owner_known:
        findings.add(Why.SHARE_AFTER_FREE, space.flags[at] < REFERENCE, owner, 0)
    _report(findings, space, slots, at, owner)
    space.flags.scatter_add_(0, at, torch.full_like(at, REFERENCE, dtype=torch.int32))
    space.flags[at] |= int(Flag.DUE)
    space.flags[space.nowhere] = 0  # masked writes must not accumulate
    note(space, at, Kind.SHARE, owner, stack)


def hand_over(space: SlotSpace, slots: torch.Tensor, owner: int, stack: int = 0) -> None:
    """Slots get another owner and keep their content and references.

    Args:
        slots: int64 ``[n]``.
        owner: hash of the new owner's id, 0 for anybody.
    """
    findings, at = _checked(space, slots)
    if space.owner_known:
        findings.add(Why.SHARE_AFTER_FREE, space.flags[at] < REFERENCE, owner, 0)
    _report(findings, space, slots, at, owner)
    space.owners[at] = owner
    space.flags[at] |= int(Flag.DUE)
    space.flags[space.nowhere] = 0
    note(space, at, Kind.HAND_OVER, owner, stack)


@taking_turns
def accept(space: SlotSpace, slots: torch.Tensor) -> None:
    """Slots hold the tokens that they are named for: from here on these are checked.

    Args:
        slots: int64 ``[n]``; those that do not exist are skipped.
    """
    at = torch.where((slots < 0) | (slots >= space.slots), space.nowhere, slots)
    space.flags[at] &= ~int(Flag.NAMELESS)


@taking_turns
def name(
    space: SlotSpace,
    slots: torch.Tensor,
    marks: torch.Tensor,
    who: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    owner: int,
) -> None:
    """Slots were filled outside a forward.

    Args:
        slots: int64 ``[n]``.
        marks: int32 ``[n]``, those of the bits :data:`MARKS` that they have from now on.
        who: tokens, positions and chain, integer ``[n]`` each; None leaves what is known.
        owner: hash of the id of the request that they were filled for, 0 if that is not known.
    """
    findings, at = _checked(space, slots)
    if space.owner_known:
        flags, holder = space.flags[at], space.owners[at]
        free = flags < REFERENCE
        foreign = (holder != 0) & (holder != owner) & (owner != 0)
        findings.add(Why.WRITE_AFTER_FREE, free, owner, 0)
        findings.add(Why.OVERWRITE, foreign & ~free, owner, holder)
    _report(findings, space, slots, at, owner)
    kept = space.flags[at] & ~int(MARKS)
    space.flags[at] = kept | marks
    if who is not None:
        tokens, positions, chain = who
        space.tokens[at] = tokens.to(torch.int32)
        space.positions[at] = positions.to(torch.int32)
        space.chain[at] = chain.to(torch.int64)
    note(space, at, Kind.FILL, owner)


def reject(space: SlotSpace, slots: torch.Tensor, stack: int = 0) -> None:
    """Slots hold drafted tokens that were not accepted: they may be overwritten, but not be read before that.

    Args:
        slots: int64 ``[n]``; those that hold nothing stay as they are.
    """
    findings, at = _checked(space, slots)
    findings.report(space.control, space.space_id, Phase.LIFE, slots, UNKNOWN, 0, -1)
    flags = space.flags[at]
    space.flags[at] = torch.where((flags & int(Flag.WRITTEN)) != 0, flags | int(Flag.REJECTED), flags)
    note(space, at, Kind.REJECT, stack=stack)


def forget(space: SlotSpace, slots: torch.Tensor, stack: int = 0) -> None:
    """Something is going to rewrite slots: who is in them is not known any more.

    Reserved slots stay reserved, free ones free: these are not read before they are allocated and written again.

    Args:
        slots: int64 ``[n]``.
    """
    outside = report_outside(space, slots)
    at = torch.where(outside, space.nowhere, slots)
    flags = space.flags[at]
    reserved = (flags & int(Flag.RESERVED)) != 0
    kept = outside | (flags < REFERENCE) | reserved
    space.flags[at] = torch.where(kept, flags, (flags & ~int(MARKS)) | int(Flag.WRITTEN | Flag.NAMELESS))
    note(space, torch.where(reserved, space.nowhere, at), Kind.FORGET, stack=stack)


def report_outside(space: SlotSpace, slots: torch.Tensor) -> torch.Tensor:
    """Report those of the slots (int64 ``[n]``) that the pool does not have; which ones they are, bool ``[n]``."""
    outside = (slots < 0) | (slots >= space.slots)
    findings = Findings(torch.ones_like(outside), space.checks)
    findings.add(Why.OUT_OF_RANGE, outside, slots, -1)
    findings.report(space.control, space.space_id, Phase.LIFE, slots, UNKNOWN, 0, -1)
    return outside


def report_taken(space: SlotSpace, rival: SlotSpace, slots: torch.Tensor, owner: int) -> None:
    """Report slots that are allocated while another pool has them, in the same memory.

    Args:
        slots: int64 ``[n]``; those that do not exist are skipped.
        owner: hash of the id of the request that they are allocated to.
    """
    at = slots[(slots >= 0) & (slots < space.slots)]
    flags = rival.flags[at]
    taken = (flags >= REFERENCE) & ((flags & int(Flag.RESERVED)) == 0)
    findings = Findings(torch.ones_like(taken), space.checks)
    findings.add(Why.DOUBLE_ALLOCATE, taken, rival.owners[at], owner)
    findings.report(space.control, space.space_id, Phase.LIFE, at, request=owner, detail=rival.tokens[at])


def identity(
    tokens: torch.Tensor, positions: torch.Tensor, namespace: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and chain of one request's tokens from position 0 on, as :func:`name` takes them.

    Args:
        tokens, positions: int64 ``[n]``.
        namespace: integer ``[1]``.
    """
    tokens = kept_bits(tokens)
    start = namespace_seed(namespace, torch.tensor([SEED], device=tokens.device))
    return tokens, positions, start + mix_tensor(tokens, positions).cumsum(0)


def _report(findings: Findings, space: SlotSpace, slots: torch.Tensor, at: torch.Tensor, owner: int) -> None:
    nowhere = at == space.nowhere
    position = torch.where(nowhere, UNKNOWN, space.positions[at])
    token = torch.where(nowhere, -1, space.tokens[at])
    findings.report(space.control, space.space_id, Phase.LIFE, slots, position, owner, token)


def _checked(space: SlotSpace, slots: torch.Tensor) -> tuple[Findings, torch.Tensor]:
    """The findings of slots that an engine names, and where to look them up; reserved and impossible ones nowhere."""
    outside = (slots < 0) | (slots >= space.slots)
    at = torch.where(outside, space.nowhere, slots)
    reserved = (space.flags[at] & int(Flag.RESERVED)) != 0
    findings = Findings(torch.ones_like(outside), space.checks)
    findings.add(Why.OUT_OF_RANGE, outside, slots, -1)
    findings.add(Why.RESERVED_SLOT, reserved & ~outside, slots, slots)
    findings.stop(outside | reserved)
    return findings, torch.where(reserved, space.nowhere, at)


_OWNED = {Event.ALLOCATE: allocate, Event.SHARE: share, Event.HAND_OVER: hand_over}
_OWNERLESS = {Event.REJECT: reject, Event.FORGET: forget}

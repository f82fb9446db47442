"""The history of slots, read from the devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from ..kernels.checks import Check
from ..kernels.slots.past import Happened, SlotPast, events_kept, read_back
from ..kernels.slots.space import SlotSpace
from ..reports.past import PastEvent, SlotHistory

#: The requests behind lower halves of hashes.
NamesOf = Callable[[Collection[int]], Mapping[int, str | int]]


def histories(
    space: SlotSpace, slots: Sequence[int], names_of: NamesOf, stack_of: Callable[[int], tuple[str, ...]] | None
) -> list[SlotHistory | None]:
    """What slots went through, None each where that is not kept.  Waits for the device.

    Args:
        slots: of the space.
        stack_of: the lines of a stack by its number; None if none are kept.
    """
    if not events_kept(space.past) or not slots:
        return [None] * len(slots)
    rows = space.past[torch.tensor(slots, dtype=torch.int64, device="cpu").to(space.past.device)].tolist()
    pasts = read_back(rows)
    names = names_of({e.owner for past in pasts for e in _all(past) if e.owner})

    def event(happened: Happened) -> PastEvent:
        return PastEvent(
            kind=happened.kind.name.lower(),
            step=max(happened.step, 0),  # the word says -1 before the first step
            request=names.get(happened.owner),
            forward=happened.forward,
            stack=stack_of(happened.stack) if stack_of is not None and happened.stack else (),
        )

    compared = bool(space.checks & Check.CONTENT)
    return [_history(past, event, compared) for past in pasts]


def _all(past: SlotPast) -> list[Happened]:
    return [*past.events, *([past.written] if past.written is not None else [])]


def _history(past: SlotPast, event: Callable[[Happened], PastEvent], compared: bool) -> SlotHistory:
    """
    Args:
        compared: the bytes of what is read and due are compared.
    """

    def step(number: int) -> int | None:
        return number if compared and number >= 0 else None

    return SlotHistory(
        events=tuple(map(event, past.events)),
        earlier=past.earlier,
        written=event(past.written) if past.written is not None else None,
        reads=past.reads if compared else 0,
        first_read=step(past.first_read),
        last_read=step(past.last_read),
        read_before=step(past.read_before),
    )

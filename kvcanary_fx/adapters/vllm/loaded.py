"""What KV connectors load, which is guarded once the first forward that reads it is over.

A connector fills blocks in the steps before that forward, or layer by layer while its model runs, and nobody is told
when.  What is there then is taken as it is, if nobody knows what was stored (:mod:`.offloaded`): from there on a change
of it is found, also while the prefix cache has it, and who reads it is compared with the tokens that it was loaded for.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class _Load(NamedTuple):
    """Blocks of one request, their places in its table, and the tokens of its table up to the last one that is
    loaded."""

    blocks: Sequence[int]
    places: Sequence[int]
    end: int


class Arriving(NamedTuple):
    """What a request's first forward reads.

    Attributes:
        blocks, places: as many, its own, and where they are in its table.
        end: the tokens of its table up to the last one that was loaded.
        tokens: the request's, from position 0 to ``end`` at least; None: the step's message does not have them.
    """

    request: str
    blocks: Sequence[int]
    places: Sequence[int]
    end: int
    tokens: Sequence[int] | None

    def parts(self, some: Container[int]) -> Iterator[tuple[bool, Arriving]]:
        """Those of the blocks that are in ``some``, and those that are not; each if there are any."""
        for inside in (True, False):
            which = [(b, i) for b, i in zip(self.blocks, self.places, strict=True) if (b in some) is inside]
            if which:
                blocks, places = zip(*which, strict=True)
                yield inside, self._replace(blocks=blocks, places=places)

    def slots(self, pages: Sequence[int], page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots that were filled, and their positions, int64 ``[n]`` each.

        Args:
            pages: the request's, of the blocks' group: those that it no longer has there are left out.
            page_size: tokens of a page.
        """
        has = [(b, i) for b, i in zip(self.blocks, self.places, strict=True) if i < len(pages) and pages[i] == b]
        rows = torch.tensor(has, dtype=torch.int64).reshape(-1, 2)[:, :, None] * page_size + torch.arange(page_size)
        slots, positions = rows.unbind(1)
        there = positions < self.end
        return slots[there], positions[there]


class Loads:
    """The loads of requests whose first forward is not over.

    Attributes:
        of: those of each request; empty in most steps.
    """

    def __init__(self) -> None:
        self.of: dict[str, list[_Load]] = {}

    def expect(self, request: str, blocks: Sequence[int], places: Sequence[int], end: int) -> None:
        """A connector is about to fill blocks of one KV cache group."""
        self.of.setdefault(request, []).append(_Load(blocks, places, end))

    def lost(self, scheduled: Any) -> None:
        """Requests have ended, or have given up their blocks, at the end of the step before.

        Args:
            scheduled: the ``SchedulerOutput``.
        """
        for request in (*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())):
            self.of.pop(request, None)

    def arriving(self, scheduled: Any) -> Iterator[Arriving]:
        """What the forward of a step is the first to read; each load is returned once.

        Args:
            scheduled: the ``SchedulerOutput``.
        """
        tokens, stored = _tokens_of(scheduled), _stored(scheduled)
        for request in [request for request in self.of if request in scheduled.num_scheduled_tokens]:
            for blocks, places, end in self.of.pop(request):
                # a load that failed, or the last token of a prompt that was loaded whole: the forward wrote it itself
                end = min(end, stored.get(request, 0))
                given = tokens.get(request)
                yield Arriving(request, blocks, places, end, given if given and len(given) >= end else None)

    def clear(self) -> None:
        """Nothing is there any more."""
        self.of.clear()


def _stored(scheduled: Any) -> Mapping[str, int]:
    """The tokens of each request of a step that it did not compute."""
    cached = scheduled.scheduled_cached_reqs
    stored = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return {**stored, **{new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}}


def _tokens_of(scheduled: Any) -> dict[str, Sequence[int] | None]:
    """Those of the requests that begin in a step, or begin again."""
    known: dict[str, Sequence[int] | None] = dict(getattr(scheduled.scheduled_cached_reqs, "all_token_ids", {}))
    for new in scheduled.scheduled_new_reqs:
        known[new.req_id] = new.prefill_token_ids or new.prompt_token_ids
    return known

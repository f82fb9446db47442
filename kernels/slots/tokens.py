"""The added tokens of a forward: whose they are, where they stand, and what they follow."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .space import RequestPlan


def kept_bits(tokens: torch.Tensor) -> torch.Tensor:
    """Token ids as a slot keeps them, int64: their low 32 bits, as a signed number.

    Placeholders of images can be any number.  With links of 64 bits, those of 2**31 or more were reported in each step.
    """
    return tokens.to(torch.int32).to(torch.int64)


def real_requests(plan: RequestPlan) -> torch.Tensor:
    """bool ``[bs]``: requests that are no padding."""
    counted = counted_requests(plan)
    return counted if plan.padding_row is None else counted & (plan.rows != plan.padding_row)


def counted_requests(plan: RequestPlan) -> torch.Tensor:
    """bool ``[bs]``: requests whose tokens are among the batch's; what is padding by its row has some, too."""
    return torch.arange(plan.rows.shape[0], device=plan.rows.device) < plan.counts[0]


def token_requests(plan: RequestPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(request, place, real)`` of each added token: its request's number, its place among the request's
    added tokens, and whether it is real rather than padding.  int64, int64, bool ``[n]``."""
    request, place, there = counted_tokens(plan)
    return request, place, there if plan.padding_row is None else there & ~of_padding(plan, request)


def counted_tokens(plan: RequestPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`token_requests`, where what is padding by its row counts as well."""
    lens = torch.where(counted_requests(plan), plan.extend_lens.to(torch.int64), 0)
    request, place, there = laid_out(lens, plan.slots.shape[0])
    return request, place, there & (torch.arange(place.shape[0], device=place.device) < plan.counts[1])


def of_padding(plan: RequestPlan, request: torch.Tensor) -> torch.Tensor:
    """bool, the shape of ``request``: requests that are padding by their row."""
    if plan.padding_row is None:
        return torch.zeros_like(request, dtype=torch.bool)
    return plan.rows[request] == plan.padding_row


def laid_out(lens: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(request, place, there)`` of ``n`` places in which ``lens[r]`` entries of each request r follow one another.

    int64, int64, bool ``[n]``: whose entry it is, its place among them, and whether there is one so far out.
    """
    ends, entry = lens.cumsum(0), torch.arange(n, device=lens.device)
    request = torch.searchsorted(ends, entry, right=True).clamp(max=max(lens.shape[0] - 1, 0))
    return request, entry - (ends - lens)[request], entry < ends[-1]


def planned_positions(plan: RequestPlan, request: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """int64 ``[n]``: the position of each added token; what :func:`token_requests` gives are the other arguments."""
    depth = place if plan.parents is None else sum_to_root(plan, torch.ones_like(place), place) - 1
    return plan.prefix_lens.to(torch.int64)[request] + depth


def sum_to_root(plan: RequestPlan, values: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """For each added token of a tree the sum of ``values`` over it and all that it follows: int64 ``[n]``.

    By doubling: after k rounds a token has the sum over 2**k of them, and knows where to go on.
    """
    assert plan.parents is not None
    n = values.shape[0]
    parent = plan.parents.to(torch.int64)
    number = torch.arange(n, device=values.device)
    up = torch.where((parent >= 0) & (parent < place), number - place + parent, n)
    up, total = torch.nn.functional.pad(up, (0, 1), value=n), torch.nn.functional.pad(values, (0, 1))
    for _ in range(n.bit_length()):
        total, up = total + total[up], up[up]
    return total[:-1]


def links_up_to(plan: RequestPlan, link: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """int64 ``[n]``: the sum of a token's link and those of the added tokens that it follows."""
    if plan.parents is not None:
        return sum_to_root(plan, link, place)
    request, total = token_requests(plan)[0], link.cumsum(0)
    return total - (total - link)[_first_token(plan)][request]


def _first_token(plan: RequestPlan) -> torch.Tensor:
    """int64 ``[bs]``: the number of each request's first added token, within the padded list."""
    lens = torch.where(counted_requests(plan), plan.extend_lens.to(torch.int64), 0)
    return (lens.cumsum(0) - lens).clamp(max=plan.slots.shape[0] - 1)


class Written(NamedTuple):
    """What a forward stores, int64 ``[n]`` each."""

    at: torch.Tensor  # the entry of each added token
    request: torch.Tensor
    links: torch.Tensor  # the sum of links from the request's first added token on


def through_writers(last: torch.Tensor, stored: torch.Tensor, written: Written) -> torch.Tensor:
    """The chain before each request, where another one may write the last slot of its prefix in the same forward.

    Prefixes can be stairs: a request follows another, which follows a third.  By doubling, as in
    :func:`sum_to_root`: a fixed number of rounds, whatever follows what.

    Args:
        last: int64 ``[bs]``, the last slot of each request's prefix, -1 for none.
        stored: int64 ``[bs]``, the chain before each request, were nothing written.
    """
    ordered, origin = torch.sort(written.at, stable=True)
    found = torch.searchsorted(ordered, last, right=True) - 1  # of tokens planned for one slot the last stays
    token, number = origin[found.clamp(min=0)], torch.arange(last.shape[0], device=last.device)
    writer = written.request[token]
    follows = (ordered[found.clamp(min=0)] == last) & (writer != number)
    total, up = torch.where(follows, written.links[token], 0), torch.where(follows, writer, number)
    for _ in range(last.shape[0].bit_length()):
        total, up = total + total[up], up[up]
    return total + stored[up]


def repeats(slots: torch.Tensor, nowhere: int) -> torch.Tensor:
    """bool ``[n]``: slots that stood earlier in the list already."""
    ordered, origin = torch.sort(slots, stable=True)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[1:] = (ordered[1:] == ordered[:-1]) & (ordered[1:] != nowhere)
    return torch.zeros_like(again).scatter(0, origin, again)

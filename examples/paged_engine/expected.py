"""What an uncorrupted engine with the oracle must produce, computed without an engine and without its KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from oracle import next_token, powers, weights_of
from tensors import upload

#: Positions of prompts that are hashed together: bounds the memory that it takes.
CHUNK = 1 << 18


class Asked(NamedTuple):
    """A prompt, how many tokens are to follow, and the request's namespace."""

    prompt: Sequence[int]
    count: int
    namespace: int = 0


def expected_outputs(
    asked: Sequence[Asked], windows: list[list[int | None]], fp8: bool, device: str = "cpu"
) -> list[list[int]]:
    """What follows each prompt."""
    if not asked:
        return []
    width = max(len(a.prompt) + a.count for a in asked)
    size = max(1, CHUNK // width)
    parts = (asked[i : i + size] for i in range(0, len(asked), size))
    return [tokens for part in parts for tokens in _some(part, windows, fp8, device)]


def _some(asked: Sequence[Asked], windows: list[list[int | None]], fp8: bool, device: str) -> list[list[int]]:
    """The requests side by side: their prompts at once, then token after token."""
    lengths, rows = [len(a.prompt) for a in asked], torch.arange(len(asked), device=device)
    longest, count = max(lengths), max(a.count for a in asked)
    ids = upload([[*a.prompt, *[0] * (longest - len(a.prompt))] for a in asked], device)
    spaces, end = upload([a.namespace for a in asked], device), upload(lengths, device)
    place = torch.arange(longest, device=device).expand_as(ids)
    power = powers(longest + count, device)
    seen = {}
    for window, found in weights_of(ids, place, spaces.unsqueeze(1).expand_as(ids), windows, fp8).items():
        inside = place < end.unsqueeze(1)
        seen[window] = torch.nn.functional.pad(found * power[:longest] * inside, (0, count))
    sums = {w: _last(found, end, w) for w, found in seen.items()}
    said = []
    for _ in range(count):
        said.append(next_token(torch.stack(list(sums.values())).sum(0)))
        for window, added in weights_of(said[-1], end, spaces, windows, fp8).items():
            seen[window][rows, end] = added * power[end]
            sums[window] = sums[window] + seen[window][rows, end]
            if window is not None:
                gone = end - window
                sums[window] -= torch.where(gone >= 0, seen[window][rows, gone.clamp(min=0)], 0)
        end = end + 1
    every = torch.stack(said, 1).tolist() if said else [[] for _ in asked]
    return [tokens[: a.count] for tokens, a in zip(every, asked, strict=True)]


def _last(found: torch.Tensor, end: torch.Tensor, window: int | None) -> torch.Tensor:
    """The sum of the last ``window`` before ``end`` of each row, of all of them for None."""
    if window is None:
        return found.sum(1)
    return (found * (torch.arange(found.shape[1], device=found.device) >= (end - window).unsqueeze(1))).sum(1)

"""What follows from a verification: which proposed tokens are accepted, and what becomes of their slots."""

from __future__ import annotations

from typing import NamedTuple

import torch
from batching import Work
from faults import Faults
from memory import Memory
from offload import Store, bytes_of


class Verdict(NamedTuple):
    """What the target says about the tokens of one request.

    Attributes:
        path: places of the accepted tokens among those of the forward, each following the one before.
        new: the tokens that the request gets: the accepted ones, and the target's own behind them.
    """

    path: list[int]
    new: list[int]


def judge(work: Work, said: list[int], wanted: int, faults: Faults) -> Verdict:
    """Follow the proposed tokens as long as they are what the target says itself.

    Args:
        said: what follows each of the request's tokens.
        wanted: tokens that the request still lacks.
    """
    path, at = [], work.known - 1
    while True:
        agrees = [i for i in _after(work, at) if work.tokens[i] == said[at]]
        if not agrees:
            break
        at = agrees[0]
        path.append(at)
    accepted = faults.on_accept(work.request, len(path))
    while len(path) < accepted and _after(work, at):
        at = _after(work, at)[0]
        path.append(at)
    places = [work.known - 1, *path[:accepted]][:wanted]
    return Verdict(places[1:], [said[i] for i in places])


def _after(work: Work, place: int) -> list[int]:
    return [i for i in range(work.known, len(work.tokens)) if work.parents[i] == place]


def settle(
    work: Work, path: list[int], stores: list[Store], memory: Memory
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Bring the accepted tokens of a tree together, and mark the slots of all others as rejected.

    Before, the tokens of a forward are in the request's row one after the other; after it, each accepted one is in
    the slot of its position.

    Args:
        stores: the target's groups.

    Returns:
        the slots that tokens came from and went to, int64 ``[n]`` each; None if all were in their places.
    """
    if not work.tree:
        return None
    places = [(place, work.known + i) for i, place in enumerate(path) if place != work.known + i]
    slots = memory.slot_tensor(work.request, work.start, work.stop)
    sources, targets = (slots[[pair[i] for pair in places]] for i in range(2))
    rejected = slots[work.known + len(path) :]
    for store in stores:
        mapped = [memory.slot_map[s] if store.group.window else s for s in (sources, targets, rejected)]
        if places:
            _move(store, *mapped[:2])
        if store.pool is not None:
            store.pool.reject(mapped[2])  # canary
    return (sources, targets) if places else None


def _move(store: Store, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy the KV of slots to others, and what the canary knows of it."""
    shadow = store.pool.export(sources) if store.pool is not None else None  # canary
    for tensor in bytes_of(store.group):
        tensor[targets] = tensor[sources]
    if store.pool is not None:
        store.pool.import_(shadow, targets)  # canary

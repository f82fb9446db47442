"""The base of all perturbations: when it strikes, at what, and its records."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from ..engine.guarded_pool import EnginePool
from ..engine.request_ids import RequestId
from ..errors import EngineError
from ..reports.summary import log


class Spot(NamedTuple):
    """A slot that can be struck, and its contents."""

    slot: int
    request: RequestId | None = None
    position: int | None = None


@dataclasses.dataclass(frozen=True)
class Target:
    """What may be struck; None is anything."""

    pool: str | None = None
    layer: str | None = None
    half: str | None = None
    request: RequestId | None = None


@dataclasses.dataclass(frozen=True)
class Strike:
    """One fault that was injected.

    Attributes:
        kind: name of the perturbation.
        what: what was done, as text.
        pool, layer, half: where; None if the fault is not about one.
        slot, request, position: what was struck first.
        partner: the second place of the fault: where a write landed, or whose token was taken.
        step: as the caller counts.
    """

    kind: str
    what: str
    pool: str | None = None
    layer: str | None = None
    half: str | None = None
    slot: int = -1
    request: RequestId | None = None
    position: int | None = None
    partner: Spot | None = None
    step: int | None = None

    def line(self) -> str:
        """The record as one stable line of ``key=value`` pairs."""
        shown = {"class": self.kind, "slot": self.slot, "request": self.request, "position": self.position}
        shown |= {"pool": self.pool, "layer": self.layer, "half": self.half, "step": self.step}
        pairs = " ".join(f"{k}={'-' if v is None else v}" for k, v in shown.items())
        return f"kvcanary.perturb {pairs} what={self.what!r}"


class Perturbation:
    """Base: decides when to strike, and records the strikes.

    Args:
        probability: of a strike, per opportunity.
        seed: of the generator that makes all choices.
        warm_up: opportunities to skip first.
        target: what may be struck.
        limit: maximum number of strikes, None for no limit.

    Attributes:
        strikes: the strikes so far.
        opportunities: how often there was something to strike.

    Raises:
        EngineError: a value is out of its range.
    """

    kind: ClassVar[str]

    def __init__(
        self,
        probability: float = 1.0,
        seed: int = 0,
        warm_up: int = 0,
        target: Target | None = None,
        limit: int | None = None,
    ):
        name = type(self).__name__
        if not 0 <= probability <= 1:
            raise EngineError(f"{name}(probability={probability}): give the share of opportunities, from 0 to 1")
        if warm_up < 0:
            raise EngineError(f"{name}(warm_up={warm_up}): give the number of opportunities to leave alone, 0 for none")
        if limit is not None and limit < 1:
            raise EngineError(f"{name}(limit={limit}): give 1 or more strikes, or None for no end")
        self.probability, self.warm_up, self.limit = probability, warm_up, limit
        self.target = target or Target()
        self.strikes: list[Strike] = []
        self.opportunities = 0
        self.random = random.Random(seed)

    def due(self) -> bool:
        """Count one opportunity; returns whether to strike."""
        self.opportunities += 1
        if self.opportunities <= self.warm_up or len(self.strikes) == self.limit:
            return False
        return self.random.random() < self.probability

    def note(self, what: str, spot: Spot, **where: Any) -> Strike:
        """Record a strike and log it."""
        strike = Strike(self.kind, what, slot=spot.slot, request=spot.request, position=spot.position, **where)
        self.strikes.append(strike)
        log.info("%s", strike.line())
        return strike

    def wants(self, spot: Spot) -> bool:
        """Whether the spot belongs to the target's request, if there is one."""
        return self.target.request in (None, spot.request)

    def halves(self, pool: EnginePool) -> list[int]:
        """Numbers of the tensors of a pool that may be struck."""
        target = self.target
        if target.pool not in (None, pool.name):
            return []
        infos = [half.info for half in pool.halves]
        return [i for i, h in enumerate(infos) if target.layer in (None, h.layer) and target.half in (None, h.half)]

    def indices(self, spots: Mapping[int, Spot]) -> list[int]:
        """The indices whose spot may be struck."""
        return [i for i, spot in spots.items() if self.wants(spot)]


# ---- rows of slots


def row_of(pool: EnginePool, number: int, slot: int) -> torch.Tensor:
    """A slot's row in tensor ``number`` of a pool, as a view."""
    tensor = pool.views[number]
    return tensor[slot // tensor.shape[1], slot % tensor.shape[1]] if pool.declared.paged else tensor[slot]


def flip_bit(row: torch.Tensor, generator: random.Random) -> int:
    """Change one bit of a row of any layout and type; returns the bit's number."""
    raw = row.reshape(-1).clone().view(torch.uint8)
    bit = generator.randrange(8 * raw.numel())
    raw[bit // 8] ^= 1 << bit % 8
    row.copy_(raw.view(row.dtype).view(row.shape))
    return bit


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and type have the same bytes."""
    raw = [t.reshape(-1).contiguous().view(torch.uint8) for t in (one, other)]
    return torch.equal(*raw)

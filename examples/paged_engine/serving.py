"""Serve a workload: on one engine, or prefilled on one and decoded on another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from config import EngineConfig
from engine import Engine
from faults import Faults
from models import expected
from transfer import move
from workload import Request

import kvcanary_fx

#: Steps after which something must be wrong.
MAX_STEPS = 20_000


@dataclasses.dataclass
class Served:
    """What came out.

    Attributes:
        engines: one, or the prefill and the decode instance.
        transfers: requests that went from one to the other.
    """

    requests: list[Request]
    engines: list[Engine]
    transfers: int = 0

    @property
    def sessions(self) -> list[Any]:
        """The canary's sessions: of each engine, and of its draft."""
        drafts = [head.session for e in self.engines if e.draft for head in e.draft.heads]
        return [s for s in [e.session for e in self.engines] + drafts if s is not None]

    def violations(self) -> list[kvcanary_fx.Violation]:
        return [v for s in self.sessions for v in s.violations()]

    def counts(self) -> dict[str, int]:
        """What was done and checked; waits for the devices."""
        stats = [s.stats() for s in self.sessions]
        return {
            "requests": len(self.requests),
            "tokens": sum(len(r.output) for r in self.requests),
            "steps": self._total(lambda e: e.steps),
            "prefix hits (positions)": self._total(lambda e: e.scheduler.hits),
            "chunks of prefills": self._total(lambda e: e.scheduler.chunks),
            "evicted pages": self._total(lambda e: e.evictions),
            "retracts": self._total(lambda e: e.scheduler.retracts),
            "aborts": self._total(lambda e: e.scheduler.aborts),
            "off-loads": self._total(lambda e: e.host.saves),
            "load-backs": self._total(lambda e: e.host.loads),
            "transfers": self.transfers,
            "drafted": self._total(lambda e: e.draft.proposed if e.draft else 0),
            "accepted": self._total(lambda e: e.accepted),
            "rejected": self._total(lambda e: e.rejected),
            "padding tokens": self._total(lambda e: e.padding),
            "slots checked: identity": sum(s.slots_checked for s in stats),
            "slots checked: bytes": sum(s.checked for s in stats),
            "slots checked: sweeps": sum(s.swept for s in stats),
            "violations": sum(s.violations for s in stats),
        }

    def _total(self, count: Callable[[Engine], int]) -> int:
        return sum(count(e) for e in self.engines)

    def wrong(self) -> list[str]:
        """Ids of the requests whose output is not the oracle's; an aborted one may have less of it."""
        right = expected(self.requests, self.engines[0].config)
        return [
            r.id
            for r, tokens in zip(self.requests, right, strict=True)
            if r.output != tokens[: len(r.output)] or (len(r.output) < r.new_tokens and not r.wants_abort)
        ]


Watch = Callable[[int, Served], None]


def nothing(step: int, served: Served) -> None:
    """A :data:`Watch` that does nothing."""


def serve(
    requests: list[Request],
    config: EngineConfig,
    transfer: bool = False,
    faults: Faults | None = None,
    watch: Watch = nothing,
    **settings: Any,
) -> Served:
    """Serve ``requests``, each from the step of its arrival on.

    Args:
        transfer: prefill on one instance, decode on another.
        watch: called after each step.
        settings: of the canary.
    """
    entry = Engine(config, faults, prefill_only=transfer, **settings)
    served = Served(requests, [entry, Engine(config, faults, **settings)] if transfer else [entry])
    drive(served, watch)
    for engine in served.engines:
        engine.close()
    return served


def drive(served: Served, watch: Watch = nothing) -> None:
    """Step the engines until all requests are done."""
    coming = sorted(served.requests, key=lambda r: r.arrival)
    for step in range(MAX_STEPS):
        while coming and coming[0].arrival <= step:
            served.engines[0].add(coming.pop(0))
        for engine in served.engines:
            engine.step()
        if len(served.engines) == 2:
            served.transfers += move(*served.engines)
        watch(step, served)
        if not coming and not any(e.busy for e in served.engines):
            return
    raise RuntimeError(f"not done after {MAX_STEPS} steps")

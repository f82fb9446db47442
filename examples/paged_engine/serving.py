"""Serve a workload: on one engine, or prefilled on one and decoded on another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from config import EngineConfig
from engine import Engine
from faults import Faults
from models import expected_tokens
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
        drafts = [e.draft.session for e in self.engines if e.draft]
        return [s for s in [e.session for e in self.engines] + drafts if s is not None]

    def violations(self) -> list[kvcanary_fx.Violation]:
        return [v for s in self.sessions for v in s.violations()]

    def total(self, count: Callable[[Engine], int]) -> int:
        return sum(count(e) for e in self.engines)

    def wrong(self) -> list[str]:
        """Ids of the requests whose output is not the oracle's; an aborted one may have less of it."""
        config = self.engines[0].config
        return [
            r.id
            for r in self.requests
            if r.output != expected_tokens(r.prompt, r.new_tokens, r.namespace, config)[: len(r.output)]
            or (len(r.output) < r.new_tokens and not r.wants_abort)
        ]


def serve(
    requests: list[Request],
    config: EngineConfig,
    transfer: bool = False,
    faults: Faults | None = None,
    tell: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> Served:
    """Serve ``requests``, each from the step of its arrival on.

    Args:
        transfer: prefill on one instance, decode on another.
        tell: gets a line every 50 steps.
        settings: of the canary.
    """
    entry = Engine(config, faults, prefill_only=transfer, **settings)
    served = Served(requests, [entry, Engine(config, faults, **settings)] if transfer else [entry])
    coming = sorted(requests, key=lambda r: r.arrival)
    for step in range(MAX_STEPS):
        while coming and coming[0].arrival <= step:
            entry.add(coming.pop(0))
        for engine in served.engines:
            engine.step()
        if transfer:
            served.transfers += move(*served.engines)
        if step % 50 == 0:
            tell(f"step {step}: {len(coming)} to come, {sum(len(e.scheduler.running) for e in served.engines)} running")
        if not coming and not any(e.busy for e in served.engines):
            break
    else:
        raise RuntimeError(f"not done after {MAX_STEPS} steps")
    for engine in served.engines:
        engine.close()
    return served

"""An EAGLE-style draft: a small model with a pool and a canary session of its own.

Its slot of position p holds token p + 1.  After each step of the target it catches up with what was accepted,
and then runs alone for the tokens that it proposes; what it writes for those is rewritten in the next step.
"""

from __future__ import annotations

from typing import Any

import canary
from batching import Plan, Work
from config import EngineConfig
from memory import Memory
from models import CompiledModel, make_draft, make_draft_group
from tensors import upload
from workload import Request, State

import kvcanary_fx


class Draft:
    """The draft model.

    Attributes:
        group: its KV tensors; slots are numbered like the target's.
        session, pool: its canary session and pool, None with the canary off.
        proposed: tokens proposed so far.
    """

    def __init__(self, config: EngineConfig, memory: Memory, settings: dict[str, Any]):
        self.config, self.memory, self.group = config, memory, make_draft_group(config)
        self.session = canary.install_draft(config, self.group, memory, **settings)  # canary
        self.pool = self.session.pool if self.session is not None else None  # canary
        backend = self.session.backend if self.session is not None else config.inner  # canary
        self.model = CompiledModel(make_draft(config, self.group), config, [self.group], backend)
        self.proposed = 0

    def run(self, plan: Plan) -> None:
        """Catch up with what the target accepted in ``plan``, then propose."""
        work = [Work(w.request, w.start, w.request.tail(w.start + 1)[: w.request.stored - w.start]) for w in plan.work]
        with kvcanary_fx.step(self.session):  # canary
            guesses = self._forward(0, work)
            decoding = [(w.request, g) for w, g in zip(work, guesses, strict=True) if self._wants(w.request)]
            for index in range(1, self.config.draft + 1):
                for request, guess in decoding:
                    request.proposed.append(guess)
                decoding = [(r, g) for r, g in decoding if self._fits(r)]
                if index == self.config.draft or not decoding:
                    break
                work = [Work(r, r.stored + index - 1, [g]) for r, g in decoding]
                guesses = self._forward(index, work)
                decoding = [(r, g) for (r, _), g in zip(decoding, guesses, strict=True)]
        self.proposed += sum(len(w.request.proposed) for w in plan.work)

    def _wants(self, request: Request) -> bool:
        left = request.new_tokens - len(request.output)
        return request.state is State.RUNNING and request.missing == 1 and left > 1

    def _fits(self, request: Request) -> bool:
        """Whether the next proposed token has a slot already, and is wanted at all."""
        end = request.stored + len(request.proposed)
        left = request.new_tokens - len(request.output)
        return end <= len(request.pages) * self.config.page and len(request.proposed) < left - 1

    def _forward(self, index: int, work: list[Work]) -> list[int]:
        """The model over ``work``: for each request the guess behind its last token."""
        plan = Plan(work, self.memory)
        plan.build_reads(self.config)
        with kvcanary_fx.forward(self.session, index, plan):  # canary
            out = self.model(plan.tensors(self.config))
        return out[upload(plan.ends, self.config.device) - 1].tolist()

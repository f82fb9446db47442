"""Drafts: small models with pools and canary sessions of their own, which propose what the target then verifies.

Their slot of position p holds token p + 1 (``eagle``), or p + 1, p + 2, ... (the layers of ``mtp``).  After each
forward of the target they catch up with what was accepted; what they write for tokens that are only proposed is
overwritten later, and never read when the target rejected it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import canary
import torch
from batching import Inputs, Plan, Work
from config import EngineConfig
from faults import Faults
from memory import Memory
from models import CompiledModel, hidden_states, make_draft, make_draft_group
from workload import Request, State

import kvcanary_fx


class Head:
    """One draft model: a layer with its pool.

    Attributes:
        offset: how much later the token of a slot is than its position.
        group: its KV tensors; slots are numbered like the target's.
        hidden: ``[slots]`` or ``[slots, dim]``, what it gets besides the token at each slot.
        session, pool: its canary session and pool, None with the canary off.
    """

    def __init__(
        self, config: EngineConfig, offset: int, table: torch.Tensor, memory: Memory, target: Any, settings: Any
    ):
        self.config, self.offset, self.group = config, offset, make_draft_group(config, offset)
        self.hidden = hidden_states(config)
        self.session = canary.install_draft(config, self.group, memory, table, offset, **settings)  # canary
        self.pool = self.session.pool if self.session is not None else None  # canary
        backend = self.session.backend if self.session is not None else config.inner  # canary
        self.model = CompiledModel(make_draft(config, self.group, offset, target), config, [self.group], backend)

    def forward(
        self, index: int, batch: Any, inputs: Inputs, hidden: torch.Tensor, faults: Faults
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The model over a batch, as the ``index``-th forward of the step: guesses and hidden states.

        Args:
            batch: what the canary is told.
            inputs: the same for the model, padded.
            hidden: ``[n]`` or ``[n, dim]``, padded here.
        """
        hidden = torch.cat((hidden, hidden.new_zeros(len(inputs.ids) - len(hidden), *hidden.shape[1:])))
        for axis in range(1, hidden.dim()):  # 32 tokens of 32 numbers: Dynamo took one size for the other
            torch._dynamo.mark_static(hidden, axis)
        inputs = dataclasses.replace(inputs, slots=inputs.slots[:1], reads=inputs.reads[:1])
        faults.on_draft(self, index, batch, inputs)
        with kvcanary_fx.forward(self.session, index, batch):  # canary
            return self.model(inputs, hidden)

    def reject(self, slots: Sequence[int]) -> None:
        """Slots of what was proposed and not accepted: they stay as they are until they are written again."""
        if self.pool is not None and slots:
            self.pool.reject(slots)  # canary


class Draft:
    """What all drafts do.

    Attributes:
        heads: the models.
        proposed: tokens proposed so far.
    """

    def __init__(
        self, config: EngineConfig, memory: Memory, target: Any, settings: dict[str, Any], table: torch.Tensor
    ):
        self.config, self.memory, self.table = config, memory, table
        self.heads = [Head(config, k, table, memory, target, settings) for k in config.offsets]
        self.proposed = self.runs = 0

    def keep(self, plan: Plan, hidden: torch.Tensor) -> None:
        """The target's hidden states ``[n]`` or ``[n, dim]`` of a forward, for when their tokens are accepted."""
        self.heads[0].hidden[torch.tensor(plan.slots, device=hidden.device)] = hidden[: len(plan.slots)]

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """The target's tokens went to other slots, int64 ``[n]``."""
        self.heads[0].hidden[targets] = self.heads[0].hidden[sources]

    def run(self, plan: Plan, faults: Faults) -> None:
        """Catch up with what the target accepted in ``plan``, then propose."""
        self.runs += 1
        self.propose(plan, self._steps(), faults)
        self.proposed += sum(len(w.request.proposed) for w in plan.work)

    def propose(self, plan: Plan, steps: int, faults: Faults) -> None:
        """Store what is new, and leave up to ``steps`` tokens with each request; every kind of draft has its own."""
        raise NotImplementedError

    def _steps(self) -> int:
        """How many tokens to propose in a row: the same each time, or up and down."""
        most = self.config.draft
        if not self.config.draft_varies or most == 1:
            return most
        return most - abs((self.runs - 1) % (2 * most - 2) - most + 1)

    def _catch_up(self, plan: Plan) -> list[Work]:
        """What an eagle draft has to store: what the target has, each slot with the token that follows."""
        return [Work(w.request, w.start, w.request.tail(w.start + 1)[: w.request.stored - w.start]) for w in plan.work]

    def _wanted(self, request: Request, steps: int) -> int:
        """How many tokens to propose in a row for a request; 0 in a prefill, and for its last token."""
        if request.state is not State.RUNNING or request.missing != 1:
            return 0
        return max(0, min(steps, request.new_tokens - len(request.output) - 1))


def make_drafts(config: EngineConfig, memory: Memory, target: Any, settings: dict[str, Any]) -> Draft | None:
    """The draft of an engine, None for none."""
    from eagle import Eagle  # they are drafts themselves
    from mtp import Mtp

    if not config.draft:
        return None
    kind = Mtp if config.draft_model == "mtp" else Eagle
    return kind(config, memory, target, settings)

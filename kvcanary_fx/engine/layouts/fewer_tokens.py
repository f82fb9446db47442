"""Plans with fewer tokens than the batch: a slot stands for several tokens, and goes by the one that completes it.

Such a plan lies in persistent memory, as captured graphs read it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ...kernels.slots.space import RequestPlan
from ...kernels.slots.tokens import laid_out
from ..step_inputs import StepInputs
from ..step_view import StepView
from .base import Layout

#: Per token of the batch, and per request: what a plan with fewer tokens needs of its own.
_TOKENS = ("tokens", "slots", "positions", "taken")
_BATCH = ("prefix_lens", "extend_lens", "history_lens", "reads", "ends")


class FewerTokens(Layout):
    """A slot for several tokens of the batch; see the layouts that are one."""

    slot_per_token = False

    def refusal(self) -> str | None:
        if self.declared.window is None and self.declared.chunk is None and not self.declared.token_offset:
            return None
        return (
            f"has {self.argument} with a window, a chunk or a token_offset, which count tokens: its slots stand for "
            "more than one"
        )

    def completed(self, plan: RequestPlan, prefix: torch.Tensor, extend: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What a forward completes.

        Args:
            prefix, extend: int64 ``[bs]``, tokens of each request before the forward, and of the forward.

        Returns:
            int64 ``[bs]`` each: the number of the first slot that each request completes, and of how many.
        """
        raise NotImplementedError

    def completing(self, number: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """The position of the token that completes each slot.

        Args:
            number: int64 ``[n]``, the number of the slot among its request's.
            last: int64 ``[n]``, the position of its request's last token.
        """
        raise NotImplementedError

    def number_of(self, position: torch.Tensor) -> torch.Tensor:
        """The number of the slot that tokens at these positions complete, int64 ``[n]``; -1 where that is none."""
        return position

    def slots_in(self, tokens: torch.Tensor) -> torch.Tensor:
        """How many slots as many tokens of a request complete."""
        return tokens

    def in_history(self) -> slice:
        """Which of a request's tokens complete a slot."""
        return slice(None)

    def slots_of(self, plan: RequestPlan, request: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
        """The slots that are completed, int64 ``[n]``.

        Args:
            request, taken: int64 ``[n]``, whose they are, and the token of the batch that completes each.
        """
        return plan.slots[taken].to(torch.int64)

    def reserve(self, place: int, inputs: StepInputs) -> None:
        for field in _TOKENS:
            inputs.register_memory(_name(field, place), "tokens", torch.int64)
        for field in _BATCH:
            inputs.register_memory(_name(field, place), "batch", torch.int64)
        inputs.register_memory(_name("counts", place), "batch", torch.int64, trailing=(3,))

    def narrowed(self, place: int, plan: RequestPlan, view: StepView) -> RequestPlan:
        if not plan.rows.shape[0]:
            return plan  # where requests add no tokens, what they read is still counted in slots
        prefix, extend = plan.prefix_lens.to(torch.int64), plan.extend_lens.to(torch.int64)
        before, added = self.completed(plan, prefix, extend)
        request, taken = self._taken(plan.slots.shape[0], prefix, extend, before, added)
        fields = {
            "prefix_lens": before,
            "extend_lens": added,
            "tokens": plan.tokens[taken],
            "slots": self.slots_of(plan, request, taken),
            "taken": taken,
        }
        if plan.positions is not None:
            fields["positions"] = self.number_of(plan.positions[taken])
        if plan.history_lens is not None and plan.history is not None:
            fields["history_lens"] = self.slots_in(plan.history_lens)
        kept: dict[str, Any] = {field: keep(view, field, place, value) for field, value in fields.items()}
        counts = getattr(view, _name("counts", place))[0]
        counts.copy_(torch.stack((plan.counts[0], added.sum(), plan.counts[2])))
        history = None if plan.history is None else plan.history[:, self.in_history()]
        # other tokens end elsewhere: in memory shared with the batch's plan, the pool walked last would leave its own
        ends = getattr(view, _name("ends", place))
        return dataclasses.replace(plan, counts=counts, history=history, ends=ends, **kept)

    def _taken(
        self, n: int, prefix: torch.Tensor, extend: torch.Tensor, before: torch.Tensor, added: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(request, token of the batch)`` of each slot that the forward completes, int64 ``[n]``; then zeros."""
        request, number, there = laid_out(added, n)
        completes = self.completing(before[request] + number, (prefix + extend - 1)[request])
        taken = (extend.cumsum(0) - extend)[request] + completes - prefix[request]
        return request, torch.where(there, taken, 0).clamp(0, n - 1)


def keep(view: StepView, field: str, place: int, value: torch.Tensor) -> torch.Tensor:
    """A value in the memory of a field of the plan, which stays where it is."""
    memory: torch.Tensor = getattr(view, _name(field, place))
    memory.copy_(value)
    return memory


def _name(field: str, place: int) -> str:
    """Where the step inputs keep a field of the plan of the pool that was given in this place."""
    return f"{field}_of_{place}"

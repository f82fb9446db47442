"""Recurrent and convolution states: one slot for all tokens of a request, rewritten in each step."""

from __future__ import annotations

import dataclasses

import torch

from ...kernels.slots.checks import table_slots
from ...kernels.slots.space import RequestPlan
from ...kernels.slots.tokens import real_requests
from ..step_view import StepView
from .base import Declared, ScaledDown
from .fewer_tokens import FewerTokens, keep


class State(FewerTokens):
    """A slot goes by its request's last token; it is read as the last step left it."""

    argument = "state=True"
    ring = True
    rewritten = True
    unlike_page_tables = "has rings or states: a kernel's page table says nothing about them"

    @classmethod
    def is_declared(cls, declared: Declared) -> bool:
        return declared.state

    @property
    def window(self) -> int | None:
        return 2  # the last token's, and that of the step that reads it

    def refusal(self) -> str | None:
        if self.room != 1:
            return (
                f"holds states, and its request_table is {list(self.declared.request_table.shape)}: it must be "
                "[requests, 1]. Where a request keeps several states, give the one that its next step starts from"
            )
        if self.declared.slot_map is not None:
            return "holds states and has a slot_map: give its own slots in the request_table"
        return super().refusal()

    def describe(self) -> list[str]:
        return ["states, rewritten in each step"]

    def completed(self, plan: RequestPlan, prefix: torch.Tensor, extend: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # the table decides where padding keeps its state
        return prefix + (extend - 1).clamp(min=0), torch.where(real_requests(plan), extend.clamp(max=1), 0)

    def completing(self, number: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return last

    def slots_of(self, plan: RequestPlan, request: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
        return table_slots(plan, request, torch.zeros_like(request))  # a batch says nothing about them

    def narrowed(self, place: int, plan: RequestPlan, view: StepView) -> RequestPlan:
        made = super().narrowed(place, plan, view)
        if made is plan:
            return plan
        # what is read is the state that the last step left, at the end of the prefix
        prefix = keep(view, "reads", place, plan.prefix_lens.to(torch.int64))
        return dataclasses.replace(made, reads=dataclasses.replace(made, prefix_lens=prefix))

    def entries(self, start: int, stop: int) -> list[int | None]:
        return [None] * (stop - start - 1) + [0]

    def scaled_down(self) -> ScaledDown:
        # the first token tells the namespace, and a state holds it after one token only
        return ScaledDown({"state": True}, row=1, first=1)

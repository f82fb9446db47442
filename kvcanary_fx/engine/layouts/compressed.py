"""Compressed caches: slot e of a request is written when its token ``(e + 1) * tokens_per_slot - 1`` is."""

from __future__ import annotations

import torch

from ...kernels.slots.space import RequestPlan
from ...kernels.slots.tokens import counted_requests
from .base import Declared, ScaledDown
from .fewer_tokens import FewerTokens

#: Tokens per slot of a scratch pool, at most.
_FEW = 4


class Compressed(FewerTokens):
    """A slot for as many tokens as ``tokens_per_slot`` says."""

    argument = "tokens_per_slot"

    @classmethod
    def is_declared(cls, declared: Declared) -> bool:
        return declared.tokens_per_slot > 1

    @property
    def _ratio(self) -> int:
        return self.declared.tokens_per_slot

    def describe(self) -> list[str]:
        return [f"{self._ratio} tokens a slot"]

    def token_at(self, position: int) -> int:
        return (position + 1) * self._ratio - 1

    def completed(self, plan: RequestPlan, prefix: torch.Tensor, extend: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = self.slots_in(prefix)
        return before, torch.where(counted_requests(plan), self.slots_in(prefix + extend) - before, 0)

    def completing(self, number: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return (number + 1) * self._ratio - 1

    def number_of(self, position: torch.Tensor) -> torch.Tensor:
        return torch.where((position + 1) % self._ratio == 0, position // self._ratio, -1)

    def slots_in(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens // self._ratio

    def in_history(self) -> slice:
        return slice(self._ratio - 1, None, self._ratio)

    def entries(self, start: int, stop: int) -> list[int | None]:
        return [None if (p + 1) % self._ratio else p // self._ratio for p in range(start, stop)]

    def scaled_down(self) -> ScaledDown:
        few = min(self._ratio, _FEW)
        return ScaledDown({"tokens_per_slot": few}, first=3 * few, more=few)

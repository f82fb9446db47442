"""A multi-token-prediction draft: a layer for each token that it proposes, each with a pool of its own.

The k-th layer's slot of position p holds token p + k, and it gets the hidden state of the layer before.  What it
stored for a token that was only guessed has to be stored again when the token is known: it starts so much earlier.
"""

from __future__ import annotations

from typing import Any

import torch
from batching import Plan, Work
from config import EngineConfig
from draft import Draft, Head
from faults import Faults
from memory import Memory
from tensors import upload
from workload import Request

import kvcanary_fx


class Mtp(Draft):
    """The draft; in each step every head runs once, as forward ``offset - 1`` of its own session."""

    def __init__(self, config: EngineConfig, memory: Memory, target: Any, settings: dict[str, Any]):
        super().__init__(config, memory, target, settings, memory.table)

    def propose(self, plan: Plan, steps: int, faults: Faults) -> None:
        requests = [w.request for w in plan.work]
        starts = {w.request.id: w.request.caught or [w.start] * len(self.heads) for w in plan.work}
        wanted = [self._wanted(r, steps) for r in requests]
        said: list[torch.Tensor] = []  # int64 [requests] each, garbage where nothing is wanted
        for number, head in enumerate(self.heads):
            work = [self._work(r, head.offset, starts[r.id][number], wanted[i]) for i, r in enumerate(requests)]
            said.append(self._run(head, work, [w.start for w in plan.work], said, faults))
        for i, tokens in enumerate(torch.stack(said, 1).tolist()):
            requests[i].proposed = tokens[: wanted[i]]
            requests[i].tree = list(range(-1, wanted[i] - 1))
        for request in requests:
            request.caught = [self._sure(request, head.offset) for head in self.heads]

    def _sure(self, request: Request, offset: int) -> int:
        """Positions whose token a layer knows."""
        return max(0, min(request.stored, request.length - offset))

    def _work(self, request: Request, offset: int, start: int, wanted: int) -> Work:
        """What a layer stores: all that it knows, and where it is to guess up to the target's last position."""
        known = request.tail(start + offset)[: max(0, request.stored - start)]
        guessed = request.stored - start - len(known) if wanted >= offset else 0
        return Work(request, start, known + [0] * guessed)

    def _run(
        self, head: Head, work: list[Work], verified: list[int], said: list[torch.Tensor], faults: Faults
    ) -> torch.Tensor:
        """One layer over ``work``: its guess for each request, int64 ``[len(work)]``."""
        device = self.config.device
        busy = [(i, w) for i, w in enumerate(work) if w.tokens]
        guess = torch.zeros(len(work), dtype=torch.int64, device=device)
        if not busy:
            return guess
        plan = Plan([w for _, w in busy], self.memory)
        self._fill_in(plan, [i for i, _ in busy], head.offset, said)
        plan.build_reads(self.config)
        slots = upload(plan.slots, device)
        with kvcanary_fx.step(head.session):  # canary
            for w, start in zip(work, verified, strict=True):
                head.reject(self.memory.slots(w.request, w.start, max(w.start, start)))
            inputs = plan.tensors(self.config)
            guesses, hidden = head.forward(head.offset - 1, plan, inputs, head.hidden[slots], faults)
        if head.offset < len(self.heads):
            self.heads[head.offset].hidden[slots] = hidden[: len(slots)]
        guess[upload([i for i, _ in busy], device)] = guesses[upload(plan.ends, device) - 1, 0]
        return guess

    def _fill_in(self, plan: Plan, numbers: list[int], offset: int, said: list[torch.Tensor]) -> None:
        """Put what the layers before guessed where a request's own tokens end."""
        at, layer, request = [], [], []
        for number, w, end in zip(numbers, plan.work, plan.ends, strict=True):
            for place in range(w.start, w.stop):
                if place + offset >= w.request.length:
                    at.append(end - w.stop + place)
                    layer.append(place + offset - w.request.length)
                    request.append(number)
        ids = upload(plan.input_ids, self.config.device)
        if at:
            ids[upload(at, ids.device)] = torch.stack(said)[upload(layer, ids.device), upload(request, ids.device)]
        plan.input_ids = ids

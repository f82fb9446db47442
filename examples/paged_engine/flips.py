"""One flipped bit in each layer and half of an engine, a step apart: is each reported where it is?"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from batching import Plan
from engine import Engine
from faults import Faults
from kv_store import Group
from workload import Request


class Found(NamedTuple):
    """Where a bit was flipped, and what a report must therefore say."""

    layer: str
    half: str
    slot: int
    request: str
    position: int
    check: str = "content"


class Flips(Faults):
    """Flips a bit of a slot that the next forward reads, then looks at what was reported of it.

    Attributes:
        todo: group, layer and half of the flips that are still to come.
        right, wrong: flips that were reported, once, as what they are; the others with what was reported instead.
    """

    def __init__(self, engine: Engine, seed: int = 0):
        self.random = random.Random(seed)
        groups = [*engine.groups, *_drafts(engine)]
        self.todo = [(g, layer, half) for g in groups for layer in range(len(g.layers)) for half in range(2)]
        self.count = len(self.todo)
        self.right: list[Found] = []
        self.wrong: list[tuple[Found, list[Found]]] = []
        self._struck: Found | None = None
        self._seen = {id(s): len(s.violations()) for s in sessions(engine)}

    def before_step(self, engine: Engine) -> None:
        """Judge what the last step reported."""
        new = []
        for session in sessions(engine):
            reports = session.violations()
            new += reports[self._seen[id(session)] :]
            self._seen[id(session)] = len(reports)
        found = [Found(v.layer, v.half, v.slot, v.request, v.position, v.check) for v in new]
        struck, self._struck = self._struck, None
        if struck is not None and found == [struck]:
            self.right.append(struck)
        elif struck is not None:
            self.wrong.append((struck, found))
        else:
            self.wrong += [(f, []) for f in found]  # nobody asked for these

    def before_forward(self, engine: Engine, plan: Plan) -> None:
        self._strike(engine, plan, [g.name for g in engine.groups])

    def before_draft(self, engine: Engine, plan: Plan) -> None:
        self._strike(engine, plan, [g.name for g in _drafts(engine)])

    def _strike(self, engine: Engine, plan: Plan, names: list[str]) -> None:
        ready = [w for w in plan.work if w.start > 1 and w.request.output]
        if self._struck is not None or not ready or not self.todo or self.todo[0][0].name not in names:
            return
        work, (group, layer, half) = self.random.choice(ready), self.todo.pop(0)
        first = engine.memory.live_from(work.start) if group.window else 0
        position = self.random.randrange(first, work.start)
        slot = _slot(engine, group, work.request, position)
        raw = group.layers[layer][half][slot].view(torch.uint8).view(-1)
        raw[self.random.randrange(raw.numel())] ^= 1 << self.random.randrange(8)
        self._struck = Found(group.names[layer], "KV"[half], slot, work.request.id, position)


def sessions(engine: Engine) -> list[Any]:
    """The canary's sessions of an engine."""
    return [engine.session] + [head.session for head in (engine.draft.heads if engine.draft else [])]


def _drafts(engine: Engine) -> list[Group]:
    return [head.group for head in engine.draft.heads] if engine.draft else []


def _slot(engine: Engine, group: Group, request: Request, position: int) -> int:
    (slot,) = engine.memory.slots(request, position, position + 1)
    return int(engine.memory.slot_map[slot]) if group.window else slot

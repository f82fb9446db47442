"""One flip in each state of each guarded layer of a hybrid, of either runner, on a CPU or a GPU."""

from __future__ import annotations

from typing import Any

import torch
from vllm_rig import Rig, prompt

#: The step from which on a request's state is flipped: it decodes.
STEP = 4

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def state_flips(rig: Rig, length: int = 60) -> dict[str, Any]:
    """What was told of each; ``ok`` if it was the layer, state and request, in a block of the request's, and nothing
    else: the runner may have copied the state since.

    Under a budget a request's state has its turn in some steps only, so a bit of it is flipped in each step until that
    is told; ``flips`` says how often.
    """
    found: dict[str, Any] = {}
    for group in rig.guard.states.groups:
        for layer, states in group.layers.items():
            for number, state in enumerate(states):
                name = group.names[number] if group.names else f"{number}"
                found[f"{layer} {name}"] = _flip(rig, group, state, layer, name, f"{len(found)}", length)
    return found


def _flip(
    rig: Rig, group: Any, state: torch.Tensor, layer: str, name: str, request: str, length: int
) -> dict[str, Any]:
    session, flipped, blocks = rig.guard.states.session, 0, []
    before = [len(each.violations()) for each in rig.guard.sessions]
    already = len(session.violations())
    rig.add(request, prompt(700 + int(request), 45), length=length)

    def at(step: int) -> None:
        if step < STEP or not rig.engine.has_unfinished_requests():
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # between two steps, whatever is queued
        blocks.append(_block(rig, group, request))
        nonlocal flipped
        if len(session.violations()) > already:
            return
        flipped += 1
        word = state[blocks[-1]].view(_WORDS[state.element_size()])
        word[(0,) * word.dim()] ^= 1 << 4
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    rig.run(at)
    told = [v for each, n in zip(rig.guard.sessions, before, strict=True) for v in each.violations()[n:]]
    where = {(v.check, v.layer, v.half, str(v.request).rpartition("-")[0], v.slot in blocks) for v in told}
    right = where == {("content", layer, name, request, True)} and len(told) == 1
    return dict(ok=right, flips=flipped, told=[str(v.line())[:160] for v in told[:2]])


def _block(rig: Rig, group: Any, request: str) -> int:
    """The block that has a request's state: with mamba_cache_mode=align the scheduler may have its next one already."""
    states, name = rig.guard.states, rig.internal(request)
    if not hasattr(states, "blocks_of"):  # the first runner's, without a prefix cache
        return rig.pages(request)[group.number][0]
    known = rig.runner.req_states
    tokens = int(known.num_computed_tokens.gpu[known.req_id_to_index[name]])
    return states.blocks_of(name, tokens)[states.groups.index(group)]

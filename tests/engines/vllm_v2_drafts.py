"""The scene ``drafts`` of :mod:`vllm_v2_run`: an engine with speculative decoding, whose target rejects some guesses.

Requests run twice.  The first time the draft guesses; the second time its guesses are replaced by what the first run
gave, with some of them wrong, so that any number of them is accepted.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

import torch
import vllm_v2_flips
from vllm_rig import Rig, prompt

PROMPTS = {f"p{i}": (prompt(i, 30) * 3)[: 50 + 7 * i] for i in range(6)}
LENGTH = 40


def drafts(rig: Rig) -> dict[str, Any]:
    """Tokens with guesses of the draft and with known ones, and a flip in each layer and half while they are verified.

    Tokens are told as a CRC: those of an unguarded engine must be the same.
    """
    count = _Count(rig)
    first = _load(rig, count, "guessed")
    table = dict(guessed=first)
    if hasattr(rig.runner, "speculator"):  # of the second runner
        table["known"] = _load(rig, count, "known", _Known(rig, dict(rig.tokens)))
    if rig.guard is None:
        return dict(ok=True, table=table)
    told = [str(v.line()) for session in rig.guard.sessions for v in session.violations()]
    uncovered = [why for session in rig.guard.sessions for why in session.uncovered]
    flips = vllm_v2_flips.flips(rig, LENGTH)
    ok = not told and not uncovered and all(row["ok"] for row in flips.values())
    return dict(ok=ok, table=table, violations=told[:6], uncovered=uncovered[:4], flips=flips)


class _Count:
    """How many guesses the scheduler heard of, and how many were accepted."""

    def __init__(self, rig: Rig):
        self.drafted = self.accepted = 0
        make = rig.scheduler.make_spec_decoding_stats

        def counted(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **rest: Any) -> Any:
            self.drafted += num_draft_tokens
            self.accepted += num_accepted_tokens
            return make(stats, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, **rest)

        rig.scheduler.make_spec_decoding_stats = counted


class _Known:
    """In the place of a draft's guesses: the tokens that a request is going to get, some of them wrong."""

    def __init__(self, rig: Rig, tokens: dict[str, list[int]]):
        self._rig, self._tokens, self._rng = rig, tokens, random.Random(3)
        self._speculator = rig.runner.speculator
        self._propose = self._speculator.propose

    def __enter__(self) -> None:
        self._speculator.propose = self

    def __exit__(self, *_: Any) -> None:
        del self._speculator.propose

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        guesses = self._propose(batch, *args, **kwargs)
        if kwargs.get("dummy_run"):
            return guesses
        ends = self._rig.runner.req_states.total_len.gpu[batch.idx_mapping].tolist()
        for row, (request, end) in enumerate(zip(batch.req_ids, ends, strict=True)):
            name = request.rpartition("-")[0].removeprefix("known ")
            given = self._tokens.get(name)
            done = end - len(PROMPTS.get(name, ()))
            if given is None or done < 0:
                continue
            right = given[done : done + guesses.shape[1]]
            wrong = self._rng.randint(0, guesses.shape[1])  # the first wrong one
            if wrong < len(right):
                right[wrong] ^= 1
            guesses[row, : len(right)] = torch.tensor(right, device=guesses.device, dtype=guesses.dtype)
        return guesses


def _load(rig: Rig, count: _Count, prefix: str, known: Any = None) -> dict[str, Any]:
    """The requests, three at once and three later; what they got."""
    rig.engine.reset_prefix_cache()
    rig.tokens.clear()
    count.drafted = count.accepted = 0
    waiting, steps = list(PROMPTS), 0

    def at(step: int) -> None:
        nonlocal steps
        steps = step
        if step in (0, 5):
            for name in [waiting.pop(0) for _ in range(3)]:
                rig.add(f"{prefix} {name}", PROMPTS[name], length=LENGTH)

    if known is None:
        rig.run(at)
    else:
        with known:
            rig.run(at)
    rig.add("again", PROMPTS["p0"] + rig.tokens[f"{prefix} p0"][:20], length=LENGTH)  # all that is cached is taken up
    rig.run()
    found = {name.removeprefix(f"{prefix} "): tokens for name, tokens in rig.tokens.items()}
    rig.tokens = dict(found)
    row = dict(
        tokens=zlib.crc32(str(sorted(found.items())).encode()),
        steps=steps,
        drafted=count.drafted,
        accepted=count.accepted,
    )
    if rig.guard is not None:
        row |= dict(recorded=rig.session.stats().recorded, violations=len(rig.session.violations()))
    return row


SCENES = {"drafts": drafts}

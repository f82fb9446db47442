"""The scene ``sleeps`` of :mod:`vllm_v2_run`: the prefix cache is reset, the engine sleeps, its weights are replaced.

SLEEP=1 KVCANARY_MODE=log KVCANARY_BUDGET=none python tests/engines/vllm_v2_run.py DIRECTORY sleeps

Without a GPU vLLM does not sleep, and the rest of the scene can be tried.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import vllm_v2_flips
from vllm_rig import Rig, prompt

LENGTH = 24


def sleeps(rig: Rig, fill: Callable[..., None]) -> dict[str, Any]:
    """The same requests, in turn: after a reset while they run, after each level of sleep, with other weights and with
    the first ones again; then a flip in each half.

    Weights of another seed give other tokens; the others must be those of the first turn, and of an unguarded engine.
    """
    table = dict(
        first=_turn(rig),
        again=_turn(rig),
        reset=_turn(rig, at=6),
    )
    rig.llm.sleep(1)
    rig.llm.wake_up()
    table["slept"] = _turn(rig)
    rig.llm.sleep(2)
    rig.llm.wake_up()
    fill(rig.runner.model, seed=7)
    table["other weights"] = _turn(rig)
    fill(rig.runner.model, seed=0)
    rig.engine.reset_prefix_cache()
    table["first weights"] = _turn(rig)
    tokens = {name: row["tokens"] for name, row in table.items()}
    same = len({tokens[name] for name in ("first", "slept", "first weights")}) == 1
    ok = same and tokens["other weights"] != tokens["first"]
    if rig.guard is None:
        return dict(ok=ok, table=table)
    told, uncovered = [str(v.line()) for v in rig.session.violations()], list(rig.session.uncovered)
    flips = vllm_v2_flips.flips(rig, LENGTH)
    ok = ok and not told and not uncovered and all(row["ok"] for row in flips.values())
    return dict(ok=ok, table=table, violations=told[:4], uncovered=uncovered[:4], flips=flips)


def _turn(rig: Rig, at: int | None = None) -> dict[str, Any]:
    """Three requests that share a prefix.

    Args:
        at: the step before which the prefix cache is reset, and who runs begins again.
    """
    rig.tokens.clear()
    for i in range(3):
        rig.add(f"s{i}", prompt(1, 48) + prompt(20 + i, 12), length=LENGTH)
    rig.run(lambda step: rig.engine.reset_prefix_cache(reset_running_requests=True) if step == at else None)
    row: dict[str, Any] = dict(tokens=zlib.crc32(str(sorted(rig.tokens.items())).encode()))
    if rig.guard is not None:
        row["violations"] = len(rig.session.violations())
    return row

"""Proof that a changed byte in each state of each layer is reported, with the launches of :mod:`.state_checks`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ....config import CanaryConfig
from ....errors import SelfTestError
from ....install import install_canary
from ....reports.summary import muted
from ..state_groups import StateGroup
from .hybrids import options_of
from .state_checks import Moved, StateChecks
from .states import checks_of


def prove_states(runner: Any, groups: Sequence[StateGroup], config: CanaryConfig) -> None:
    """Prove the content check on each group, if it is on.  Nothing may be stored in the states yet.

    The last block of the cache is written to, and cleared.

    Raises:
        SelfTestError: a changed byte was not reported, or an unchanged one was.
    """
    if "content" not in config.checks:
        return
    table = torch.zeros(1, 1, dtype=torch.int32, device=runner.device)
    with muted(), torch.inference_mode(False):
        options = options_of(config) | dict(incidents=None, status=None, on_violation=None)
        session = install_canary(*(group.pool(table, allocations=False) for group in groups), config=config, **options)
        assert session is not None
        session.mark_ready()
        checks = checks_of(session, groups, 1)
        rows = list(_last_blocks(groups))
        try:
            failed = _failures(session, checks, rows)
        finally:
            for row in rows:
                row.zero_()
    if failed:
        raise SelfTestError(failed)


def _last_blocks(groups: Sequence[StateGroup]) -> Iterator[torch.Tensor]:
    for group in groups:
        for layer in group.layers.values():
            yield from (state[-1] for state in layer)


def _failures(session: Any, checks: StateChecks, rows: Sequence[torch.Tensor]) -> list[tuple[str, str, list[str]]]:
    block = min(half.view.shape[0] for half in checks.halves) - 1
    moved = [Moved(0, 0, (block,) * checks.groups, (block,) * checks.groups)]
    for number, row in enumerate(rows):  # groups share their memory: each is filled before any is looked at
        row.fill_(number % 100 + 1)
    for _ in range(2):  # of one block after the other, as groups share their memory
        checks.begin(0, moved, moved)
        checks.compare()
        checks.record()
    early = session.violations()
    if early:
        return [(early[0].check, "nothing", [early[0].line()])]
    for row in rows:
        row.add_(1)
    checks.begin(1, moved, [])
    checks.compare()
    told = {(v.layer, v.half) for v in session.violations() if v.check == "content"}
    infos = [half.info for pool in session.pools.values() for half in pool.halves]
    silent = [info for info in infos if (info.layer, info.half) not in told]
    return [("content", f"a changed byte in state {info.half} of {info.layer}", []) for info in silent]

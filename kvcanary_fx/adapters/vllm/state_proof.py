"""Proof that a changed byte in each state of each layer is reported, as :mod:`.proof` does it for attention.

A step of a request leaves its states in the last block; their bytes are changed, and the next step reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ...config import CanaryConfig
from ...engine.layers import EagerLayers
from ...engine.session import EngineSession
from ...errors import SelfTestError
from ...install import install_canary
from ...reports.summary import muted
from .state_groups import StateGroup

_REQUEST = "the proof of the canary"


def prove(groups: Sequence[StateGroup], config: CanaryConfig) -> None:
    """Prove the content check on each group, if it is on.  Nothing may be stored in the states yet.

    Raises:
        SelfTestError: a changed byte was not reported, or an unchanged one was.
    """
    if "content" not in config.checks:
        return
    alone = dataclasses.replace(
        config, mode="log", incidents=None, status=None, on_violation=None, budget=None, verify_fraction=None
    )
    with muted(), torch.inference_mode(False):
        failed = [failure for group in groups for failure in _failures(group, alone)]
    if failed:
        raise SelfTestError(failed)


def _failures(group: StateGroup, config: CanaryConfig) -> list[tuple[str, str, list[str]]]:
    first = next(iter(group.layers.values()))[0]
    block = first.shape[0] - 1
    rows = [state[block] for layer in group.layers.values() for state in layer]
    table = torch.full((1, 1), block, dtype=torch.int32, device=first.device)
    session = install_canary(group.pool(table, allocations=False), config=config)
    assert session is not None
    session.mark_ready()
    layers = EagerLayers(session)
    try:
        _fill(rows, 60)
        _step(session, layers, group, 0)
        early = session.violations()
        _fill(rows, 90)
        _step(session, layers, group, 1)
        told = {(v.layer, v.half) for v in session.violations() if v.check == "content"}
    finally:
        for row in rows:
            row.zero_()
    if early:
        return [(early[0].check, "nothing", [early[0].line()])]
    silent = [half.info for half in session.pools[group.name].halves if (half.info.layer, half.info.half) not in told]
    return [("content", f"a changed byte in state {info.half} of {info.layer}", []) for info in silent]


def _fill(rows: Sequence[torch.Tensor], number: int) -> None:
    for row in rows:
        row.fill_(number)


def _step(session: EngineSession, layers: EagerLayers, group: StateGroup, prefix: int) -> None:
    """A step of one token, of a request with so many."""
    device = next(iter(group.layers.values()))[0].device
    batch = {
        "input_ids": torch.tensor([7], device=device),
        "slots": torch.tensor([0], device=device),
        "request_rows": torch.tensor([0]),
        "prefix_lens": torch.tensor([prefix], device=device),
        "extend_lens": [1],
        "positions": torch.tensor([prefix], device=device),
        "request_ids": [_REQUEST],
    }
    with session.step(batch), session.forward():
        layers.begin()
        for layer in group.layers:
            layers.record(layer)

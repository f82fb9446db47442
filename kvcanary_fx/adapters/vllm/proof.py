"""Proof that a changed byte in each half of each layer is reported, in vLLM's own cache, before the first request.

A token is stored in the last block of each KV cache group, its bytes are changed, and the next forward reads it.  The
session is one of its own, which compares all bytes whatever the budget; the block is zeroed afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ...config import CanaryConfig
from ...engine.layers import LayerChecks
from ...engine.session import EngineSession
from ...errors import SelfTestError
from ...install import install_canary
from ...kernels.compile_ahead import compile_ahead
from ...kernels.layer_ops import record_layer, verify_layer
from ...reports.summary import muted
from .pools import Group

_REQUEST = "the proof of the canary"


def prove(groups: Sequence[Group], config: CanaryConfig) -> None:
    """Prove the content check on each group, if it is on.  Nothing may be stored in the caches yet.

    Raises:
        SelfTestError: a changed byte was not reported, or an unchanged one was.
    """
    if "content" not in config.checks:
        return
    alone = dataclasses.replace(
        config, mode="log", budget="auto", verify_fraction="1", incidents=None, status=None, on_violation=None
    )
    with muted(), torch.inference_mode(False):
        failed = [failure for group in groups for failure in _failures(group, alone)]
    if failed:
        raise SelfTestError(failed)


def _failures(group: Group, config: CanaryConfig) -> list[tuple[str, str, list[str]]]:
    halves = [half for layer in group.layers.values() for half in layer]
    slot = halves[0].shape[0] * group.kernel_page_size // group.page_size * group.page_size - group.page_size
    rows = [half[slot // group.kernel_page_size, slot % group.kernel_page_size] for half in halves]
    table = torch.full((1, 2), slot // group.page_size, dtype=torch.int32, device=halves[0].device)
    session = install_canary(group.pool(table, allocations=False), config=config)
    assert session is not None
    session.mark_ready()
    try:
        compile_ahead(lambda: _forwards(session, group, slot), table.device)
        _write(rows, 60)
        _forward(session, group, slot, 0)
        early = session.violations()
        _write(rows, 90)
        _forward(session, group, slot, 1)
        told = {(v.layer, v.half) for v in session.violations() if v.check == "content"}
    finally:
        for row in rows:
            row.zero_()
    if early:
        return [(early[0].check, "nothing", [early[0].line()])]
    names = ("latent", "rope") if group.mla else ("K", "V")
    silent = [(layer, half) for layer in group.layers for half in names if (layer, half) not in told]
    return [("content", f"a changed byte in half {half} of {layer}", []) for layer, half in silent]


def _write(rows: Sequence[torch.Tensor], number: int) -> None:
    """Elements of 8 bits are written as bytes: not every type of them takes numbers."""
    for row in rows:
        (row.view(torch.uint8) if row.element_size() == 1 else row).fill_(number)


def _forwards(session: EngineSession, group: Group, slot: int) -> None:
    for prefix in (0, 1):
        _forward(session, group, slot, prefix)


def _forward(session: EngineSession, group: Group, slot: int, prefix: int) -> None:
    device = next(iter(group.layers.values()))[0].device
    layers = LayerChecks(session)
    batch = {
        "input_ids": torch.tensor([7], device=device),
        "request_rows": torch.tensor([0]),
        "prefix_lens": torch.tensor([prefix], device=device),
        "extend_lens": [1],
        "request_ids": [_REQUEST],
        f"slots_{group.number}": torch.tensor([slot + prefix], device=device),
    }
    with session.step(batch), session.forward(), layers.publish():
        for layer in group.layers:
            verify_layer(device, layer)
            record_layer(None, None, device, layer)

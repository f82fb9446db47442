"""Proof that a changed byte in each half of each layer is reported, in vLLM's own cache, before the first request.

A token is stored in the last block of each KV cache group, its bytes are changed, and the next forward reads it.  The
session is one of its own, which compares all bytes whatever the budget; the block is zeroed afterwards.  Its forwards
are like those of requests, so that they run the same compiled kernels.
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
from ...kernels.ring import Word
from ...reports.summary import muted
from .pools import ENCODER, Group

_REQUEST = "the proof of the canary"


def prove(groups: Sequence[Group], config: CanaryConfig, hold: bool = False) -> None:
    """Prove the content check on each group, if it is on.  Nothing may be stored in the caches yet.

    Args:
        hold: layers are recorded as with ``publish(hold)``, see :meth:`.LayerChecks.publish`.

    Raises:
        SelfTestError: a changed byte was not reported, or an unchanged one was.
    """
    if "content" not in config.checks:
        return
    alone = dataclasses.replace(config, mode="log", incidents=None, status=None, on_violation=None)
    if config.verify_fraction is not None:
        alone = dataclasses.replace(alone, verify_fraction="1")
    with muted(), torch.inference_mode(False):
        failed = [failure for group in groups for failure in _failures(group, alone, hold)]
    if failed:
        raise SelfTestError(failed)


def _failures(group: Group, config: CanaryConfig, hold: bool) -> list[tuple[str, str, list[str]]]:
    halves = [half for layer in group.layers.values() for half in layer]
    slot = halves[0].shape[0] * group.kernel_page_size // group.page_size * group.page_size - group.page_size
    rows = [half[slot // group.kernel_page_size, slot % group.kernel_page_size] for half in halves]
    table = torch.full((1, 2), slot // group.page_size, dtype=torch.int32, device=halves[0].device)
    session = install_canary(group.pool(table, allocations=False), config=config)
    assert session is not None
    session.mark_ready()
    for control in session.controls.by_device.values():
        control.words[Word.EVERY].fill_(1)  # until the budget is measured, which takes more steps
    proof = _Proof(session, group, slot, hold)
    try:
        compile_ahead(proof.forwards, table.device)
        _write(rows, 60)
        proof.forward(0)
        early = session.violations()
        _write(rows, 90)
        proof.forward(1)
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


class _Proof:
    """The forwards of a proof: each adds a token in the next slot."""

    def __init__(self, session: EngineSession, group: Group, slot: int, hold: bool):
        self._session, self._group, self._slot, self._hold = session, group, slot, hold
        self._device = next(iter(group.layers.values()))[0].device
        self._layers = LayerChecks(session)

    def forwards(self) -> None:
        for prefix in (0, 1):
            self.forward(prefix)

    def forward(self, prefix: int) -> None:
        """A forward of a request with so many tokens in the cache."""
        device, slot = self._device, self._slot + prefix
        batch = {
            "input_ids": torch.tensor([7], device=device),
            "request_rows": torch.tensor([0]),
            "prefix_lens": torch.tensor([prefix], device=device),
            "extend_lens": [1],
            "positions": torch.tensor([prefix], device=device),
            "namespaces": [0],
            "request_ids": [_REQUEST],
            f"slots_{self._group.number}": torch.tensor([slot], device=device),
        }
        if self._group.cross:  # whose batch is the encoder's
            batch[ENCODER] = dict(batch)
        with self._session.step(batch), self._session.forward(), self._layers.publish(self._hold):
            for layer, halves in self._group.layers.items():
                verify_layer(device, layer)
                record_layer(*self._operands(halves, slot), device, layer)

    def _operands(
        self, halves: tuple[torch.Tensor, torch.Tensor], slot: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """K and V of the token in a slot as attention gets them: V is a part of a product, and a cache of 8 bits is not
        compared with either."""
        size = self._group.kernel_page_size
        key, value = (half[slot // size, slot % size][None].contiguous() for half in halves)
        if key.element_size() == 1:
            return None, None
        if self._group.mla:
            return key, value
        return key, torch.stack([value, value, value], 1)[:, 2]

"""Runs each kernel once before the first request: a kernel that is compiled in a step keeps its clients waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....config import CanaryConfig
from ....engine.layers import LayerChecks
from ....engine.session import EngineSession
from ....kernels.compile_ahead import compile_ahead
from ....kernels.content.gpu_layer import FEW_SLOTS
from ....kernels.layer_ops import record_layer
from .. import proof
from ..ops import layers_are_apart
from ..pools import Group
from .batches import ROUND

_OWNER = "kvcanary warm-up"


class WarmUp:
    """Made-up steps of a session that is not ready yet, so that nothing of them counts.

    They write to no cache.  Keys and values have the strides that they usually have: K is a tensor of its own, since it
    was rotated, and V a part of the product that all three were.
    """

    def __init__(self, runner: Any, groups: Sequence[Group]):
        self._runner, self._groups = runner, groups
        self._layers: LayerChecks | None = None

    @property
    def layers(self) -> LayerChecks:
        """The checks of layers whose launches are bound now."""
        assert self._layers is not None
        return self._layers

    def run(self, session: EngineSession, then: Callable[[LayerChecks], object]) -> None:
        """Steps of few tokens and of many, with a history and without: they have kernels of their own.

        Args:
            then: launches what else is to be compiled beside them.
        """

        def rehearse() -> None:
            checks = LayerChecks(session)
            self._steps(session, checks)
            then(checks)

        compile_ahead(rehearse, self._runner.device)
        self._layers = LayerChecks(session)
        self._steps(session, self._layers)

    def prove(self, config: CanaryConfig) -> None:
        """Prove the checks on the cache, with the kernels that were compiled.

        Raises:
            SelfTestError: a changed byte was not reported, or an unchanged one was.
        """
        proof.prove(self._groups, config, layers_are_apart(self._runner.vllm_config))

    def _steps(self, session: EngineSession, checks: LayerChecks) -> None:
        most = min(self._runner.max_num_tokens, *(self._slots(group) for group in self._groups))
        for tokens in dict.fromkeys((1, min(FEW_SLOTS + 1, most))):
            for history in (False, True):
                self._events(session)
                self._step(session, checks, tokens, history)

    def _slots(self, group: Group) -> int:
        first = next(iter(group.layers.values()))[0]
        return first.shape[0] * first.shape[1]

    def _events(self, session: EngineSession) -> None:
        """What an allocator reports, so that nothing is left of it."""
        for group in self._groups:
            pool, size = session.pools[group.name], group.page_size
            pool.allocate([1], page_size=size, owner=_OWNER)
            pool.share([1], page_size=size, owner=_OWNER)
            pool.hand_over([1], page_size=size, owner=_OWNER)
            for _ in range(2):
                pool.release([1], page_size=size, owner=_OWNER)

    def _step(self, session: EngineSession, checks: LayerChecks, tokens: int, history: bool) -> None:
        device = self._runner.device
        numbers = torch.arange(tokens, device=device)
        batch: dict[str, Any] = {
            "input_ids": numbers.to(torch.int32),
            "request_rows": [0],
            "prefix_lens": torch.zeros(1, dtype=torch.int32, device=device),
            "extend_lens": [tokens],
            "positions": numbers,
            "namespaces": [0],
            "request_ids": [_OWNER],
        }
        if history:
            batch.update(history=torch.zeros(1, ROUND, dtype=torch.int64, device=device), history_lens=[0])
        batch.update({f"slots_{group.number}": numbers for group in self._groups})
        hold = layers_are_apart(self._runner.vllm_config)
        with session.step(batch), session.forward(), checks.publish(hold):
            for group in self._groups:
                tables = self._runner.block_tables.input_block_tables[group.number]
                lengths = self._runner.input_buffers.seq_lens
                if group.layer_with_table is not None:
                    session.check_reads(tables[:1], lengths[:1], pool=group.name, page_size=group.kernel_page_size)
                for layer, (k, v) in group.layers.items():
                    key = torch.zeros(tokens, *k.shape[2:], dtype=k.dtype, device=device)
                    value = torch.zeros(tokens, 3, *v.shape[2:], dtype=v.dtype, device=device)[:, 2]
                    record_layer(key, value, device, layer)

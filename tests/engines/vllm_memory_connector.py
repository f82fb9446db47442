"""A KV connector that keeps blocks in this process's memory, for models of one KV cache group."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

#: How a block is filled: its number, and all tokens up to its end.
Fill = tuple[int, tuple[int, ...]]


@dataclasses.dataclass
class Loads(KVConnectorMetadata):
    """What the worker is to load, by request."""

    of: dict[str, list[Fill]] = dataclasses.field(default_factory=dict)


class MemoryConnector(KVConnectorBase_V1):
    """Both roles are objects of one process, and share what is stored.

    Attributes:
        stored: the bytes of a block in each layer, by all tokens up to its end.
        steps: after how many a request's blocks are there; 0: before the model of the step that asks for them.
        fails: of how many requests the first block cannot be loaded.
        fails_each: of each so many; 0: of none.
        sends: for how many steps the blocks of a request that has ended are still read; 0: they are given back at once.
    """

    stored: ClassVar[dict[tuple[int, ...], dict[str, torch.Tensor]]] = {}
    caches: ClassVar[dict[str, torch.Tensor]] = {}
    steps: ClassVar[int] = 0
    fails: ClassVar[int] = 0
    fails_each: ClassVar[int] = 0
    loads: ClassVar[int] = 0
    sends: ClassVar[int] = 0
    sending: ClassVar[dict[str, int]] = {}  # steps left, by request

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._size = vllm_config.cache_config.block_size
        self._local: dict[str, int] = {}
        self._loads = Loads()
        self._running: list[list[Any]] = []  # steps left, request, blocks
        self._failed: set[int] = set()

    # ---- of the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches.update(kv_caches)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        for request, fills in self._get_connector_metadata().of.items():
            (first, _), *rest = fills
            MemoryConnector.loads += 1
            if MemoryConnector.fails or (self.fails_each and not self.loads % self.fails_each):
                MemoryConnector.fails = max(0, self.fails - 1)
                self._failed.add(first)
                fills = rest
            if self.steps:
                self._running.append([self.steps, request, fills])
            else:
                self._fill(fills)

    def _fill(self, fills: list[Fill]) -> None:
        for block, tokens in fills:
            for layer, cache in self.caches.items():
                cache[block] = self.stored[tokens][layer]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        sent = {request for request, steps in self.sending.items() if steps <= 1}
        MemoryConnector.sending = {name: steps - 1 for name, steps in self.sending.items() if name not in sent}
        ended = set()
        for running in list(self._running):
            running[0] -= 1
            if not running[0]:
                self._running.remove(running)
                self._fill(running[2])
                ended.add(running[1])
        return sent, ended

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    # ---- of the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self._local[request.request_id] = end = num_computed_tokens // self._size
        tokens = tuple(request.all_token_ids)
        while (end + 1) * self._size < len(tokens) and tokens[: (end + 1) * self._size] in self.stored:
            end += 1
        more = end * self._size - num_computed_tokens
        return more, bool(self.steps and more)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            (ids,), tokens = blocks.get_block_ids(), tuple(request.all_token_ids)
            first = self._local[request.request_id]
            which = range(first, first + num_external_tokens // self._size)
            self._loads.of[request.request_id] = [(ids[i], tokens[: (i + 1) * self._size]) for i in which]

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        loads, self._loads = self._loads, Loads()
        return loads

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        if self.sends:
            self.sending[request.request_id] = self.sends
        tokens = tuple(request.prompt_token_ids)
        full = min(len(tokens), request.num_computed_tokens) // self._size  # it may have been aborted
        for i, block in enumerate(block_ids[:full]):
            kept = {layer: cache[block].clone() for layer, cache in self.caches.items()}
            self.stored.setdefault(tokens[: (i + 1) * self._size], kept)
        return bool(self.sends), None

"""Schedulers with a bug: blocks of one request are freed while it reads them, as if they had left a sliding window.

``vllm serve --scheduler-cls vllm_early.Early`` (``vllm_early.EarlyAsync`` with asynchronous scheduling).  The request
is the one that its client called ``early-A`` (``X-Request-Id``).
"""

from __future__ import annotations

import logging
from typing import Any

from tiny_vllm import client_name
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

log = logging.getLogger("vllm.early")

#: Its first blocks are freed, once it has decoded so many tokens.
REQUEST, BLOCKS, TOKENS = "early-A", 2, 6


class _Bug:
    """In front of a scheduler."""

    running: list[Any]
    kv_cache_manager: Any
    _freed = False

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        for request in self.running if not self._freed else ():
            decoded = request.num_computed_tokens - request.num_prompt_tokens
            if client_name(request.request_id) == REQUEST and decoded >= TOKENS:
                self._freed = True
                self._free(request)
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _free(self, request: Any) -> None:
        (manager,) = self.kv_cache_manager.coordinator.single_type_managers
        blocks = list(manager.req_to_blocks[request.request_id][:BLOCKS])
        manager.get_num_skipped_tokens = lambda computed: BLOCKS * manager.block_size
        try:
            manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens)
        finally:
            del manager.get_num_skipped_tokens
        queue = self.kv_cache_manager.block_pool.free_block_queue
        for block in blocks:  # the next request gets them
            queue.remove(block)
        queue.prepend_n(blocks)
        log.warning("freed early: %s", [block.block_id for block in blocks])


class Early(_Bug, Scheduler):
    pass


class EarlyAsync(_Bug, AsyncScheduler):
    pass

"""The life of blocks: reports what the allocators of a PagedAttentionCache do to the canary's pools.

A slot's references are those of transformers' ledger, and one more while the block is registered by its content for
later requests.  Free are the blocks on the cache's free list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...engine.guarded_pool import EnginePool
from ...engine.transfer import ShadowSlice
from ..hooks import Parameter, hook
from .groups import Group


class BlockLife:
    """Watches the allocators of one cache.

    Args:
        cache: transformers' PagedAttentionCache; its methods are wrapped, on this object only.
        groups: with the pool of each.
    """

    def __init__(self, cache: Any, groups: Sequence[tuple[Group, EnginePool]]):
        self._groups = {group.index: (group, pool) for group, pool in groups}
        self._request: str | None = None
        #: Shadows of requests about to be moved to host memory, by request and group.
        self._leaving: dict[tuple[str, str], ShadowSlice] = {}
        self._keep_leaving = False
        self._watch(cache)

    def _watch(self, cache: Any) -> None:
        for group, _ in self._groups.values():
            self._watch_allocator(group)
            self._watch_ledger(group)
        hook(cache.pool, "get_free_blocks", self._take)
        hook(cache.pool, "free_blocks", self._give_back)

    # ---- on whose behalf

    def _watch_allocator(self, group: Group) -> None:
        allocator = group.allocator
        for method in ("allocate_cache_to_request", "acquire_prefix_blocks", "mark_complete_blocks"):
            hook(allocator, method, self._on_behalf("request_id", getattr(allocator, method)))
        hook(allocator, "fork_blocks", self._on_behalf("dest_request_id", allocator.fork_blocks))
        free = self._on_behalf("request_id", allocator.free_blocks)

        def free_blocks(original: Any, request_id: str, no_cache: bool = False) -> Any:
            if no_cache and self._keep_leaving:
                self._leave(group, request_id)
            return free(original, request_id, no_cache)

        hook(allocator, "free_blocks", free_blocks)
        hook(allocator, "copy_blocks", lambda original, source, dest: self._copy(original, group, source, dest))

    def _on_behalf(self, parameter: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A wrapper for a method with a parameter that names the request."""
        request = Parameter(method, parameter)

        def wrapper(original: Any, *args: Any, **kwargs: Any) -> Any:  # no generator: each request of a step comes here
            before, self._request = self._request, request.of(args, kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._request = before

        return wrapper

    @contextlib.contextmanager
    def _acting_for(self, request: str) -> Iterator[None]:
        before, self._request = self._request, request
        try:
            yield
        finally:
            self._request = before

    # ---- the free list

    def _take(self, original: Any, index: int, num_blocks: int) -> list[int]:
        blocks: list[int] = original(index, num_blocks)
        if blocks:
            group, pool = self._groups[index]
            pool.allocate(blocks, self._request, group.page)
        return blocks

    def _give_back(self, original: Any, index: int, block_ids: list[int]) -> None:
        if block_ids:
            group, pool = self._groups[index]
            pool.release(block_ids, self._request, group.page)
        original(index, block_ids)

    # ---- the ledger of shared and cached blocks

    def _watch_ledger(self, group: Group) -> None:
        ledger, pool = group.allocator.ledger, self._groups[group.index][1]

        def acquire(original: Any, block_id: int) -> None:
            pool.share([block_id], self._request, group.page)
            original(block_id)

        def register_new_hash(original: Any, block_id: int, block_hash: int) -> int | None:
            identical: int | None = original(block_id, block_hash)
            if identical is None:
                pool.share([block_id], page_size=group.page)
            return identical

        def release(original: Any, block_id: int, no_cache: bool = False) -> bool:
            registered = block_id in ledger.block_to_hash
            to_be_freed: bool = original(block_id, no_cache)
            if registered and block_id not in ledger.block_to_hash:
                pool.release([block_id], page_size=group.page)
            if not to_be_freed:
                pool.release([block_id], self._request, group.page)
            return to_be_freed

        def reset(original: Any) -> None:
            if ledger.block_to_hash:
                pool.release(list(ledger.block_to_hash), page_size=group.page)
            original()

        for wrapper in (acquire, register_new_hash, release, reset):
            hook(ledger, wrapper.__name__, wrapper)

    # ---- blocks that move with their bytes

    def _copy(self, original: Any, group: Group, source: list[int], dest: list[int]) -> None:
        pool = self._groups[group.index][1]
        shadow = pool.export(group.slots_in(source))
        original(source, dest)
        pool.import_(shadow, group.slots_in(dest))

    def watch_offloading(self, manager: Any) -> None:
        """Let shadows travel with requests that are saved in host memory.

        Args:
            manager: transformers' OffloadingManager.
        """
        if manager._cpu_pool is None:
            return
        self._keep_leaving = True
        hook(manager, "_offload_to_cpu", self._offload)
        hook(manager, "restore_scheduled_requests", self._restore)
        hook(manager, "free_request_cpu_cache", self._drop)

    def _leave(self, group: Group, request: str) -> None:
        """Blocks are freed before they are copied, so their shadow is taken first."""
        blocks = group.allocator.block_table.get(request, [])
        self._leaving[request, group.name] = self._groups[group.index][1].export(group.slots_in(blocks))

    def _offload(self, original: Any, victims: Any, victim_block_tables: Any) -> Any:
        saved = original(victims, victim_block_tables)
        for request, name in list(self._leaving):
            if request in victim_block_tables and request not in saved:
                del self._leaving[request, name]
        return saved

    def _restore(self, original: Any, requests_in_batch: Any) -> None:
        returning = [f.state.request_id for f in requests_in_batch if f.state.is_cpu_offloaded]
        original(requests_in_batch)
        for request in returning:
            for group, pool in self._groups.values():
                shadow = self._leaving.pop((request, group.name), None)
                if shadow is not None:
                    self._arrive(group, pool, request, shadow)

    def _arrive(self, group: Group, pool: EnginePool, request: str, shadow: ShadowSlice) -> None:
        held = len(shadow) // group.page
        slots = group.slots_in(group.allocator.block_table[request][:held])
        pool.import_(shadow[: len(slots)], slots, owner=request)

    def _drop(self, original: Any, state: Any) -> None:
        if state.is_cpu_offloaded:
            for key in [k for k in self._leaving if k[0] == state.request_id]:
                del self._leaving[key]
        original(state)

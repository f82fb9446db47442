"""Hooks on vLLM's block pool: who has which block.

A block counts one reference for each request that has it.  A full block whose requests have all ended stays in vLLM's
prefix cache: it then belongs to the cache, with one reference, until a request takes it up again or it is handed out
anew.  So a block that is freed while a request still reads it is found either way.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.core import single_type_kv_cache_manager as managers
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager

from . import registry
from .identity import namespace
from .patching import wrap, wrap_in_all

if TYPE_CHECKING:
    from ...engine_pools import EnginePool
    from .guard import Guard

#: Who a block belongs to that no request has and the prefix cache keeps.
CACHE = "the prefix cache of vLLM"

#: ``(request id, KV cache group)`` of the call into the block pool that is running; None where it is not known.
_CALLER: contextvars.ContextVar[tuple[str | None, int | None]] = contextvars.ContextVar(
    "kvcanary_vllm_caller", default=(None, None)
)


class Books:
    """What the canary knows of the blocks of one block pool, beside the references that its session counts.

    Attributes:
        group: the group that each block was handed out to.
        idle: blocks that belong to the prefix cache.
    """

    def __init__(self, guard: Guard):
        self._guard = weakref.ref(guard)
        self._pages = {g.number: g.page_size for g in guard.groups}
        self.group: dict[int, int] = {}
        self.idle: set[int] = set()

    def taken(self, blocks: Iterable[Any], request: str | None, group: int | None) -> None:
        """Blocks were handed out anew."""
        if group is None:
            return
        ids = [b.block_id for b in blocks]
        for old, cached in self._by_group([i for i in ids if i in self.idle]):
            self._pool(old).release(self._slots(old, cached), owner=CACHE)
        self.idle.difference_update(ids)
        self.group.update(dict.fromkeys(ids, group))
        if group in self._pages:
            self._pool(group).allocate(self._slots(group, ids), owner=request)

    def touched(self, blocks: Iterable[Any], request: str | None) -> None:
        """A request takes up blocks that it found in the prefix cache."""
        ids = [b.block_id for b in blocks if not b.is_null]
        for group, some in self._by_group(ids):
            idle = [i for i in some if i in self.idle]
            if idle:
                self._pool(group).hand_over(self._slots(group, idle), owner=request)
            shared = [i for i in some if i not in self.idle]
            if shared:
                self._pool(group).share(self._slots(group, shared), owner=request)
        self.idle.difference_update(ids)

    def freed(self, blocks: Iterable[tuple[int, bool]], request: str | None) -> None:
        """A request lets go of blocks.

        Args:
            blocks: ``(id, whether the prefix cache keeps it as its only owner)``.
        """
        given = list(blocks)
        kept = [i for i, keeps in given if keeps]
        for group, some in self._by_group(kept):
            self._pool(group).hand_over(self._slots(group, some), owner=CACHE)
        for group, some in self._by_group([i for i, keeps in given if not keeps]):
            self._pool(group).release(self._slots(group, some), owner=request)
            self.idle.difference_update(some)
        self.idle.update(i for i in kept if i in self.group)

    def filled_elsewhere(self, blocks: Iterable[Any]) -> None:
        """Blocks will be filled by a KV connector, whose writes are not guarded."""
        for group, some in self._by_group([b.block_id for b in blocks if not b.is_null]):
            self._pool(group).forget(self._slots(group, some))

    def _by_group(self, ids: Iterable[int]) -> list[tuple[int, list[int]]]:
        """Blocks of guarded groups, by group."""
        found: dict[int, list[int]] = {}
        for block in ids:
            group = self.group.get(block)
            if group in self._pages and group is not None:
                found.setdefault(group, []).append(block)
        return list(found.items())

    def _pool(self, group: int) -> EnginePool:
        guard = self._guard()
        assert guard is not None
        return guard.session.pools[f"group{group}"]

    def _slots(self, group: int, blocks: list[int]) -> torch.Tensor:
        size = self._pages[group]
        return (torch.tensor(blocks).unsqueeze(1) * size + torch.arange(size)).flatten()


_BOOKS: weakref.WeakKeyDictionary[Any, Books] = weakref.WeakKeyDictionary()


def _books(pool: Any) -> Books | None:
    known = _BOOKS.get(pool)
    guard = registry.of_pool(pool) if known is None else None
    if guard is not None:
        known = _BOOKS[pool] = Books(guard)
    return known


@contextlib.contextmanager
def _caller(request: str | None, group: int | None) -> Iterator[None]:
    token = _CALLER.set((request, group))
    try:
        yield
    finally:
        _CALLER.reset(token)


def hook() -> None:
    """Follow every block pool that is made in this process from here on."""
    wrap(BlockPool, "__init__", _made)
    wrap(BlockPool, "get_new_blocks", _get_new_blocks)
    wrap(BlockPool, "touch", _touch)
    wrap(BlockPool, "free_blocks", _free_blocks)
    wrap(KVCacheManager, "allocate_slots", _of_request)
    wrap(KVCacheManager, "free", _of_request)
    for name in ("add_local_computed_blocks", "allocate_new_blocks", "free", "remove_skipped_blocks"):
        wrap_in_all(managers.SingleTypeKVCacheManager, name, _of_group)
    wrap_in_all(managers.SingleTypeKVCacheManager, "allocate_external_computed_blocks", _external)


def _made(original: Callable[..., None], pool: Any, *args: Any, **kwargs: Any) -> None:
    original(pool, *args, **kwargs)
    if type(pool) is BlockPool:  # others keep blocks in host memory
        registry.claim(pool)


def _get_new_blocks(original: Callable[..., Any], pool: Any, num_blocks: int) -> Any:
    blocks = original(pool, num_blocks)
    books = _books(pool)
    if books is not None and blocks:
        books.taken(blocks, *_CALLER.get())
    return blocks


def _touch(original: Callable[..., None], pool: Any, blocks: Any) -> None:
    original(pool, blocks)
    books = _books(pool)
    if books is not None and blocks:
        books.touched(blocks, _CALLER.get()[0])


def _free_blocks(original: Callable[..., None], pool: Any, ordered_blocks: Iterable[Any]) -> None:
    blocks = list(ordered_blocks)
    books = _books(pool)
    original(pool, blocks)
    if books is not None:
        own = [b for b in blocks if not b.is_null and (b.pool is None or b.pool is pool)]
        ended = ((b.block_id, b.ref_cnt == 0 and pool.enable_caching and b.block_hash is not None) for b in own)
        books.freed(ended, _CALLER.get()[0])


def _of_request(original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    guard = registry.of_pool(manager.block_pool)
    if guard is not None:
        space = namespace(request.lora_request, request.cache_salt)
        if space:
            guard.namespaces[request.request_id] = space
    with _caller(request.request_id, None):
        return original(manager, request, *args, **kwargs)


def _of_group(original: Callable[..., Any], manager: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
    with _caller(request_id, manager.kv_cache_group_id):
        return original(manager, request_id, *args, **kwargs)


def _external(original: Callable[..., Any], manager: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
    before = len(manager.req_to_blocks[request_id])
    with _caller(request_id, manager.kv_cache_group_id):
        made = original(manager, request_id, *args, **kwargs)
    books = _books(manager.block_pool)
    if books is not None:
        books.filled_elsewhere(manager.req_to_blocks[request_id][before:])
    return made

"""Hooks on vLLM's block pool and its managers, which say whose blocks they ask for."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.v1.core import single_type_kv_cache_manager as managers
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager

from . import registry
from .books import Books
from .identity import namespace
from .patching import wrap, wrap_in_all

#: ``(request id, KV cache group)`` of the call into the block pool that is running; None where it is not known.
_CALLER: contextvars.ContextVar[tuple[str | None, int | None]] = contextvars.ContextVar(
    "kvcanary_vllm_caller", default=(None, None)
)


def _books(pool: Any) -> Books | None:
    guard = registry.of_pool(pool)
    if guard is not None and guard.books is None:
        guard.books = Books(guard)
    return None if guard is None else guard.books


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

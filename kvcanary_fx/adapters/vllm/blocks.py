"""Hooks on vLLM's block pool and its managers, which say for which request they ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core import single_type_kv_cache_manager as managers
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager

from .identity import namespace
from .journal import Journal
from .patching import wrap, wrap_each, wrap_in_all

#: Of a block pool: its journal.
_JOURNAL = "_kvcanary_journal"


def journal_of(pool: Any) -> Journal | None:
    """The journal of a block pool; None for one that was made without the hooks, or that has blocks in host memory."""
    return getattr(pool, _JOURNAL, None)


def hook() -> None:
    """Follow every block pool made in this process from now on."""
    wrap(BlockPool, "__init__", _made)
    wrap(BlockPool, "get_new_blocks", _get_new_blocks)
    wrap(BlockPool, "touch", _touch)
    wrap(BlockPool, "free_blocks", _free_blocks)
    wrap(KVCacheManager, "allocate_slots", _of_request)
    wrap(KVCacheManager, "free", _of_request)
    for name in ("add_local_computed_blocks", "allocate_new_blocks", "free", "remove_skipped_blocks"):
        wrap_each(managers.SingleTypeKVCacheManager, name, _of_group)
    wrap_in_all(managers.SingleTypeKVCacheManager, "allocate_external_computed_blocks", _external)


def _made(original: Callable[..., None], pool: Any, *args: Any, **kwargs: Any) -> None:
    original(pool, *args, **kwargs)
    if type(pool) is BlockPool:  # other classes keep blocks in host memory
        setattr(pool, _JOURNAL, Journal())


def _get_new_blocks(original: Callable[..., Any], pool: Any, num_blocks: int) -> Any:
    blocks = original(pool, num_blocks)
    journal = journal_of(pool)
    if journal is not None and blocks:
        request, group = journal.caller
        if group is not None:
            journal.note("taken", [b.block_id for b in blocks], request, group)
    return blocks


def _touch(original: Callable[..., None], pool: Any, blocks: Any) -> None:
    original(pool, blocks)
    journal, ids = journal_of(pool), [b.block_id for b in blocks if not b.is_null]
    if journal is not None and ids:
        journal.note("touched", ids, journal.caller[0])


def _free_blocks(original: Callable[..., None], pool: Any, ordered_blocks: Iterable[Any]) -> None:
    blocks = list(ordered_blocks)
    original(pool, blocks)
    journal = journal_of(pool)
    own = [b for b in blocks if not b.is_null and (b.pool is None or b.pool is pool)]
    if journal is not None and own:
        kept = [b.ref_cnt == 0 and pool.enable_caching and b.block_hash is not None for b in own]
        journal.note("freed", list(zip((b.block_id for b in own), kept, strict=True)), journal.caller[0])


def _of_request(original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    journal = journal_of(manager.block_pool)
    if journal is None:
        return original(manager, request, *args, **kwargs)
    if request.lora_request is not None or request.cache_salt:
        journal.name(request.request_id, namespace(request.lora_request, request.cache_salt))
    outer, journal.caller = journal.caller, (request.request_id, None)
    try:
        return original(manager, request, *args, **kwargs)
    finally:
        journal.caller = outer


def _of_group(original: Callable[..., Any], manager: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
    """Called for each request in each step: so no context variable, and no generator."""
    journal = journal_of(manager.block_pool)
    if journal is None:
        return original(manager, request_id, *args, **kwargs)
    outer, journal.caller = journal.caller, (request_id, manager.kv_cache_group_id)
    try:
        return original(manager, request_id, *args, **kwargs)
    finally:
        journal.caller = outer


def _external(original: Callable[..., Any], manager: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
    before = len(manager.req_to_blocks[request_id])
    made = _of_group(original, manager, request_id, *args, **kwargs)
    journal = journal_of(manager.block_pool)
    filled = [b.block_id for b in manager.req_to_blocks[request_id][before:] if not b.is_null]
    if journal is not None and filled:
        journal.note("filled_elsewhere", filled)
    return made

"""A hook on what vLLM's scheduler does about blocks that a KV connector could not load.

With ``kv_load_failure_policy=recompute`` the first request that has such a block goes back to the tokens before it, and
writes this block and all of its later ones once more; requests that share them go on, and read in the same forward what
it writes.  So they have given up these blocks until then, and take them up again like any that are about to be filled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from .blocks import journal_of
from .journal import FREED, TOUCHED, Journal
from .patching import wrap_in_all


def hook() -> None:
    """Follow every scheduler of this process."""
    wrap_in_all(Scheduler, "_handle_invalid_blocks", _handle_invalid_blocks)


def _handle_invalid_blocks(
    original: Callable[..., Any], scheduler: Any, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
) -> Any:
    journal = journal_of(scheduler.kv_cache_manager.block_pool)
    before = {
        r.request_id: r.num_computed_tokens - num_scheduled_tokens.get(r.request_id, 0) for r in scheduler.running
    }
    made = original(scheduler, invalid_block_ids, num_scheduled_tokens)
    if journal is not None and scheduler.recompute_kv_load_failures:
        for request in scheduler.running:
            if request.num_computed_tokens < before[request.request_id]:
                _share_again(scheduler, journal, request)
    return made


def _share_again(scheduler: Any, journal: Journal, request: Any) -> None:
    """Note that the others give up what a request writes once more, and take it up.

    Args:
        request: has gone back to the tokens before a block; vLLM knows such blocks in models of one KV cache group.
    """
    manager = scheduler.kv_cache_manager
    tables = {name: manager.get_block_ids(name)[0] for name in scheduler.requests}
    first = request.num_computed_tokens // scheduler.block_size
    rewritten = {b for b in tables.pop(request.request_id)[first:] if manager.block_pool.blocks[b].ref_cnt > 1}
    shared = {name: [block for block in table if block in rewritten] for name, table in tables.items()}
    sharing = [(name, blocks) for name, blocks in shared.items() if blocks]
    for name, blocks in sharing:
        journal.note(FREED, [], blocks, name)
    for name, blocks in sharing:
        journal.note(TOUCHED, blocks, name)

"""Hooks on vLLM's block pool.  For which request and KV cache group it is asked, the tables of its one manager say
(:mod:`.holders`), or else the frames of its callers.

The managers that ask it are called for each request in each step, and seldom need a block: when each had a call of ours
around it, 129 steps of 64 requests made 24,768 of them, for 576 calls that took blocks (a profile on an H100).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType
from typing import Any, cast

from vllm.v1.core import single_type_kv_cache_manager as managers
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager

from .holders import Holders
from .journal import FILLED, FREED, TOUCHED, Journal
from .patching import replace, wrap, wrap_in_all
from .settings import from_env

#: Of a block pool: its journal, see :func:`journal_of`.
JOURNAL = "_kvcanary_journal"

#: Methods of a KV cache group's manager, and of the manager of all, that lead to the block pool; their first argument
#: is a request, or its id.
_OF_A_GROUP = frozenset(
    (
        "add_local_computed_blocks",
        "allocate_external_computed_blocks",
        "allocate_new_blocks",
        "free",
        "remove_skipped_blocks",
    )
)
_OF_ALL = frozenset(("allocate_slots", "free"))

#: Frames between such a method and the block pool, at most.
_DEPTH = 16

#: What :func:`_look_at` found: it makes a new tuple of a function's names each time.
_ARGUMENTS: dict[CodeType, tuple[str, str] | None] = {}


def journal_of(pool: Any) -> Journal | None:
    """The journal of a block pool; None for one that was made without the hooks, or that has blocks in host memory."""
    return getattr(pool, JOURNAL, None)


def look_for_holders(scheduler: Any, journal: Journal) -> None:
    """Let the journal of a scheduler's block pool find out for all calls of a step at once who got blocks, where they
    are those of one manager of full attention: others free some blocks in between, and a KV connector has some filled.
    """
    journal.undecided = False
    manager = scheduler.kv_cache_manager
    of_groups: Sequence[Any] = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
    if len(of_groups) != 1 or getattr(scheduler, "connector", None) is not None:
        return
    if type(of_groups[0]) is managers.FullAttentionManager and of_groups[0].block_pool is manager.block_pool:
        journal.holders = Holders(of_groups[0])


def hook() -> None:
    """Follow every block pool made in this process from now on."""
    wrap(BlockPool, "__init__", _made)
    replace(BlockPool, "get_new_blocks", _get_new_blocks)
    wrap(BlockPool, "touch", _touch)
    replace(BlockPool, "free_blocks", _free_blocks)
    wrap_in_all(managers.SingleTypeKVCacheManager, "allocate_external_computed_blocks", _external)
    wrap_in_all(managers.SingleTypeKVCacheManager, "_apply_cow", _copied)


def _made(original: Callable[..., None], pool: Any, *args: Any, **kwargs: Any) -> None:
    original(pool, *args, **kwargs)
    if type(pool) is BlockPool:  # other classes keep blocks in host memory
        setattr(pool, JOURNAL, Journal(from_env().config.stacks))


def _get_new_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_new_blocks(pool: Any, num_blocks: int) -> Any:
        blocks, journal = original(pool, num_blocks), getattr(pool, JOURNAL, None)
        if journal is not None and blocks:
            if journal.holders is not None:
                journal.handed_out.append(blocks)
                return blocks
            request, group = _caller(sys._getframe(1), pool)
            if group is not None:
                journal.taken([b.block_id for b in blocks], [request], [len(blocks)], group)
        return blocks

    return get_new_blocks


def _touch(original: Callable[..., None], pool: Any, blocks: Any) -> None:
    original(pool, blocks)
    journal, ids = journal_of(pool), [b.block_id for b in blocks if not b.is_null]
    if journal is not None and ids:
        journal.note(TOUCHED, ids, _caller(sys._getframe(1), pool)[0])


def _free_blocks(original: Callable[..., None]) -> Callable[..., None]:
    def free_blocks(pool: Any, ordered_blocks: Iterable[Any]) -> None:
        blocks = list(ordered_blocks)
        original(pool, blocks)
        journal, caches = journal_of(pool), pool.enable_caching
        if journal is None:
            return
        kept: list[int] = []  # two lists, as a pair for each block is garbage that Python then collects more often
        left: list[int] = []
        for b in blocks:
            if not b.is_null and (b.pool is None or b.pool is pool):
                if journal.retained and journal.retained[b.block_id]:
                    journal.retained[b.block_id] -= 1  # whoever is first: the last one gives up the block
                    continue
                (kept if caches and b.ref_cnt == 0 and b.block_hash is not None else left).append(b.block_id)
        if kept or left:
            request = _caller(sys._getframe(1), pool)[0]
            if journal.handed_out:  # some of them, perhaps, to a request that is preempted in the same step
                journal.settle(gone={*kept, *left}, of=request)
            journal.note(FREED, kept, left, request)

    return free_blocks


def _caller(frame: FrameType | None, pool: Any) -> tuple[str | None, int | None]:
    """``(request id, KV cache group)`` for which a block pool is asked; None where no frame says it.

    Most often a group's manager asks itself, and its frame is not looked at more closely: each look at the code of a
    frame, and each :func:`sys._getframe`, is an audit event, for which a hook of filelock takes 4 us (a profile of 1B
    on an H200, where three or four of these were a quarter of what blocks took of the scheduler).
    """
    if frame is not None:
        values = frame.f_locals
        this, request = values.get("self"), values.get("request_id")
        group = getattr(this, "kv_cache_group_id", None)
        if group is not None and type(request) is str and getattr(this, "block_pool", None) is pool:
            return request, group
    for _ in range(_DEPTH):
        if frame is None:
            break
        code = frame.f_code
        names = _ARGUMENTS[code] if code in _ARGUMENTS else _look_at(code)
        if names is not None:
            values = frame.f_locals
            this, request = values.get(names[0]), values.get(names[1])
            if isinstance(this, managers.SingleTypeKVCacheManager) and this.block_pool is pool:
                return request, this.kv_cache_group_id
            if isinstance(this, KVCacheManager) and code.co_name in _OF_ALL:
                return getattr(request, "request_id", None), None
        frame = frame.f_back
    return None, None


def _look_at(code: CodeType) -> tuple[str, str] | None:
    """The first two arguments of a function of these names; None for others."""
    name, names = code.co_name, code.co_varnames
    found = names[:2] if (name in _OF_A_GROUP or name in _OF_ALL) and len(names) > 1 else None
    return _ARGUMENTS.setdefault(code, cast("tuple[str, str] | None", found))


def _external(
    original: Callable[..., Any],
    manager: Any,
    request_id: str,
    num_local_computed_tokens: int,
    num_external_computed_tokens: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    before = len(manager.req_to_blocks[request_id])
    made = original(manager, request_id, num_local_computed_tokens, num_external_computed_tokens, *args, **kwargs)
    journal, table = journal_of(manager.block_pool), manager.req_to_blocks[request_id]
    filled = [place for place in range(before, len(table)) if not table[place].is_null]
    if journal is not None and filled:
        end = num_local_computed_tokens + num_external_computed_tokens
        journal.note(FILLED, [table[place].block_id for place in filled], request_id, filled, end)
    return made


def _copied(
    original: Callable[..., None], manager: Any, request_id: str, block_idx: int, source_block: Any, cow_block: Any
) -> None:
    """A prefix ends inside a block: the request gets a copy of it, which has one reference more until it is made."""
    original(manager, request_id, block_idx, source_block, cow_block)
    journal = journal_of(manager.block_pool)
    if journal is not None:
        journal.retained[cow_block.block_id] += 1
        journal.note("copied", source_block.block_id, cow_block.block_id, request_id)

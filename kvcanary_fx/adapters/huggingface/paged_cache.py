"""The paged cache of the installed transformers: differences between versions are handled here.

From 5.18 on a cache has an allocator per attention type (``groups.py``, ``blocks.py``); before, one block manager
for all groups of layers (``block_manager.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ...engine.guarded_pool import EnginePool
from .block_manager import ManagedBlockLife, managed_groups
from .blocks import BlockLife
from .groups import Group


def page_setting() -> str:
    """ContinuousBatchingConfig's name for the tokens of a page: ``page_size``, or ``block_size`` before 5.18."""
    from transformers import ContinuousBatchingConfig

    names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    return "page_size" if "page_size" in names else "block_size"


def groups_of(cache: Any, requests: int, layer_name: Callable[[int], str]) -> list[Group]:
    """The groups of layers of a PagedAttentionCache.

    Args:
        requests: the most requests that a batch can have.
        layer_name: from a layer's number to its name in reports.
    """
    if _has_block_manager(cache):
        return managed_groups(cache, requests, layer_name)
    return [Group(name, allocator, requests, layer_name) for name, allocator in cache.cache_allocators.items()]


def watch_blocks(cache: Any, groups: Sequence[tuple[Group, EnginePool]]) -> BlockLife:
    """From now on report to the pools what happens to the blocks of ``cache``."""
    return (ManagedBlockLife if _has_block_manager(cache) else BlockLife)(cache, groups)


def _has_block_manager(cache: Any) -> bool:
    return hasattr(cache, "group_cache_managers")

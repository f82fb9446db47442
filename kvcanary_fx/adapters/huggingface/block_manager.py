"""The paged cache of transformers before 5.18: groups of layers that share tensors, and one manager of their blocks.

There is a tensor of keys and one of values for each layer of a group, and all groups use the same ones.  A block
belongs to one group at a time and has ``block_size`` rows in each of these tensors; indices of reads and writes count
rows, so each index is a slot.  Two more blocks, at the end, take padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...engine.guarded_pool import EnginePool
from ..hooks import hook
from .blocks import BlockLife
from .groups import Group


class ManagedLayers:
    """A group of layers of such a cache, with the attributes that an allocator has from 5.18 on."""

    def __init__(self, cache: Any, manager: Any):
        """
        Args:
            manager: transformers' CacheAllocator of the group, which has only the block tables.
        """
        self.cache, self.manager = cache, manager
        self.index: int = manager._index
        self.tokens_per_page = self.block_physical_stride = manager.block_size
        self.sliding_window: int | None = getattr(manager, "sliding_window", None)
        places = cache.layer_index_to_group_indices.items()
        self.layer_indices = [number for number, (group, _) in places if group == self.index]
        self.num_blocks: int = cache.num_blocks
        self.cache_tensor: torch.Tensor = cache.key_cache[0]
        self.block_table: dict[str, list[int]] = manager.block_table


class ManagedGroup(Group):
    """A group whose blocks the cache's block manager gives out."""

    def tensors(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        cache = self.allocator.cache
        pages = [[t.view(-1, self.page, *t.shape[1:]) for t in half] for half in (cache.key_cache, cache.value_cache)]
        return list(zip(*pages, strict=True))

    def trash(self) -> range:
        end = self.allocator.num_blocks * self.page
        return range(end, end + 2 * self.page)

    def written_trash(self) -> range:
        # made by torch.empty, and only the block before it is zeroed: on an H200 its NaN was what had been there before
        end = self.allocator.num_blocks * self.page
        return range(end + self.page, end + 2 * self.page)

    def hand_back(self, blocks: Sequence[int]) -> None:
        self.allocator.cache._block_manager.free_blocks(blocks, shareable=False)


def managed_groups(cache: Any, requests: int, layer_name: Callable[[int], str]) -> list[Group]:
    """The groups of ``cache``, named by attention type; later ones of the same type are numbered."""
    seen: Counter[str] = Counter()
    groups: list[Group] = []
    for manager in cache.group_cache_managers:
        layers = ManagedLayers(cache, manager)
        kind = "full_attention" if layers.sliding_window is None else "sliding_attention"
        seen[kind] += 1
        name = kind if seen[kind] == 1 else f"{kind}_{seen[kind]}"
        groups.append(ManagedGroup(name, layers, requests, layer_name))
    return groups


class ManagedBlockLife(BlockLife):
    """Watches the block manager of one cache.

    It counts the references of each block that can be shared, and has a table of the blocks with known content.
    A block without references stays in the table until it is given out again.
    """

    def _watch(self, cache: Any) -> None:
        self._blocks = cache._block_manager
        self._known: set[int] = set()  # blocks whose entry in the table has a reference in our pools
        self._acting: int = 0  # group that the running call is for
        self._children: Iterator[str] | None = None  # children of a fork that get their own blocks
        self._forked: dict[int, int] = {}  # groups of blocks that will be copied to
        for group, _ in self._groups.values():
            self._watch_manager(group)
        hook(cache, "search_prefix_match", self._match)
        hook(cache, "mark_shareable_blocks_as_complete", self._complete)
        hook(cache, "copy_cache", self._copy_all)
        manager = self._blocks
        for name, wrapper in (
            ("get_free_blocks", self._hand_out),
            ("free_blocks", self._free),
            ("has_enough_free_blocks", self._evict),
            ("increase_ref_count", self._acquire),
            ("decrease_ref_count", self._drop_reference),
            ("uninitialize_unshared_block", self._drop_reference),
            ("mark_shareable_blocks_as_complete", self._register),
        ):
            hook(manager, name, wrapper)

    # ---- on whose behalf

    def _watch_manager(self, group: Group) -> None:
        manager = group.allocator.manager
        for method in ("allocate_blocks", "free_blocks"):
            on_behalf = self._on_behalf("request_id", getattr(manager, method))
            hook(manager, method, self._in_group(group.index, on_behalf))
        hook(manager, "fork_blocks", self._in_group(group.index, self._fork))

    def _in_group(self, index: int, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*args: Any, **kwargs: Any) -> Any:
            before, self._acting = self._acting, index
            try:
                return wrapper(*args, **kwargs)
            finally:
                self._acting = before

        return acting

    def _fork(self, original: Any, parent_request_id: str, children_request_ids: list[str], block_manager: Any) -> Any:
        parents = set(self._groups[self._acting][0].allocator.block_table.get(parent_request_id, []))
        self._children = iter(children_request_ids)
        try:
            source, destination = original(parent_request_id, children_request_ids, block_manager)
        finally:
            self._children = None
        group, pool = self._groups[self._acting]
        for child in children_request_ids:
            shared = [block for block in group.allocator.block_table[child] if block in parents]
            if shared:
                pool.share(shared, child, group.page)
        self._forked.update(dict.fromkeys(destination, self._acting))
        return source, destination

    def _match(self, original: Any, request_id: str, prompt_ids: list[int]) -> Any:
        """Leave the last token out: if the whole prompt matches, it would be written to a shared block again."""
        with self._acting_for(request_id):
            return original(request_id, prompt_ids[:-1])

    def _complete(self, original: Any, state: Any, num_complete_blocks: int) -> None:
        with self._acting_for(state.request_id):
            original(state, num_complete_blocks)

    # ---- the manager's lists

    def _hand_out(self, original: Any, n_blocks: int, last_block_id: Any, shareable: bool, group_id: int) -> Any:
        blocks = original(n_blocks, last_block_id, shareable, group_id)
        if blocks:
            group, pool = self._groups[group_id]
            pool.allocate(blocks, self._request if self._children is None else next(self._children), group.page)
        return blocks

    def _free(self, original: Any, blocks: list[int], shareable: bool) -> None:
        if blocks and not shareable:
            group, pool = self._groups[self._acting]
            pool.release(blocks, self._request, group.page)
        original(blocks, shareable)

    def _evict(self, original: Any, n_blocks: int) -> bool:
        """Blocks of known content without references are given out when no others are left."""
        if len(self._blocks._uninit_block_ids) >= n_blocks:
            return original(n_blocks)  # type: ignore[no-any-return]
        before = set(self._blocks._init_block_ids)
        enough: bool = original(n_blocks)
        for block in before.difference(self._blocks._init_block_ids):
            self._known.discard(block)
            group, pool = self._group_of(block)
            pool.release([block], page_size=group.page)
        return enough

    # ---- blocks that can be shared

    def _acquire(self, original: Any, block_id: int) -> None:
        group, pool = self._group_of(block_id)
        pool.share([block_id], self._request, group.page)
        original(block_id)

    def _drop_reference(self, original: Any, block_id: int) -> None:
        group, pool = self._group_of(block_id)
        original(block_id)
        pool.release([block_id], self._request, group.page)

    def _register(self, original: Any, num_complete_blocks: int, allocated_blocks: list[int], prompt_ids: Any) -> None:
        candidates = [block for block in allocated_blocks if block not in self._known]
        original(num_complete_blocks, allocated_blocks, prompt_ids)
        table, blocks = self._blocks._hash_to_id, self._blocks._id_to_block
        for block in candidates:
            if block in blocks and table.get(blocks[block].hash) == block:
                self._known.add(block)
                group, pool = self._group_of(block)
                pool.share([block], page_size=group.page)

    def _group_of(self, block: int) -> tuple[Group, EnginePool]:
        return self._groups[self._blocks._id_to_block[block].group_id]

    # ---- blocks that move with their bytes

    def _copy_all(self, original: Any, list_source_blocks: list[int], list_forked_blocks: list[int]) -> None:
        moves = []
        for source, destination in zip(list_source_blocks, list_forked_blocks, strict=True):
            group, pool = self._groups[self._forked.pop(destination, self._acting)]
            moves.append((pool, group.slots_in([destination]), pool.export(group.slots_in([source]))))
        original(list_source_blocks, list_forked_blocks)
        for pool, slots, shadow in moves:
            pool.import_(shadow, slots)

    def watch_offloading(self, manager: Any) -> None:
        if not manager._num_cpu_blocks:
            return
        hook(manager, "_offload_to_cpu", self._offload_victims)
        hook(manager, "restore_scheduled_requests", self._restore)
        hook(manager, "free_request_cpu_cache", self._drop)

    def _offload_victims(self, original: Any, victims: Any) -> Any:
        saved = original(victims)
        for request in saved:
            for group, _ in self._groups.values():
                self._leave(group, request)
        return saved

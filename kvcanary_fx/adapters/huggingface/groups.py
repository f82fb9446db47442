"""A group of layers of a PagedAttentionCache: its tensors as a pool, its block tables as a request table.

transformers keeps one byte tensor for all layers.  An allocator per attention type divides it into blocks; a block has
a page for each layer of the group, and a page holds the keys and then the values of ``tokens_per_page`` tokens.
Indices of reads and writes count rows of that tensor, of which a block has ``block_physical_stride``; layer views are
shifted, so that one index serves all layers of a group.  Here a slot is ``block * tokens_per_page + offset``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...engine.kv_pool import KVPool
from ...kernels.ops import request_kernels_for
from ...kernels.staging import lasting


class Group:
    """One allocator as a pool of the canary.

    Args:
        name: the attention type, ``full_attention`` or ``sliding_attention``; the pool's name.
        allocator: transformers' CacheAllocator of the group.
        requests: the most requests that a batch can have.
        layer_name: from a layer's number to its name in reports.

    Attributes:
        index: the allocator's index in the cache.
        table: int32 ``[requests, width]``, the blocks of each request; slots, if a sliding group's window is not a
            whole number of pages.  ``rows``: the same, with a column more where their number is odd.
        window: tokens that attention sees, None for all.
        layers: names of the layers, by their number in the model.
    """

    def __init__(self, name: str, allocator: Any, requests: int, layer_name: Callable[[int], str]):
        self.name, self.allocator = name, allocator
        self.index: int = allocator.index
        self.page: int = allocator.tokens_per_page
        self.stride: int = allocator.block_physical_stride
        self.window: int | None = getattr(allocator, "sliding_window", None)
        #: Slots of one entry of the table: a ring of 10 slots in pages of 4 repeats after 10, not 12.
        self.entry = self.page if self.window is None or self.window % self.page == 0 else 1
        self.layers = {number: layer_name(number) for number in allocator.layer_indices}
        room = allocator.num_blocks * self.page if self.window is None else self.window
        device = allocator.cache_tensor.device
        width = room // self.entry
        self.rows = lasting(requests, width + width % 2, dtype=torch.int32, device=device).fill_(-1)
        self.table = self.rows[:, :width]

    def pool(self) -> KVPool:
        """The tensors of all layers, as views of the cache."""
        return KVPool(
            layers=self.tensors(),
            request_table=self.table,
            name=self.name,
            layer_names=list(self.layers.values()),
            paged=True,
            table_page_size=self.entry,
            slots_from=self.field,
            reserved=tuple(self.trash()),
            never_read=tuple(self.written_trash()),
            window=self.window,
            ring=self.window is not None,
        )

    def tensors(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer, ``[blocks, page, heads, head_dim]`` each, as views of the cache."""
        tensor = self.allocator.cache_tensor
        rows = tensor.view(-1, *tensor.shape[2:])  # K and V of a token lie apart, so each is a row
        pages = rows.view(-1, self.stride, *rows.shape[1:]).split(self.page, dim=1)
        return list(zip(pages[0::2], pages[1::2], strict=True))

    def trash(self) -> range:
        """Slots of padding, which no request ever has."""
        return range(2 * self.allocator.blocks_per_sector * self.page)

    def written_trash(self) -> range:
        """Those of them that padding is written to and nothing reads, as far as they are memory that nobody filled."""
        return range(0)

    def hand_back(self, blocks: Sequence[int]) -> None:
        """Put blocks on the free list, even if they are in use: a fault that the self-proof plants."""
        self.allocator.pool.free_blocks(self.index, blocks)

    @property
    def field(self) -> str:
        """The batch's field that holds this group's planned slots."""
        return f"{self.name}_slots"

    def slots_of(self, index: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Slots of transformers' cache indices, int64; -1 for a row that is not in the first layer's page.

        Args:
            out: int64, at least as many, where they go; None: new memory.
        """
        room = torch.empty_like(index) if out is None else out[: index.shape[0]]
        slots: torch.Tensor = request_kernels_for(index.device).slots_of_memory(index, self.page, self.stride, room)
        return slots

    def slots_in(self, blocks: Iterable[int]) -> torch.Tensor:
        """All slots of blocks, int64 ``[blocks * page]`` on the host."""
        first = torch.tensor(list(blocks), dtype=torch.int64).reshape(-1, 1) * self.page
        return (first + torch.arange(self.page)).flatten()

    def entries(self, blocks: Sequence[int]) -> list[int]:
        """A row of the table for a request with these blocks."""
        if self.entry == self.page:
            return list(blocks[: self.table.shape[1]])
        return self.slots_in(blocks).tolist()[: self.window]

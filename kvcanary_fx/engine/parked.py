"""Shadows of pages whose bytes are kept elsewhere meanwhile, as in the host's memory, until they come back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import torch

from ..kernels.ops import parked_kernels_for
from .guarded_pool import EnginePool
from .transfer import ShadowSlice

#: Pages of a piece of memory: it grows by so many, and none of it ever moves.
ROOM = 256

#: int32 entries of a slot besides its digests: token, position, the halves of its chain, marks; as the kernel of
#: :mod:`kvcanary_fx.kernels.slots.gpu_parked` has them.
WHO = 5


class ParkedShadows:
    """Of pages of one pool, by keys of the caller's; a key that comes again has what was parked last.

    Nothing here waits for a device: what is read back is as of its place in the device's stream, like all else.
    """

    def __init__(self, pool: EnginePool, page_size: int, memory: Callable[[int, int], torch.Tensor] | None = None):
        """
        Args:
            page_size: slots of a page.
            memory: makes int32 ``[rows, columns]`` that the pool's device reads and writes; None: in its own memory.
        """
        self.pool, self._page_size = pool, page_size
        self._tensors, self._planes = pool.digests.shape[:2]
        self._columns = page_size * (WHO + self._tensors * self._planes)
        self._memory = memory or self._own_memory
        self._pieces: list[torch.Tensor] = []
        kernels = parked_kernels_for(pool.declared.device)
        self._park = None if kernels is None else kernels.Park(pool.space, pool.digests)
        self._rows: dict[Hashable, int] = {}

    def put(self, keys: Sequence[Hashable], pages: Sequence[int]) -> None:
        """Park what is known of pages of the pool, each under its key; of a key that is named twice, the last one."""
        pool, last = self.pool, dict(zip(keys, pages, strict=True))
        if not last:
            return
        rows = [self._row_of(key) for key in last]
        if self._park is not None:
            # a connector may store blocks in each step of a server, and without the kernel that is about 20 launches
            self._park(list(last.values()), [self._address(row) for row in rows], self._page_size)
            return
        slots = pool.slot_tensor(list(last.values()), self._page_size)
        packed = self._packed(ShadowSlice.take(pool.space, pool.digests, slots, pool.content.parts))
        for piece, which, at in self._places(rows):
            piece[pool.slot_tensor(at)] = packed if len(at) == len(rows) else packed[pool.slot_tensor(which)]

    def get(self, keys: Sequence[Hashable]) -> ShadowSlice:
        """The shadow of the slots of pages, in order.

        Raises:
            KeyError: nothing was parked under a key.
        """
        pool, device = self.pool, self.pool.declared.device
        rows = torch.empty(len(keys), self._columns, dtype=torch.int32, device=device)
        for piece, which, at in self._places([self._rows[key] for key in keys]):
            rows[pool.slot_tensor(which)] = piece[pool.slot_tensor(at)]
        return self._unpacked(rows)

    def _row_of(self, key: Hashable) -> int:
        row = self._rows.setdefault(key, len(self._rows))
        while row >= ROOM * len(self._pieces):
            self._pieces.append(self._memory(ROOM, self._columns))
        return row

    def _address(self, row: int) -> int:
        piece, at = divmod(row, ROOM)
        return self._pieces[piece].data_ptr() + 4 * self._columns * at

    def _places(self, rows: Sequence[int]) -> Iterable[tuple[torch.Tensor, list[int], list[int]]]:
        """For each piece of memory: which of the rows are in it, and where."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        for i, row in enumerate(rows):
            which, at = found.setdefault(row // ROOM, ([], []))
            which.append(i)
            at.append(row % ROOM)
        return [(self._pieces[number], which, at) for number, (which, at) in found.items()]

    def _packed(self, shadow: ShadowSlice) -> torch.Tensor:
        """int32 ``[pages, columns]``."""
        parts = [shadow.tokens, shadow.positions, shadow.chain.contiguous().view(torch.int32), shadow.marks]
        n = len(shadow) // self._page_size
        by_page = shadow.digests.reshape(-1, n, self._page_size).transpose(0, 1)
        return torch.cat([*(part.reshape(n, -1) for part in parts), by_page.reshape(n, -1)], dim=1)

    def _unpacked(self, rows: torch.Tensor) -> ShadowSlice:
        size, n = self._page_size, rows.shape[0]
        tokens, positions, chain, marks, digests = rows.split(
            [size, size, 2 * size, size, self._columns - WHO * size], dim=1
        )
        by_half = digests.reshape(n, -1, size).transpose(0, 1).reshape(self._tensors, self._planes, n * size)
        return ShadowSlice(
            tokens.reshape(-1),
            positions.reshape(-1),
            chain.contiguous().view(torch.int64).reshape(-1),
            marks.reshape(-1),
            by_half,
            self.pool.content.parts,
        )

    def _own_memory(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.int32, device=self.pool.declared.device)

"""A small pool with the layout of a real one, and one request whose tokens a compiled model writes to it."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import torch

from ..config import CanaryConfig
from ..engine.batch_fields import Batch
from ..engine.kv_pool import KVPool
from ..engine.session import EngineSession
from ..kernels.writes.layout import FLOAT_DTYPES
from ..passes.write_ops import register_kv_write
from .scratch_tensors import scaled_down

#: Slots of a scratch pool that belong to no request, so that a stray write stays inside.
_SPARE = 4

#: Tokens of a request's history; more than are ever stored.
_HISTORY = 128

#: An entry of a request table that is out of bounds in every scratch pool.
BEYOND = 9999

_LIBRARY = torch.library.Library("kvcanary_doctor", "FRAGMENT")
_LIBRARY.define("store(Tensor(a!) pool, Tensor value, Tensor slots, int shift) -> ()")
register_kv_write("kvcanary_doctor::store", slots="slots", pools={"pool": "value"})


def _store(pool: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, shift: int) -> None:
    """A KV write; ``shift`` makes it go wrong."""
    at = slots + shift
    if pool.dim() == value.dim() + 1:  # [pages, page_size, ...]
        pool[at // pool.shape[1], at % pool.shape[1]] = value
    else:
        pool[at] = value


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("store", _store, _device)
torch.library.register_fake("kvcanary_doctor::store", lambda *_: None, lib=_LIBRARY)


class Scratch:
    """A session over a scratch pool with one request, ``patient``, in row 1 of the request table.

    Attributes:
        session: of the scratch pool alone.
        stored: tokens of the request so far.
    """

    def __init__(self, pool: KVPool, config: CanaryConfig):
        self._small = pool.layout.scaled_down()
        self._reserved = pool.table_page_size  # the first page takes the padding
        pages = -(-self._small.row // pool.table_page_size)
        row = pages * pool.table_page_size
        page = pool.tensors[0][0].shape[1] if pool.paged else 1
        first = -(-(self._reserved + row + _SPARE) // page)
        self._tensors = scaled_down(pool.tensors, first)
        self._paged = pool.paged
        self.table = torch.zeros(3, pages, dtype=torch.int32, device=pool.device)
        self._map: torch.Tensor | None = None
        if pool.slot_map is not None:  # the table's slot numbers differ from the pool's
            self._map = torch.arange(first * page, device=pool.device).roll(-1)
            self._map[: self._reserved] = 0
        scratch = dataclasses.replace(
            pool,
            layers=self._tensors,
            order="NHD",  # they are views in this order
            kv_axis=None,
            request_table=self.table,
            slot_map=self._map,
            slots_from="slots",
            reserved=tuple(range(self._reserved)),
            padding_row=None,
            batch=None,
            scales={},
            allocations=True,
            **self._small.fields,
        )
        # the check after the forward would find everything that the check before it should have found
        settings = dataclasses.replace(
            config,
            mode="log",
            budget="auto",
            verify_fraction="1",
            verify_after=False,
            incidents=None,
            status=None,
            on_violation=None,
        )
        self.session = EngineSession([scratch], settings)
        self._layout, self._offset = scratch.layout, scratch.token_offset
        self.session.mark_ready()
        self._slots = self.slots_at(range(row))
        self.session.pool.allocate(self._slots, owner="patient")
        self.stored = 0
        self._generator = torch.Generator("cpu").manual_seed(0)
        # Dynamo stores what it compiled in the code object, and gives up after a few sessions with the same one
        write = types.FunctionType(_write_all.__code__.replace(), globals())
        self._write = torch.compile(write, backend=self.session.backend, dynamic=False)

    def reset(self) -> None:
        """Reset to one request with a few tokens and no reports."""
        pool = self.session.pool
        self.table[1] = torch.arange(1, self.table.shape[1] + 1, device=self.table.device)
        pool.release(self._slots)
        pool.allocate(self._slots, owner="patient")
        self.session.mark_ready()
        self.stored = 0
        self._forward(self._small.first)

    def append(self, **faults: Any) -> None:
        """One step that fills one more slot; ``faults`` as in :meth:`_forward`."""
        self._forward(self._small.more, **faults)

    @property
    def live(self) -> int:
        """The last written entry of the request's row: the next step reads it."""
        return max(entry for entry in self._layout.entries(0, self.stored)[-self._small.more :] if entry is not None)

    def slots_at(self, entries: Sequence[int]) -> list[int]:
        """The slots of entries of the request's row, in the pool's own numbering."""
        slots = [entry + self._reserved for entry in entries]
        return slots if self._map is None else self._map[slots].tolist()

    def misread(self) -> None:
        """Change the entry of the request's row for the slot that the next step reads."""
        self.table[1, self.live // self.session.pool.declared.table_page_size] = BEYOND

    def positions_off_by_one(self) -> list[int]:
        """The fields of a batch with wrong positions."""
        return [self.stored + 1 + i for i in range(self._small.more)]

    def another_history(self) -> torch.Tensor:
        """A history that differs from the stored tokens."""
        return self._history().flip(1)

    def flip(self) -> None:
        """Change one bit of the last tensor of the last layer, in the slot that the next step reads."""
        slot, tensor = self.slots_at([self.live])[0], self._tensors[-1][-1]
        row = tensor[slot // tensor.shape[1], slot % tensor.shape[1]] if self._paged else tensor[slot]
        raw = row.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        raw[0] ^= 1
        row.copy_(raw.view(tensor.dtype).view(row.shape))

    def _history(self) -> torch.Tensor:
        return torch.arange(_HISTORY, device="cpu").unsqueeze(0)

    def _forward(self, count: int, astray: int = 0, shift: int = 0, nan: bool = False, **plan: Any) -> None:
        """One step that appends tokens.

        Args:
            astray: offset of the slots that the write gets from the planned ones.
            shift: offset of the slots really written from those.
            nan: write a NaN.
            plan: wrong fields of the batch.
        """
        start, end = self.stored, self.stored + count
        entries = self._layout.entries(start, end)
        written = self.slots_at([entry for entry in entries if entry is not None])
        batch = Batch(
            input_ids=list(range(start + self._offset, end + self._offset)),
            slots=[0 if entry is None else entry + self._reserved for entry in entries],
            request_rows=[1],
            prefix_lens=[start],
            extend_lens=[count],
            request_ids=["patient"],
            history=self._history(),
            history_lens=[_HISTORY],
        )
        values = [[self._values(tensor, len(written), nan) for tensor in layer] for layer in self._written()]
        received = torch.tensor([slot + astray for slot in written], device=self.table.device)
        with torch.no_grad(), self.session.step(dataclasses.replace(batch, **plan)), self.session.forward():
            self._write(self._written(), values, received, shift)
        self.stored = end

    def _written(self) -> list[list[torch.Tensor]]:
        """The tensors of each layer, without those that another layer writes."""
        first = {id(tensor): number for number, layer in reversed(list(enumerate(self._tensors))) for tensor in layer}
        return [[t for t in layer if first[id(t)] == number] for number, layer in enumerate(self._tensors)]

    def _values(self, tensor: torch.Tensor, n: int, nan: bool) -> torch.Tensor:
        shape = (n, *tensor.shape[2 if self._paged else 1 :])
        if tensor.dtype not in FLOAT_DTYPES:
            return torch.randint(0, 100, shape, generator=self._generator, device="cpu").to(tensor.device, tensor.dtype)
        made = torch.randn(shape, generator=self._generator, device="cpu")
        if nan:
            made.view(n, -1)[0, 0] = torch.nan
        return made.to(tensor.device, tensor.dtype)


def _write_all(
    tensors: list[list[torch.Tensor]], values: list[list[torch.Tensor]], slots: torch.Tensor, shift: int
) -> None:
    for layer, given in zip(tensors, values, strict=True):
        for tensor, value in zip(layer, given, strict=True):
            torch.ops.kvcanary_doctor.store(tensor, value, slots, shift)

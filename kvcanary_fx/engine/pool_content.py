"""The bytes of a pool: its tensors, one half each, and the digests of their slots."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..kernels.buffers import Count, Gate, HalfBuffers, RowState, Site
from ..kernels.checks import Check, Phase
from ..kernels.content.digest import coefficients, seeds
from ..kernels.content.layer import LayerHalf, LayerRecord
from ..kernels.content.pool import PoolBytes
from ..kernels.ops import import_gpu_kernels, layer_kernels_for, pool_kernels_for
from ..kernels.slots.space import SlotSpace
from ..kernels.writes.layout import SlotLayout
from ..reports.violation import HalfInfo
from ..runtime.pool_half import Place, PoolHalf
from ..runtime.registry import PoolRegistry
from .kv_pool import KVPool
from .transfer import Part, ShadowSlice

#: What the checks of layers need, by the layer's name.
LayerRecords = dict[str, LayerRecord]


class PoolContent:
    """What was written to the slots of a pool, tensor by tensor.

    Attributes:
        digests: int32 ``[tensors, planes, slots]``, those of all halves in one block.
        halves: one per tensor, in the order of ``declared.tensors``; a tensor of several layers is the first one's.
        views: the tensors of the halves.
        counters: int64 ``[len(Count)]`` for each half, of what opaque attention does.
        counts: int64 ``[tensors, >= len(Count)]``, the memory of all of these.
        imported: bool ``[slots + 1]``, for reports: the bytes came with an exported shadow; None if that never
            happened.
        outside_gate: of checks that are in no graph.
        bytes: all tensors, for the kernels that read them in one launch.
    """

    def __init__(self, declared: KVPool, registry: PoolRegistry, space: SlotSpace, planes: int):
        self._space, self.planes = space, planes
        self._compared = bool(space.checks & Check.CONTENT)  # asked in each step, where an enum takes 1 us
        device = declared.device
        tensors = len({address_of(tensor) for layer in declared.tensors for tensor in layer})
        self.digests = torch.zeros(tensors, planes, declared.slots, dtype=torch.int32, device=device)
        self.halves: list[PoolHalf] = []
        self.views: list[torch.Tensor] = []
        # rows begin at multiples of 16 bytes: a kernel of Triton's is compiled anew where an address does not
        self.counts = torch.zeros(tensors, len(Count) + len(Count) % 2, dtype=torch.int64, device=device)
        self.counters = list(self.counts[:, : len(Count)])
        self.imported: torch.Tensor | None = None
        self._layers: dict[str, list[_Part]] = {}  # by the name of the layer
        known: dict[object, int] = {}
        for number, layer in enumerate(declared.tensors):
            name = declared.names_of_layers[number]
            for place, tensor in enumerate(layer):
                reader = address_of(tensor) in known
                if not reader:
                    known[address_of(tensor)] = len(self.halves)
                    self._declare(declared, registry, number, place, tensor)
                part = _Part(known[address_of(tensor)], place, reader)
                self._layers.setdefault(name, []).append(part)
        self.outside_gate = torch.zeros(len(Gate), dtype=torch.int64, device=device)
        self.bytes = PoolBytes(tuple(self._sites(self.outside_gate)), tuple(self.views), space)
        if device.type == "cuda":
            pool_kernels_for(device).prepare(self.bytes)

    def _declare(self, declared: KVPool, registry: PoolRegistry, number: int, place: int, tensor: torch.Tensor) -> None:
        layout = SlotLayout(tuple(tensor.shape), (0, 1) if declared.paged else (0,), tensor.dtype, paged=declared.paged)
        half_id, name = registry.new_id(), declared.names_of_layers[number]
        label = declared.half_names[place] if place < len(declared.half_names) else f"part {place}"
        half = PoolHalf(
            id=half_id,
            info=HalfInfo(half_id, name, label, declared.name, None, layout.positions),
            place=Place(int(tensor.storage_offset()) * tensor.element_size(), tuple(tensor.stride()), layout),
            buffers=HalfBuffers(
                digest=self.digests[len(self.halves)],
                rows=torch.zeros(1, len(RowState), dtype=torch.int32, device=tensor.device),
            ),
            seeds=seeds(declared.layer_numbers[number], place),
            layer_number=number,
            address=tensor.data_ptr(),
            space=self._space,
        )
        registry.declare(tensor, half)
        # memory that the ops keep is made here, never inside an op: that may run in a CUDA graph's own pool
        coefficients(layout.words, tensor.device)
        self.halves.append(half)
        self.views.append(tensor)

    def layer_records(self, gate: torch.Tensor) -> LayerRecords:
        """What the checks of each layer need.

        Args:
            gate: int64 ``[len(Gate)]``, of the graph that the ops are in.
        """
        sites, kernels = self._sites(gate), layer_kernels_for(gate.device)
        return {
            name: kernels.LayerRecord([LayerHalf(sites[p.half], self.views[p.half], p.place, p.reader) for p in parts])
            for name, parts in self._layers.items()
        }

    def _sites(self, gate: torch.Tensor) -> list[Site]:
        """What a kernel needs of each half, in a graph with this gate."""
        return [
            Site(
                layout=half.place.layout,
                half=half.buffers,
                control=self._space.control,
                gate=gate,
                counters=counters,
                half_id=half.id,
                seed1=half.seeds[0],
                seed2=half.seeds[1],
                checks=self._space.checks,
                space=self._space,
            )
            for half, counters in zip(self.halves, self.counters, strict=True)
        ]

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """What a shadow must know of the pool's tensors."""
        return tuple(
            Part(h.info.layer, h.info.half, h.seeds, h.place.layout.row_bytes, h.place.layout.dtype)
            for h in self.halves
        )

    def verify(
        self,
        slots: torch.Tensor,
        count: torch.Tensor | None,
        owners: torch.Tensor | None,
        phase: Phase,
        positions: torch.Tensor | None = None,
    ) -> None:
        """Compare the bytes of slots in all layers.  See :func:`.content.pool.verify_slots`."""
        if self._compared:
            pool_kernels_for(slots.device).verify_slots(self.bytes, slots, count, owners, phase, positions)

    def verify_listed(self, in_flight: bool, stream: torch.cuda.Stream | None = None) -> None:
        """Compare the bytes of what a forward reads in all layers.  See :func:`.content.pool.verify_listed`."""
        if self._compared and self._space.slots:
            pool_kernels_for(self._space.block.device).verify_listed(self.bytes, in_flight, stream)

    def forget(self, slots: torch.Tensor) -> None:
        """Forget the bytes of slots (int64 ``[n]``; those that do not exist are skipped)."""
        inside = self._inside(slots)
        self.digests[:, :, inside] = 0
        if self.imported is not None:
            self.imported[inside] = False

    def fingerprint(self, slots: torch.Tensor) -> None:
        """Digest the bytes of slots (int64 ``[n]``; others than exist are skipped) as they are, in every layer."""
        if self._space.slots:
            pool_kernels_for(slots.device).fingerprint_slots(self.bytes, slots)

    def receive(self, shadow: ShadowSlice, slots: torch.Tensor) -> None:
        """Expect the bytes that a shadow was exported with, in slots (int64 ``[n]``)."""
        there = (slots >= 0) & (slots < self._space.slots)
        self.take_over(shadow[there], slots[there])
        if self.imported is None:
            self.imported = torch.zeros(self._space.slots + 1, dtype=torch.bool, device=slots.device)
        self.imported[slots[there]] = True

    def take_over(self, shadow: ShadowSlice, slots: torch.Tensor) -> None:
        """The same in slots that exist, for bytes that do not leave the pool."""
        self.digests[:, :, slots] = shadow.digests

    def _inside(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots that exist; the others are reported elsewhere."""
        return slots[(slots >= 0) & (slots < self._space.slots)]


class _Part(NamedTuple):
    """One tensor of a layer: its half, its place among the layer's tensors, and whether another layer writes it."""

    half: int
    place: int
    reader: bool


def address_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """What makes two views the same."""
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


import_gpu_kernels()  # not in the first step

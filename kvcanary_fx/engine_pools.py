"""The pools of an engine: what they are made of, and what happens to their slots outside a forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .binding import Controls, check_mask
from .errors import EngineError
from .kernels import slot_life
from .kernels.buffers import Count, HalfBuffers, RowState, Site
from .kernels.chain import SEED, mix_tensor
from .kernels.cpu import digest_rows
from .kernels.digest import coefficients, seeds
from .kernels.layer_ops import LayerHalf
from .kernels.layout import POOL_DTYPES, SlotLayout
from .kernels.request_checks import namespace_seed
from .kernels.slot_space import Flag, SlotSpace
from .pools import Place, PoolHalf, PoolRegistry
from .request_ids import RequestId, RequestIds
from .transfer import ShadowSlice
from .violations import ALL_LAYERS, HalfInfo

if TYPE_CHECKING:
    from .config import CanaryConfig

#: Labels of a layer's tensors, in the order in which they are given.
HALF_LABELS = ("K", "V", "K scale", "V scale")

Slots = torch.Tensor | Sequence[int]


@dataclasses.dataclass(frozen=True)
class KVPool:
    """The KV tensors of a group of layers that share slot numbers, as an engine describes them.

    Attributes:
        layers: for each layer its tensors: K and V, or an MLA latent alone; scales may follow.  Each is
            ``[slots, ...]``, or ``[pages, page_size, ...]`` with ``paged=True``.
        request_table: integer ``[requests, width]``: for each request the pages (slots, with
            ``table_page_size=1``) of its positions.  Read on the device in each forward; never copied.
        name: for reports.
        layer_names: names of the layers for reports, by default ``layers.0``, ``layers.1``, ...
        half_names: names of a layer's tensors for reports, by default ``K``, ``V``, ``K scale``, ``V scale``.
        paged: whether the tensors have two slot axes.
        table_page_size: slots of one entry of the request table.
        slot_map: integer, from the index space of the table to this pool's, for a sliding window with slots
            of its own; what it maps to a reserved slot is outside the window.
        slots_from: the batch's field with the slots planned for this pool.
        reserved: slots that take the padding of a batch.
        token_offset: the slot of position p holds the token of position p + token_offset (an EAGLE draft's: 1).
        window: tokens that attention sees, the newest included; None for all.
        allocations: the engine reports allocate and release.  False: the owner check is off.
    """

    layers: Sequence[Sequence[torch.Tensor]]
    request_table: torch.Tensor
    name: str = "kv"
    layer_names: Sequence[str] | None = None
    half_names: Sequence[str] = HALF_LABELS
    paged: bool = False
    table_page_size: int = 1
    slot_map: torch.Tensor | None = None
    slots_from: str = "slots"
    reserved: tuple[int, ...] = (0,)
    token_offset: int = 0
    window: int | None = None
    allocations: bool = True

    def __post_init__(self) -> None:
        if not self.layers or not all(len(layer) for layer in self.layers):
            raise EngineError(
                f"pool {self.name!r} has no layers, or a layer without tensors: give layers=[(k, v), ...]"
            )
        if self.layer_names is not None and len(self.layer_names) != len(self.layers):
            raise EngineError(
                f"pool {self.name!r} has {len(self.layers)} layers and {len(self.layer_names)} layer_names"
            )
        table = self.request_table
        if table.dim() != 2 or table.dtype.is_floating_point:
            raise EngineError(
                f"the request_table of pool {self.name!r} is {table.dtype} {list(table.shape)}; it must be integer "
                "[requests, width]"
            )
        counts = {self._slots_of(tensor) for layer in self.layers for tensor in layer}
        if len(counts) > 1:
            raise EngineError(
                f"the tensors of pool {self.name!r} have different numbers of slots: {sorted(counts)}. Layers that do "
                "not share slot numbers are pools of their own"
            )
        outside = [s for s in self.reserved if not 0 <= s < self.slots]
        if outside:
            raise EngineError(f"pool {self.name!r} has {self.slots} slots, and reserved={outside} are not among them")

    def _slots_of(self, tensor: torch.Tensor) -> int:
        axes = 2 if self.paged else 1
        if tensor.dtype not in POOL_DTYPES or tensor.dim() < axes:
            raise EngineError(
                f"a tensor of pool {self.name!r} is {tensor.dtype} {list(tensor.shape)}; it must be [slots, ...], or "
                "[pages, page_size, ...] with paged=True, in a floating-point or 8-bit type"
            )
        return tensor.shape[0] * (tensor.shape[1] if self.paged else 1)

    @property
    def slots(self) -> int:
        return self._slots_of(self.layers[0][0])

    @property
    def device(self) -> torch.device:
        return self.layers[0][0].device


class EnginePool:
    """A pool under guard: the life of its slots.

    Attributes:
        declared: how the engine described it.
        space: who is in each slot, and who may be.
        halves: one per tensor, in the order of ``declared.layers``.
    """

    def __init__(
        self, declared: KVPool, registry: PoolRegistry, controls: Controls, config: CanaryConfig, ids: RequestIds
    ):
        self.declared, self._ids, self._planes = declared, ids, config.planes
        self.name = declared.name
        self.checks = check_mask(config)
        device = declared.device
        info = HalfInfo(registry.new_id(), ALL_LAYERS, "*", declared.name, None, declared.slots)
        self.info = info
        self.space = SlotSpace.allocate(
            declared.slots,
            device,
            controls(device),
            info.id,
            self.checks,
            reserved=declared.reserved,
            token_offset=declared.token_offset,
            window=declared.window,
            owner_known=declared.allocations,
            verify_every=config.verify_every,
        )
        controls.reserve_stamps(device, declared.slots)
        tensors = sum(len(layer) for layer in declared.layers)
        #: int32 ``[tensors, planes, slots]``, the digests of all halves in one block
        self.digests = torch.zeros(tensors, config.planes, declared.slots, dtype=torch.int32, device=device)
        self.halves: list[PoolHalf] = []
        self.views: list[torch.Tensor] = []
        self.counters: list[torch.Tensor] = []  # int64 [len(Count)] each, of what opaque attention does
        self.live_slots = 0  # allocated and not released, as far as the host was told
        self.adopted = 0
        for number, layer in enumerate(declared.layers):
            for place, tensor in enumerate(layer):
                self._declare(registry, number, place, tensor)

    def _declare(self, registry: PoolRegistry, number: int, place: int, tensor: torch.Tensor) -> None:
        declared = self.declared
        layout = SlotLayout(tuple(tensor.shape), (0, 1) if declared.paged else (0,), tensor.dtype, paged=declared.paged)
        names, half_id = declared.layer_names, registry.new_id()
        label = declared.half_names[place] if place < len(declared.half_names) else f"part {place}"
        half = PoolHalf(
            id=half_id,
            info=HalfInfo(
                half_id, names[number] if names else f"layers.{number}", label, declared.name, None, layout.positions
            ),
            place=Place(int(tensor.storage_offset()) * tensor.element_size(), tuple(tensor.stride()), layout),
            buffers=HalfBuffers(
                digest=self.digests[len(self.halves)],
                rows=torch.zeros(1, len(RowState), dtype=torch.int32, device=tensor.device),
            ),
            seeds=seeds(number, place),
            layer_number=number,
            address=tensor.data_ptr(),
            space=self.space,
        )
        registry.declare(tensor, half)
        # memory that the ops keep is made here, never inside an op: that may run in a CUDA graph's own pool
        coefficients(layout.words, tensor.device)
        self.counters.append(torch.zeros(len(Count), dtype=torch.int64, device=tensor.device))
        self.halves.append(half)
        self.views.append(tensor)

    def describe(self) -> str:
        """The pool in one line."""
        declared = self.declared
        also = [f"window {declared.window}"] if declared.window is not None else []
        also += [f"token offset {declared.token_offset}"] if declared.token_offset else []
        also += [] if declared.allocations else ["allocations not reported, so owner is off"]
        shown = "".join(f", {what}" for what in also)
        layers, tensors = len(declared.layers), len(self.halves)
        return f"pool {self.name}: {declared.slots} slots, {layers} layers, {tensors} tensors{shown}"

    def layer_halves(self, gate: torch.Tensor) -> dict[str, tuple[LayerHalf, ...]]:
        """The tensors of each layer, as the ops around opaque attention need them.

        Args:
            gate: int64 ``[len(Gate)]``, of the graph that the ops are in.
        """
        layers: dict[str, list[LayerHalf]] = {}
        for half, view, counters in zip(self.halves, self.views, self.counters, strict=True):
            site = Site(
                layout=half.place.layout,
                half=half.buffers,
                control=self.space.control,
                gate=gate,
                counters=counters,
                half_id=half.id,
                seed1=half.seeds[0],
                seed2=half.seeds[1],
                checks=self.checks,
                space=self.space,
            )
            of_layer = layers.setdefault(half.info.layer, [])
            of_layer.append(LayerHalf(site, view, len(of_layer)))
        return {name: tuple(halves) for name, halves in layers.items()}

    # ---- the life of slots

    def allocate(self, slots: Slots, owner: RequestId | None = None) -> None:
        """Slots were taken from the free list.

        Args:
            slots: integer ``[n]``.
            owner: id of the request that may write them; None: anybody may.
        """
        given = self.slot_tensor(slots)
        slot_life.allocate(self.space, given, self._ids.hash(owner))
        self._forget_content(given)
        self.live_slots += given.numel()

    def release(self, slots: Slots, owner: RequestId | None = None) -> None:
        """One reference to each slot was dropped; a slot without references is free.

        Args:
            owner: id of the one that lets go, if known: letting go of another's slot is then a violation.
        """
        given = self.slot_tensor(slots)
        slot_life.release(self.space, given, self._ids.hash(owner))
        self.live_slots -= given.numel()

    def share(self, slots: Slots, owner: RequestId | None = None) -> None:
        """One reference to each slot was added: a shared slot is read by several and written by nobody."""
        given = self.slot_tensor(slots)
        slot_life.share(self.space, given, self._ids.hash(owner))
        self.live_slots += given.numel()

    def adopt(
        self,
        slots: Slots,
        tokens: torch.Tensor | Sequence[int] | None = None,
        positions: torch.Tensor | Sequence[int] | None = None,
        namespace: int = 0,
        owner: RequestId | None = None,
    ) -> None:
        """The slots were filled by something that is not guarded: take their bytes as they are.

        Args:
            owner: id of the request that they were filled for, if known: filling another's is a violation.
            tokens, positions: who is in the slots, if known; they must be one request's, in order, from
                position 0.  Without them, the identity of these slots is not checked.
            namespace: of the request.

        Raises:
            EngineError: one of tokens and positions, or lengths that do not match.
        """
        given = self.slot_tensor(slots)
        who = self._identity(given, tokens, positions, namespace)
        marks = Flag.WRITTEN if who is not None else Flag.WRITTEN | Flag.NAMELESS
        self._name(given, marks, who, owner)
        self._fingerprint(given)
        self.adopted += given.numel()

    def forget(self, slots: Slots) -> None:
        """Something is going to rewrite the slots: forget their bytes and who is in them."""
        given = self.slot_tensor(slots)
        self._name(given, Flag.WRITTEN | Flag.NAMELESS, None, None)
        self._forget_content(given)

    def reject(self, slots: Slots) -> None:
        """The slots hold drafted tokens that the target did not accept.

        They stay allocated, and the next token that is written there makes them good again; a forward that reads
        one before that is a violation of the token check, whether or not the batch has a ``history``.

        Args:
            slots: integer ``[n]``; slots that hold nothing may be among them.
        """
        slot_life.reject(self.space, self.slot_tensor(slots))

    def export(self, slots: Slots) -> ShadowSlice:
        """The shadow of slots that are about to be moved with their bytes, as tensors of the pool's device."""
        given = self.slot_tensor(slots)
        return ShadowSlice.take(self.space, self.digests, given)

    def import_(self, shadow: ShadowSlice, slots: Slots, owner: RequestId | None = None) -> None:
        """The slots received the bytes of exported ones: the next reader checks that all of them arrived.

        Args:
            owner: id of the request that they were loaded for, if known: loading over another's is a violation.

        Raises:
            EngineError: the shadow is of another number of slots, layers or digest bits.
        """
        given = self.slot_tensor(slots)
        shadow = shadow.to(given.device)
        shadow.require(given.numel(), self.digests, self.name)
        who = (shadow.tokens, shadow.positions, shadow.chain)
        slot_life.name(self.space, given, shadow.marks, who, self._ids.hash(owner))
        inside = (given >= 0) & (given < self.space.slots)
        self.digests[:, :, given[inside]] = shadow.digests[:, :, inside]

    def slot_tensor(self, slots: Slots) -> torch.Tensor:
        """Slots as int64 ``[n]`` on the pool's device.

        Raises:
            EngineError: they are no integers.
        """
        given = slots if isinstance(slots, torch.Tensor) else torch.tensor(list(slots), dtype=torch.int64)
        if given.dtype.is_floating_point or given.dtype == torch.bool:
            raise EngineError(f"slots are integers, not {given.dtype}")
        return given.to(device=self.declared.device, dtype=torch.int64, non_blocking=True).reshape(-1)

    # ---- helpers

    def _name(
        self,
        slots: torch.Tensor,
        marks: Flag,
        who: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
        owner: RequestId | None,
    ) -> None:
        each = torch.full_like(slots, int(marks), dtype=torch.int32)
        slot_life.name(self.space, slots, each, who, self._ids.hash(owner))

    def _identity(
        self,
        slots: torch.Tensor,
        tokens: torch.Tensor | Sequence[int] | None,
        positions: torch.Tensor | Sequence[int] | None,
        namespace: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        if tokens is None and positions is None:
            return None
        if tokens is None or positions is None:
            raise EngineError("adopt takes tokens and positions together, or neither")
        who, where = (torch.as_tensor(t, dtype=torch.int64, device=slots.device) for t in (tokens, positions))
        if who.numel() != slots.numel() or where.numel() != slots.numel():
            raise EngineError(f"adopt got {slots.numel()} slots, {who.numel()} tokens, {where.numel()} positions")
        spaces = torch.tensor([namespace], device=slots.device)
        start = namespace_seed(spaces, torch.tensor([SEED], device=slots.device))
        return who, where, start + mix_tensor(who, where).cumsum(0)

    def _forget_content(self, slots: torch.Tensor) -> None:
        self.digests[:, :, self._inside(slots)] = 0

    def _inside(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots that exist; the others were reported."""
        return slots[(slots >= 0) & (slots < self.space.slots)]

    def _fingerprint(self, slots: torch.Tensor) -> None:
        """Digest the bytes of the slots as they are, in every layer."""
        slots = self._inside(slots)
        for half, view in zip(self.halves, self.views, strict=True):
            half.buffers.digest[:, slots] = digest_of(half, view, slots)


def digest_of(half: PoolHalf, view: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Digests of the bytes of slots (int64 ``[n]``), int32 ``[planes, n]``, on any device."""
    return digest_rows(half.place.layout, view, slots, half.seeds, half.buffers.digest.shape[0])

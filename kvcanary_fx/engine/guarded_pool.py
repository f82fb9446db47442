"""The pools of an engine: what they are made of, and what happens to their slots outside a forward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import EngineError
from ..kernels.buffers import Count, Gate, HalfBuffers, RowState, Site
from ..kernels.checks import Check, Phase, Why
from ..kernels.content.cpu import digest_rows
from ..kernels.content.digest import coefficients, seeds
from ..kernels.content.pool import PoolBytes
from ..kernels.context import LayerHalf
from ..kernels.findings import Findings
from ..kernels.ops import pool_kernels_for
from ..kernels.slots import life as slot_life
from ..kernels.slots.chain import SEED, mix_tensor
from ..kernels.slots.checks import namespace_seed
from ..kernels.slots.space import REFERENCE, Flag, SlotSpace
from ..kernels.slots.tokens import repeats
from ..kernels.writes.layout import SlotLayout
from ..reports.violation import ALL_LAYERS, HalfInfo
from ..runtime.binding import Controls, check_mask
from ..runtime.pool_half import Place, PoolHalf
from ..runtime.registry import PoolRegistry
from .arguments import integers
from .kv_pool import KVPool, Slots
from .request_ids import RequestId, RequestIds
from .scales import Scales
from .transfer import Part, ShadowSlice

if TYPE_CHECKING:
    from ..config import CanaryConfig


class EnginePool:
    """A pool under guard: the life of its slots.

    Attributes:
        declared: how the engine described it.
        space: who is in each slot, and who may be.
        halves: one per tensor, in the order of ``declared.tensors``; a tensor of several layers is the first one's.
        rivals: the pools that have some of these tensors too, with pages of their own in them.
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
            window=declared.layout.window,
            once=declared.layout.once,
            owner_known=declared.allocations,
            verify_every=1 if declared.layout.rewritten else config.verify_every,
        )
        controls.reserve_stamps(device, declared.slots)
        tensors = len({_address(tensor) for layer in declared.tensors for tensor in layer})
        #: int32 ``[tensors, planes, slots]``, the digests of all halves in one block
        self.digests = torch.zeros(tensors, config.planes, declared.slots, dtype=torch.int32, device=device)
        self.halves: list[PoolHalf] = []
        self.views: list[torch.Tensor] = []
        self.counters: list[torch.Tensor] = []  # int64 [len(Count)] each, of what opaque attention does
        self.rivals: list[EnginePool] = []
        self._layers: dict[str, list[_Part]] = {}  # by the name of the layer
        self.live_slots = 0  # allocated and not released, as far as the host was told
        self.adopted = 0
        self.imported: torch.Tensor | None = None  # bool [slots + 1], for reports: the bytes came with import_
        known: dict[object, int] = {}
        for number, layer in enumerate(declared.tensors):
            name = declared.names_of_layers[number]
            for place, tensor in enumerate(layer):
                reader = _address(tensor) in known
                if not reader:
                    known[_address(tensor)] = len(self.halves)
                    self._declare(registry, number, name, place, tensor)
                part = _Part(known[_address(tensor)], place, reader)
                self._layers.setdefault(name, []).append(part)
        self.scales = Scales(declared, registry, self.space, config.planes)
        self.outside_gate = torch.zeros(len(Gate), dtype=torch.int64, device=device)  # of checks that are in no graph
        self.bytes = PoolBytes(tuple(self._sites(self.outside_gate)), tuple(self.views), self.space)
        if device.type == "cuda":
            pool_kernels_for(device).prepare(self.bytes)

    def _declare(self, registry: PoolRegistry, number: int, name: str, place: int, tensor: torch.Tensor) -> None:
        declared = self.declared
        layout = SlotLayout(tuple(tensor.shape), (0, 1) if declared.paged else (0,), tensor.dtype, paged=declared.paged)
        half_id = registry.new_id()
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
        layers, tensors = len(declared.layers), len(self.halves)
        return f"pool {self.name}: {declared.slots} slots, {layers} layers, {tensors} tensors, {declared.describe()}"

    def layer_halves(self, gate: torch.Tensor) -> dict[str, tuple[LayerHalf, ...]]:
        """The tensors of each layer, as the ops around opaque attention need them.

        Args:
            gate: int64 ``[len(Gate)]``, of the graph that the ops are in.
        """
        sites = self._sites(gate)
        return {
            name: tuple(LayerHalf(sites[p.half], self.views[p.half], p.place, p.reader) for p in parts)
            for name, parts in self._layers.items()
        }

    def _sites(self, gate: torch.Tensor) -> list[Site]:
        """What a kernel needs of each half, in a graph with this gate."""
        return [
            Site(
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
            for half, counters in zip(self.halves, self.counters, strict=True)
        ]

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """What a shadow must know of the pool's tensors."""
        return tuple(
            Part(h.info.layer, h.info.half, h.seeds, h.place.layout.row_bytes, h.place.layout.dtype)
            for h in self.halves
        )

    # ---- the life of slots

    def allocate(self, slots: Slots, owner: RequestId | None = None) -> None:
        """Slots were taken from the free list.

        Args:
            slots: integer ``[n]``.
            owner: id of the request that may write them; None: anybody may.
        """
        given = self.slot_tensor(slots)
        self._refuse_rivals(given, self._ids.hash(owner))
        slot_life.allocate(self.space, given, self._ids.hash(owner))
        self.forget_content(given)
        self.live_slots += given.numel()

    def release(self, slots: Slots, owner: RequestId | None = None) -> None:
        """One reference to each slot was dropped; a slot without references is free.

        The bytes of those are compared once more, in all layers and whatever ``verify_fraction`` is: nobody will read
        them again.

        Args:
            owner: id of the one that lets go, if known: letting go of another's slot is then a violation.
        """
        given = self.slot_tensor(slots)
        space = self.space
        at = torch.where((given >= 0) & (given < space.slots), given, space.nowhere)
        owners, held = space.owners[at], space.flags[at] >= REFERENCE
        slot_life.release(space, given, self._ids.hash(owner))
        gone = held & (space.flags[at] < REFERENCE) & ~repeats(at, space.nowhere)
        self.verify_bytes(torch.where(gone, at, -1), None, owners, Phase.LIFE)
        self.live_slots -= given.numel()

    def share(self, slots: Slots, owner: RequestId | None = None) -> None:
        """One reference to each slot was added: a shared slot is read by several and written by nobody."""
        given = self.slot_tensor(slots)
        slot_life.share(self.space, given, self._ids.hash(owner))
        self.live_slots += given.numel()

    def hand_over(self, slots: Slots, owner: RequestId | None = None) -> None:
        """The slots go to another owner with what they hold, such as from a request to a prefix cache.

        Args:
            owner: id of the new owner; None: anybody may read and write them.
        """
        slot_life.hand_over(self.space, self.slot_tensor(slots), self._ids.hash(owner))

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
        """Something is going to rewrite the slots: forget their bytes and who is in them.

        Free and reserved slots may be among them, so that all slots of a pool can be named.
        """
        given = self.slot_tensor(slots)
        slot_life.forget(self.space, given)
        self.forget_content(given)

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
        self._report_outside(given)
        return ShadowSlice.take(self.space, self.digests, given, self.parts)

    def import_(self, shadow: ShadowSlice, slots: Slots, owner: RequestId | None = None) -> None:
        """The slots received the bytes of exported ones: the next reader checks that all of them arrived.

        Args:
            owner: id of the request that they were loaded for, if known: loading over another's is a violation.

        Raises:
            EngineError: the shadow is of another number of slots or digest bits, lacks one of the pool's layers, or is
                of rows with other bytes (``shadow.without_bytes()`` is of any).
        """
        if not isinstance(shadow, ShadowSlice):
            raise EngineError(f"import_ takes what export returned, not a {type(shadow).__name__}")
        given = self.slot_tensor(slots)
        shadow = shadow.fitted(given.numel(), self.parts, self._planes, self.name).to(given.device)
        who = (shadow.tokens, shadow.positions, shadow.chain)
        slot_life.name(self.space, given, shadow.marks, who, self._ids.hash(owner))
        if not shadow.exact:
            self.forget_content(given)
            self._fingerprint(given)
            return
        inside = (given >= 0) & (given < self.space.slots)
        self.digests[:, :, given[inside]] = shadow.digests[:, :, inside]
        if self.imported is None:
            self.imported = torch.zeros(self.space.slots + 1, dtype=torch.bool, device=given.device)
        self.imported[self._inside(given)] = True

    def verify_bytes(
        self, slots: torch.Tensor, count: torch.Tensor | None, owners: torch.Tensor | None, phase: Phase
    ) -> None:
        """Compare the bytes of slots in all layers.  See :func:`.content.pool.verify_slots`."""
        if self.checks & Check.CONTENT:
            pool_kernels_for(slots.device).verify_slots(self.bytes, slots, count, owners, phase)

    def slot_tensor(self, slots: Slots) -> torch.Tensor:
        """Slots as int64 ``[n]`` on the pool's device.

        Raises:
            EngineError: they are no integers.
        """
        return (
            integers(slots, "slots").to(device=self.declared.device, dtype=torch.int64, non_blocking=True).reshape(-1)
        )

    # ---- helpers

    def _refuse_rivals(self, slots: torch.Tensor, owner: int) -> None:
        """Report slots that are handed out here while another pool has them, in the same memory."""
        at = self._inside(slots)
        for rival in self.rivals:
            flags = rival.space.flags[at]
            taken = (flags >= REFERENCE) & ((flags & int(Flag.RESERVED)) == 0)
            findings = Findings(torch.ones_like(taken), self.space.checks)
            findings.add(Why.DOUBLE_ALLOCATE, taken, rival.space.owners[at], owner)
            findings.report(
                self.space.control, self.space.space_id, Phase.LIFE, at, request=owner, detail=rival.space.tokens[at]
            )

    def _report_outside(self, slots: torch.Tensor) -> None:
        """Report slots that the pool does not have."""
        outside = (slots < 0) | (slots >= self.space.slots)
        findings = Findings(outside, self.space.checks)
        findings.add(Why.OUT_OF_RANGE, outside, slots, -1)
        findings.report(self.space.control, self.space.space_id, Phase.LIFE, slots, detail=-1)

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
        given = {"tokens": tokens, "positions": positions}
        who, where = (integers(t, what).to(slots.device, torch.int64).reshape(-1) for what, t in given.items())
        if who.numel() != slots.numel() or where.numel() != slots.numel():
            raise EngineError(f"adopt got {slots.numel()} slots, {who.numel()} tokens, {where.numel()} positions")
        spaces = integers([namespace], "namespaces").to(slots.device)
        start = namespace_seed(spaces, torch.tensor([SEED], device=slots.device))
        return who, where, start + mix_tensor(who, where).cumsum(0)

    def forget_content(self, slots: torch.Tensor) -> None:
        """Forget the bytes of slots (int64 ``[n]``), and keep who is in them."""
        inside = self._inside(slots)
        self.digests[:, :, inside] = 0
        if self.imported is not None:
            self.imported[inside] = False

    def _inside(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots that exist; the others were reported."""
        return slots[(slots >= 0) & (slots < self.space.slots)]

    def _fingerprint(self, slots: torch.Tensor) -> None:
        """Digest the bytes of the slots as they are, in every layer."""
        slots = self._inside(slots)
        for half, view in zip(self.halves, self.views, strict=True):
            half.buffers.digest[:, slots] = digest_of(half, view, slots)


class Pools(dict[str, EnginePool]):
    """Pools by name; a name that none has is answered with those that there are."""

    def __missing__(self, name: object) -> EnginePool:
        raise EngineError(f"the session has no pool {name!r}: its pools are {', '.join(map(repr, self))}")


class _Part(NamedTuple):
    """One tensor of a layer: its half, its place among the layer's tensors, and whether another layer writes it."""

    half: int
    place: int
    reader: bool


def _address(tensor: torch.Tensor) -> tuple[object, ...]:
    """What makes two views the same."""
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def find_rivals(pools: Sequence[EnginePool]) -> None:
    """Let pools know of each other that have tensors in common."""
    addresses = [{_address(view) for view in pool.views} for pool in pools]
    for i, pool in enumerate(pools):
        pool.rivals = [other for j, other in enumerate(pools) if i != j and addresses[i] & addresses[j]]


def digest_of(half: PoolHalf, view: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Digests of the bytes of slots (int64 ``[n]``), int32 ``[planes, n]``, on any device."""
    return digest_rows(half.place.layout, view, slots, half.seeds, half.buffers.digest.shape[0])

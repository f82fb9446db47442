"""The pools of an engine: who is in their slots, and what happens to those outside a forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import EngineError
from ..kernels.checks import Phase
from ..kernels.slots import life as slot_life
from ..kernels.slots.space import REFERENCE, Flag, SlotSpace
from ..kernels.slots.tokens import repeats
from ..reports.violation import ALL_LAYERS, HalfInfo
from ..runtime.binding import Controls, check_mask
from ..runtime.registry import PoolRegistry
from .arguments import integers
from .kv_pool import KVPool, Slots
from .pool_content import PoolContent, address_of
from .request_ids import RequestId, RequestIds
from .scales import Scales
from .transfer import ShadowSlice

if TYPE_CHECKING:
    from ..config import CanaryConfig


class EnginePool:
    """A pool under guard: the life of its slots.

    Attributes:
        declared: how the engine described it.
        space: who is in each slot, and who may be.
        content: the bytes; ``halves``, ``views`` and ``digests`` are its own.
        rivals: the pools that have some of these tensors too, with pages of their own in them.
    """

    def __init__(
        self, declared: KVPool, registry: PoolRegistry, controls: Controls, config: CanaryConfig, ids: RequestIds
    ):
        self.declared, self._ids = declared, ids
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
            verify_every=1 if declared.layout.rewritten else config.verify_every_on(device),
        )
        controls.reserve_stamps(device, declared.slots)
        self.content = PoolContent(declared, registry, self.space, config.planes)
        self.halves, self.views, self.digests = self.content.halves, self.content.views, self.content.digests
        self.scales = Scales(declared, registry, self.space, config.planes)
        self.rivals: list[EnginePool] = []
        self.live_slots = 0  # allocated and not released, as far as the host was told
        self.adopted = 0

    def describe(self) -> str:
        """The pool in one line."""
        declared = self.declared
        layers, tensors = len(declared.layers), len(self.halves)
        return f"pool {self.name}: {declared.slots} slots, {layers} layers, {tensors} tensors, {declared.describe()}"

    # ---- the life of slots

    def allocate(self, slots: Slots, owner: RequestId | None = None) -> None:
        """Slots were taken from the free list.

        Args:
            slots: integer ``[n]``.
            owner: id of the request that may write them; None: anybody may.
        """
        given = self.slot_tensor(slots)
        for rival in self.rivals:
            slot_life.report_taken(self.space, rival.space, given, self._ids.hash(owner))
        slot_life.allocate(self.space, given, self._ids.hash(owner))
        self.content.forget(given)
        self.live_slots += given.numel()

    def release(self, slots: Slots, owner: RequestId | None = None) -> None:
        """One reference to each slot was dropped; a slot without references is free.

        The bytes of those are compared once more, in all layers and whatever share a step compares: nobody will read
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
        self.content.verify(torch.where(gone, at, -1), None, owners, Phase.LIFE)
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
        each = torch.full_like(given, int(marks), dtype=torch.int32)
        slot_life.name(self.space, given, each, who, self._ids.hash(owner))
        self.content.fingerprint(given)
        self.adopted += given.numel()

    def forget(self, slots: Slots) -> None:
        """Something is going to rewrite the slots: forget their bytes and who is in them.

        Free and reserved slots may be among them, so that all slots of a pool can be named.
        """
        given = self.slot_tensor(slots)
        slot_life.forget(self.space, given)
        self.content.forget(given)

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
        slot_life.report_outside(self.space, given)
        return ShadowSlice.take(self.space, self.digests, given, self.content.parts)

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
        shadow = shadow.fitted(given.numel(), self.content.parts, self.content.planes, self.name).to(given.device)
        who = (shadow.tokens, shadow.positions, shadow.chain)
        slot_life.name(self.space, given, shadow.marks, who, self._ids.hash(owner))
        if not shadow.exact:
            self.content.forget(given)
            self.content.fingerprint(given)
            return
        self.content.receive(shadow, given)

    def slot_tensor(self, slots: Slots) -> torch.Tensor:
        """Slots as int64 ``[n]`` on the pool's device.

        Raises:
            EngineError: they are no integers.
        """
        return (
            integers(slots, "slots").to(device=self.declared.device, dtype=torch.int64, non_blocking=True).reshape(-1)
        )

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
        return slot_life.identity(who, where, integers([namespace], "namespaces").to(slots.device))


class Pools(dict[str, EnginePool]):
    """Pools by name; a name that none has is answered with those that there are."""

    def __missing__(self, name: object) -> EnginePool:
        raise EngineError(f"the session has no pool {name!r}: its pools are {', '.join(map(repr, self))}")


def find_rivals(pools: Sequence[EnginePool]) -> None:
    """Let pools know of each other that have tensors in common."""
    addresses = [{address_of(view) for view in pool.views} for pool in pools]
    for i, pool in enumerate(pools):
        pool.rivals = [other for j, other in enumerate(pools) if i != j and addresses[i] & addresses[j]]

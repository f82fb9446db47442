"""The pools of an engine: who is in their slots, and what happens to slots outside a forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from ..errors import EngineError
from ..kernels.slots import life as slot_life
from ..kernels.slots.events import COLUMNS, Event, EventRow
from ..kernels.slots.space import Flag, SlotSpace
from ..reports.violation import ALL_LAYERS, HalfInfo
from ..runtime.binding import Controls, check_mask
from ..runtime.registry import PoolRegistry
from .arguments import integers, integers_on
from .kv_pool import KVPool, Slots
from .pool_content import LayerRecords, PoolContent, address_of
from .request_ids import RequestId, RequestIds
from .scales import Scales
from .slot_events import SlotEvents, slots_in
from .transfer import ShadowSlice

if TYPE_CHECKING:
    from ..config import CanaryConfig

_ALLOCATE, _RELEASE, _SHARE, _HAND_OVER = Event.ALLOCATE, Event.RELEASE, Event.SHARE, Event.HAND_OVER

#: Of rows one behind the other, where each begins, and its owner.
_BEGINS, _OWNERS = (slice(int(column), None, COLUMNS) for column in (EventRow.BEGIN, EventRow.OWNER))


class EnginePool:
    """A pool under guard: the life of its slots.

    Attributes:
        declared: the engine's declaration.
        histories: what slots of the pool went through, see :class:`.SlotHistories`.
        rivals: the pools that share some of these tensors, with other pages in them.
        adopted: slots whose bytes were accepted as they were.
        expected: slots of which it was said what comes back, see :meth:`expect`.
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
        self._space = SlotSpace.allocate(
            declared.slots,
            device,
            controls(device),
            info.id,
            self.checks,
            reserved=declared.reserved,
            token_offset=declared.token_offset,
            window=declared.layout.window,
            chunk=declared.chunk,
            once=declared.layout.once,
            owner_known=declared.allocations,
            history=config.slot_history,
            verify_every=1 if declared.layout.rewritten else config.verify_every_on(device),
        )
        controls.reserve_stamps(device, declared.slots)
        self._content = PoolContent(declared, registry, self._space, config.planes)
        self._events = SlotEvents(self._space, self._content, ids, config.stacks)
        self.histories = self._events.histories
        self.halves, self.views = self._content.halves, self._content.views
        self.scales = Scales(declared, registry, self._space, config.planes)
        self.rivals: list[EnginePool] = []
        self.live_slots = 0  # allocated and not released, as far as the host knows
        self.adopted = self.expected = 0
        self._arrived: torch.Tensor | None = None  # int64 [slots + 1], the chain of slots that were expected, or 0

    def describe(self) -> str:
        """The pool in one line."""
        declared = self.declared
        layers, tensors = len(declared.layers), len(self.halves)
        return f"pool {self.name}: {declared.slots} slots, {layers} layers, {tensors} tensors, {declared.describe()}"

    # ---- the life of slots

    @property
    def space(self) -> SlotSpace:
        """Who is in each slot, and who may be, after all allocator calls so far."""
        self._events.flush()
        return self._space

    @property
    def content(self) -> PoolContent:
        """The bytes, after all allocator calls so far; ``halves`` and ``views`` are its own."""
        self._events.flush()
        return self._content

    @property
    def on_device(self) -> tuple[SlotSpace, PoolContent]:
        """Both as the device knows them, without the calls that wait on the host: nothing is sent, so that another
        thread may read them."""
        return self._space, self._content

    @property
    def digests(self) -> torch.Tensor:
        """int32 ``[tensors, planes, slots]``, those of all halves in one block."""
        return self.content.digests

    def flush(self) -> None:
        """Send the queued allocator calls to the device.  Every step, forward and read of violations does this by
        itself.

        Call it before rewriting the bytes of slots that were just released, outside a forward: a GPU compares the bytes
        of freed slots when the calls are sent.

        Raises:
            EngineError: a CUDA graph is being captured, and calls are queued.
        """
        self._events.flush()

    @property
    def calls(self) -> SlotEvents:
        """Those of the allocator that wait to be sent."""
        return self._events

    def allocate(self, slots: Slots, owner: RequestId | None = None, page_size: int = 1) -> None:
        """Slots were taken from the free list.

        On a GPU this and the calls below are queued, and sent to the device together (:meth:`flush`).

        Args:
            slots: integer ``[n]``, on any device or a sequence; with a ``page_size`` they are pages of so many.
            owner: id of the request that may write them; None: anybody may.

        Raises:
            EngineError: they are no integers, or a CUDA graph is being captured.
        """
        for rival in self.rivals:
            slot_life.report_taken(self.space, rival.space, self.slot_tensor(slots, page_size), self._ids.hash(owner))
        named = self._events.add(_ALLOCATE, slots, page_size, owner)
        self.live_slots += named

    def allocate_each(
        self,
        given: Sequence[tuple[Slots, RequestId | None]],
        page_size: int = 1,
        written_in_step: bool = False,
    ) -> None:
        """As many calls of :meth:`allocate`, in order, for less of the host's time than one after the other.

        Args:
            given: the slots and the owner of each.
            written_in_step: nobody writes to them before the next step or :meth:`flush`.  A GPU then is told at once of
                slots that were released and are handed out again: the bytes of what was released need not be compared
                before the new owner has them.

        Raises:
            EngineError: as :meth:`allocate` does; the calls before the wrong one are made.
        """
        if not (written_in_step and self._add_alike(_ALLOCATE, given, page_size, 1, written_in_step)):
            self._add_each(self.allocate, _ALLOCATE, given, page_size, live=1)

    def tell_now(
        self, calls: Sequence[tuple[Event, list[int], RequestId | None]], page_size: int, into_step: bool = True
    ) -> bool:
        """Several calls in order, for a step that waits for the host: the device is told here and now, with few
        functions, if nothing else waits to be sent.

        Args:
            calls: of :meth:`allocate`, as :meth:`allocate_each` makes them with ``written_in_step``, of :meth:`release`
                and of :meth:`hand_over`: the event, the pages, one at least, and the owner, who is known already.
            into_step: the device may do it with the next step; False: before whatever is launched next.

        Returns:
            False: nothing was done.
        """
        if self.rivals:
            return False
        known, live, released = self._ids.known, 0, False
        rows: list[int] = []
        pages: list[int] = []
        for event, some, owner in calls:
            whose = known.get(owner)
            if whose is None:
                return False
            rows += event, len(pages), whose
            pages += some
            if event is _ALLOCATE:
                live += len(some)
            elif event is _RELEASE:
                live, released = live - len(some), True
        if not self._events.tell_now(rows, pages, page_size, released, into_step):
            return False
        self.live_slots += live * page_size
        return True

    def tell_handed_out(
        self,
        given_up: Sequence[int],
        holder: RequestId,
        pages: list[int],
        owners: Sequence[RequestId | None],
        lengths: Sequence[int],
        page_size: int,
        into_step: bool = True,
    ) -> bool:
        """:meth:`tell_now` of pages that were handed out, in a call for each owner: most such steps have nothing else.

        Args:
            given_up: those of them that ``holder`` had, which releases them first.
            pages: of all owners, one after the other, one at least.
            owners, lengths: of each call, who gets its pages, and how many these are.
        """
        if self.rivals:
            return False
        known, at, n = self._ids.known, len(given_up), len(lengths)
        whose = list(map(known.get, owners))
        if None in whose or (given_up and holder not in known):
            return False
        # no loop: of many requests each takes the host a quarter of a microsecond
        rows: list[Any] = [_ALLOCATE] * (COLUMNS * n)
        rows[_OWNERS] = whose
        rows[_BEGINS] = range(at, at + n) if len(pages) == n else accumulate(lengths[:-1], initial=at)
        named = pages
        if given_up:
            rows[:0], named = (_RELEASE, 0, known[holder]), [*given_up, *pages]
        if not self._events.tell_now(rows, named, page_size, bool(given_up), into_step):
            return False
        self.live_slots += (len(pages) - len(given_up)) * page_size
        return True

    def release(self, slots: Slots, owner: RequestId | None = None, page_size: int = 1) -> None:
        """One reference to each slot was dropped; a slot without references is free.

        The bytes of freed slots are compared once more, in all layers and whatever share a step compares: they will not
        be read again.

        Args:
            slots, page_size: as :meth:`allocate` takes them.
            owner: id of the request that releases them, if known: releasing another's slot is then a violation.
        """
        named = self._events.add(_RELEASE, slots, page_size, owner)
        self.live_slots -= named

    def release_each(self, given: Sequence[tuple[Slots, RequestId | None]], page_size: int = 1) -> None:
        """As many calls of :meth:`release`, in order, for less of the host's time.

        Args:
            given: the slots and the owner of each.

        Raises:
            EngineError: as :meth:`release` does; the calls before the wrong one are made.
        """
        self._add_each(self.release, _RELEASE, given, page_size, live=-1)

    def share(self, slots: Slots, owner: RequestId | None = None, page_size: int = 1) -> None:
        """One reference to each slot was added: a shared slot may be read by several requests and written by none."""
        named = self._events.add(_SHARE, slots, page_size, owner)
        self.live_slots += named

    def share_each(self, given: Sequence[tuple[Slots, RequestId | None]], page_size: int = 1) -> None:
        """As many calls of :meth:`share`, for less of the host's time; arguments as of :meth:`release_each`."""
        self._add_each(self.share, _SHARE, given, page_size, live=1)

    def hand_over_each(self, given: Sequence[tuple[Slots, RequestId | None]], page_size: int = 1) -> None:
        """The same of :meth:`hand_over`."""
        self._add_each(self.hand_over, _HAND_OVER, given, page_size, live=0)

    def _add_each(
        self,
        call: Callable[[Slots, RequestId | None, int], None],
        event: Event,
        given: Sequence[tuple[Slots, RequestId | None]],
        page_size: int,
        live: int,
    ) -> None:
        """Make calls of one kind in order: at once if nothing is odd about them and others wait already, else the
        first by itself and the others at once.

        Args:
            call: makes one.
            live: what each slot of theirs adds to :attr:`live_slots`.
        """
        # a first allocation may send what waits, as its pages were freed before: the others can then wait together
        if event is not _ALLOCATE and self._add_alike(event, given, page_size, live):
            return
        for slots, owner in given[:1]:
            call(slots, owner, page_size)
        rest = given[1:]
        if rest and not self._add_alike(event, rest, page_size, live):
            for slots, owner in rest:
                call(slots, owner, page_size)

    def _add_alike(
        self,
        event: Event,
        given: Sequence[tuple[Slots, RequestId | None]],
        page_size: int,
        live: int,
        written_in_step: bool = False,
    ) -> bool:
        """Note calls at once, if nothing is odd about any of them; whether they were."""
        named = None if self.rivals else self._events.add_alike(event, given, page_size, written_in_step)
        self.live_slots += live * (named or 0)
        return named is not None

    def hand_over(self, slots: Slots, owner: RequestId | None = None, page_size: int = 1) -> None:
        """The slots get another owner and keep their content, for example from a request to a prefix cache.

        Args:
            owner: id of the new owner; None: anybody may read and write them.
        """
        self._events.add(_HAND_OVER, slots, page_size, owner)

    def adopt(
        self,
        slots: Slots,
        tokens: torch.Tensor | Sequence[int] | None = None,
        positions: torch.Tensor | Sequence[int] | None = None,
        namespace: int = 0,
        owner: RequestId | None = None,
    ) -> None:
        """The slots were filled by something that is not guarded: accept their bytes as they are.

        Args:
            owner: id of the request that they were filled for, if known: filling another request's slot is a violation.
            tokens, positions: who is in the slots, if known; they must be one request's, in order, from
                position 0.  Without them, the identity of these slots is not checked.  Of a token the low 32 bits are
                kept, as of a batch's.
            namespace: of the request.

        Raises:
            EngineError: one of tokens and positions, or lengths that do not match.
        """
        given = self.slot_tensor(slots)
        who = self._identity(given, tokens, positions, namespace)
        self._name(given, who, Flag(0) if who is not None else Flag.NAMELESS, owner)
        self.content.fingerprint(given)
        self.adopted += given.numel()

    def announce(
        self,
        slots: Slots,
        history: torch.Tensor | Sequence[int],
        positions: torch.Tensor | Sequence[int],
        namespace: int = 0,
        owner: RequestId | None = None,
    ) -> None:
        """The slots are being filled by something that is not guarded, and the next forward reads them: say for which
        tokens.  Neither bytes nor tokens are compared in that forward; behind it, :meth:`accept` them.

        Args:
            history: integer ``[m]``, the request's tokens from position 0 on.
            positions: those that the slots are for, each below ``m``, on the host.
            namespace, owner: of the request, as for :meth:`adopt`.

        Raises:
            EngineError: lengths that do not match, or positions that the history does not have.
        """
        given = self.slot_tensor(slots)
        who = self._told(given, history, positions, namespace, "announce")
        self.forget(given)
        self._name(given, who, Flag.NAMELESS, owner)

    def expect(
        self,
        slots: Slots,
        shadow: ShadowSlice,
        history: torch.Tensor | Sequence[int],
        positions: torch.Tensor | Sequence[int],
        namespace: int = 0,
        owner: RequestId | None = None,
    ) -> Callable[[], None]:
        """:meth:`announce` slots that get back the bytes with which a shadow of this pool was exported.

        The next forward compares who is in them with what it is about to read, and all of their bytes.

        Args:
            shadow: of as many slots.  Those in which it knows no token are announced.

        Returns:
            to call behind that forward, in the place of :meth:`accept`.

        Raises:
            EngineError: as of :meth:`announce`, or the shadow does not fit, as of :meth:`import_`.
        """
        given = self.slot_tensor(slots)
        shadow = self._fitted(shadow, given, "expect")
        if not shadow.exact:
            raise EngineError(
                "expect compares bytes, and the shadow is without_bytes(): import_ takes them as they are"
            )
        told = self._told(given, history, positions, namespace, "expect")
        known = shadow.marks == int(Flag.WRITTEN)
        was = shadow.tokens, shadow.positions, shadow.chain
        who = tuple(torch.where(known, stored.to(new.dtype), new) for stored, new in zip(was, told, strict=True))
        tokens, places, chain = who
        self.forget(given)
        marks = torch.where(known, int(Flag.WRITTEN), int(Flag.WRITTEN | Flag.NAMELESS)).to(torch.int32)
        slot_life.name(self.space, given, marks, (tokens, places, chain), self._ids.hash(owner))
        self.content.take_over(shadow.of_slots(known), given)
        self.hand_over(given, owner)
        if self._arrived is None:
            self._arrived = torch.zeros(self.declared.slots + 1, dtype=torch.int64, device=given.device)
        self._arrived[given] = torch.where(known, chain, 0)
        self.expected += given.numel()
        return functools.partial(self._accept, torch.where(known, -1, given))

    def came_with_transfer(self, slot: int) -> bool:
        """Whether the bytes of a slot are to be those of others that were exported; for reports, waits for the device.

        A slot that was filled since holds another chain.
        """
        imported = self.content.imported
        if imported is not None and bool(imported[slot]):
            return True
        return self._arrived is not None and int(self._arrived[slot]) == int(self.space.chain[slot]) != 0

    def _told(
        self,
        given: torch.Tensor,
        history: torch.Tensor | Sequence[int],
        positions: torch.Tensor | Sequence[int],
        namespace: int,
        call: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, positions and chain of slots that were announced."""
        where, tokens = integers(positions, "positions").reshape(-1), integers(history, "history").reshape(-1)
        if where.numel() != given.numel():
            raise EngineError(f"{call} got {given.numel()} slots, {where.numel()} positions")
        if where.device.type != "cpu":
            raise EngineError(f"{call} got positions on {where.device}, where they cannot be looked at: give a list")
        if where.numel() and not 0 <= int(where.min()) <= int(where.max()) < tokens.numel():
            raise EngineError(
                f"{call} got positions beyond a history of {tokens.numel()} tokens: give it the request's tokens "
                "from position 0 to the last of these"
            )
        device, every = given.device, torch.arange(tokens.numel(), device=given.device)
        who, where = integers_on(device, tokens, "history"), integers_on(device, where, "positions")
        who, _, chain = slot_life.identity(who, every, integers_on(device, [namespace], "namespaces"))
        return who[where], where, chain[where]

    def accept(self, slots: Slots) -> None:
        """Slots that were announced have been filled: accept their bytes as they are.  From here on they are guarded
        like any that a forward wrote."""
        given = self.slot_tensor(slots)
        self._accept(given)
        self.adopted += given.numel()

    def _accept(self, slots: torch.Tensor) -> None:
        """The same of slots (int64 ``[n]``) of which those below 0 are left as they are."""
        slot_life.accept(self.space, slots)
        self.content.fingerprint(slots)

    def _name(
        self,
        slots: torch.Tensor,
        who: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
        besides: Flag,
        owner: RequestId | None,
    ) -> None:
        """Say that slots (int64 ``[n]``) are filled.

        Args:
            besides: what they are flagged with, besides that.
        """
        marks = torch.full_like(slots, int(Flag.WRITTEN | besides), dtype=torch.int32)
        slot_life.name(self.space, slots, marks, who, self._ids.hash(owner))

    def forget(self, slots: Slots, page_size: int = 1) -> None:
        """Something is going to rewrite the slots: forget their bytes and who is in them.

        Free and reserved slots may be among them, so that all slots of a pool can be named.
        """
        self._events.add(Event.FORGET, slots, page_size)

    def reject(self, slots: Slots, page_size: int = 1) -> None:
        """The slots hold drafted tokens that the target did not accept.

        They stay allocated, and the next write makes them valid again; a forward that reads
        one before that is a violation of the token check, whether or not the batch has a ``history``.

        Args:
            slots: integer ``[n]``; empty slots are allowed.
        """
        self._events.add(Event.REJECT, slots, page_size)

    def export(self, slots: Slots) -> ShadowSlice:
        """The shadow of slots that are about to be moved with their bytes, as tensors of the pool's device."""
        given = self.slot_tensor(slots)
        slot_life.report_outside(self.space, given)
        return ShadowSlice.take(self.space, self.digests, given, self.content.parts)

    def import_(self, shadow: ShadowSlice, slots: Slots, owner: RequestId | None = None) -> None:
        """The slots received the bytes of exported ones: the next read checks that all of them arrived.

        Args:
            owner: id of the request that they were loaded for, if known: loading over another request's slot is a
                violation.

        Raises:
            EngineError: the shadow is of another number of slots or digest bits, lacks one of the pool's layers, or is
                of rows with other bytes (``shadow.without_bytes()`` is of any).
        """
        given = self.slot_tensor(slots)
        shadow = self._fitted(shadow, given, "import_")
        who = (shadow.tokens, shadow.positions, shadow.chain)
        slot_life.name(self.space, given, shadow.marks, who, self._ids.hash(owner))
        if not shadow.exact:
            self.content.forget(given)
            self.content.fingerprint(given)
            return
        self.content.receive(shadow, given)

    def _fitted(self, shadow: ShadowSlice, slots: torch.Tensor, call: str) -> ShadowSlice:
        """The shadow of this pool's tensors, laid over slots (int64 ``[n]``)."""
        if not isinstance(shadow, ShadowSlice):
            raise EngineError(f"{call} takes what export returned, not a {type(shadow).__name__}")
        return shadow.fitted(slots.numel(), self.content.parts, self.content.planes, self.name).to(slots.device)

    def copy(self, sources: Slots, targets: Slots, owner: RequestId | None = None, page_size: int = 1) -> None:
        """Slots are about to be copied to others, which somebody has: what is known of them is known of the copies, and
        who reads these next compares all their bytes.

        Args:
            sources, targets: as many, as :meth:`allocate` takes them.
            owner: id of the request that the copies are made for, if known.
        """
        given, to = (self.slot_tensor(slots, page_size) for slots in (sources, targets))
        shadow = self.export(given)
        who = (shadow.tokens, shadow.positions, shadow.chain)
        slot_life.name(self.space, to, shadow.marks, who, self._ids.hash(owner))
        self.content.take_over(shadow, to)
        self.hand_over(targets, owner, page_size)

    def slot_tensor(self, slots: Slots, page_size: int = 1) -> torch.Tensor:
        """Slots, or those of pages, as int64 ``[n]`` on the pool's device.

        Raises:
            EngineError: they are no integers.
        """
        given = integers_on(self.declared.device, slots, "slots")
        return slots_in(given.reshape(-1), page_size)

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
    """Pools by name; the error for an unknown name lists the known ones."""

    def __init__(self, pools: Iterable[tuple[str, EnginePool]]):
        super().__init__(pools)
        self._records: dict[tuple[int, ...], LayerRecords] = {}  # by the gates of a graph

    def layer_records(self, gates: Mapping[torch.device, torch.Tensor]) -> LayerRecords:
        """What the checks of the layers of all pools need in one graph, by the layer's name; made once for each.

        Args:
            gates: int64 ``[len(Gate)]`` for each device.
        """
        key = tuple(id(gate) for gate in gates.values())
        known = self._records.get(key)
        if known is None:
            known = self._records[key] = {}
            for pool in self.values():
                gate = gates.get(pool.declared.device)
                if gate is not None:
                    known.update(pool.content.layer_records(gate))
        return known

    def __missing__(self, name: object) -> EnginePool:
        raise EngineError(f"the session has no pool {name!r}: its pools are {', '.join(map(repr, self))}")


def find_rivals(pools: Sequence[EnginePool]) -> None:
    """Make pools that share tensors known to each other."""
    addresses = [{address_of(view) for view in pool.views} for pool in pools]
    for i, pool in enumerate(pools):
        pool.rivals = [other for j, other in enumerate(pools) if i != j and addresses[i] & addresses[j]]

"""The shadow of a pool whose slots an engine allocates: who is in each slot, and who may be.

One *slot space* per pool, shared by all its layers: 32 bytes a slot.  The functions that work on it are in
:mod:`.checks` (each forward) and :mod:`.life` (when the engine's allocator moves slots), the
plain reference of both in :mod:`.naive`.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch

from ..checks import Check
from ..ring import UNKNOWN, Control
from ..turns import taking_turns
from .past import count_steps_anew, new_past


class Flag(enum.IntFlag):
    """Bits of :attr:`SlotSpace.flags`; the bits from :data:`REFERENCE` up count the references to the slot."""

    WRITTEN = 1  # holds a token
    RESERVED = 2  # takes the padding of a batch; no token may live there
    NAMELESS = 4  # holds a token of unknown identity, which is not checked
    REJECTED = 8  # holds a drafted token that the target did not accept: to be overwritten, not to be read
    PLANNED = 16  # the forward that begins writes it, and no request may read what another writes; until check_writes
    DUE = 32  # shared or handed over, and not read since: the next that reads it compares its bytes, whatever the share


#: The bits that say what a slot holds; the others, who may use it.
MARKS = Flag.WRITTEN | Flag.NAMELESS | Flag.REJECTED

#: One reference in the flags of a slot; a slot without any is free.
REFERENCE = 256


class SpaceCount(enum.IntEnum):
    """Columns of :attr:`SlotSpace.counters`, int64 each."""

    FORWARDS = 0
    CHECKED = 1  # slots whose identity was compared
    RECORDED = 2  # slots whose identity was stored


class Column(enum.IntEnum):
    """Columns of :attr:`SlotSpace.block`, int32 each; the last two are halves of int64 and begin at an even one."""

    TOKEN = 0
    POSITION = 1
    FLAGS = 2
    READS = 3
    CHAIN = 4
    OWNER = 6


#: Stands for "no window", for "no chunks", and for the width of a ring.
ENDLESS = 2**31 - 1

#: 32-bit columns of a slot's entry: one 32-byte sector of a GPU's memory.
COLUMNS = 8


@dataclasses.dataclass(frozen=True)
class SlotSpace:
    """The buffers of one pool's slots, and what the checks need to know besides.

    A check wants everything about a slot at once, and slots are scattered over the pool: what is known of a slot
    therefore lies side by side in ``block``, and the other buffers are its columns.

    The last entry of each buffer belongs to no slot: masked writes go there.

    Attributes:
        block: int32 ``[slots + 1, COLUMNS]``.
        planned: int64 ``[slots + 1]``, which added token of a forward was planned for the slot first, less the
            forward's :meth:`epoch`; what earlier forwards left is larger.
        listed: int32 ``[slots]``, the slots whose ``reads`` is ``clock``, in any order; not kept by the reference.
        listed_count: int32 ``[1]``, how many they are.
        clock: number of the forward that is running.
        past: int32 ``[slots + 1, columns]``, what each slot went through, see :mod:`.history`; no columns if that is
            not kept.
        space_id: takes the place of a half's number in a violation's record.
        token_offset: the slot of position p holds the token of position p + token_offset (an EAGLE draft's: 1).
        window: slots of a request that attention still reads, the newest ones; None for all.
        chunk: a token's attention reads the slots of its own chunk of so many positions alone; None: no chunks.
        verify_every: a step checks the bytes of the slots with ``(slot + step) % verify_every == 0``, where the step
            is the engine's, so that each slot's turn comes within as many steps, whichever graph runs them; BY_BUDGET:
            as the control's word says.
        owner_known: the engine reports allocations, so that free slots and owners are known.
        once: a slot is written once in its life, as those of cross-attention are.
        tokens, positions, chain: identity of the token in the slot.
        owners: hash of the id of the request that allocated the slot; 0 for anybody's.
        flags: :class:`Flag` bits and the reference count.
        reads: number of the last forward in which attention reads the slot and its bytes are to be checked.
    """

    block: torch.Tensor
    planned: torch.Tensor
    listed: torch.Tensor
    listed_count: torch.Tensor
    clock: torch.Tensor  # int32 [1]
    past: torch.Tensor
    counters: torch.Tensor  # int64 [len(SpaceCount)]
    control: Control
    space_id: int
    checks: Check
    token_offset: int = 0
    window: int | None = None
    chunk: int | None = None
    owner_known: bool = True
    verify_every: int = 1
    once: bool = False
    tokens: torch.Tensor = dataclasses.field(init=False)  # int32 [slots + 1]
    positions: torch.Tensor = dataclasses.field(init=False)  # int32 [slots + 1]
    chain: torch.Tensor = dataclasses.field(init=False)  # int64 [slots + 1]
    owners: torch.Tensor = dataclasses.field(init=False)  # int64 [slots + 1]
    flags: torch.Tensor = dataclasses.field(init=False)  # int32 [slots + 1]
    reads: torch.Tensor = dataclasses.field(init=False)  # int32 [slots + 1]

    def __post_init__(self) -> None:
        wide = self.block.view(torch.int64)
        columns = dict(
            tokens=self.block[:, Column.TOKEN],
            positions=self.block[:, Column.POSITION],
            flags=self.block[:, Column.FLAGS],
            reads=self.block[:, Column.READS],
            chain=wide[:, Column.CHAIN // 2],
            owners=wide[:, Column.OWNER // 2],
        )
        for name, column in columns.items():
            object.__setattr__(self, name, column)

    @property
    def slots(self) -> int:
        return self.block.shape[0] - 1

    @property
    def nowhere(self) -> int:
        """Index of the entry that belongs to no slot."""
        return self.slots

    @classmethod
    def allocate(
        cls,
        slots: int,
        device: torch.device,
        control: Control,
        space_id: int,
        checks: Check,
        *,
        reserved: tuple[int, ...] = (0,),
        token_offset: int = 0,
        window: int | None = None,
        chunk: int | None = None,
        owner_known: bool = True,
        verify_every: int = 1,
        once: bool = False,
        history: int = 0,
    ) -> SlotSpace:
        """A space in which nothing is written; without ``owner_known`` every slot counts as allocated.

        Args:
            history: events of each slot that are kept.
        """
        space = cls(
            block=torch.zeros(slots + 1, COLUMNS, dtype=torch.int32, device=device),
            planned=torch.zeros(slots + 1, dtype=torch.int64, device=device),
            listed=torch.zeros(slots, dtype=torch.int32, device=device),
            listed_count=torch.zeros(1, dtype=torch.int32, device=device),
            clock=torch.zeros(1, dtype=torch.int32, device=device),
            past=new_past(slots, history, device),
            counters=torch.zeros(len(SpaceCount), dtype=torch.int64, device=device),
            control=control,
            space_id=space_id,
            checks=checks,
            token_offset=token_offset,
            window=window,
            chunk=chunk,
            owner_known=owner_known,
            verify_every=verify_every,
            once=once,
        )
        space.tokens.fill_(-1)
        space.positions.fill_(UNKNOWN)
        space.reads.fill_(-1)
        space.flags.fill_(0 if owner_known else REFERENCE)
        for slot in reserved:
            space.flags[slot] = Flag.RESERVED | REFERENCE
        return space

    def epoch(self) -> torch.Tensor:
        """int64 ``[1]``: what the running forward takes from the numbers in ``planned``."""
        return (self.clock.to(torch.int64) + 1) << 32

    def to(self, device: torch.device | str) -> SlotSpace:
        """The same space with its buffers on another device; the ring stays where it is."""
        buffers = ("block", "planned", "listed", "listed_count", "clock", "past", "counters")
        return dataclasses.replace(self, **{name: getattr(self, name).to(device) for name in buffers})

    def count_steps_anew(self) -> None:
        """The engine's steps are numbered from here; what slots went through was before the first."""
        count_steps_anew(self.past)

    @taking_turns
    def forget_identity(self) -> None:
        """Forget who is in the slots, in place; who owns them stays known."""
        self.tokens.fill_(-1)
        self.positions.fill_(UNKNOWN)
        self.chain.zero_()
        self.reads.fill_(-1)
        self.listed_count.zero_()
        self.flags.bitwise_and_(~int(MARKS))


@dataclasses.dataclass(frozen=True)
class RequestPlan:
    """What one forward is to read and write, in one pool, as tensors of the device.

    A batch may be padded: ``counts`` says how many requests and tokens are real.

    Attributes:
        counts: int64 ``[3]``, real requests, real tokens, and the number of the engine's step.  A negative number of
            requests says that there is no forward: what is captured in a graph then leaves all as it is, but for the
            list of slots to compare, which is empty.
        rows: integer ``[bs]``, each request's row in ``table``.
        prefix_lens: integer ``[bs]``, tokens that are in the pool already.
        extend_lens: integer ``[bs]``, tokens that this forward adds.
        tokens: integer ``[n]``, the ids of the added tokens, request after request.
        slots: integer ``[n]``, where they go.
        positions: integer ``[n]`` or None.
        owners: int64 ``[bs]``, hashes of the requests' ids; 0 if unknown: such a request is foreign to no slot.
        namespaces: int64 ``[bs]`` or None.
        table: integer ``[requests, width]``, pages of each request (slots, with a page size of 1).
        slot_map: integer ``[n]`` or None, from the slots in ``table`` to this pool's, -1 or 0 where there is none.
        history: integer ``[bs, length]`` or None, the requests' own token ids.
        history_lens: integer ``[bs]``, how many of them are valid.
        history_by_row: the history's rows are those of ``table``, ``[requests, length]``.
        parents: integer ``[n]`` or None: of a tree of drafted tokens, the number of the token that each follows among
            those that its request adds, always an earlier one; -1 for what follows the prefix.  None: each follows the
            one before it.
        columns: how many positions to look at, at least the longest prefix of the batch.
        ends: int64 ``[bs]``, where each request's added tokens end; written by the kernels of ``walk``.
        real_slots: int64 ``[n]``, ``slots`` with -1 for padding and for what is outside of the pool; written by
            ``check_writes``, for the layers.  A session gives both persistent memory: captured graphs read them.
        ring: a row's columns are used again and again: position p is in column ``p // page_size`` modulo their
            number.  Only in a space with a window, no longer than a row.
        reads: what the forward reads, where that does not follow from what it writes; None: this plan.
        taken: int64 ``[n]`` or None, the batch's tokens that this plan's are, where it has fewer: a write that
            received a slot for each token of the batch received these.
        in_flight: some request's prefix has slots that another request writes in this forward.
        padding_row: a request with this row is padding, wherever it stands in the batch: its tokens go to reserved
            slots or to none.  None: there is no such row.
        launches: the launches of a plan that comes again, in memory that is the same each time, by what they do; None:
            it comes once.
    """

    counts: torch.Tensor
    rows: torch.Tensor
    prefix_lens: torch.Tensor
    extend_lens: torch.Tensor
    tokens: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor | None
    owners: torch.Tensor
    namespaces: torch.Tensor | None
    table: torch.Tensor
    columns: int
    page_size: int = 1
    slot_map: torch.Tensor | None = None
    history: torch.Tensor | None = None
    history_lens: torch.Tensor | None = None
    history_by_row: bool = False
    parents: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    real_slots: torch.Tensor | None = None
    ring: bool = False
    reads: RequestPlan | None = None
    taken: torch.Tensor | None = None
    in_flight: bool = False
    padding_row: int | None = None
    launches: dict[Any, Any] | None = dataclasses.field(default=None, init=False, compare=False, repr=False)

    def keep_launches(self) -> None:
        """The plan comes again: its launches are kept.  A changed copy of it has launches of its own."""
        object.__setattr__(self, "launches", {})

    def head(self, tokens: int) -> RequestPlan:
        """The plan without the padding after its first ``tokens``, in the same memory."""
        head = object.__new__(RequestPlan)  # by replace(), a prompt's forward took 84 us for its plans
        fields = head.__dict__
        fields.update(self.__dict__, launches=None)
        for name in ("tokens", "slots", "positions", "parents", "real_slots"):
            if fields[name] is not None:
                fields[name] = fields[name][:tokens]
        return head

    def with_launches_of(self, other: RequestPlan) -> RequestPlan:
        """This plan with the launches kept for another, if it lies in the same memory but for the history."""
        if self is not other and all(_in_one_place(getattr(self, name), getattr(other, name)) for name in _FIXED):
            object.__setattr__(self, "launches", other.launches)
        return self

    @property
    def known_history(self) -> torch.Tensor | None:
        """The history, if there is one that says anything."""
        history = self.history
        return history if history is not None and self.history_lens is not None and history.numel() else None

    def memory_for(self, name: str, entries: int) -> torch.Tensor:
        """The memory of ``ends`` or ``real_slots``; made here for a plan that came without.

        Never from inside of an op: what it allocates may belong to a CUDA graph.
        """
        if getattr(self, name) is None:
            object.__setattr__(self, name, torch.empty(entries, dtype=torch.int64, device=self.slots.device))
        memory: torch.Tensor = getattr(self, name)
        return memory

    def to(self, device: torch.device) -> RequestPlan:
        """The plan for a pool of this device; itself, if nothing of it is elsewhere.

        Kernels follow addresses on any device.  A device can read pinned host memory.
        """
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in given.items()
            if isinstance(value, torch.Tensor) and _elsewhere(value, device)
        }
        if not moved:
            return self
        moved |= dict(ends=None, real_slots=None)  # the kernels write them: made on the device when needed
        moved["reads"] = self.reads.to(device) if self.reads is not None else None
        return dataclasses.replace(self, **moved)

    @property
    def width(self) -> int:
        """Positions that a row of the table has room for; without end in a ring."""
        if self.ring:
            return ENDLESS
        return self.table.shape[1] * self.page_size


#: The fields of a plan that its launches are bound to.
_FIXED = tuple(f.name for f in dataclasses.fields(RequestPlan) if f.init and f.name != "history")


def _in_one_place(a: Any, b: Any) -> bool:
    """Whether two fields are the same memory, or equal."""
    if a is b:
        return True
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return not isinstance(a, torch.Tensor | RequestPlan) and not isinstance(b, torch.Tensor) and bool(a == b)
    return a.data_ptr() == b.data_ptr() and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


def _elsewhere(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device != device and not (tensor.device.type == "cpu" and tensor.is_pinned())

"""The memory that kernels and host share: the shadow of a half, and the counters.  The violation ring: :mod:`.ring`.

Everything here is allocated once, outside any CUDA graph, and keeps its address: captured graphs hold
raw pointers to it.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

import torch

from .checks import Check
from .ring import UNKNOWN, Control
from .writes.layout import SlotLayout

if TYPE_CHECKING:
    from .slots.space import SlotSpace


class Gate(enum.IntEnum):
    """Words of a compiled graph's own control tensor, int64 each."""

    STEP = 0  # calls of this graph
    LENIENT_NEXT = 1  # set by the host: something else wrote to a pool since the last call
    LENIENT_NOW = 2  # the same, for the call that is running
    OPS = 3  # canary ops that ran in this graph


class Count(enum.IntEnum):
    """Columns of a graph's counters, one row a site, int64 each."""

    VERIFY_RUNS = 0
    RECORD_RUNS = 1
    CHECKED = 2
    RECORDED = 3
    ADOPTED = 4


class RowState(enum.IntEnum):
    """Columns of :attr:`HalfBuffers.rows`, int32 each."""

    NEXT = 0  # index after the last slot written in this row; in an engine's pool 1 once anything was recorded
    ORIGIN = 1  # token position of the row's slot 0, or UNKNOWN
    LENGTH = 2  # tokens the last write put into this row


#: "No slot of this row is about to be written", in the ``first`` argument of the kernels.
NOT_WRITTEN = 2**31 - 1


@dataclasses.dataclass
class HalfBuffers:
    """The shadow of one half of one layer's pool."""

    digest: torch.Tensor  # int32 [planes, slots]; plane 0 is zero where nothing is recorded
    rows: torch.Tensor  # int32 [rows, len(RowState)]
    #: int32 [slots]: digests before a write that may reach any slot; 0 where nothing was recorded
    baseline: torch.Tensor | None = None

    @classmethod
    def allocate(cls, layout: SlotLayout, planes: int, device: torch.device) -> HalfBuffers:
        half = cls(
            digest=torch.zeros(planes, layout.slots, dtype=torch.int32, device=device),
            rows=torch.zeros(layout.rows, len(RowState), dtype=torch.int32, device=device),
        )
        half.rows[:, RowState.ORIGIN] = UNKNOWN
        return half

    def reset(self) -> None:
        """Forget everything recorded, in place."""
        self.digest.zero_()
        self.forget_rows()

    def forget_rows(self) -> None:
        """Forget how far each row was written, in place."""
        self.rows.zero_()
        self.rows[:, RowState.ORIGIN] = UNKNOWN


@dataclasses.dataclass
class IdentityBuffers:
    """Who is in a slot, one per slot space: kept for the chain check and for reports.

    The last entry belongs to no slot: masked writes go there.
    """

    tokens: torch.Tensor  # int32 [slots + 1]
    positions: torch.Tensor  # int32 [slots + 1], UNKNOWN where nothing was recorded
    chain: torch.Tensor  # int64 [slots + 1]

    @classmethod
    def allocate(cls, slots: int, device: torch.device) -> IdentityBuffers:
        return cls(
            tokens=torch.full((slots + 1,), -1, dtype=torch.int32, device=device),
            positions=torch.full((slots + 1,), UNKNOWN, dtype=torch.int32, device=device),
            chain=torch.zeros(slots + 1, dtype=torch.int64, device=device),
        )

    def reset(self) -> None:
        """Forget who is in the slots, in place."""
        self.tokens.fill_(-1)
        self.positions.fill_(UNKNOWN)
        self.chain.zero_()


@dataclasses.dataclass(frozen=True)
class Site:
    """Everything a kernel needs besides the tensors of the step: one half in one compiled graph."""

    layout: SlotLayout
    half: HalfBuffers
    control: Control
    gate: torch.Tensor  # int64 [len(Gate)], of the graph
    counters: torch.Tensor  # int64 [len(Count)], of the site
    half_id: int
    seed1: int
    seed2: int
    checks: Check
    #: a step checks the slots with (slot + step) % verify_every == 0, and those it is about to write; BY_BUDGET: as the
    #: control's word says; no engine's pool
    verify_every: int = 1
    lenient: bool = False  # the pool may be rewritten unseen between two calls (captured graphs)
    space: SlotSpace | None = None  # of an engine's pool: which slots are about to be read
    watched: bool = False  # no graph writes the half: what it holds when first seen is what it should hold
    parts: tuple[Part, ...] = ()  # halves that other graphs record, in what a graph reads
    #: those of :mod:`.content.gpu_write`, by how a call's tensors lie in memory
    launches: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Part:
    """A half that other graphs record, in a tensor that a graph reads.

    Attributes:
        site: its own layout and shadow, with the counters of the site that reads.
        strides: of the half.
        ahead: elements from the start of the tensor that is read to the start of the half.
    """

    site: Site
    strides: tuple[int, ...]
    ahead: int

    def of(self, seen: torch.Tensor) -> torch.Tensor:
        """The half in the tensor that is read."""
        return seen.as_strided(self.site.layout.shape, self.strides, seen.storage_offset() + self.ahead)

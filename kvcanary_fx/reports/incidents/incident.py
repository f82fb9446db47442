"""An incident: what was known when a check failed, as plain values and tensors of the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ..past import SlotHistory
from ..violation import Violation

#: Version of the file.  A change that an older reader would misread gets the next number.
FORMAT = 1

#: What a slot is, by the numbers of :attr:`PoolScene.map`.
STATES = ("empty", "written", "free", "shared", "reserved", "rejected")


@dataclasses.dataclass(frozen=True)
class HalfScene:
    """One tensor of a pool, in the slots that the incident is about.

    Attributes:
        id: number of the half.
        heads: how many of the pool's rows a slot has, one a head, where the shadow numbers them; else 1.
        dtype: of the elements, ``bfloat16``.
        row_shape: of a slot's elements.
        seeds: what the digests of its rows start from.
        recorded: int32 ``[planes, n]``, the digests in the shadow, 0 where none; None if they were left out.
        rows: uint8 ``[n, row_bytes]``, the bytes; None if they were left out.
    """

    id: int
    layer: str
    half: str
    pool: str
    heads: int
    dtype: str
    row_shape: tuple[int, ...]
    seeds: tuple[int, int]
    recorded: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    @property
    def name(self) -> str:
        return f"{self.half} of {self.layer}"


@dataclasses.dataclass(frozen=True)
class SlotScene:
    """What is known of a slot.

    Attributes:
        slot: as the shadow numbers it.
        state: one of :data:`STATES`.
        references: how many hold it; None where no allocator is known.
        owner, token, position: None if unknown.
        imported: its bytes came with an exported shadow.
        fits: whether it holds what the prefix of the request needs there that reads it; None if nothing tells.
        past: what it went through; None if that is not kept.
    """

    slot: int
    state: str
    references: int | None = None
    owner: str | int | None = None
    token: int | None = None
    position: int | None = None
    imported: bool = False
    fits: bool | None = None
    past: SlotHistory | None = None


@dataclasses.dataclass(frozen=True)
class RequestScene:
    """A request in the batch of the forward that ran, or of the last one.

    Attributes:
        row: of the request table.
        prefix, extend: tokens in the pool, and tokens that the forward adds.
        tokens, slots, positions: of the added ones.
        table: the request's row, as far as it is used.
        page_size: slots of an entry of the table.
    """

    request: str | int | None
    row: int
    prefix: int
    extend: int
    tokens: tuple[int, ...]
    slots: tuple[int, ...]
    positions: tuple[int, ...]
    table: tuple[int, ...]
    page_size: int = 1

    def reads(self, slot: int) -> int | None:
        """The position of the prefix that lies in a slot, by the table; None if none does."""
        for column, page in enumerate(self.table):
            position = column * self.page_size + slot % self.page_size
            if page == slot // self.page_size and position < self.prefix:
                return position
        return None


@dataclasses.dataclass(frozen=True)
class PoolScene:
    """A pool: tensors that share slot numbers.

    Attributes:
        slots: of the whole pool, as the shadow numbers them.
        positions: slots of a row or a page; 0 without.
        near: the slots that the incident is about, and their neighbours.
        map: uint8 ``[slots]``, the state of each as a number of :data:`STATES`; None if the pool is too large.
        owners: int32 ``[slots]``, an index into ``owner_names``, -1 for nobody; None where no allocator is known.
        batch: the requests of the forward.
    """

    name: str
    slots: int
    positions: int
    halves: tuple[HalfScene, ...]
    near: tuple[SlotScene, ...]
    map: torch.Tensor | None = None
    owners: torch.Tensor | None = None
    owner_names: tuple[str | int, ...] = ()
    batch: tuple[RequestScene, ...] = ()

    def place(self, slot: int) -> int | None:
        """The number of a slot in ``near``, and in the tensors of the halves."""
        return next((i for i, s in enumerate(self.near) if s.slot == slot), None)


@dataclasses.dataclass(frozen=True)
class Row:
    """A recorded row elsewhere: the half as the file names it, and the slot."""

    half: int
    slot: int


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What the bytes of a slot showed when the file was written.

    Attributes:
        unchanged: they are still those that failed the check; all below is of the bytes that are there.
        bit: the bit of the row that has to be flipped to get what was recorded; None if no single one does.
        nonzero: bytes of the row that are not zero.
        poisoned: elements that are NaN or Inf.
        same_as: recorded rows with the same bytes, those left out that failed a check with it.
        moved_to: slots that hold what should be here, and are not recorded with it.
    """

    unchanged: bool
    bit: int | None
    nonzero: int
    poisoned: int
    same_as: tuple[Row, ...] = ()
    moved_to: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Record:
    """A violation, where the file has its slot, and what its bytes showed.

    Attributes:
        pool: index of the pool; None if it is in none.
        half: number of the half; None if the slot is wrong in all layers.
        slot: as the shadow numbers it.
    """

    violation: Violation
    pool: int | None
    half: int | None
    slot: int
    evidence: Evidence | None = None


@dataclasses.dataclass(frozen=True)
class Incident:
    """Everything in a file.

    Attributes:
        made: when, in ISO 8601 with the time zone.
        reason: ``violation`` or ``snapshot``.
        records: the violations, causes before consequences; at most :data:`~.file.MOST_RECORDS`.
        total: how many there were.
        settings, system: of the session; versions and devices.
        graphs: what the session guards in which graph, as text.
        coverage: why something runs unguarded.
        log: the last lines of the logger ``kvcanary``.
        hidden: what was kept out, as the setting ``privacy`` names it.
        missing: what could not be read, and why.
    """

    made: str
    reason: str
    records: tuple[Record, ...]
    total: int
    pools: tuple[PoolScene, ...]
    settings: Mapping[str, Any]
    system: Mapping[str, Any]
    graphs: tuple[str, ...] = ()
    coverage: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """When it was, and how much was found."""
        count = "1 violation" if self.total == 1 else f"{self.total} violations"
        return f"kvcanary incident of {self.made}, {count}"

    def half(self, number: int | None) -> HalfScene | None:
        """The half with a number."""
        return next((h for pool in self.pools for h in pool.halves if h.id == number), None)

"""What the rules that name a cause ask of an incident."""

from __future__ import annotations

import dataclasses

from .incident import STATES, Incident, PoolScene, Record, RequestScene, SlotScene
from .tenants import Tenants, until


@dataclasses.dataclass(frozen=True)
class Facts:
    """What failed in the first step of an incident.

    Attributes:
        first: the most telling record.
        records: all of the step.
    """

    incident: Incident
    first: Record
    records: tuple[Record, ...]

    @property
    def pool(self) -> PoolScene | None:
        return None if self.first.pool is None else self.incident.pools[self.first.pool]

    @property
    def slot(self) -> SlotScene | None:
        """What is known of the slot of the first record."""
        near = () if self.pool is None else self.pool.near
        return next((s for s in near if s.slot == self.first.slot), None)

    @property
    def tenants(self) -> Tenants | None:
        """Those who had the slot of the first record; None if its history is not known."""
        past = self.slot.past if self.slot is not None else None
        return Tenants(until(past, self.first.violation)) if past is not None else None

    @property
    def had(self) -> bool | None:
        """Whether the request of the first record ever had the slot; None if nothing tells."""
        return self.tenants.had(self.first.violation.request) if self.tenants is not None else None

    @property
    def request(self) -> RequestScene | None:
        """The request of the first record, in the batch."""
        batch = () if self.pool is None else self.pool.batch
        asked = self.first.violation.request
        return next((r for r in batch if asked is not None and r.request == asked), None)

    @property
    def alike(self) -> tuple[Record, ...]:
        """The records of the same check and reason, in the same pool."""
        v = self.first.violation
        same = (v.check, v.why, self.first.pool)
        return tuple(r for r in self.records if (r.violation.check, r.violation.why, r.pool) == same)

    @property
    def missing(self) -> bool:
        """Whether the request owns written slots that its row of the table does not name.

        Not told where the row names slots of another pool, or is not whole in the file.
        """
        pool, request = self.pool, self.request
        if pool is None or request is None or request.request not in pool.owner_names or not self.named:
            return False
        if pool.map is None or pool.owners is None or request.prefix > len(request.table) * request.page_size:
            return False
        mine = (pool.owners == pool.owner_names.index(request.request)) & (pool.map == STATES.index("written"))
        pages = {slot // request.page_size for slot in mine.nonzero().flatten().tolist()}
        return not pages <= set(request.table)

    @property
    def named(self) -> bool:
        """Whether the request's row names the slot itself, with no map between."""
        return self.request is not None and self.request.reads(self.first.slot) is not None

    @property
    def rewritten(self) -> bool:
        """Whether a token of the batch goes to the slot although that position is stored in it already."""
        slot = self.slot
        if self.pool is None or slot is None or slot.position is None or slot.state not in ("written", "shared"):
            return False
        going = (pair for r in self.pool.batch for pair in zip(r.slots, r.positions, strict=False))
        return (slot.slot, slot.position) in going

    @property
    def reasons(self) -> set[str | None]:
        return {record.violation.why for record in self.records}

    @property
    def tokens(self) -> int:
        """How many tokens the batch writes."""
        return sum(r.extend for r in self.pool.batch) if self.pool is not None else 0

    def slot_of(self, asked: str | int | None, position: int) -> int | None:
        """Where the row of a request of the batch has a position."""
        for request in self.pool.batch if self.pool is not None else ():
            column = position // request.page_size
            if request.request == asked and 0 <= column < len(request.table):
                return request.table[column] * request.page_size + position % request.page_size
        return None

    def reads(self, slot: int) -> bool:
        """Whether some request of the batch has a slot in its prefix."""
        return self.pool is not None and any(r.reads(slot) is not None for r in self.pool.batch)

    @property
    def arrived(self) -> bool:
        """Whether some slot that came with a transfer passed its checks, near those that failed."""
        failed = {r.slot for r in self.records}
        return self.pool is not None and any(s.imported and s.slot not in failed for s in self.pool.near)

    def held(self, slot: int) -> bool:
        """Whether anybody holds a slot of the pool, as far as the file has a map."""
        if self.pool is None or self.pool.map is None or not 0 <= slot < self.pool.slots:
            return False
        return int(self.pool.map[slot]) in (1, 3)  # written, shared

"""What the violations of a step mean for requests and blocks: the message from a worker to the scheduler."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Container
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...reports.violation import Violation

#: Checks whose failure says that the bytes of the slot are not the KV of its token.
_BYTES = frozenset({"content", "operand", "poison"})

#: The same, by the reason: somebody writes, or wrote, where another request's KV is.
_WRITES = frozenset(
    {"OVERWRITE", "WRITE_SHARED", "WRITE_AFTER_FREE", "DOUBLE_ALLOCATE", "PLANNED_TWICE", "NOT_THE_PLANNED_SLOT"}
)


def new_id() -> str:
    """The id of an incident, for the log and the client."""
    return f"kvc-{secrets.token_hex(4)}"


@dataclasses.dataclass
class Verdict:
    """Of one step, over all its violations.

    Attributes:
        id: of the incident, for the log and the client.
        requests: ids of the requests that violations name.
        past: those that are named only for a block that they gave up.
        damaged: blocks whose bytes are wrong, by KV cache group: nobody may read them any more.
        doubtful: blocks that are wrong for the named request only, by KV cache group.
        everyone: a violation names neither a request nor a slot: all requests of the step may be concerned.
        outcome: what becomes of requests that read the damage: ``recompute``, ``abort``, or ``log`` for nothing.
        late: not all bytes are compared in each step, so blocks computed from the damage may be in the prefix cache.
        total: how many there were.
    """

    id: str = dataclasses.field(default_factory=new_id)
    requests: set[str] = dataclasses.field(default_factory=set)
    past: set[str] = dataclasses.field(default_factory=set)
    damaged: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    doubtful: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    everyone: bool = False
    outcome: str = "log"
    late: bool = False
    total: int = 0

    def add(self, violation: Violation, page_sizes: list[int]) -> None:
        """Take a violation in.

        Args:
            page_sizes: tokens of a block of each KV cache group.
        """
        self.total += 1
        if violation.request is not None:
            (self.past if violation.phase == "life" else self.requests).add(str(violation.request))
        number = violation.pool.removeprefix("group").removeprefix("draft")
        if violation.slot < 0 or not number.isdigit():
            self.everyone |= violation.request is None
            return
        group, block = int(number), violation.slot // page_sizes[int(number)]
        # what was found when a block changed hands is the past: by now the block may be an innocent request's
        wrong = violation.phase != "life" and (violation.check in _BYTES or violation.why in _WRITES)
        (self.damaged if wrong else self.doubtful).setdefault(group, set()).add(block)

    def joined(self, other: Verdict) -> Verdict:
        """Of both, as one incident."""
        blocks: list[dict[int, set[int]]] = []
        for mine, others in ((self.damaged, other.damaged), (self.doubtful, other.doubtful)):
            blocks.append({g: mine.get(g, set()) | others.get(g, set()) for g in mine.keys() | others.keys()})
        return dataclasses.replace(
            self,
            requests=self.requests | other.requests,
            past=self.past | other.past,
            damaged=blocks[0],
            doubtful=blocks[1],
            everyone=self.everyone or other.everyone,
            late=self.late or other.late,
            total=self.total + other.total,
        )

    def as_json(self) -> bytes:
        """For another process: :meth:`from_json`."""
        fields = dataclasses.asdict(self)
        for name in ("requests", "past"):
            fields[name] = sorted(fields[name])
        for name in ("damaged", "doubtful"):
            fields[name] = [[group, sorted(blocks)] for group, blocks in fields[name].items()]
        return json.dumps(fields).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Verdict:
        """What :meth:`as_json` made.

        Raises:
            ValueError: the text is none of it.
        """
        fields = json.loads(text)
        for name in ("requests", "past"):
            fields[name] = set(fields[name])
        for name in ("damaged", "doubtful"):
            fields[name] = {group: set(blocks) for group, blocks in fields[name]}
        return cls(**fields)

    def blocks(self) -> set[int]:
        """All blocks that it names; an id belongs to one group at a time."""
        return {block for part in (self.damaged, self.doubtful) for some in part.values() for block in some}

    def readers(
        self, tables: dict[str, tuple[list[int], ...]], begun_again: Container[str] = frozenset()
    ) -> dict[str, int]:
        """The requests that it concerns, each with its first block that must not be read again.

        Args:
            tables: the blocks of each request, by group.
            begun_again: requests that began again and have no token since: what was wrong with blocks that they gave
                up for it is past.
        """
        found: dict[str, int] = {}
        for request, groups in tables.items():
            named = self.everyone or request in self.requests or (request in self.past and request not in begun_again)
            places = [
                place
                for group, table in enumerate(groups)
                for place, block in enumerate(table)
                if block in self.damaged.get(group, ()) or (named and block in self.doubtful.get(group, ()))
            ]
            if places or (named and any(groups)):  # without blocks it has nothing wrong
                found[request] = min(places, default=0)
        return found

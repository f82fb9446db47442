"""The entries of a prefix cache, as an engine passes them to a sweep."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import EngineError
from ..kernels.slots.prefixes import ListedSlots
from .kv_pool import Slots
from .request_ids import RequestId, RequestIds

if TYPE_CHECKING:
    from .guarded_pool import EnginePool


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """Slots that a prefix cache lists: a prefix as a whole, or a node of a tree of prefixes.

    Attributes:
        slots: integer ``[n]``, in the order of their tokens; none for the root of a tree.
        parent: the node before, whether or not it is in the same sweep: slots are checked once, in the node that has
            them, and the first one must follow the parent's last.
        start: position of the first slot; None: behind ``parent``, 0 without one.
        namespace: of the requests that may take the prefix.
        owner: id of the owner of the cache's slots, where they were handed over; None: not compared.
        tokens: integer ``[n]``, what the cache takes the tokens in the slots to be; None: not compared.

    Raises:
        EngineError: a start that is negative, or is not where ``parent`` ends; as many tokens as slots are needed.
    """

    slots: Slots
    parent: Prefix | None = None
    start: int | None = None
    namespace: int = 0
    owner: RequestId | None = None
    tokens: torch.Tensor | Sequence[int] | None = None

    def __post_init__(self) -> None:
        behind = 0 if self.parent is None else self.parent.end
        if self.start is None:
            object.__setattr__(self, "start", behind)
        elif self.start < 0 or (self.parent is not None and self.start != behind):
            raise EngineError(
                f"a prefix has start={self.start}: it must be a position, and where its parent ends ({behind}), if it "
                "has one"
            )
        if self.tokens is not None and len(self.tokens) != len(self.slots):
            raise EngineError(f"a prefix has {len(self.slots)} slots and {len(self.tokens)} tokens")

    @property
    def end(self) -> int:
        """The position behind its last slot."""
        return (self.start or 0) + len(self.slots)


def listed_slots(prefixes: Iterable[Prefix], pool: EnginePool, ids: RequestIds) -> ListedSlots:
    """The slots of prefixes, one prefix after the other, on the pool's device."""
    given = list(prefixes)
    lengths = torch.tensor([len(p.slots) for p in given], dtype=torch.int64, device="cpu")
    ends = lengths.cumsum(0)
    places = {id(p): int(end) - 1 for p, end in zip(given, ends, strict=True)}
    total = int(ends[-1]) if given else 0
    extra: list[Slots] = []  # last slots of parents that are not among the prefixes
    before = torch.arange(total, device="cpu") - 1
    for prefix, length, end in zip(given, lengths.tolist(), ends.tolist(), strict=True):
        if length:
            before[end - length] = _place_before(prefix, places, total, extra)
    slots = _together([p.slots for p in given], pool)
    source, before = torch.cat((slots, _together(extra, pool))), before.to(slots.device)
    starts = torch.tensor([p.start for p in given], dtype=torch.int64, device="cpu") - (ends - lengths)

    def each(values: Sequence[int]) -> torch.Tensor:
        """One value a prefix as one a slot."""
        return torch.tensor(values, dtype=torch.int64, device="cpu").repeat_interleave(lengths).to(slots.device)

    return ListedSlots(
        slots=slots,
        positions=(starts.repeat_interleave(lengths) + torch.arange(total, device="cpu")).to(slots.device),
        before=torch.where(before >= 0, source[before.clamp(min=0)], -1) if total else slots,
        owners=each([ids.hash(p.owner) for p in given]),
        namespaces=each([p.namespace for p in given]),
        tokens=_together([[-1] * len(p.slots) if p.tokens is None else p.tokens for p in given], pool),
    )


def _place_before(prefix: Prefix, places: dict[int, int], total: int, extra: list[Slots]) -> int:
    """Where the slot before a prefix stands: among those of the prefixes, behind them, or -1 for nowhere."""
    parent = prefix.parent
    while parent is not None and not len(parent.slots):
        parent = parent.parent
    if parent is None:
        return -1
    if id(parent) not in places:
        extra.append(parent.slots[-1:])
        places[id(parent)] = total + len(extra) - 1
    return places[id(parent)]


def _together(parts: Sequence[Slots], pool: EnginePool) -> torch.Tensor:
    """Integers ``[n]`` in one tensor on the pool's device, copied there at once where they are on the host."""
    if any(isinstance(part, torch.Tensor) and part.device.type != "cpu" for part in parts):
        return torch.cat([pool.slot_tensor(part) for part in parts])
    if all(not isinstance(part, torch.Tensor) for part in parts):
        return pool.slot_tensor([number for part in parts for number in part])
    return pool.slot_tensor(torch.cat([torch.as_tensor(part, dtype=torch.int64, device="cpu") for part in parts]))

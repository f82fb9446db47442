"""The contract of a layout.  The base class answers for a pool with one slot per token."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch

from ...kernels.slots.space import RequestPlan
from ..step_inputs import StepInputs
from ..step_view import StepView


class Declared(Protocol):
    """What layouts need from their pool; see :class:`~..kv_pool.KVPool`."""

    @property
    def request_table(self) -> torch.Tensor: ...
    @property
    def table_page_size(self) -> int: ...
    @property
    def slot_map(self) -> torch.Tensor | None: ...
    @property
    def token_offset(self) -> int: ...
    @property
    def window(self) -> int | None: ...
    @property
    def chunk(self) -> int | None: ...
    @property
    def ring(self) -> bool: ...
    @property
    def tokens_per_slot(self) -> int: ...
    @property
    def state(self) -> bool: ...
    @property
    def written_once(self) -> bool: ...


#: The window of a scratch pool whose real one has a window; the chunks where it has chunks: requests there are shorter.
SMALL_WINDOW, SMALL_CHUNK = 4, 16


@dataclasses.dataclass(frozen=True)
class ScaledDown:
    """A layout as a pool of a few slots has it, for a request of a few tokens.

    Attributes:
        fields: the arguments of ``KVPool`` that make it.
        row: slots that a row of the request table has room for, at least.
        first: tokens of the request's first forward, after which its first token is still in a slot.
        more: tokens of each later forward, which fill one slot.
    """

    fields: dict[str, Any]
    row: int = 16
    first: int = 3
    more: int = 1


class Layout:
    """One slot per token of the batch; the slot of a position is in its own column of the request table.

    Attributes:
        argument: what declares the layout, as a user writes it.
        ring: the columns of a row are used again and again.
        slot_per_token: a token has one slot, and a slot one token.
        rewritten: each step replaces the bytes and the digest of a slot, so each step must compare.
        once: a slot is written once, and read by graphs that may never write it: their bytes are checked before each
            forward.
        unlike_page_tables: why the page table that a kernel gets cannot be compared with the request table, or None.
    """

    argument = ""
    ring = False
    slot_per_token = True
    rewritten = False
    once = False
    unlike_page_tables: str | None = None

    def __init__(self, declared: Declared):
        self.declared = declared

    @classmethod
    def is_declared(cls, declared: Declared) -> bool:
        """Whether a pool declares this layout."""
        return True

    @property
    def window(self) -> int | None:
        """How many slots of a request attention still reads, the newest ones; None for all."""
        return self.declared.window

    @property
    def room(self) -> int:
        """Slots that a row of the request table has."""
        return self.declared.request_table.shape[1] * self.declared.table_page_size

    def refusal(self) -> str | None:
        """Why the rest of the declaration does not fit, as text; None if it does."""
        return None

    def describe(self) -> list[str]:
        """The layout in words, for the line about the pool."""
        return []

    def reserve(self, place: int, inputs: StepInputs) -> None:
        """Register the memory that the plans of the pool given in this place need."""

    def narrowed(self, place: int, plan: RequestPlan, view: StepView) -> RequestPlan:
        """The plan of a forward, out of one that has a slot for each token of the batch."""
        return plan

    def token_at(self, position: int) -> int:
        """The position of the token that reports name for a slot, which goes by ``position`` among its request's."""
        return position

    def entries(self, start: int, stop: int) -> list[int | None]:
        """Where a forward writes the tokens from ``start`` to ``stop``: slots of the request's row, or None."""
        return list(range(start, stop))

    def scaled_down(self) -> ScaledDown:
        """The same layout for a scratch pool: proof that the checks work needs few slots."""
        window = None if self.declared.window is None else SMALL_WINDOW
        return ScaledDown({"window": window, "chunk": None if self.declared.chunk is None else SMALL_CHUNK})

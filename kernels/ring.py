"""The ring of violations: the columns of a row, and its writer.

Kernels append and count, the host reads.  :func:`append` is the one writer in torch, plain code and vectorised;
:mod:`.triton_ring` has the one of the Triton kernels.
"""

from __future__ import annotations

import dataclasses
import enum
import functools

import torch

from .turns import taking_turns

#: One value for all rows, or one each.
Values = torch.Tensor | int

#: A position, or a row's origin, that nothing showed.
UNKNOWN = -(2**31)


class Ring(enum.IntEnum):
    """Columns of a violation's row, int64 each."""

    STEP = 0
    HALF = 1
    CHECK = 2
    PHASE = 3
    LENIENT = 4
    SLOT = 5
    ORIGIN = 6
    STORED = 7
    FOUND = 8
    DETAIL = 9
    REQUEST = 10  # hash of the request's id, 0 if unknown
    POSITION = 11  # token position, UNKNOWN where nothing shows it
    WHY = 12  # what exactly failed, a checks.Why; 0 where the check says it
    FORWARD = 13  # which forward of which step of the engine, Word.FORWARD when it was found


class Word(enum.IntEnum):
    """Words of :attr:`Control.words`, int64 each."""

    HEAD = 0  # rows ever written to the ring, kept or not
    DRAINED = 1  # rows the host has taken out; a row lies at its number modulo the capacity
    STEP = 2  # guarded graph calls
    BOXED = 3  # whether the black box has a row
    FORWARD = 4  # int32 each: index of the engine's forward that began last, number of its step; -1 without an engine
    EVERY = 5  # N of the share 1/N of the slots whose bytes are due in a step, where a budget sets it
    BELL = 6  # address of :attr:`Control.bell`, 0 without one


#: A ``verify_every`` that stands for what :attr:`Word.EVERY` says when a kernel runs: captured graphs follow it.
BY_BUDGET = 0

#: The halves of :attr:`Word.FORWARD`.
HALF_FORWARD, HALF_STEP = 0, 1


def forward_and_step(word: int) -> tuple[int, int]:
    """The halves of :attr:`Word.FORWARD`, each -1 without an engine."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000, word >> 32


@dataclasses.dataclass
class Control:
    """What one device's kernels report into: a ring of violations and a few words beside it."""

    words: torch.Tensor  # int64 [len(Word)]
    ring: torch.Tensor  # int64 [capacity + 1, len(Ring)]; the last row takes what has no room
    stamps: torch.Tensor  # int64 [2, slots]: which write reached a slot last, and which slots were written twice
    blackbox: torch.Tensor | None = None  # pinned int64 [len(Ring) + 1]: survives a device-side assert
    #: pinned int64 [2]: not 0 once a Triton kernel, or :func:`append`, wrote a row, until the host hushes it
    bell: torch.Tensor | None = None

    @classmethod
    def allocate(cls, capacity: int, device: torch.device) -> Control:
        box = bell = None
        words = torch.zeros(len(Word), dtype=torch.int64, device=device)
        if device.type == "cuda":  # on the host, also where a user has made the GPU the default device
            box = cls.black_box(pinned=True)
            bell = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)
            words[Word.BELL] = bell.data_ptr()
        words[Word.FORWARD] = -1
        words[Word.EVERY] = 1
        return cls(
            words=words,
            ring=torch.zeros(capacity + 1, len(Ring), dtype=torch.int64, device=device),
            stamps=torch.full((2, 0), -1, dtype=torch.int64, device=device),
            blackbox=box,
            bell=bell,
        )

    @staticmethod
    def black_box(pinned: bool) -> torch.Tensor:
        """int64 ``[len(Ring) + 1]`` on the host, a row that says nothing yet, and whether it does."""
        box = torch.zeros(len(Ring) + 1, dtype=torch.int64, device="cpu", pin_memory=pinned)
        box[Ring.POSITION], box[Ring.FORWARD] = UNKNOWN, -1
        return box

    @property
    def flag(self) -> torch.Tensor:
        """int64 ``[2]``, part of ``words``: rows ever, rows read."""
        return self.words[Word.HEAD : Word.DRAINED + 1]

    @property
    def capacity(self) -> int:
        return self.ring.shape[0] - 1

    @functools.cached_property
    def heard(self) -> memoryview | None:
        """The two words of the bell as the host reads them: an item takes a thirtieth of a tensor's."""
        return None if self.bell is None else self.bell.numpy().data

    def rang(self) -> bool:
        """Whether a device has written rows since :meth:`hush`, as far as the host knows; asks the device nothing."""
        heard = self.heard
        return heard is not None and (heard[0] or heard[1]) != 0

    def hush(self) -> None:
        """The host is about to read the ring: later rows ring again."""
        if self.heard is not None:
            self.heard[0] = self.heard[1] = 0

    def every(self, verify_every: int) -> int | torch.Tensor:
        """``verify_every``, or int64 ``[]`` where the budget's word stands for it."""
        return self.words[Word.EVERY] if verify_every == BY_BUDGET else verify_every


@taking_turns
def append(
    control: Control,
    mask: torch.Tensor | bool,
    *,
    half: Values,
    check: Values,
    phase: int,
    slot: Values,
    stored: Values,
    found: Values,
    detail: Values = 0,
    request: Values = 0,
    position: Values = UNKNOWN,
    why: Values = 0,
    origin: Values = UNKNOWN,
    lenient: bool = False,
) -> None:
    """Append one row per entry of ``mask`` that is set, without a host sync on a GPU.

    Rows without room are counted and dropped.

    Args:
        mask: bool, of any shape, the others broadcast to it; True for one row.
    """
    if isinstance(mask, bool):
        mask = torch.tensor([mask], device=control.words.device)
    columns = {
        Ring.HALF: half,
        Ring.CHECK: check,
        Ring.PHASE: int(phase),
        Ring.LENIENT: int(lenient),
        Ring.SLOT: slot,
        Ring.ORIGIN: origin,
        Ring.STORED: stored,
        Ring.FOUND: found,
        Ring.DETAIL: detail,
        Ring.REQUEST: request,
        Ring.POSITION: position,
        Ring.WHY: why,
    }
    given = {c: v.expand(mask.shape).reshape(-1) for c, v in columns.items() if isinstance(v, torch.Tensor)}
    mask = mask.reshape(-1)
    if not mask.is_cuda:
        # sizes that depend on data are free on the CPU, and usually there is nothing to report
        if not bool(mask.any()):
            return
        given = {c: v[mask] for c, v in given.items()}
        mask = mask[mask]
    rows = torch.zeros(mask.shape[0], len(Ring), dtype=torch.int64, device=mask.device)
    rows[:, Ring.STEP] = control.words[Word.STEP]
    rows[:, Ring.FORWARD] = control.words[Word.FORWARD]
    for column, value in {**columns, **given}.items():
        rows[:, column] = value
    number = control.words[Word.HEAD] + mask.cumsum(0) - 1
    keep = mask & (number - control.words[Word.DRAINED] < control.capacity)
    control.ring[torch.where(keep, number % control.capacity, control.capacity)] = rows
    control.words[Word.HEAD] += mask.sum()
    if control.bell is not None:  # a word of its own: what is not unread here must not silence a kernel
        control.bell[1:].copy_(control.words[Word.HEAD, None] - control.words[Word.DRAINED], non_blocking=True)

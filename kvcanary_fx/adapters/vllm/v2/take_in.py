"""A step's inputs out of what the runner prepared on the device and what the host says, in one launch of a graph.

What the host says lies in a ring of pinned memory, the :class:`Landing`, that the kernel reads: a copy would take the
host 15 us in each step, and the device a launch more.  An entry of the ring is int64::

    requests, tokens, number of the step, pages, whether the requests' fields are new, which calls of the allocator the
        step takes along (:class:`.events.Along`), who had all pages that it hands out; -1 requests: no forward
    group, place, page, owner             of each new page of a request table; the owner, if it is handed out here
    row, owner, namespace, index, added   a block of ``room`` entries each, by request

0 requests: nothing was written, or the device has read it.  A launch that finds this goes on as the last one did, with
the next step: most steps of a small model, which wait for the host, are such, and to write an entry took it 4 us (1B,
H200).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ....kernels.compile_ahead import launch_or_compile
from ....kernels.ring import HALF_FORWARD, HALF_STEP
from ....kernels.slots.events import RECORD, Due
from ....kernels.staging import lasting, packing
from ....kernels.writes.geometry import on_device

#: Words of an entry before the pages; room for pages; fields of a request.
HEAD, PAGES, FIELDS = 7, 2048, 5

#: Pages of a launch for few tokens, at most: see :func:`most_pages`.
FEW = 512

#: Of these words, those for the number of pages, for the allocator's calls, and for who had the pages.
COUNT, DUE, HOLDER = 3, 5, 6

#: Writes them to memory, in a third of the time that an assignment to a slice of a numpy array takes.
_pack_head = struct.Struct(f"{HEAD}q").pack_into

#: Steps that the host may be ahead of the device: entries of the ring.
AHEAD = 32

#: Of so many entries the first is always written, so that the host sees how far the device is.
WRITTEN = AHEAD // 2

#: Requests or tokens of a program.
BLOCK = 256


class Landing:
    """What the host tells the device of a step.

    Each :meth:`send` is for the one launch that follows it: both sides count the launches to know the entry.

    Attributes:
        next: the entry of the next launch.  In the place of a :meth:`send`, whoever has nothing to say but that the
            step goes on as the last one did adds 1; not at a multiple of :data:`WRITTEN`.
        ring: int64 ``[AHEAD, HEAD + RECORD * PAGES + FIELDS * room]`` on the host.
        fields: int64 ``[FIELDS * room]`` on the device, of the requests of the last step.
        turn: int64 ``[2]`` on the device: the entry that the next launch reads, and programs that have read it.
    """

    def __init__(self, room: int, device: torch.device):
        self.room, self._device = room, device
        pinned, size = device.type == "cuda", HEAD + RECORD * PAGES + FIELDS * room
        self.ring = lasting(AHEAD, size, dtype=torch.int64, device="cpu", pin_memory=pinned).zero_()
        self.fields = lasting(FIELDS * room, dtype=torch.int64, device=device).zero_()
        self.turn = lasting(2, dtype=torch.int64, device=device).zero_()
        self._heads = [memoryview(entry).cast("B") for entry in self.ring.numpy()]
        self._words = [head.cast("q") for head in self._heads]
        self._fields: Sequence[Sequence[int]] = ()
        self.next, self._fresh = 0, False

    @property
    def due(self) -> Due:
        """Where a launch before that one finds which calls the step takes along."""
        return Due(self.ring, self.turn, DUE, COUNT, HOLDER, HEAD)

    def restart(self) -> None:
        """Launches without a :meth:`send` are over: a warm-up."""
        self.turn.zero_()
        self.next = 0

    def requests(self, *fields: Sequence[int]) -> None:
        """Another batch: its rows, owners, namespaces, indices of their state and added tokens."""
        self._fields, self._fresh = fields, True

    def send(
        self,
        requests: int,
        tokens: int,
        step: int,
        pages: Sequence[int],
        told: bool = True,
        calls: int = 0,
        holder: int = 0,
    ) -> None:
        """Write the entry of the next launch, in the current stream.

        Args:
            pages: group, place in its table, page and owner, of at most :func:`most_pages`.
            told: with what :meth:`requests` said last, if no entry has it yet.
            calls: which calls of the allocator the step takes along, of :class:`.Along`.
            holder: of pages that are handed out, the hash of the id that had all of them, and releases them first.
        """
        turn = self.next
        self.next = (turn + 1) % AHEAD
        # once the entry that is written half a round before this one has been read, the launches that read this one and
        # the next few in the last round have ended.  An event for each half of the ring took 50 to 65 us in one step of
        # 16 (1B, H200)
        if not turn % WRITTEN and self._words[turn - WRITTEN][0]:
            self._catch_up()
        count, fresh = len(pages) // RECORD, told and self._fresh
        _pack_head(self._heads[turn], 0, requests, tokens, step, count, fresh, calls, holder)
        if not count and not fresh:
            return
        if count:
            packing(RECORD * count).pack_into(self._heads[turn], 8 * HEAD, *pages)
        if fresh:
            at, room = HEAD + RECORD * PAGES, self.room
            for number, field in enumerate(self._fields):
                packing(len(field)).pack_into(self._heads[turn], 8 * (at + number * room), *field)
            self._fresh = False

    def _catch_up(self) -> None:
        """The device is half a round behind the host: wait for it."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def skip(self) -> None:
        """The next launch, in the current stream, is in a replay of a model's graph that is no forward of the
        session's, or one that was checked before it: see :attr:`.RequestPlan.counts`."""
        self.send(-1, 0, 0, (), told=False)


def most_pages(tokens: int) -> int:
    """New pages, at most, that a launch for so many tokens takes in: it has a program for each block of them.

    32 prompts of 512 tokens have 1,056.  To send them to the tables by themselves took the host 0.27 ms of such a step,
    launches left out (CPU core); here it takes 0.06.
    """
    return min(PAGES, max(FEW, tokens))


class Inputs(NamedTuple):
    """The step inputs of a session, and where they come from.

    Attributes:
        counts: int64 ``[3]``.
        live: the same, for the checks in a graph of the model, whose replay may be no forward.
        rows, owners, namespaces, prefix_lens, extend_lens: int64 ``[bs]``.
        tokens, positions: int64 ``[n]``.
        slots: int64 ``[n]`` for each group.
        tables: int32 ``[requests, width]``, the request table of each group.
        clock: int64 ``[1]``, see :meth:`.LayerChecks.clock`.
        stored: integer ``[states]``, tokens in the cache, by the index of the request's state.
        starts: integer ``[> bs]``, where each request's tokens begin.
        given_tokens, given_positions: integer ``[>= n]``.
        mapping: int64 ``[groups, >= n]``, the slots by group number.
        groups: the number of each group.
    """

    counts: torch.Tensor
    live: torch.Tensor
    rows: torch.Tensor
    owners: torch.Tensor
    namespaces: torch.Tensor
    prefix_lens: torch.Tensor
    extend_lens: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: list[torch.Tensor]
    tables: list[torch.Tensor]
    clock: torch.Tensor
    stored: torch.Tensor
    starts: torch.Tensor
    given_tokens: torch.Tensor
    given_positions: torch.Tensor
    mapping: torch.Tensor
    groups: list[int]


def naive(landing: Landing, inputs: Inputs) -> None:
    """Plain code, the reference."""
    turn = int(landing.turn[0])
    entry = landing.ring[turn].to(landing.fields.device, copy=True)
    landing.ring[turn, 0] = landing.ring[turn, DUE] = 0
    landing.turn[0] = (turn + 1) % AHEAD
    requests, tokens, step, pages, fresh, *_ = entry[:HEAD].tolist()
    if not requests:
        requests, tokens, step = inputs.live.tolist()
        step, pages, fresh = step + 1, 0, False
    inputs.live.copy_(torch.tensor([requests, tokens, step], device="cpu"))
    if requests < 0:
        return
    kept, said = (
        words.view(FIELDS, landing.room)[:, :requests] for words in (landing.fields, entry[HEAD + RECORD * PAGES :])
    )
    if fresh:
        kept.copy_(said)
    rows, owners, namespaces, index, added = kept
    inputs.counts.copy_(torch.tensor([requests, tokens, step], device="cpu"))
    halves = inputs.clock.view(torch.int32)
    halves[HALF_FORWARD], halves[HALF_STEP] = 0, step
    inputs.rows[:requests], inputs.owners[:requests], inputs.namespaces[:requests] = rows, owners, namespaces
    inputs.prefix_lens[:requests] = inputs.stored[index].long()
    spans = inputs.starts[: requests + 1].diff().long()
    inputs.extend_lens[:requests] = torch.where(added < 0, spans, added)
    inputs.tokens[:tokens] = inputs.given_tokens[:tokens].long()
    inputs.positions[:tokens] = inputs.given_positions[:tokens].long()
    for out, group in zip(inputs.slots, inputs.groups, strict=True):
        out[:tokens] = inputs.mapping[group, :tokens]
    for group, place, page, _ in entry[HEAD : HEAD + RECORD * pages].view(pages, RECORD).tolist():
        inputs.tables[group].view(-1)[place] = page


class TakeIn:
    """Fills the step inputs."""

    def __init__(self, landing: Landing, inputs: Inputs):
        self._landing, self._inputs = landing, inputs
        addresses = [*(t.data_ptr() for t in inputs.slots), *(t.data_ptr() for t in inputs.tables)]
        device = inputs.counts.device
        self._addresses = torch.tensor([*addresses, *inputs.groups], dtype=torch.int64, device="cpu").to(device)

    def __call__(self, requests: int, tokens: int) -> None:
        """For batches of at most so many requests and tokens."""
        if self._inputs.counts.is_cuda:
            self.launch(requests, tokens)
        else:
            naive(self._landing, self._inputs)

    def launch(self, requests: int, tokens: int) -> None:
        """The Triton kernel."""
        from .triton_take_in import take_in_kernel

        landing, inputs = self._landing, self._inputs
        most = max(requests, tokens, FEW)
        with on_device(inputs.counts):
            launch_or_compile(
                take_in_kernel,
                (-(-most // BLOCK),),
                landing.ring,
                landing.ring.stride(0),
                landing.turn,
                landing.fields,
                landing.room,
                inputs.counts,
                inputs.live,
                inputs.clock,
                inputs.rows,
                inputs.owners,
                inputs.namespaces,
                inputs.prefix_lens,
                inputs.extend_lens,
                inputs.stored,
                inputs.starts,
                inputs.given_tokens,
                inputs.given_positions,
                inputs.mapping,
                inputs.mapping.stride(0),
                inputs.tokens,
                inputs.positions,
                self._addresses,
                len(inputs.tables),
                AHEAD=AHEAD,
                HEAD=HEAD,
                DUE=DUE,
                RECORD=RECORD,
                PAGES=PAGES,
                GROUPS=len(inputs.slots),
                BLOCK=BLOCK,
            )

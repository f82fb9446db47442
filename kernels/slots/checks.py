"""The identity checks of a forward: the slots a request is about to read, and those it is about to write.

Vectorised torch without host syncs, so that the same code runs on the CPU, on a GPU and inside a CUDA graph.
It walks the rows of the request table itself: there is no plan of what to verify that could overflow.

Bit-equal to :mod:`.naive`, which says in plain loops what is checked.
"""

from __future__ import annotations

import torch

from ..checks import Check, Phase, Why
from ..findings import Findings
from ..turns import taking_turns
from .chain import SEED, mix_tensor
from .history import note_reads, note_writes
from .planned import plan_writes, rival_writers, unmark_writes
from .space import REFERENCE, Flag, RequestPlan, SlotSpace, SpaceCount
from .tokens import (
    Written,
    counted_tokens,
    kept_bits,
    links_up_to,
    of_padding,
    planned_positions,
    real_requests,
    repeats,
    through_writers,
    token_requests,
)

#: Positions of a row that are processed together; bounds the scratch memory of a walk.
CHUNK = 4096


def namespace_seed(namespaces: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Where each request's chain starts, int64 ``[bs]``; namespace 0 is the default one.

    Only the start is namespaced.  Every later link is the difference of two neighbours, so a prefix of
    another namespace shows once, at its first slot, and a splice of two shows where they meet.
    """
    if namespaces is None:
        return torch.full_like(like, SEED, dtype=torch.int64)
    spaces = namespaces.to(torch.int64)
    return torch.where(spaces == 0, SEED, SEED + mix_tensor(spaces, torch.full_like(spaces, -1)))


def table_slots(plan: RequestPlan, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The slots in the request table, unchecked, in this pool's index space.

    Args:
        requests, positions: int64, shapes that broadcast together.
    """
    rows = plan.rows.to(torch.int64).clamp(0, plan.table.shape[0] - 1)[requests]
    pages = positions // plan.page_size
    columns = plan.table.shape[1]
    pages = pages % columns if plan.ring else pages.clamp(0, columns - 1)
    raw = plan.table[rows, pages].to(torch.int64) * plan.page_size + positions % plan.page_size
    return mapped(raw, plan.slot_map)


def mapped(slots: torch.Tensor, slot_map: torch.Tensor | None) -> torch.Tensor:
    """Slots of the table's index space in this pool's; -1 where the map has no entry."""
    if slot_map is None:
        return slots
    known = (slots >= 0) & (slots < slot_map.shape[0])
    return torch.where(known, slot_map[slots.clamp(0, slot_map.shape[0] - 1)].to(torch.int64), -1)


def walk(space: SlotSpace, plan: RequestPlan) -> None:
    """Before a forward: is every slot that attention will read the one it should be?

    Stamps the slots that passed and are due, for the layers' content checks.
    """
    forward = (plan.counts[0] >= 0).to(torch.int32)
    space.clock.add_(forward)
    space.counters[SpaceCount.FORWARDS] += forward
    plan_writes(space, plan)
    stamped = []
    if plan.rows.shape[0] and plan.table.numel():
        _check_rows(space, plan)
        stop = walked(space, plan)
        stamped = [_walk_columns(space, plan, at, min(at + CHUNK, stop)) for at in range(0, stop, CHUNK)]
    if not space.reads.is_cuda:
        _list_reads(space, stamped)


def _list_reads(space: SlotSpace, stamped: list[torch.Tensor]) -> None:
    """List the stamped slots once for all layers: finding them by their stamps would scan the pool."""
    slots = torch.cat(stamped).unique() if stamped else space.listed[:0]
    slots = slots[slots != space.nowhere]
    space.listed[: slots.numel()] = slots.to(torch.int32)
    space.listed_count.fill_(slots.numel())


def walked(space: SlotSpace, plan: RequestPlan) -> int:
    """How many positions of each request a walk checks: from 0 on, in a ring from the window's first on."""
    if plan.ring:
        return max((space.window or 1) - 1, 0)
    return min(plan.columns, plan.width)


def first_read(space: SlotSpace, prefix: torch.Tensor) -> torch.Tensor:
    """int64, like ``prefix``: the first position that a forward reads of requests with so many tokens stored."""
    first = torch.zeros_like(prefix)
    if space.window is not None:
        first = (prefix - space.window + 1).clamp(min=0)
    return first if space.chunk is None else torch.maximum(first, prefix // space.chunk * space.chunk)


def _row_exists(plan: RequestPlan) -> torch.Tensor:
    return (plan.rows >= 0) & (plan.rows < plan.table.shape[0])


def _check_rows(space: SlotSpace, plan: RequestPlan) -> None:
    """The rows of the request table: do they exist, and are they wide enough?"""
    lengths = plan.prefix_lens.to(torch.int64) + plan.extend_lens
    findings = Findings(real_requests(plan), space.checks)
    findings.add(Why.NO_SUCH_ROW, ~_row_exists(plan), plan.table.shape[0], plan.rows.to(torch.int64))
    findings.add(Why.ROW_TOO_NARROW, lengths > plan.width, plan.width, lengths)
    findings.report(space.control, space.space_id, Phase.PRE, -1, request=plan.owners, detail=-1)


def _walk_columns(space: SlotSpace, plan: RequestPlan, start: int, stop: int) -> torch.Tensor:
    """Check positions from ``start`` on: int64 ``[n]``, the slots that were stamped, ``space.nowhere`` among them."""
    position = torch.arange(start, stop, device=plan.rows.device).unsqueeze(0)
    prefix = plan.prefix_lens.to(torch.int64).unsqueeze(1)
    first = first_read(space, prefix)
    position = position + first if plan.ring else position
    live = (real_requests(plan) & _row_exists(plan)).unsqueeze(1) & (position < prefix) & (position >= first)
    requests = torch.arange(live.shape[0], device=live.device).unsqueeze(1)
    slot = table_slots(plan, requests, position)
    outside = (slot < 0) | (slot >= space.slots)
    at = torch.where(outside, space.nowhere, slot)
    findings = Findings(live, space.checks)
    _check_place(findings, space, plan, slot, at, outside)
    before = table_slots(plan, requests, (position - 1).clamp(min=0))
    known = (before >= 0) & (before < space.slots) & (position > first)
    _check_identity(findings, space, plan, at, torch.where(known, before, space.nowhere), position)
    findings.report(
        space.control,
        space.space_id,
        Phase.PRE,
        slot,
        position,
        request=plan.owners.unsqueeze(1),
        detail=torch.where(outside, -1, space.tokens[at]),
    )
    space.counters[SpaceCount.CHECKED] += live.sum()
    if not space.checks & Check.CONTENT:
        return at[:0].flatten()
    sound = live & ~outside & ((space.flags[at] & Flag.WRITTEN) != 0) & (space.flags[at] >= REFERENCE)
    turn = (at + plan.counts[2]) % space.control.every(space.verify_every) == 0
    due = sound & (turn | ((space.flags[at] & Flag.DUE) != 0))
    stamped = torch.where(due, at, space.nowhere).flatten()
    space.flags[stamped] &= ~int(Flag.DUE)
    note_reads(space, torch.where(space.reads[stamped] == space.clock, space.nowhere, stamped))
    space.reads[stamped] = space.clock
    return stamped


def _check_place(
    findings: Findings,
    space: SlotSpace,
    plan: RequestPlan,
    slot: torch.Tensor,
    at: torch.Tensor,
    outside: torch.Tensor,
) -> None:
    """Is the slot one that this request may read, and does it hold a token?"""
    flags, owner, request = space.flags[at], space.owners[at], plan.owners.unsqueeze(1)
    reserved = (flags & Flag.RESERVED) != 0
    findings.add(Why.OUT_OF_RANGE, outside, slot, -1)
    findings.add(Why.RESERVED_SLOT, reserved & ~outside, slot, slot)
    findings.stop(outside | reserved)
    if space.owner_known:
        free = flags < REFERENCE
        foreign = (owner != 0) & (request != 0) & (owner != request) & (flags < 2 * REFERENCE)
        findings.add(Why.READ_AFTER_FREE, free, request, 0)
        findings.add(Why.FOREIGN_READ, foreign & ~free, request, owner)
    unwritten = (flags & Flag.WRITTEN) == 0
    findings.add(Why.NEVER_WRITTEN, unwritten, 0, 0)
    rival, writer = rival_writers(space, plan, at)
    findings.add(Why.READ_WHILE_WRITTEN, rival, request, writer)
    findings.stop(unwritten)
    rejected = (flags & Flag.REJECTED) != 0
    findings.add(Why.REJECTED_TOKEN, rejected, 0, space.tokens[at].to(torch.int64))
    findings.stop((flags & Flag.NAMELESS) != 0)


def _check_identity(
    findings: Findings,
    space: SlotSpace,
    plan: RequestPlan,
    at: torch.Tensor,
    before: torch.Tensor,
    position: torch.Tensor,
) -> None:
    """Does the slot hold the token that belongs at this position of this request?

    Args:
        before: the slot of the position before, or the entry that belongs to no slot.
    """
    token, stored = space.tokens[at].to(torch.int64), space.positions[at].to(torch.int64)
    requests = torch.arange(at.shape[0], device=at.device).unsqueeze(1)
    _check_token(findings, space, plan, requests, position, token)
    misplaced = stored != position
    findings.add(Why.WRONG_POSITION, misplaced, position, stored)
    link = mix_tensor(token, stored)
    seeds = namespace_seed(plan.namespaces, plan.owners).unsqueeze(1)
    start = seeds + link
    begins = (position == 0) & ~misplaced
    findings.add(Why.OTHER_NAMESPACE, begins & (space.chain[at] != start), start, space.chain[at])
    flags = space.flags[before]
    comparable = (before != space.nowhere) & ((flags & Flag.WRITTEN) != 0) & ((flags & Flag.NAMELESS) == 0)
    after = space.chain[before] + link
    broken = comparable & (position > 0) & (space.chain[at] != after)
    findings.add(Why.WRONG_PREDECESSOR, broken, after, space.chain[at])


def _check_token(
    findings: Findings,
    space: SlotSpace,
    plan: RequestPlan,
    requests: torch.Tensor,
    position: torch.Tensor,
    token: torch.Tensor,
) -> None:
    """Is the token the one that the request's own history has at this position?"""
    if plan.history is None or plan.history_lens is None or not plan.history.numel():
        return
    place = position + space.token_offset
    valid = place < plan.history_lens.to(torch.int64)[requests].clamp(max=plan.history.shape[1])
    of = plan.rows.to(torch.int64).clamp(0, plan.history.shape[0] - 1)[requests] if plan.history_by_row else requests
    expected = kept_bits(plan.history[of, place.clamp(max=plan.history.shape[1] - 1)])
    findings.add(Why.WRONG_TOKEN, valid & (token != expected), expected, token)


def check_writes(space: SlotSpace, plan: RequestPlan) -> None:
    """Before a forward, after its :func:`walk`: may its tokens go where they are planned to?  Writes ``real_slots``."""
    if plan.slots.shape[0] == 0 or plan.rows.shape[0] == 0:
        return
    request, place, there = counted_tokens(plan)
    padding = there & of_padding(plan, request)
    real = there & ~padding
    position = planned_positions(plan, request, place)
    slot = plan.slots.to(torch.int64)
    outside = (slot < 0) | (slot >= space.slots)
    given = plan.memory_for("real_slots", slot.shape[0])
    others = torch.where(plan.counts[0] >= 0, -1, given)  # if there is no forward, another one's are there
    given.copy_(torch.where(real & ~outside, slot, others))
    at = torch.where(outside | ~there, space.nowhere, slot)
    flags, owner, mine = space.flags[at], space.owners[at], plan.owners[request]
    reserved = (flags & Flag.RESERVED) != 0
    nowhere = (reserved & ~outside) | (slot == -1)
    findings = Findings(there & ~(nowhere & _behind_window(space, plan, request, position, real)), space.checks)
    findings.add(Why.PADDING_WRITES, padding & ~outside & ~reserved, slot, slot)
    findings.stop(padding)
    findings.add(Why.OUT_OF_RANGE, outside, slot, -1)
    findings.add(Why.RESERVED_SLOT, reserved & ~outside, slot, slot)
    findings.stop(outside | reserved)
    findings.add(Why.PLANNED_TWICE, repeats(torch.where(real, at, space.nowhere), space.nowhere), slot, slot)
    if space.owner_known:
        free, shared = flags < REFERENCE, flags >= 2 * REFERENCE
        foreign = (owner != 0) & (mine != 0) & (owner != mine)
        findings.add(Why.WRITE_AFTER_FREE, free, mine, 0)
        findings.add(Why.WRITE_SHARED, shared, mine, owner)
        findings.add(Why.OVERWRITE, foreign & ~free & ~shared, mine, owner)
        if space.once:
            findings.add(Why.WRITTEN_BEFORE, (flags & Flag.WRITTEN) != 0, mine, owner)
    if plan.table.numel():
        column = plan.prefix_lens.to(torch.int64)[request] + place  # a tree's tokens are in the row one by one
        there = table_slots(plan, request, column)
        fits = (column < plan.width) & _row_exists(plan)[request]
        findings.add(Why.TABLE_DIFFERS, fits & (there != slot), slot, there)
    if plan.positions is not None:
        given = plan.positions.to(torch.int64)
        findings.add(Why.WRONG_POSITION, given != position, position, given)
    tokens = kept_bits(plan.tokens)
    _check_token(findings, space, plan, request, position, tokens)
    findings.report(space.control, space.space_id, Phase.PRE, slot, position, request=mine, detail=tokens)
    unmark_writes(space, plan)


def _behind_window(
    space: SlotSpace, plan: RequestPlan, request: torch.Tensor, position: torch.Tensor, real: torch.Tensor
) -> torch.Tensor:
    """bool ``[n]``: tokens of a long prefill that no later forward reads, behind the window or in a chunk before, so
    that they may be stored nowhere.

    Never a request's newest token, which attention reads in this forward.
    """
    if space.window is None and space.chunk is None:
        return torch.zeros_like(real)
    newest = plan.prefix_lens.to(torch.int64) + plan.extend_lens - 1
    if plan.parents is not None:  # a tree is not as deep as it has tokens
        newest = torch.zeros_like(newest).scatter_reduce(0, request, torch.where(real, position, 0), "amax")
    newest = newest[request]
    behind = torch.zeros_like(real)
    if space.window is not None:
        behind |= position <= newest - max(space.window - 1, 1)
    if space.chunk is not None:
        behind |= position < torch.minimum((newest + 1) // space.chunk * space.chunk, newest)
    return behind


@taking_turns
def check_before(space: SlotSpace, plan: RequestPlan) -> None:
    """:func:`walk` and :func:`check_writes`."""
    walk(space, plan.reads or plan)
    check_writes(space, plan)


def may_store_ahead(plan: RequestPlan) -> bool:
    """Whether the module has :func:`.gpu.check_and_store` for a plan: without a GPU it takes as long as one after the
    other."""
    return False


@taking_turns
def store(space: SlotSpace, plan: RequestPlan) -> None:
    """After a forward: remember who is in the slots that it wrote."""
    if plan.slots.shape[0] == 0 or plan.rows.shape[0] == 0:
        return
    request, place, real = token_requests(plan)
    slot = plan.slots.to(torch.int64)
    real = real & (slot >= 0) & (slot < space.slots)
    at = torch.where(real, slot, space.nowhere)
    real = real & ((space.flags[at] & Flag.RESERVED) == 0)
    at = torch.where(real, at, space.nowhere)
    expected = planned_positions(plan, request, place)
    position = expected if plan.positions is None else plan.positions.to(torch.int64)
    tokens = kept_bits(plan.tokens)
    links = links_up_to(plan, torch.where(real, mix_tensor(tokens, position), 0), place)
    chain = _chain_before(space, plan, Written(at, request, links))[request] + links
    space.tokens[at] = tokens.to(torch.int32)
    space.positions[at] = position.to(torch.int32)
    space.chain[at] = chain
    space.flags[at] = (space.flags[at] | int(Flag.WRITTEN)) & ~int(Flag.NAMELESS | Flag.REJECTED)
    note_writes(space, at, plan.owners[request])
    space.counters[SpaceCount.RECORDED] += real.sum()


def _chain_before(space: SlotSpace, plan: RequestPlan, written: Written) -> torch.Tensor:
    """int64 ``[bs]``: the chain of the last slot of each request's prefix, its namespace's seed without one."""
    seeds = namespace_seed(plan.namespaces, plan.owners)
    if not plan.table.numel():
        return seeds
    prefix = plan.prefix_lens.to(torch.int64)
    last = table_slots(plan, torch.arange(prefix.shape[0], device=prefix.device), (prefix - 1).clamp(min=0))
    known = (prefix > 0) & (last >= 0) & (last < space.slots)
    stored = torch.where(known, space.chain[torch.where(known, last, space.nowhere)], seeds)
    return through_writers(torch.where(known, last, -1), stored, written) if plan.in_flight else stored


def planned_slots(space: SlotSpace, plan: RequestPlan) -> torch.Tensor:
    """bool ``[slots + 1]``: the slots that a forward may write, those that it plans to and the reserved ones."""
    mask = (space.flags & int(Flag.RESERVED)) != 0
    if plan.real_slots is not None:
        mask.index_fill_(0, torch.where(plan.real_slots < 0, space.nowhere, plan.real_slots), True)
    return mask


def taken_of(plan: RequestPlan, received: torch.Tensor) -> torch.Tensor:
    """The slots that a write received, as ``check_received`` takes them: one for each of the plan's tokens.

    Args:
        received: int64 ``[m]``: one for each token of the batch, or one for each of the plan's.
    """
    if plan.taken is None or received.shape[0] != plan.taken.shape[0]:
        return received
    return received[plan.taken]


def slots_of_memory(index: torch.Tensor, unit: int, stride: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """The slots of rows of an engine's memory, int64; -1 for a row that holds none.

    Args:
        index: integer ``[n]``, rows of memory, of which each page has ``stride``, the first ``unit`` of them its slots.
        out: int64 ``[n]``, where they go; None: new memory.
    """
    page = index.div(stride, rounding_mode="floor")
    offset = index - page * stride
    slots = torch.where((index >= 0) & (offset < unit), page * unit + offset, -1).to(torch.int64)
    return slots if out is None else out.copy_(slots)


def check_indices(
    space: SlotSpace, plan: RequestPlan, index: torch.Tensor, longest: int, unit: int, stride: int
) -> None:
    """Before attention: are the rows of memory that it gathers those of the request table?

    Args:
        index: integer ``[n]``, as :func:`slots_of_memory` takes it: those of all positions of a request, request by
            request, with those of the tokens that this forward adds.  More of them are padding.
        longest: no request has more positions.
    """
    if plan.rows.shape[0] == 0 or not plan.table.numel():
        return
    total = plan.prefix_lens.to(torch.int64) + plan.extend_lens
    first = (total.cumsum(0) - total).unsqueeze(1)
    position = torch.arange(longest, device=index.device).unsqueeze(0)
    live = (real_requests(plan) & _row_exists(plan)).unsqueeze(1) & (position < total.unsqueeze(1))
    known = torch.nn.functional.pad(index.to(torch.int64), (0, 1), value=-1)
    got = slots_of_memory(known[(first + position).clamp(max=index.shape[0])], unit, stride)
    requests = torch.arange(plan.rows.shape[0], device=index.device).unsqueeze(1)
    slot = table_slots(plan, requests, position)
    findings = Findings(live, space.checks)
    findings.add(Why.READ_DIFFERS, got != slot, slot, got)
    request = plan.owners.unsqueeze(1)
    findings.report(space.control, space.space_id, Phase.PRE, slot, position.expand(live.shape), request, detail=-1)


def check_received(space: SlotSpace, plan: RequestPlan, received: torch.Tensor, half_id: int) -> None:
    """In a layer's write: are the slots it received the planned ones, in the order of the tokens?

    Args:
        received: int64 ``[m]``, slots as the write got them; what goes beyond the real tokens is padding.  A token of a
            row that means padding may have got any reserved slot, or none.
        half_id: the half that writes, for the report.
    """
    n = plan.slots.shape[0]
    if n == 0 or plan.rows.shape[0] == 0 or not space.checks & Check.INDEX:
        return
    request, place, there = counted_tokens(plan)
    missing = max(n - received.shape[0], 0)
    got = torch.nn.functional.pad(received[:n], (0, missing), value=-1)
    planned = plan.slots.to(torch.int64)
    if plan.padding_row is not None:
        there = there & (_takes_tokens(space, got) | ~of_padding(plan, request))
    findings = Findings(there, space.checks)
    findings.add(Why.NOT_THE_PLANNED_SLOT, got != planned, planned, got)
    position = planned_positions(plan, request, place)
    findings.report(space.control, half_id, Phase.POST, planned, position, plan.owners[request], kept_bits(plan.tokens))


class ReceivedCheck:
    """:func:`check_received` for every layer of one forward."""

    def __init__(self, space: SlotSpace, plan: RequestPlan):
        self._space, self._plan = space, plan

    def __call__(self, received: torch.Tensor, half_id: int, stream: torch.cuda.Stream | None = None) -> None:
        """
        Args:
            received: integer ``[m]``, contiguous.
            stream: where to launch, on a GPU.
        """
        check_received(self._space, self._plan, received.to(torch.int64), half_id)


def _takes_tokens(space: SlotSpace, slots: torch.Tensor) -> torch.Tensor:
    """bool ``[n]``: slots of the pool that are not reserved."""
    inside = (slots >= 0) & (slots < space.slots)
    return inside & ((space.flags[torch.where(inside, slots, space.nowhere)] & Flag.RESERVED) == 0)


def check_reads(space: SlotSpace, plan: RequestPlan, pages: torch.Tensor, lengths: torch.Tensor, size: int) -> None:
    """Before attention: does the page table that its kernel gets say what the request table says?

    Args:
        pages: integer ``[bs, columns]``, pages of ``size`` slots in this pool's index space; it may have more rows,
            which are padding.
        lengths: integer ``[bs]``, how many positions the kernel will read of each request.
    """
    pages, lengths = pages[: plan.rows.shape[0]], lengths[: plan.rows.shape[0]]
    if plan.rows.shape[0] == 0 or not plan.table.numel():
        return
    requests = torch.arange(plan.rows.shape[0], device=pages.device).unsqueeze(1)
    total = plan.prefix_lens.to(torch.int64) + plan.extend_lens
    real = real_requests(plan) & _row_exists(plan)
    given = lengths.to(torch.int64)
    whole = Findings(real, space.checks)
    room = pages.shape[1] * size
    whole.add(Why.ROW_TOO_NARROW, given > room, room, given)
    whole.add(Why.LENGTH_DIFFERS, given != total, total, given)
    whole.report(space.control, space.space_id, Phase.PRE, -1, request=plan.owners, detail=-1)
    if room == 0:
        return
    position = torch.arange(room, device=pages.device).unsqueeze(0)
    got = pages.to(torch.int64)[:, position[0] // size] * size + position % size
    slot = table_slots(plan, requests, position)
    live = real.unsqueeze(1) & (position < torch.minimum(given, total).unsqueeze(1))
    if space.window is not None:
        live = live & (position > (total - 1 - space.window).unsqueeze(1))
    if space.chunk is not None:
        live = live & (position >= ((total - 1) // space.chunk * space.chunk).unsqueeze(1))
    each = Findings(live, space.checks)
    each.add(Why.READ_DIFFERS, got != slot, slot, got)
    request = plan.owners.unsqueeze(1)
    each.report(space.control, space.space_id, Phase.PRE, slot, position.expand(live.shape), request, detail=-1)

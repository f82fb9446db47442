"""The identity checks on a GPU: launches of the kernels.  Bit-equal to :mod:`.naive`.

Grids are fixed by shapes, lengths are read from device memory and nothing waits for the device, so every function
may run while a CUDA graph is captured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..bound_launch import BoundLaunch, BoundLaunches
from ..checks import Check
from ..compile_ahead import launch_or_compile
from ..replay import Replayed
from ..ring import BY_BUDGET, UNKNOWN
from ..side_stream import capturing
from ..staging import lasting
from ..writes.geometry import on_device
from . import checks as request_checks
from . import triton_reads, triton_writes
from .checks import walked
from .past import events_kept
from .space import COLUMNS, ENDLESS, MARKS, Column, Flag, RequestPlan, SlotSpace, SpaceCount

#: Positions, tokens, requests and sums of earlier blocks that a program looks at together.
BLOCK_POSITIONS = 128
BLOCK_TOKENS = 256
BLOCK_REQUESTS = 256
BLOCK_SUMS = 256

#: Programs of a launch over the positions of a batch, at most, if there are not more requests: each looks at every
#: n-th block of its request.  A program that has nothing to do is not free, and tables are as wide as the longest
#: request may be: 131,072 positions of 256 requests are 262,144 blocks.
PROGRAMS = 8192

#: Tokens of a plan, at most, that are stored before the model: what their slots held takes 40 bytes each, for each size
#: of a batch, and a step with a long prompt does not wait for the host.
MOST_AHEAD = 1024

#: The arguments that say where the history is.
_HISTORY = ("history_ptr", "history_stride", "history_step", "history_width", "history_rows")


#: Warps of a program.
WARPS = 4

#: Positions and warps of a program that walks: of nine pairs the fastest for 64 and 256 requests of 4,096 tokens
#: (11.1 and 35 us; with 128 and four warps 14 and 53; H200).
WALK_POSITIONS, WALK_WARPS = 64, 1


class Launch(NamedTuple):
    """A kernel, its grid, its arguments, and the warps of each program."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int = WARPS


def _launch(
    space: SlotSpace,
    plan: RequestPlan,
    what: str,
    launches: Callable[[SlotSpace, RequestPlan], list[Launch]],
    own_replay: bool = False,
) -> None:
    """Launch what a plan says; bound, if the plan comes again, except for its history, which is another tensor in each
    step.

    In a graph's capture nothing is kept: what is allocated there is the graph's.

    Args:
        own_replay: what is captured is the plan's own and goes with it: it gets the memory of the bound launches, since
            memory of a graph's own is 2 MiB at least.
    """
    device, kept = space.block.device, plan.launches
    if kept is None or (not (own_replay and what in kept) and capturing(device if device.type == "cuda" else None)):
        with on_device(space.block):
            for made in launches(space, plan):
                launch_or_compile(made.kernel, made.grid, **made.arguments, num_warps=made.warps)
        return
    history = plan.known_history
    form = what if history is None else (what, history.dtype, history.data_ptr() & 15)
    bound = kept.get(form)
    if bound is None:
        bound = kept[form] = [_bound(made, device, history is not None) for made in launches(space, plan)]
    for launch, grid, of_history in bound:
        if history is None or not of_history:
            (launch if launch.ready else launch.first)(grid, (), None)
            continue
        where = *history.stride(), history.shape[1], history.shape[0]
        if launch.ready:
            launch(grid, (history.data_ptr(), *where), None)
        else:
            launch.first(grid, (history, *where), None)


def _bound(made: Launch, device: torch.device, with_history: bool) -> tuple[BoundLaunch, tuple[int, ...], bool]:
    """The launch, its grid, and whether it takes the history."""
    of_history = with_history and _HISTORY[0] in made.arguments
    changing = _HISTORY if of_history else ()
    fixed = {name: value for name, value in made.arguments.items() if name not in changing}
    return BoundLaunch(made.kernel, device, fixed, changing, made.warps), (*made.grid, 1, 1)[:3], of_history


def _over_positions(positions: int, bs: int, block: int) -> tuple[int, int]:
    """The grid of a launch over so many positions of each request, a block at a time."""
    # without triton.cdiv, which takes the host 3 us: it is for code that Triton compiles, too
    return max(1, min(-(-positions // block), PROGRAMS // bs)), bs


def _wide(space: SlotSpace) -> dict[str, Any]:
    return dict(wide_ptr=space.block.view(torch.int64), slots=space.slots)


def _ring_args(space: SlotSpace, source: int) -> dict[str, Any]:
    control = space.control
    checks = space.checks if space.owner_known else space.checks & ~Check.OWNER
    return dict(
        words_ptr=control.words, ring_ptr=control.ring, capacity=control.capacity, source=source, checks=int(checks)
    )


def _reach_args(space: SlotSpace) -> dict[str, Any]:
    """How far back attention reads."""
    window, chunk = (ENDLESS if tokens is None else tokens for tokens in (space.window, space.chunk))
    return dict(window=window, chunk=chunk)


def _past_args(space: SlotSpace) -> dict[str, Any]:
    kept = events_kept(space.past)
    return dict(past_ptr=space.past if kept else space.block, KEPT=kept)


def _table_args(plan: RequestPlan) -> dict[str, Any]:
    table, slot_map = plan.table, plan.slot_map
    return dict(
        table_ptr=table,
        row_stride=table.stride(0),
        page_stride=table.stride(1),
        table_rows=table.shape[0],
        columns=table.shape[1],
        map_ptr=slot_map.contiguous() if slot_map is not None else table,
        map_size=slot_map.shape[0] if slot_map is not None else 0,
        PAGE=plan.page_size,
        HAS_MAP=slot_map is not None,
        RING=plan.ring,
    )


def _history_args(space: SlotSpace, plan: RequestPlan) -> dict[str, Any]:
    history, lens = plan.known_history, plan.history_lens
    known = history is not None
    if history is None or lens is None:
        history, lens = plan.owners.unsqueeze(1), plan.owners
    return dict(
        history_ptr=history,
        history_stride=history.stride(0),
        history_step=history.stride(1),
        history_width=history.shape[1],
        history_rows=history.shape[0],
        history_lens_ptr=lens.contiguous(),
        offset=space.token_offset,
        HAS_HISTORY=known,
        BY_ROW=known and plan.history_by_row,
    )


def _request_args(plan: RequestPlan) -> dict[str, Any]:
    return dict(
        counts_ptr=plan.counts,
        row_ptr=plan.rows.contiguous(),
        padding=plan.padding_row if plan.padding_row is not None else UNKNOWN,
        prefix_ptr=plan.prefix_lens.contiguous(),
        owner_ptr=plan.owners.contiguous(),
    )


def _position_args(plan: RequestPlan) -> dict[str, Any]:
    positions = plan.positions if plan.positions is not None else plan.tokens
    return dict(position_ptr=positions.contiguous(), HAS_POSITIONS=plan.positions is not None)


def _space_args(plan: RequestPlan) -> dict[str, Any]:
    spaces = plan.namespaces if plan.namespaces is not None else plan.owners
    return dict(spaces_ptr=spaces.contiguous(), HAS_SPACES=plan.namespaces is not None)


def _list_args(plan: RequestPlan, ends: torch.Tensor) -> dict[str, Any]:
    """What tells which of the added tokens are real, and each one's request."""
    bs = plan.rows.shape[0]
    return dict(
        bs=bs, steps=bs.bit_length(), ends_ptr=ends, n=plan.slots.shape[0], HAS_PADDING=plan.padding_row is not None
    )


def _token_args(plan: RequestPlan) -> dict[str, Any]:
    """The added tokens."""
    bs, ends = plan.rows.shape[0], plan.ends
    if ends is None:
        ends = torch.empty(bs, dtype=torch.int64, device=plan.slots.device)
        launch_or_compile(
            triton_writes.ends_kernel, (1,), plan.counts, bs, plan.extend_lens.contiguous(), ends, BLOCK=BLOCK_REQUESTS
        )
    return dict(
        token_ptr=plan.tokens.contiguous(),
        slot_ptr=plan.slots.contiguous(),
        BLOCK=BLOCK_TOKENS,
        **_list_args(plan, ends),
    )


def _plan_args(space: SlotSpace, plan: RequestPlan) -> dict[str, Any]:
    """The slots that the forward writes, and the mark that they get."""
    return dict(
        planned_ptr=space.planned,
        slots=space.slots,
        slot_ptr=plan.slots.contiguous(),
        mark=0 if plan.in_flight else int(Flag.PLANNED),
    )


def walk(space: SlotSpace, plan: RequestPlan) -> None:
    """Before a forward: is every slot that attention will read the one it should be?  See :mod:`.checks`."""
    _launch(space, plan, "walk", _walk_launches)


def _walk_launches(space: SlotSpace, plan: RequestPlan) -> list[Launch]:
    bs, known = plan.rows.shape[0], plan.rows.shape[0] > 0 and plan.table.numel() > 0
    ring, request = _ring_args(space, space.space_id), _request_args(plan)
    tokens, writes = _list_args(plan, plan.memory_for("ends", bs)), _plan_args(space, plan)
    blocks = -(-plan.slots.shape[0] // BLOCK_TOKENS)
    begin = dict(
        block_ptr=space.block,
        clock_ptr=space.clock,
        counters_ptr=space.counters,
        listed_count_ptr=space.listed_count,
        extend_ptr=plan.extend_lens.contiguous(),
        table_rows=plan.table.shape[0],
        width=plan.width,
        PLAN=blocks == 1,
        TOKENS=BLOCK_TOKENS,
        BLOCK=BLOCK_REQUESTS,
        **request,
        **tokens,
        **writes,
        **(ring if known else ring | dict(checks=0)),
    )
    launches = [Launch(triton_reads.open_kernel, (max(1, -(-bs // BLOCK_REQUESTS)),), begin)]
    if blocks > 1:
        rows = {name: value for name, value in request.items() if name not in ("prefix_ptr", "owner_ptr")}
        listed = dict(block_ptr=space.block, clock_ptr=space.clock, BLOCK=BLOCK_TOKENS, **rows, **tokens, **writes)
        launches.append(Launch(triton_writes.plan_kernel, (blocks,), listed))
    stop = walked(space, plan)
    if not known or stop <= 0:
        return launches
    read = dict(
        block_ptr=space.block,
        clock_ptr=space.clock,
        planned_ptr=space.planned,
        counters_ptr=space.counters,
        listed_ptr=space.listed,
        listed_count_ptr=space.listed_count,
        stop=stop,
        **_reach_args(space),
        every=space.verify_every,
        BY_BUDGET=space.verify_every == BY_BUDGET,
        BLOCK=WALK_POSITIONS,
        **request,
        **tokens,
        **_space_args(plan),
        **_wide(space),
        **_table_args(plan),
        **_history_args(space, plan),
        **_past_args(space),
        **ring,
    )
    return [*launches, Launch(triton_reads.walk_kernel, _over_positions(stop, bs, WALK_POSITIONS), read, WALK_WARPS)]


def check_writes(space: SlotSpace, plan: RequestPlan) -> None:
    """Before a forward, after :func:`walk`: may its tokens go where they are planned to go?"""
    if plan.slots.shape[0] == 0 or plan.rows.shape[0] == 0:
        return
    if plan.parents is not None:  # a tree: small, and rare enough for the code that runs on any device
        request_checks.check_writes(space, plan)
        return
    _launch(space, plan, "check_writes", _check_launches)


def _check_launches(space: SlotSpace, plan: RequestPlan) -> list[Launch]:
    n = plan.slots.shape[0]
    arguments = dict(
        block_ptr=space.block,
        planned_ptr=space.planned,
        clock_ptr=space.clock,
        real_ptr=plan.memory_for("real_slots", n),
        extend_ptr=plan.extend_lens.contiguous(),
        **_reach_args(space),
        once=int(space.once),
        HAS_TABLE=plan.table.numel() > 0,
        **_token_args(plan),
        **_request_args(plan),
        **_position_args(plan),
        **_wide(space),
        **_table_args(plan),
        **_history_args(space, plan),
        **_ring_args(space, space.space_id),
    )
    return [Launch(triton_writes.writes_kernel, (-(-n // BLOCK_TOKENS),), arguments)]


def store(space: SlotSpace, plan: RequestPlan) -> None:
    """After a forward: remember who is in the slots that it wrote; of a plan that comes again, a replay."""
    if plan.slots.shape[0] == 0 or plan.rows.shape[0] == 0:
        return
    if plan.parents is not None or plan.in_flight:  # the kernels take the chain before a request from its slot
        request_checks.store(space, plan)
        return
    _run_or_replay(space, plan, "after", _store, functools.partial(_store, own_replay=plan.known_history is None))


def _store(space: SlotSpace, plan: RequestPlan, own_replay: bool = False) -> None:
    _launch(space, plan, "store", _store_launches, own_replay)


def _store_launches(space: SlotSpace, plan: RequestPlan) -> list[Launch]:
    n, bs = plan.slots.shape[0], plan.rows.shape[0]
    blocks, device = -(-max(n, bs) // BLOCK_TOKENS), space.block.device
    links, sums, before = (torch.empty(k, dtype=torch.int64, device=device) for k in (n, blocks, bs))
    request = _request_args(plan)
    common = dict(
        block_ptr=space.block,
        links_ptr=links,
        sums_ptr=sums,
        before_ptr=before,
        counters_ptr=space.counters,
        words_ptr=space.control.words,
        SUM_BLOCK=BLOCK_SUMS,
        **_past_args(space),
        **_token_args(plan),
        **_position_args(plan),
        **_wide(space),
    )
    joined = dict(HAS_TABLE=plan.table.numel() > 0, ALL=blocks == 1, **_space_args(plan), **_table_args(plan))
    launches = [Launch(triton_writes.links_kernel, (blocks,), request | common | joined)]
    if blocks > 1:
        launches.append(Launch(triton_writes.store_kernel, (-(-n // BLOCK_TOKENS),), request | common))
    return launches


def check_before(space: SlotSpace, plan: RequestPlan) -> None:
    """:func:`walk` and :func:`check_writes`; of a plan that comes again, one replay."""
    _run_or_replay(space, plan, "before", _one_by_one)


def may_store_ahead(plan: RequestPlan) -> bool:
    """Whether :func:`check_and_store` may take the place of :func:`check_before`, and of :func:`store` later."""
    if plan.launches is None or plan.in_flight or _changes(plan):
        return False
    return 0 < plan.slots.shape[0] <= MOST_AHEAD and plan.rows.shape[0] > 0


def check_and_store(space: SlotSpace, plan: RequestPlan) -> None:
    """:func:`check_before` and :func:`store` in one replay, for a plan that :func:`may_store_ahead`.

    What the slots held is kept for :func:`take_back`.  Not while a CUDA graph is captured.
    """
    kept = plan.launches
    assert kept is not None
    replayed = kept.get("ahead")
    if replayed is None:
        replayed = kept["ahead"] = Replayed(space.block.device)
    if replayed.graph is not None:
        replayed.graph.replay()
    else:
        replayed(functools.partial(_check_and_store, space, plan))


def _check_and_store(space: SlotSpace, plan: RequestPlan) -> None:
    _one_by_one(space, plan)
    before, n = _held_before(space, plan), plan.slots.shape[0]
    torch.remainder(plan.memory_for("real_slots", n)[:n], space.slots + 1, out=before.at)  # of -1: nowhere
    torch.index_select(space.block, 0, before.at, out=before.entries)
    _store(space, plan, own_replay=plan.known_history is None)


class _Before(NamedTuple):
    """What the slots that a plan writes held before: int64 ``[n]``, and their entries, int32 ``[n, COLUMNS]``."""

    at: torch.Tensor
    entries: torch.Tensor


def _held_before(space: SlotSpace, plan: RequestPlan) -> _Before:
    """The memory for it, kept with the plan's launches."""
    assert plan.launches is not None
    before: _Before | None = plan.launches.get("held before")
    if before is None:
        n, device = plan.slots.shape[0], space.block.device
        at = lasting(n, dtype=torch.int64, device=device)
        before = _Before(at, lasting(n, COLUMNS, dtype=torch.int32, device=device))
        plan.launches["held before"] = before
    return before


def take_back(space: SlotSpace, plan: RequestPlan) -> None:
    """The forward failed: what :func:`check_and_store` stored last for this plan is taken back.

    Who may use the slots stays as it is now, and so does what slots went through.
    """
    at, entries = _held_before(space, plan)
    wide, flags = entries.view(torch.int64), space.flags[at]
    space.flags[at] = (flags & ~int(MARKS)) | (entries[:, Column.FLAGS] & int(MARKS))
    space.tokens[at], space.positions[at] = entries[:, Column.TOKEN], entries[:, Column.POSITION]
    space.chain[at] = wide[:, Column.CHAIN // 2]
    stored = (at != space.nowhere) & ((flags & int(Flag.RESERVED)) == 0)
    space.counters[SpaceCount.RECORDED] -= stored.sum()


def _run_or_replay(
    space: SlotSpace,
    plan: RequestPlan,
    what: str,
    run: Callable[[SlotSpace, RequestPlan], None],
    captured: Callable[[SlotSpace, RequestPlan], None] | None = None,
) -> None:
    """``run``, or of a plan that comes again a replay.

    Args:
        captured: what the replay is captured of; default: ``run``.
    """
    device, kept = space.block.device, plan.launches
    if kept is None or _changes(plan) or capturing(device if device.type == "cuda" else None):
        run(space, plan)
        return
    replayed = kept.get(what)
    if replayed is None:
        replayed = kept[what] = Replayed(device)
    if replayed.graph is not None:
        replayed.graph.replay()
    else:
        replayed(functools.partial(captured or run, space, plan))


def _changes(plan: RequestPlan) -> bool:
    """Whether what a plan launches has other arguments each time."""
    return plan.parents is not None or (not plan.history_by_row and plan.known_history is not None)


def _one_by_one(space: SlotSpace, plan: RequestPlan) -> None:
    walk(space, plan.reads or plan)
    check_writes(space, plan)


def check_received(space: SlotSpace, plan: RequestPlan, received: torch.Tensor, half_id: int) -> None:
    """In a layer's write: are the slots it received the planned ones?  See :mod:`.checks`."""
    n = plan.slots.shape[0]
    if n == 0 or plan.rows.shape[0] == 0 or not space.checks & Check.INDEX:
        return
    if plan.parents is not None:
        request_checks.check_received(space, plan, received, half_id)
        return
    with on_device(space.block):
        launch_or_compile(
            triton_writes.received_kernel,
            (-(-n // BLOCK_TOKENS),),
            space.block,
            space.slots,
            received_ptr=received.contiguous(),
            received_count=received.shape[0],
            **_request_args(plan),
            **_token_args(plan),
            **_ring_args(space, half_id),
        )


class ReceivedCheck:
    """:func:`check_received` for every layer of one forward: what the layers have in common is bound once."""

    def __init__(self, space: SlotSpace, plan: RequestPlan):
        self._space, self._plan = space, plan
        self._nothing = not plan.slots.shape[0] or not plan.rows.shape[0] or not space.checks & Check.INDEX
        self._bound: dict[tuple[torch.dtype, int], BoundLaunch] = {}

    def __call__(self, received: torch.Tensor, half_id: int, stream: torch.cuda.Stream | None = None) -> None:
        """
        Args:
            received: integer ``[m]``, contiguous.
            stream: where to launch; None for the current one.
        """
        if self._nothing:
            return
        space, plan = self._space, self._plan
        if plan.parents is not None:
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                request_checks.check_received(space, plan, received.to(torch.int64), half_id)
            return
        grid, address = (-(-plan.slots.shape[0] // BLOCK_TOKENS), 1, 1), received.data_ptr()
        form = received.dtype, address & 15
        launch = self._bound.get(form)
        if launch is not None and launch.ready:
            launch(grid, (address, received.shape[0], half_id), stream)
            return
        ring = _ring_args(space, half_id)
        del ring["source"]
        arguments = dict(block_ptr=space.block, slots=space.slots, **_request_args(plan), **_token_args(plan), **ring)
        changing = ("received_ptr", "received_count", "source")
        kernel, device = triton_writes.received_kernel, space.block.device
        self._bound[form] = launch = BoundLaunch(kernel, device, arguments, changing, warps=WARPS)
        launch.first(grid, (received, received.shape[0], half_id), stream)


def check_reads(space: SlotSpace, plan: RequestPlan, pages: torch.Tensor, lengths: torch.Tensor, size: int) -> None:
    """Before attention: does the page table that its kernel gets say what the request table says?"""
    bs, room = plan.rows.shape[0], pages.shape[1] * size
    if bs == 0 or not plan.table.numel():
        return
    lengths = lengths.contiguous()
    where = pages.data_ptr() & 15, lengths.data_ptr() & 15
    form = "reads", pages.dtype, pages.stride(), lengths.dtype, *where, room, size
    changing = {"pages_ptr": pages, "lengths_ptr": lengths}

    def others() -> dict[str, Any]:
        stride, step = pages.stride()
        return dict(pages_stride=stride, pages_step=step, room=room, SIZE=size, **_reach_args(space))

    _compare_with_table(space, plan, triton_reads.reads_kernel, room, form, changing, others)


def _compare_with_table(
    space: SlotSpace,
    plan: RequestPlan,
    kernel: Any,
    positions: int,
    form: tuple[Any, ...],
    changing: Mapping[str, torch.Tensor | int],
    others: Callable[[], dict[str, Any]],
) -> None:
    """Launch what compares something given for attention with the request table; kept with the plan, if it comes again.

    Args:
        positions: of each request, at most.
        form: what the launch is bound for: ``others``, and the types and alignments of ``changing``.
        others: makes the kernel's own arguments that do not change.
    """
    device = space.block.device
    grid = (*_over_positions(positions, plan.rows.shape[0], BLOCK_POSITIONS), 1)
    kept = None if capturing(device if device.type == "cuda" else None) else plan.launches
    launch = kept.get(form) if kept is not None else None
    if launch is not None and launch.ready:
        launch(grid, [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in changing.values()], None)
        return
    arguments = dict(
        extend_ptr=plan.extend_lens.contiguous(),
        BLOCK=BLOCK_POSITIONS,
        **others(),
        **_request_args(plan),
        **_table_args(plan),
        **_ring_args(space, space.space_id),
    )
    launch = BoundLaunch(kernel, device, arguments, tuple(changing), warps=WARPS)
    if kept is not None:
        kept[form] = launch
    launch.first(grid, tuple(changing.values()), None)


def slots_of_memory(index: torch.Tensor, unit: int, stride: int, out: torch.Tensor) -> torch.Tensor:
    """See :func:`.checks.slots_of_memory`."""
    n = index.shape[0]
    if n:
        _memory_launches(index.device)(
            (unit, stride),
            (-(-n // BLOCK_TOKENS), 1, 1),
            (index, out, n),
            lambda: dict(unit=unit, stride=stride, BLOCK=BLOCK_TOKENS),
        )
    return out


@functools.cache
def _memory_launches(device: torch.device) -> BoundLaunches:
    return BoundLaunches(triton_reads.memory_kernel, device, ("index_ptr", "out_ptr", "n"), warps=WARPS)


def check_indices(
    space: SlotSpace, plan: RequestPlan, index: torch.Tensor, longest: int, unit: int, stride: int
) -> None:
    """Before attention: are the rows of memory that it gathers those of the request table?  See :mod:`.checks`."""
    if plan.rows.shape[0] == 0 or not plan.table.numel() or longest == 0:
        return
    form = "indices", index.dtype, index.data_ptr() & 15, unit, stride
    changing: dict[str, torch.Tensor | int] = {"index_ptr": index, "index_count": index.shape[0]}
    kernel = triton_reads.indices_kernel
    _compare_with_table(space, plan, kernel, longest, form, changing, lambda: dict(unit=unit, stride=stride))

"""The running forward of a session, the checks outside its graphs, and the schedule of periodic work."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from ..config import CanaryConfig
from ..errors import EngineError, SessionStateError
from ..kernels.checks import Phase
from ..kernels.ops import request_kernels_for
from ..kernels.ring import HALF_FORWARD, HALF_STEP, Word
from ..kernels.side_stream import SideStream, capturing
from ..kernels.slots import checks as request_checks
from ..kernels.slots.space import RequestPlan
from ..kernels.slots.tokens import token_requests
from ..runtime.binding import Controls
from .arguments import integer_tensor, require_whole

if TYPE_CHECKING:
    from .guarded_pool import EnginePool


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Periodic work of a session, in steps; 0 is never."""

    sweep: int = 0
    health: int = 64
    stats: int = 0
    windows: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            argument = {"windows": "window_report_every"}.get(field.name, f"{field.name}_every")
            require_whole(argument, getattr(self, field.name), 0, "steps, 0 for never")


@dataclasses.dataclass
class Forward:
    """The forward that is running.

    Attributes:
        index: number of the forward within its step, as the engine counts.
        plans: what the forward reads and writes in each pool, by the number of its slot space.
        remembered: the identity of the slots that it writes is stored already.
        stored_ahead: the numbers of the slot spaces that have it since before the model runs, outside of a graph: if
            the forward fails, it is taken back there.
        captured: it began in the capture of a CUDA graph, so its end is in the graph.
    """

    index: int
    plans: dict[int, RequestPlan]
    remembered: bool = False
    stored_ahead: set[int] = dataclasses.field(default_factory=set)
    captured: bool = dataclasses.field(default_factory=lambda: capturing())

    def __post_init__(self) -> None:
        if type(self.index) is not int or self.index < 0:
            require_whole("the index of forward()", self.index, 0, "forwards of the step")

    def require(self, index: int) -> None:
        """Refuse to be entered as another forward.

        Raises:
            SessionStateError: ``index`` is not the running one's.
        """
        if index != self.index:
            raise SessionStateError(
                f"forward({index}) inside forward({self.index}): leave one before entering the next; a draft model "
                "with pools of its own has a session of its own"
            )


class Clock:
    """Tells the devices which step and forward is running.  Reports carry both, also if they are read much later.

    Both are halves of one word, since forwards are captured and steps are not.  Outside of a forward the device has 0,
    so that a captured forward 0, which is nearly every one, writes nothing at its replays: a kernel from which the
    model and the checks fork took 5 us of each (H200).
    """

    def __init__(self, controls: Controls):
        self._controls, self._has = controls, -1  # what the devices have; -1 until a forward begins
        self._halves: dict[tuple[torch.device, int], torch.Tensor] = {}  # of the word, int32 []

    def place(self, device: torch.device) -> torch.Tensor | None:
        """Where a device has the word, int64 ``[1]``; None if it has none."""
        control = self._controls.by_device.get(device)
        return None if control is None else control.words[Word.FORWARD : Word.FORWARD + 1]

    def word(self, step: int) -> int:
        """The whole word as a step begins: for those who send numbers to the device anyway."""
        return step << 32 | (self._has & 0xFFFFFFFF)

    def begin_step(self, number: int, told: torch.device | None = None) -> None:
        """A step of the engine begins.  Not recorded in a graph that is being captured: its replays are other steps.

        Args:
            told: a device that has the word already.
        """
        devices = self._controls.by_device
        if len(devices) == 1 and told in devices:
            return
        untold = [device for device in devices if device != told]
        if untold and not capturing():
            self._fill(HALF_STEP, number, untold)

    def begin_forward(self, forward: Forward) -> None:
        """A forward begins.  Launches only if the devices do not have its index."""
        if forward.index != self._has:
            self._fill(HALF_FORWARD, forward.index, self._controls.by_device)
            if not forward.captured:  # else its replays write it
                self._has = forward.index

    def end_forward(self, forward: Forward) -> None:
        """It is over; after all that reports it."""
        if forward.index:
            with contextlib.suppress(RuntimeError):  # on a device that nothing runs on any more
                self._fill(HALF_FORWARD, 0, self._controls.by_device)
            if not forward.captured:
                self._has = 0

    def _fill(self, half: int, value: int, devices: Iterable[torch.device]) -> None:
        for device in devices:
            control = self._controls.by_device[device]
            place = self._halves.get((device, half))
            if place is None:
                place = self._halves[device, half] = control.words.view(torch.int32)[2 * Word.FORWARD + half]
            place.fill_(value)


@contextlib.contextmanager
def on_sides(sides: Collection[SideStream]) -> Iterator[None]:
    """In a forward that is captured whole, run work on the side streams: its graphs wait for it.

    A graph that is replayed inside a forward was captured without that work, and starts in the model's stream's order.
    """
    with contextlib.ExitStack() as stack:
        for side in sides:
            stack.enter_context(side.fork())
        yield


def check_before(
    pools: Mapping[int, EnginePool], plans: Mapping[int, RequestPlan], ahead: set[int] | None = None
) -> None:
    """Check what a forward is about to read and write in each pool, by the number of its slot space.

    Args:
        ahead: then store who is going to be in the slots that it writes, if all plans :func:`may_be_stored_ahead`; gets
            the number of each slot space that has it.  None: do not.
    """
    for number, plan in plans.items():
        pool = pools[number]
        space = pool.space
        if plan.in_flight:
            _name_ahead(pool, plan)
        kernels = request_kernels_for(space.block.device)
        if ahead is None:
            kernels.check_before(space, plan)
        else:
            kernels.check_and_store(space, plan)
            ahead.add(number)
        pool.scales.check()
        if pool.declared.layout.once:
            # the graphs that read them may never write them, and then guard nothing
            pool.content.verify_listed(plan.in_flight)


def check_layers(
    pools: Mapping[int, EnginePool],
    running: Forward,
    sides: Mapping[torch.device, SideStream],
    before: Mapping[torch.device, SideStream],
) -> None:
    """Compare the bytes that a forward reads, in all layers of each pool at once, where no graph of ours has the
    layers.

    In one launch a pool, whatever the number of layers.  What is read is what the walk of :func:`check_before` listed.

    Args:
        sides: where it may run beside the model, which reads the same bytes.
        before: where :func:`check_before` may have run.
    """
    joined = running.captured == capturing()  # the forward ends where it began: inside a capture, or outside
    for number, plan in running.plans.items():
        pool = pools[number]
        if pool.declared.layout.once:  # check_before has
            continue
        device, stream = pool.declared.device, None
        if device in sides and joined and only_read(pool, plan):
            stream = sides[device].stream
            sides[device].start()
            if running.captured:
                sides[device].follow(before[device])
        elif running.captured and device in before:
            before[device].join()
        pool.content.verify_listed(plan.in_flight, stream)


def only_read(pool: EnginePool, plan: RequestPlan) -> bool:
    """Whether a forward writes to none of the slots that it reads: else its check must end before the write."""
    if pool.declared.layout.rewritten or plan.ring or plan.in_flight:
        return False
    return plan.reads is None and plan.taken is None


def may_be_stored_ahead(pools: Mapping[int, EnginePool], plans: Mapping[int, RequestPlan]) -> bool:
    """Whether who is going to be in the slots that a forward writes may be stored before the model runs, along with
    :func:`check_before`: on a GPU that is a replay less of the host's.

    Not where a forward rewrites slots that it reads: a report of what it read would name what it writes.
    """
    for number, plan in plans.items():
        declared = pools[number].declared
        if declared.layout.rewritten or declared.layout.once or plan.ring:
            return False
        if not request_kernels_for(declared.device).may_store_ahead(plan):
            return False
    return True


def take_back(pools: Mapping[int, EnginePool], running: Forward) -> None:
    """A forward failed, and who is going to be in the slots that it writes was stored ahead: nobody is in them."""
    with contextlib.suppress(RuntimeError):  # out of memory, or a device that nothing runs on any more: as the model
        while running.stored_ahead:
            number = running.stored_ahead.pop()
            space = pools[number].on_device[0]
            request_kernels_for(space.block.device).take_back(space, running.plans[number])


def forget_written(pools: Mapping[int, EnginePool], running: Forward) -> None:
    """A forward failed while the model ran: the slots that it writes hold old bytes or new ones, whose record may not
    have come.  They are compared again once they are recorded.

    Seen: a request whose slot was rewritten as its forward failed was released, and that slot reported.
    """
    if running.captured:
        return
    with contextlib.suppress(RuntimeError):  # as above
        for number, plan in running.plans.items():
            if plan.slots.numel() and plan.rows.numel():
                pools[number].on_device[1].forget(plan.slots[token_requests(plan)[2]].to(torch.int64))


def remember(pools: Mapping[int, EnginePool], running: Forward) -> None:
    """Store who is in the slots that a forward wrote.

    After the model, or beside a captured one once :func:`check_before` has run: from then on only reports need the
    identities, and a replay cannot stop half way.  After the model the two launches took 11 us of a decode step (H200).
    Where plans come again, :func:`check_before` has stored them (:func:`may_be_stored_ahead`).
    """
    if running.remembered:
        return
    running.remembered = True
    for number, plan in running.plans.items():
        if plan.in_flight:  # named ahead
            continue
        space = pools[number].space
        request_kernels_for(space.block.device).store(space, plan)


def check_after(pools: Mapping[int, EnginePool], plans: Mapping[int, RequestPlan], config: CanaryConfig) -> None:
    """Compare the bytes that a forward read once more: something may have written to them while it ran.

    A violation reported before the forward is not repeated, since the digest found has replaced the one stored.
    """
    for number in plans:
        pool = pools[number]
        if config.verifies_after(pool.declared.device):
            pool.content.verify(pool.space.listed, pool.space.listed_count, None, Phase.POST)


def check_reads(
    pool: EnginePool, running: Forward, pages: torch.Tensor, lengths: torch.Tensor, page_size: int | None
) -> None:
    """Compare the page table that an attention kernel gets with the request table of a pool.

    Raises:
        EngineError: fewer rows than the forward has requests, or a pool of rings or states.
    """
    plan = _plan_like_page_tables(pool, running)
    if plan is None:
        return
    integer_tensor(pages, "the pages of check_reads")
    integer_tensor(lengths, "the lengths of check_reads")
    if (
        lengths.dim() != 1
        or pages.dim() != 2
        or pages.shape[0] < plan.rows.shape[0]
        or lengths.shape[0] < plan.rows.shape[0]
    ):
        raise EngineError(
            f"check_reads got pages {list(pages.shape)} and lengths {list(lengths.shape)} for a forward of "
            f"{plan.rows.shape[0]} requests: pages are [bs, columns], lengths [bs]"
        )
    size = pool.declared.table_page_size if page_size is None else page_size
    require_whole("the page_size of check_reads", size, 1, "slots")
    request_kernels_for(pool.space.block.device).check_reads(pool.space, plan, pages, lengths, size)


def check_indices(
    pool: EnginePool, running: Forward, index: torch.Tensor, longest: int, unit: int, stride: int
) -> None:
    """Compare the rows of memory that are gathered for attention with the request table of a pool.

    Raises:
        EngineError: an index that is no list of integers, numbers that are not whole or too small, or a pool of rings
            or states.
    """
    plan = _plan_like_page_tables(pool, running)
    if plan is None:
        return
    integer_tensor(index, "the index of check_indices")
    require_whole("the longest of check_indices", longest, 0, "positions")
    require_whole("the unit of check_indices", unit, 1, "slots")
    require_whole("the stride of check_indices", stride, 1, "rows of memory")
    if index.dim() != 1 or unit > stride:
        raise EngineError(
            f"check_indices got an index {list(index.shape)}, unit={unit} and stride={stride}: the index is [n], and a "
            "page has no more slots than rows of memory"
        )
    request_kernels_for(pool.space.block.device).check_indices(pool.space, plan, index, longest, unit, stride)


def _plan_like_page_tables(pool: EnginePool, running: Forward) -> RequestPlan | None:
    """What a forward reads in a pool, whose request table a page table can be compared with; None: nothing.

    Raises:
        EngineError: a pool of rings or states.
    """
    unlike = pool.declared.layout.unlike_page_tables
    if unlike is not None:
        raise EngineError(f"pool {pool.name!r} {unlike}")
    return running.plans.get(pool.space.space_id)


def _name_ahead(pool: EnginePool, plan: RequestPlan) -> None:
    """Store who will be in the slots that this forward writes, before the walk; their bytes are not known yet.

    Plain torch on all devices: the kernels that store identities need a walk before them.
    """
    slots = plan.slots.to(torch.int64)
    pool.content.forget(slots)
    request_checks.store(pool.space, plan)

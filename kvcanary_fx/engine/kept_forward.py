"""Forwards that come again: their checks before the model are a small CUDA graph, and those after it, if there are any.

An engine that prepares its batches on the device tells the host little that is new in a step.  The checks that run
around its model read the step's inputs at addresses that never change, so they are captured once for some sizes of a
batch, padded, and a step is a replay.  Launched one by one, with the inputs filled in from Python, they were 2.3 of the
12.2 ms of a profiled step of vLLM (64 requests, H100).  Who is in the slots that are written is stored before the
model, too: a replay behind it took 12 us of the host (H200), in steps that wait for the host::

    checks = LayerChecks(session)
    checks.reserve(requests, tokens)
    kept = checks.keep(requests, tokens, take_in)
    with checks.kept(kept, send, requests, tokens):
        model(...)

If the model is one CUDA graph, they can be in it, see :meth:`.LayerChecks.captured`: then the host launches nothing of
ours in a step.  A replay of these took it 13 us (H200).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..config import CanaryConfig
from ..kernels.compile_ahead import compile_ahead
from ..kernels.replay import capture
from ..kernels.side_stream import can_fork
from .forward import Forward, check_after, check_before, check_reads, only_read, remember

if TYPE_CHECKING:
    from ..kernels.context import ForwardContext
    from ..kernels.held import Held
    from .guarded_pool import EnginePool


#: Contexts that are kept of a forward: those of decode steps, which come again and wait for the host.
MOST_CONTEXTS = 512


class Reads(NamedTuple):
    """The page table that attention gets, see :meth:`.EngineSession.check_reads`, at addresses that never change."""

    pool: EnginePool
    pages: torch.Tensor
    lengths: torch.Tensor
    page_size: int


@dataclasses.dataclass(frozen=True)
class KeptForward:
    """The checks around the model, for batches of at most so many requests and tokens.

    Attributes:
        forward: its plans are padded.
        before: launches the checks before the model, and ``first``.
        inside: the checks, without a graph of their own, where a graph of the model is captured; None: they cannot be
            in one.  Its counts are ``live`` of :meth:`.LayerChecks.keep`.
        first: launches, there, what must come before all writes of the model; None: nothing must.
        after: launches those after it; None: there are none.
        beside: in a graph of the model, the checks before it may run beside it.
        contexts: what the ops of layers outside of a graph find, by the tokens of the batch, up to ``MOST_CONTEXTS``;
            all of them are in the memory of the padded one.
    """

    requests: int
    tokens: int
    forward: Forward
    before: Callable[[], None]
    inside: Callable[[], None] | None
    first: Callable[[], None] | None
    after: Callable[[], None] | None
    beside: bool
    contexts: dict[int, ForwardContext]

    def context(self, tokens: int, held: Held | None = None) -> ForwardContext:
        """What the ops of the layers find: keys and values have no row for the padding of the plans.

        Args:
            held: takes what the layers wrote until the model has run; None: they record.
        """
        found = self.contexts.get(tokens)
        if found is not None:
            return found if held is None else dataclasses.replace(found, held=held)
        padded = self.contexts[self.tokens]
        plans = {number: plan.head(tokens) for number, plan in padded.requests.items()}
        if tokens > MOST_CONTEXTS:
            return dataclasses.replace(padded, requests=plans, held=held)
        self.contexts[tokens] = dataclasses.replace(padded, requests=plans)
        return self.context(tokens, held)


def keep(
    pools: Mapping[int, EnginePool],
    forward: Forward,
    context: ForwardContext,
    config: CanaryConfig,
    take_in: Callable[[], None],
    begin: Callable[[Forward], None],
    join: Callable[[], None],
    reads: Sequence[Reads],
    live: torch.Tensor | None = None,
    first: Callable[[], None] | None = None,
) -> KeptForward:
    """Capture the checks around the model; on the CPU they run as they are.

    Args:
        pools: by the number of their slot space.
        forward: of the padded batch; its plans are at the addresses of all steps.
        take_in: fills the step's inputs on the device.
        begin: what the first layer does before its own checks, in a forward.
        join: lets the stream wait for work that was forked from it.
        reads: with pages and lengths of as many requests.
        live: the counts of what is captured in a graph of the model.
        first: launches what comes before all of these.
    """
    (device,) = {pool.declared.device for pool in pools.values()}
    ((requests, tokens),) = {(plan.rows.shape[0], plan.slots.shape[0]) for plan in forward.plans.values()}

    side = device if can_fork(device) and config.beside else None

    def check(running: Forward) -> None:
        take_in()
        check_before(pools, running.plans)
        with _beside(side, lambda: begin(running)):
            for pool, pages, lengths, size in reads:
                check_reads(pool, running, pages[:requests], lengths[:requests], size)
            remember(pools, dataclasses.replace(running))  # which notes that it has

    def after() -> None:
        check_after(pools, forward.plans, config)

    checked = config.verifies_after(device)

    def before() -> None:
        if first is not None:
            first()
        check(forward)

    inside = functools.partial(check, _counted(forward, live)) if live is not None and not checked else None

    def around() -> None:
        before()
        if inside is not None:
            inside()
        after()
        join()

    compile_ahead(around, device)
    around()  # no kernel is compiled while a graph is captured
    return KeptForward(
        requests,
        tokens,
        forward,
        _captured(device, before),
        inside,
        first,
        _captured(device, after) if checked else None,
        all(only_read(pools[number], plan) for number, plan in forward.plans.items()),
        {tokens: context},
    )


def _counted(forward: Forward, counts: torch.Tensor) -> Forward:
    """The same forward with other counts, in the same memory."""
    plans = {}
    for number, plan in forward.plans.items():
        reads = None if plan.reads is None else dataclasses.replace(plan.reads, counts=counts)
        plans[number] = dataclasses.replace(plan, counts=counts, reads=reads)
    return dataclasses.replace(forward, plans=plans)


@contextlib.contextmanager
def _beside(device: torch.device | None, run: Callable[[], None]) -> Iterator[None]:
    """What the block launches runs beside what ``run`` launches, when the block is over: neither needs the other.

    Args:
        device: None: one after the other.
    """
    if device is None:
        yield
        run()
        return
    current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    run()
    current.wait_stream(side)


@dataclasses.dataclass(frozen=True)
class _Captured:
    """A graph, and what holds the memory that it reads."""

    graph: torch.cuda.CUDAGraph
    run: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


def _captured(device: torch.device, run: Callable[[], None]) -> Callable[[], None]:
    """What ``run`` launches as a graph, or ``run`` itself where there are none."""
    graph = capture(device, run)
    return run if graph is None else _Captured(graph, run)


def smallest(kept: Sequence[KeptForward], requests: int, tokens: int) -> KeptForward | None:
    """The first that a batch fits into; None if it is too large for all.

    Args:
        kept: in the order of their size.
    """
    return next((each for each in kept if requests <= each.requests and tokens <= each.tokens), None)

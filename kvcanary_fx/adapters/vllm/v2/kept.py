"""Steps whose checks before the model are captured, see :mod:`kvcanary_fx.engine.kept_forward`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ....engine.forward import Forward, check_reads
from ....engine.kept_forward import KeptForward, Reads, smallest
from ....engine.kept_step import GoingOn, KeptStep
from ....engine.layers import LayerChecks
from ....engine.session import EngineSession
from ....engine.slot_events import SlotEvents
from ....engine.steps import Steps
from ....kernels.slots.events import RECORD, Along
from ....kernels.staging import lasting
from ....runtime.pace import Sample
from ..books import CACHE, Books
from ..pools import Group
from .rows import Rows
from .take_in import AHEAD, WRITTEN, Inputs, Landing, TakeIn, most_pages
from .take_in import FEW as FEW_PAGES

#: Requests of a batch with prompts in it: graphs of their own for few, since one for many has programs for all of them.
FEW = 16

#: Blocks, at most, that a step's own entry hands out: there is room for as many calls that release and hand out.
MOST_HANDED_OUT = 128

#: Steps that are made once: those of a prompt took the host 0.07 ms, half of it for views of what is planned.
STEPS = 256

#: Sizes of batches whose checks were looked for: 14 us of a prompt's step on a CPU core with emptied caches.
SIZES = 4096


class Run:
    """Steps in a row that go on as the last one did, and of which nothing is to be said: they are only counted.

    Whoever begins one has seen that it is such a step, as :meth:`.GuardV2.before_model` does, takes 1 off ``left``, and
    adds 1 to the steps that have begun and to those that are done.  All else that such a step changes is done for all
    of them by :meth:`KeptSteps.settle`, before anything else happens.  The fields are where one look finds them: a step
    of a small model waits for the host, which has other work's data in its caches by then.

    Attributes:
        left: how many may come.
        of: how many there might have been.
        requests, tokens, graph: of the batch, and the tokens of its graph.
        steps: of the session; None before the first run.
        calls, queue: the allocator's calls, and those of them that wait.
        raw: the stream in which they were sent.
    """

    __slots__ = ("calls", "graph", "left", "of", "queue", "raw", "requests", "steps", "tokens")

    def __init__(self, calls: SlotEvents):
        self.left = self.of = self.tokens = self.graph = self.raw = 0
        self.requests: list[str] = []
        self.steps: Steps | None = None
        self.calls, self.queue = calls, calls.queue


class KeptSteps:
    """The checks of batches whose requests add a token, or a token and its drafts, and of batches with prompts.

    Attributes:
        run: steps that are only counted.
    """

    def __init__(
        self,
        runner: Any,
        groups: Sequence[Group],
        session: EngineSession,
        checks: LayerChecks,
        rows: Rows,
        places: Callable[[torch.Tensor], None],
    ):
        """
        Args:
            checks: with room reserved for the largest batch.
            places: as of :class:`.Forwards`.
        """
        self._session, self._checks, self._rows = session, checks, rows
        self._adaptive = runner.adaptive_verification is not None
        self._landing = Landing(runner.max_num_reqs, runner.device)
        self._live = lasting(3, dtype=torch.int64, device=runner.device).zero_()
        take_in = TakeIn(self._landing, _inputs(runner, groups, session, checks.clock(), self._live, rows))

        def begin(requests: int, tokens: int) -> None:
            take_in(requests, tokens)
            places(self._live)

        # with several pools, each would add four launches to all steps; their calls are sent before a step
        pools = list(session.pools.values())
        self._calls = pools[0].calls if len(pools) == 1 else None
        page_size = pools[0].declared.table_page_size
        rows.owners = session.ids.known
        first = None if self._calls is None else self._calls.in_step(self._landing.due, page_size)
        self._claim_or_flush = self._flush if self._calls is None else self._calls.claim_or_flush
        reads, self._tables = [], {}
        for group in (g for g in groups if g.layer_with_table is not None):
            pages, lengths = runner.block_tables.input_block_tables[group.number], runner.input_buffers.seq_lens
            reads.append(Reads(session.pools[group.name], pages, lengths, group.kernel_page_size))
            self._tables[group.name] = pages.data_ptr(), pages.stride(0)
        self._lengths = runner.input_buffers.seq_lens.data_ptr()
        self._kept = [self._keep(begin, reads, first, *size) for size in _sizes(runner)]
        self._landing.restart()
        self._known: tuple[Any, ...] = ()  # what the landing has of the requests
        self._stored = 0  # about how many tokens they have in the cache
        self._fits: dict[tuple[int, int], KeptForward | None] = {}  # by size, what was looked for
        self._size = 0, 0  # requests and tokens of the running step
        self._pages: list[int] = []  # that the tables lack, see :meth:`.Rows.new_pages`
        self._step: KeptStep | None = None  # the last one, for those like it
        self._form: tuple[Any, ...] = ()  # what it depends on
        self._made: dict[tuple[Any, ...], KeptStep] = {}  # by their forms, since the last capture
        self._goes_on: _LastStep | None = None  # if the next one may be like it
        self.run = Run(pools[0].calls)
        self._pool, self._pages_of = pools[0], page_size
        # they go with the step's own entry where its launches take calls, and there is one table to find them in
        alone = len(runner.kv_cache_config.kv_cache_groups) == 1
        self._hands_out = first is not None and alone and not pools[0].rivals
        self._handed_out: _HandedOut | None = None  # of which the device is not told yet

    def _keep(
        self,
        begin: Callable[[int, int], None],
        reads: Sequence[Reads],
        first: Callable[[], None] | None,
        requests: int,
        tokens: int,
    ) -> KeptForward:
        return self._checks.keep(requests, tokens, lambda: begin(requests, tokens), reads, self._live, first)

    def for_graph(self, tokens: int) -> KeptForward | None:
        """The checks that are captured with a model for so many tokens; None: they cannot be in its graph."""
        found = smallest(self._kept, min(self._landing.room, tokens), tokens)
        return found if found is not None and found.inside is not None else None

    def skip(self) -> None:
        """The checks before the model in the graph that is about to be replayed are to do nothing."""
        self.interrupted()
        self._landing.skip()

    def kept(self, batch: Any) -> KeptForward | None:
        """The checks that a batch fits into."""
        size = batch.num_reqs, batch.num_tokens
        if size not in self._fits:
            if len(self._fits) >= SIZES:
                self._fits.clear()
            self._fits[size] = smallest(self._kept, *size)
        return self._fits[size]

    def overwritten(self) -> None:
        """Another step writes the step inputs."""
        self.interrupted()
        self._known = ()

    def captured(self) -> None:
        """A graph was captured."""
        self.interrupted()
        self._step, self._form = None, ()
        self._made.clear()

    def compared(self, group: Group, metadata: Any) -> bool:
        """Whether attention gets the table and lengths that are compared already.

        Args:
            metadata: of a layer.
        """
        table, lengths = getattr(metadata, "block_table", None), getattr(metadata, "seq_lens", None)
        if table is None or (table.data_ptr(), table.stride(0)) != self._tables[group.name]:
            return False
        return lengths is None or lengths.data_ptr() == self._lengths

    def compare_table(self, kept: KeptForward, group: Group, table: torch.Tensor, lengths: torch.Tensor) -> None:
        """Compare the block table that attention gets.

        Args:
            table: integer ``[requests, pages]``.
            lengths: integer ``[requests]``.
        """
        pool = self._session.pools[group.name]
        plan = kept.forward.plans[pool.space.space_id]
        real = dataclasses.replace(plan, rows=plan.rows[: table.shape[0]])
        check_reads(pool, Forward(0, {pool.space.space_id: real}), table, lengths, group.kernel_page_size)

    def step(
        self, kept: KeptForward, batch: Any, namespaces: Mapping[str, int], hold: bool, in_graph: bool
    ) -> KeptStep:
        """A step of the engine around the model.

        Args:
            batch: vLLM's ``InputBatch``, prepared.
            namespaces: by the request's id, if not 0.
            hold: as of :meth:`.LayerChecks.publish`.
            in_graph: as of :meth:`.LayerChecks.kept`.
        """
        self.interrupted()
        self._tell_requests(batch, namespaces)
        self._pages = pages = self._rows.new_pages()
        if len(pages) > RECORD * most_pages(kept.tokens):
            self._rows.write(pages)
            self._pages = []
        requests, tokens = size = batch.num_reqs, batch.num_tokens
        step, form = self._step, (size, hold, in_graph)
        if step is None or form != self._form:
            step = self._made.get(form)
            if step is None:
                step = self._checks.kept(kept, self._send, requests, tokens, hold, in_graph)
                if len(self._made) >= STEPS:
                    self._made.clear()
                self._made[form] = step
            self._step, self._size, self._form = step, size, form
        step.stored = self._stored
        self._stored += tokens
        return step

    def again(self, batch: Any, namespaces: Mapping[str, int]) -> KeptStep | None:
        """The last step, if this one differs from it in its tokens and their places alone; else None.

        Most steps do: their requests have room in their last page.  The arguments are those of :meth:`step`; the model
        is a graph with all checks in it.
        """
        self.settle()
        step = self._step
        if step is None or not step.in_graph or self._rows.added or self._rows.behind:
            return None
        if self._size != (batch.num_reqs, batch.num_tokens):
            return None
        if self._said(batch, namespaces) != self._known:
            return None
        self._pages = []
        step.stored = self._stored
        self._stored += self._size[1]
        return step

    def interrupted(self) -> None:
        """The next step is none that goes on as the last one did."""
        self.settle()
        self._goes_on = None

    def hand_out(self, cached: Any, event: tuple[Any, ...], books: Books) -> bool:
        """Requests got blocks in the step that is about to begin, and nothing else is new in it: let its own entry tell
        the device, if it goes on as the last one did.

        What :meth:`.Books.tell_now` and :meth:`.Rows.more` do, in few functions: these were half of what such a step
        took of our host code.

        Args:
            cached: of the ``SchedulerOutput``, which says who got them, too.
            event: as of :meth:`.Books.taken`, its name first.
            books: of the session.

        Returns:
            False: nothing was noted; there is something odd about them, or the step will not go on.
        """
        if self._handed_out is not None:
            self.settle()  # no forward came
        if not self._hands_out or self._goes_on is None:
            return False
        _, blocks, who, lengths, _ = event
        if len(blocks) > MOST_HANDED_OUT or self._pool.content.imported is not None:
            return False
        given_up = len(books.idle.intersection(blocks))
        if given_up not in (0, len(blocks)) or not self._rows.handed_out(
            cached.req_ids, cached.new_block_ids, who, blocks, lengths
        ):
            return False
        books.note_handed_out(blocks)
        self._handed_out = _HandedOut(blocks, who, lengths, self._session.ids.hash(CACHE) if given_up else 0)
        return True

    def _say_handed_out(self, handed_out: _HandedOut, step: int) -> None:
        """The step that begins goes on, and is told of blocks with its new pages."""
        self._handed_out, pages, self._rows.added = None, self._rows.added, []
        self._pool.calls.flush()  # what was before them
        self._landing.send(*self._size, step, pages, calls=Along.HANDED_OUT, holder=handed_out.holder)
        if not handed_out.holder:
            self._pool.live_slots += len(handed_out.blocks) * self._pages_of

    def _new_pages(self) -> Sequence[int]:
        """Those of a step that goes on."""
        pages = self._rows.new_pages()
        if len(pages) <= RECORD * FEW_PAGES:
            return pages
        self._rows.write(pages)
        return ()

    def _tell_handed_out(self, handed_out: _HandedOut) -> None:
        """Blocks were handed out in a step that does not go on: tell the device as in any other."""
        self._handed_out = None
        pool, (blocks, who, lengths, given_up) = self._pool, handed_out
        if given_up:
            pool.release(blocks, owner=CACHE, page_size=self._pages_of)
        of_each = iter(blocks)
        given = [(list(itertools.islice(of_each, n)), owner) for n, owner in zip(lengths, who, strict=True)]
        pool.allocate_each(given, self._pages_of, written_in_step=True)

    def settle(self) -> None:
        """Do what the steps of the run that is over have left to be done, and tell the device of blocks of which none
        has told it."""
        if self._handed_out is not None:
            self._tell_handed_out(self._handed_out)
        self._end_run()

    def _end_run(self) -> None:
        run = self.run
        passed, run.left, run.of = run.of - run.left, 0, 0
        if not passed:
            return
        self._stored += passed * run.tokens
        self._landing.next = (self._landing.next + passed) % AHEAD
        passing = None if self._goes_on is None else self._goes_on.going.passing
        if passing is not None:
            passing.left = max(0, passing.left - passed)  # another thread may have ended its row of calls

    def _begin_run(self, last: _LastStep) -> None:
        """A step went on: those behind it are only counted, up to one that has to be written, or looked at."""
        run, landing, passing = self.run, self._landing, last.going.passing
        n = -landing.next % WRITTEN
        if passing is not None:
            n = min(n, passing.left) if passing.key == "step" and passing.ranks is None else 0
            if self._stored + n * run.tokens > passing.most:
                n = int((passing.most - self._stored) // run.tokens)
        run.left = run.of = max(0, n)
        run.raw = run.calls.raw

    def may_go_on(self, batch: Any) -> None:
        """The step of a batch has begun, with all checks in the model's graph: let the next one :meth:`go_on`."""
        requests, tokens = self._size
        going = self._checks.going_on() if requests == tokens else None  # no drafts, which the device may drop
        if going is not None:
            requested, moved = self._known[:2]
            self._goes_on = _LastStep(requested, moved, batch.num_tokens_after_padding, going)
            self.run.requests, self.run.tokens, self.run.graph = requested, tokens, batch.num_tokens_after_padding
            self.run.steps = going.steps

    def go_on(self, batch: Any) -> bool | Sample:
        """Begin the step of a batch whose requests are those of the last one, if all else is as it was; it ends with
        the replay.

        Returns:
            False: nothing has begun.  What measures the step, if it is measured: the model runs from here on.

        What :meth:`again` and its step do, as :meth:`.LayerChecks.going_on` says, with fewer functions: what takes 6 us
        in a loop took 65 to 80 on a CPU core whose caches other work had emptied.
        """
        last, (requests, tokens), run = self._goes_on, self._size, self.run
        if run.of:
            self._end_run()
        if last is None or batch.num_tokens != tokens or batch.num_tokens_after_padding != last.graph:
            return False
        rows, (steps, passing, look), sample = self._rows, last.going, None
        if batch.req_ids != last.requests or rows.moved != last.moved or steps.closed or steps.thread is not None:
            return False
        if passing is not None:  # see Pace.passes
            if (
                passing.left
                and passing.key == "step"
                and passing.least <= self._stored <= passing.most
                and (passing.ranks is None or not passing.ranks.news())
            ):
                passing.left -= 1
            else:
                sample = look(self._stored)
        steps.begun += 1
        steps.done += 1
        self._stored += tokens
        landing = self._landing
        if self._handed_out is not None:
            self._say_handed_out(self._handed_out, steps.begun)
        elif self._claim_or_flush():
            landing.send(requests, tokens, steps.begun, self._new_pages(), calls=Along.OF_RING)
        elif rows.added or rows.behind or not landing.next % WRITTEN:
            landing.send(requests, tokens, steps.begun, self._new_pages())
        else:
            landing.next = (landing.next + 1) % AHEAD
        if sample is None:
            if self._calls is not None:
                self._begin_run(last)
            return True
        sample.model_runs()
        return sample

    def _flush(self) -> bool:
        """Send the calls of all pools; none is left to the step."""
        for pool in self._session.pools.values():
            pool.calls.flush()
        return False

    def _send(self, step: int) -> None:
        calls = self._calls is not None and self._calls.claim()
        self._landing.send(*self._size, step, self._pages, calls=int(calls))

    def _said(self, batch: Any, namespaces: Mapping[str, int]) -> tuple[Any, ...]:
        """What is said of the requests of a batch."""
        index, added = batch.idx_mapping_np.tobytes(), batch.num_scheduled_tokens.tobytes()
        return batch.req_ids, self._rows.moved, index, added, batch.num_draft_tokens > 0, namespaces

    def _tell_requests(self, batch: Any, namespaces: Mapping[str, int]) -> None:
        """Write what is said of each request, unless it is what the landing has."""
        said = self._said(batch, namespaces)
        if said == self._known:
            return
        index, added, drafted = batch.idx_mapping_np, batch.num_scheduled_tokens, batch.num_draft_tokens > 0
        rows = self._rows.rows_of(batch.req_ids)
        self._known = list(batch.req_ids), self._rows.moved, *said[2:5], dict(namespaces)  # vLLM writes to its own
        if self._adaptive and drafted:  # the device decides how many each gets
            added = np.full(batch.num_reqs, -1)
        owners = self._session.ids.hashes(batch.req_ids)
        spaces = [namespaces.get(request, 0) for request in batch.req_ids]
        self._landing.requests(rows, owners, spaces, index.tolist(), added.tolist())
        self._stored = sum(batch.num_computed_tokens_np.tolist())  # numpy's sum took 0.1 ms of a prompt's step


class _HandedOut(NamedTuple):
    """Blocks that requests got, as :meth:`.Books.taken` has them.

    Attributes:
        holder: the hash of the cache's id, if it had all of them; 0: it had none.
    """

    blocks: list[int]
    requests: list[str | None]
    lengths: list[int]
    holder: int


class _LastStep(NamedTuple):
    """A step that may come again: its requests, whether they have other rows by now (:attr:`.Rows.moved`), its graph's
    tokens, and what begins it."""

    requests: list[str]
    moved: int
    graph: int
    going: GoingOn


def _inputs(
    runner: Any, groups: Sequence[Group], session: EngineSession, clock: torch.Tensor, live: torch.Tensor, rows: Rows
) -> Inputs:
    def buffer(name: str) -> torch.Tensor:
        found = session.inputs.buffer(name)
        assert found is not None
        return found

    return Inputs(
        counts=session.inputs.counts,
        live=live,
        rows=buffer("request_rows"),
        owners=buffer("owners"),
        namespaces=buffer("namespaces"),
        prefix_lens=buffer("prefix_lens"),
        extend_lens=buffer("extend_lens"),
        tokens=buffer("input_ids"),
        positions=buffer("positions"),
        slots=[buffer(f"slots_{group.number}") for group in groups],
        tables=rows.tables,
        clock=clock,
        stored=runner.req_states.num_computed_tokens.gpu,
        starts=runner.input_buffers.query_start_loc,
        given_tokens=runner.input_buffers.input_ids,
        given_positions=runner.input_buffers.positions,
        mapping=runner.block_tables.slot_mappings,
        groups=[group.number for group in groups],
    )


def _sizes(runner: Any) -> list[tuple[int, int]]:
    """Requests and tokens, the smallest first."""
    most, tokens, each = runner.max_num_reqs, runner.max_num_tokens, runner.num_speculative_steps + 1
    requests = [1 << i for i in range((most - 1).bit_length())] + [most]
    decodes = [(n, n * each) for n in requests if n * each <= tokens]
    return list(dict.fromkeys([*decodes, (min(FEW, most), tokens), (most, tokens)]))

"""The guard of a Model Runner V2.

::

    execute_model        requests, tables, positions and slots are prepared on the device
      pre_forward          our step begins: identity, tables, owners, bytes of what is read
      model or graph       each layer records what it wrote (in the graph, if it is one)
      finish_forward       our step ends
    sample_tokens        rejected drafts are marked, and the draft's layers record (:mod:`.drafts`)
    get_output           where the tokens are read: violations are read and reported, before a token leaves
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ....engine.layers import LayerChecks
from ....engine.session import EngineSession
from ....errors import EngineError
from ....kernels.side_stream import capturing
from .. import ops
from ..guard import Guard, are_refilled, widths
from ..journal import ATTRIBUTE, TAKEN, Message
from ..pools import Group
from ..settings import VllmSettings
from ..verdict import Verdict
from .drafts import Drafting
from .forwards import Forwards, Measured
from .outputs import News
from .rows import Rows
from .warm_up import WarmUp

log = logging.getLogger("kvcanary")


class GuardV2(Guard):
    """A Model Runner V2 under guard; its session begins with the KV cache, since graphs are captured with its ops.

    It is made once every half of the cache has proved to be compared.

    Attributes:
        layers_in_graphs: of each graph of the target that was captured whole, by its tokens, how many layers record in
            it.
        checked_in_graphs: those of them that have the checks before the model in them, too.
        drafting: what is checked of drafts.
        follows_samples: :meth:`sampled` has something to do.
        open: our step, while the model runs; None in one that goes on as the last did, which ends with the replay,
            unless it is measured.
        lets_pass: in steps of plain messages (:attr:`.Message.plain`) there is nothing to do for :meth:`begin_step`.
        passing: the running step is such.
    """

    counts_beside = True
    lets_pass = passing = False

    def __init__(
        self,
        runner: Any,
        settings: VllmSettings,
        self_test: bool,
        groups: list[Group],
        unguarded: Mapping[str, str] | None = None,
    ):
        self._runner = runner
        self._room = runner.max_num_reqs, runner.max_num_tokens
        self._warm_up = WarmUp(runner, groups)
        self.open: _Open | Measured | None = None
        self._opened: _Open | None = None  # the last one: it is used again
        self._tokens = self._replayed = 0  # of the running forward; the second, of the graph that is it
        self.drafting = Drafting(runner, groups)
        self._layers_of_ours = sum(len(group.layers) for group in groups) - self.drafting.layers
        self._stale = False  # the plan on the device is that of a step that has ended
        # the running step, if there is one, differs from the last one in tokens and pages alone, as far as known yet
        self._alike = False
        self._disabled = self._capturing = False
        self._reads_until_free = 0  # of tokens, until K and V of a forward that ran from Python are freed
        self.layers_in_graphs: dict[int, int] = {}
        self.checked_in_graphs: set[int] = set()
        super().__init__(runner, settings, self_test, groups, unguarded, drafts=[])

    def begin(self, allocations: bool) -> None:
        """Make the session."""
        super().begin(allocations)
        self.reactions.logged = True
        # what such a rank finds may be known one of its steps later, or two, and tokens have left by then
        self.reactions.late = self.reactions.late or self.reactions.elsewhere
        self.follows_samples = self.drafting.expected or self.reactions.elsewhere
        self._reading = self._counts.busy()  # held where violations are read, and in forwards that do more than go on
        hears = self.reactions.ranks is None and not self._ends_engine
        self._bells = self._news.bells() if hears else None
        self.lets_pass = not (self._ends_engine or self.follows_samples or self.has_connector)

    def _install(self, allocations: bool) -> EngineSession:
        if not allocations:
            raise EngineError("Model Runner V2 needs vLLM's own scheduler, with KVCANARY_MODE set in its process")
        return self._session_of(
            self.groups,
            allocations,
            warm_up=self._begin_session,
            health_every=0,  # it waits for the device; see :meth:`after_model`
            max_requests=self._room[0],
            max_tokens=self._room[1],
            mode="log",  # raised where the tokens are read
        )

    def _begin_session(self, session: EngineSession) -> None:
        """Before anything counts."""
        self._news = News(session)
        if self.reactions.elsewhere:
            self._news.patience = -1
        self._warm_up.run(session, lambda checks: self._forwards_of(session, checks))
        self._forwards = self._forwards_of(session, self._warm_up.layers)
        self._run = self._forwards.run
        self.drafting.mark_in(session)
        self._warm_up.prove(self.settings.session_config)

    def _forwards_of(self, session: EngineSession, checks: LayerChecks) -> Forwards:
        checks.reserve(*self._room)
        return Forwards(self._runner, self.groups, session, checks, self._rows, self.places)

    def places(self, counts: torch.Tensor) -> None:
        """Launch what is checked besides attention's cache, in a step that the device has the inputs of.

        Args:
            counts: of the step, int64 ``[3]``.
        """

    def _make_layers(self, session: EngineSession) -> LayerChecks:
        return self._warm_up.layers

    def _make_ledger(self, runner: Any) -> Rows:
        self._rows = Rows(runner.max_num_reqs, widths(runner, runner.num_speculative_steps), runner.device)
        return self._rows

    @functools.cached_property
    def _ends_engine(self) -> bool:
        return self.settings.on_violation == "raise"

    # ---- capture

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """While vLLM captures its graphs: their layers record what the step that replays them writes."""
        self._idle()
        self._forwards.captured()
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    @contextlib.contextmanager
    def dummy_forward(self, tokens: int, whole: bool) -> Iterator[None]:
        """Around a forward of dummy requests, in a capture or before one.

        Args:
            whole: if anything is captured, it is all of the forward, and not pieces of it.
        """
        if not self._capturing:
            yield
            return
        before = self._forwards.for_graph(tokens) if whole and capturing() else None
        layers = self._layers.captured(min(self._room[0], tokens), tokens, whole, self._forwards.holds, before=before)
        with layers, ops.telling_writes(self._layers.about_to_write), ops.one_forward(own=self._own) as guarded:
            yield
        if capturing():
            self.layers_in_graphs[tokens] = len(guarded.in_graph) + len(guarded.outside)
            if before is not None:
                self.checked_in_graphs.add(tokens)

    def forget_stored(self) -> None:
        """The KV cache's memory is about to be given back, and so is that of K and V that are still held."""
        super().forget_stored()
        if self._reads_until_free:
            self._reads_until_free = 0
            self._layers.held.let_go()

    def _idle(self) -> None:
        """The next replay is of no request of ours."""
        if self._stale:
            self._stale = False
            self._forwards.interrupted()
            with torch.inference_mode(False):
                self._layers.reserve(*self._room)

    def disable(self, disabled: bool) -> None:
        """The runner runs dummy requests from here, or no longer does."""
        self._disabled = disabled
        if disabled:
            self._idle()

    # ---- steps

    def begin_step(self, scheduled: Any) -> None:
        """The runner is about to prepare a batch; :meth:`end_step` comes behind, in the place of :meth:`step`."""
        self.passing, run = False, self._run
        if run.left:  # those behind this one are looked at, whatever becomes of it
            run.of, run.left = run.of - run.left, 0
        told: Message | None = getattr(scheduled, ATTRIBUTE, None)
        if told is None:
            self._require_warm_up(scheduled)
            return
        if self.books.loads.of:
            self.books.loads.lost(scheduled)
        if self.has_connector:
            self.park_what_is_stored(scheduled)
        cached = scheduled.scheduled_cached_reqs
        events: Sequence[tuple[Any, ...]] = told.events
        plain = not (
            self._ends_engine  # then violations are looked for before each forward
            or self.drafting.expected  # and here the draft's layers are told of each
            or told.namespaces
            or scheduled.kv_cache_block_copies
        )
        ended = scheduled.finished_req_ids
        alike = plain and not (
            scheduled.scheduled_new_reqs
            or scheduled.preempted_req_ids
            or cached.resumed_req_ids
            or (ended and self._forwards.images.any)
        )
        if (
            alike
            and len(events) == 1
            and events[0][0] == TAKEN
            and self.lets_pass
            and not (ended or told.stacks or getattr(scheduled, "new_block_ids_to_zero", None))
            and self._forwards.hand_out(cached, events[0], self.books)
        ):
            self._alike, self.scheduled = True, scheduled
            return
        if plain and events and not told.stacks:
            for new in scheduled.scheduled_new_reqs:
                for session in self.sessions:
                    session.ids.hash(new.req_id)
            # of hybrids the runner clears what is handed out, and a connector fills it: bytes that were released are
            # compared before that
            events = self.books.tell_now(events, into_step=not are_refilled(scheduled, events))
        self._alike = alike and not events
        if not self._alike:
            self._take(scheduled, told, events)
        else:
            if ended:
                self._ended(ended)
            if any(cached.new_block_ids):
                self._rows.more(cached.req_ids, cached.new_block_ids)
        self.scheduled = scheduled

    def _take(self, scheduled: Any, told: Message, events: Sequence[tuple[Any, ...]]) -> None:
        """Something is new in a step: a request, its blocks, or what becomes of these.

        Args:
            events: those of the message that were not applied yet.
        """
        self._forwards.interrupted()
        if events or scheduled.kv_cache_block_copies or getattr(scheduled, "new_block_ids_to_zero", None):
            with self._counts.busy():  # another thread may be reading violations, and send what is queued
                self.books.apply(events, told.stacks)
                self.compare_what_is_refilled(scheduled, told.events)
        self._forget_namespaces(scheduled.finished_req_ids)
        if told.namespaces:
            self.namespaces.update(told.namespaces)
        self._rows.take(scheduled)
        if scheduled.scheduled_new_reqs or self._forwards.images.any:
            self._forwards.images.take(scheduled)

    def _ended(self, requests: Iterable[str]) -> None:
        """Requests have ended that were in no batch of late, and nothing else is new in a step: it may go on."""
        self._forget_namespaces(requests)
        self._rows.ended(requests)

    def _forget_namespaces(self, requests: Iterable[str]) -> None:
        """Of requests that have ended, whose ids may be given again."""
        for request in requests:
            self.namespaces.pop(request, None)

    def end_step(self) -> None:
        """The step is over, also if something in it raised.  Where nothing is open, ``scheduled = None`` is all."""
        self.scheduled = None
        opened, self.open = self.open, None
        if opened is not None:  # the model raised
            opened.end(*sys.exc_info())

    def _require_warm_up(self, scheduled: Any) -> None:
        """vLLM's own warm-up calls the runner without a scheduler; who else reports no blocks does not know the canary.

        Raises:
            EngineError: mode ``raise``, and requests are not of the warm-up.
        """
        requests = [*scheduled.num_scheduled_tokens, *scheduled.finished_req_ids]
        if not requests or all(request.startswith("_") for request in requests):
            self._idle()
            return
        why = "the scheduler does not report what it does to blocks: set KVCANARY_MODE in its process, too"
        if self.settings.config.mode == "raise":
            raise EngineError(f"{why}, or unset KVCANARY_MODE")
        self.session.lose_coverage(why)

    def before_model(self, scheduler_output: Any, input_batch: Any = None, attn_metadata: Any = None) -> None:
        """The inputs of a forward are prepared: before the model, with the arguments of vLLM's connectors.

        Args:
            input_batch: vLLM's; None: there is no forward.
            attn_metadata: of attention, by layer; None: in the forward context.

        Raises:
            KVCacheViolation: the engine is to end, a check of an earlier step failed, and this rank's outputs are not
                read.
        """
        batch, metadata, news, run = input_batch, attn_metadata, self._news, self._run
        if batch is None:
            return
        news.dropped += 1
        if self.passing and self.scheduled is not None:  # as in most steps
            steps = run.steps
            if (
                run.left
                and metadata is not None
                and batch.num_tokens == run.tokens
                and batch.num_tokens_after_padding == run.graph
                and batch.req_ids == run.requests
                and steps is not None
                and not steps.closed
                and not run.queue
                and run.raw == run.calls.raw
                and news.dropped <= news.patience
                and not self._reading.locked()
            ):
                run.left -= 1
                steps.begun += 1
                steps.done += 1
                return
            self._alike = True
        if (
            self._alike
            and self.scheduled is not None
            and metadata is not None
            and (news.dropped <= news.patience or not self._unread())
            and not self._reading.locked()
        ):
            began = self._forwards.go_on(batch)
            if began:
                if began is not True:
                    self.open = Measured(began)
                return
        self._begin_forward(batch, metadata)

    def _begin_forward(self, batch: Any, metadata: Any) -> None:
        """A forward that does not go on as the last one did, or that is none of ours; arguments as of
        :meth:`.Forwards.begin`."""
        scheduled, tokens = self.scheduled, batch.num_tokens_after_padding
        replayed = tokens if metadata is not None else 0  # vLLM gives it where there is no context
        graph = replayed if replayed in self.checked_in_graphs else 0
        if scheduled is None or self._disabled:
            if graph:
                self._forwards.skip()
            return
        self._look_at_unread()
        self._stale, self._tokens, self._replayed = True, tokens, replayed
        opened = self._opened = self._opened or _Open(self)
        opened.begin(from_python=replayed not in self.layers_in_graphs)
        try:
            joined = self._settle(scheduled)
            if not joined:
                opened.running = self._forwards.again(batch, graph, self.namespaces)
            if opened.running is None:
                new, in_flight = scheduled.scheduled_new_reqs, self.in_flight
                opened.running = self._forwards.begin(batch, metadata, new, self.namespaces, in_flight, graph)
            if self.drafting.expected:
                self.drafting.begin(batch.num_draft_tokens)
        except BaseException:
            opened.end(*sys.exc_info())
            raise
        self.open = opened

    def _settle(self, scheduled: Any) -> bool:
        """Report the blocks that requests have taken up; whether any did, or began in this step: not in most steps."""
        if self.books.loads.of:
            mark = self._forwards.images.mark_prompt
            self.books.announce_loaded(scheduled, self.ledger, self.namespaces, mark)
        if not self.books.pending:  # nor can a request read what another one writes in this forward
            self.in_flight = False
            return bool(scheduled.scheduled_new_reqs or scheduled.scheduled_cached_reqs.resumed_req_ids)
        in_flight, self.in_flight = self.ledger.in_flight(scheduled, self._page_sizes, self.books.taken_up)
        self.books.settle(in_flight)
        return True

    def _look_at_unread(self) -> None:
        """Read the violations of steps whose tokens nobody reads on this rank."""
        if self._unread():
            with self._counts.busy():
                self.session.drain()
                self._tell_news()
        if self._ends_engine and self.session.found.untold:
            self.session.check()

    def _unread(self) -> bool:
        """Whether there are violations in steps whose tokens nobody reads on this rank."""
        return self._news.unread(early=self._ends_engine or self.reactions.elsewhere)

    def after_model(self) -> None:
        """After the model."""
        opened, self.open = self.open, None
        if opened is None:
            return
        if isinstance(opened, Measured):
            opened.end()
            return
        if opened.from_python:
            ops.record_own(opened.guarded)
        if opened.from_python and self._news.dropped <= self._news.patience and self._forwards.holds:
            # the tokens of the step before are read next, while the device waits for the host, and then those of this
            # one, with the next step on the device
            self._layers.held.keeps, self._reads_until_free = True, 2
            opened.end()
            self._layers.held.keeps = False  # if nothing was held
        else:
            opened.end()
        inside, outside = len(opened.guarded.in_graph), len(opened.guarded.outside)
        self.calls_in_graph += inside
        self.calls_outside += outside
        seen = self.layers_in_graphs.get(self._replayed, 0) if self._replayed else inside + outside
        if seen < self._layers_of_ours:
            self.session.lose_coverage(
                f"only {seen} of {self._layers_of_ours} layers were checked in a forward of {self._tokens} tokens"
            )

    def draft_forward(
        self, tokens: int, whole: bool, rows: torch.Tensor | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Around the first forward of a proposal; arguments as in :class:`.Drafting`."""
        if not self.drafting.layers:
            return contextlib.nullcontext()
        if self._capturing:
            return self.drafting.captured(self._layers, tokens, whole)
        return self.drafting.forward(rows)

    # ---- where the tokens are read

    def sampled(self) -> None:
        """The tokens of a step are on their way: :meth:`read` comes when they have arrived.  Where
        :attr:`follows_samples`."""
        if self.drafting.expected:
            uncovered = self.drafting.end()
            if uncovered is not None:
                self.session.lose_coverage(uncovered)
        if self.reactions.elsewhere:
            # the checks are at the beginning of a step's work: where the host is not far ahead they are done by now,
            # and the rank whose tokens are read hears of it before they leave
            self._look_at_unread()

    def read(self) -> Verdict | None:
        """A step's tokens have arrived: report its violations.

        Returns:
            what they mean for requests and blocks, if there were any and the engine goes on.

        Raises:
            KVCacheViolation: the engine is to end, and a check failed.
        """
        reactions, bells = self.reactions, self._bells
        if self._reads_until_free:
            self._reads_until_free -= 1
            if not self._reads_until_free:
                self._layers.held.let_go()
        elif bells is not None and reactions.verdict is None:  # as in most steps: what is below, without a call
            for bell in bells:
                if bell[0] or bell[1]:
                    break
            else:
                self._news.dropped = 0
                return None
        unread = reactions.verdict is not None or (reactions.ranks is not None and reactions.heard())
        unread = unread or (self._ends_engine and self.session.found.untold)
        self._news.dropped = 0
        if not self._news.news() and not unread:
            return None
        with self._counts.busy():  # this may be another thread than the runner's
            self.session.drain()
            self._tell_news()
        if self._ends_engine:
            self.session.check()
        return reactions.take_verdict()


class _Open:
    """A forward of ours while the model runs.

    Attributes:
        running: the checks around the model, once they have begun.
        guarded: the layers that were guarded so far, by ops that run from Python.
        from_python: such ops may run.
    """

    def __init__(self, guard: GuardV2):
        self._busy, self._books, self._own = guard._counts.busy(), guard.books, guard._own
        self._none = ops.Guarded()
        self._token: Any = None

    def begin(self, from_python: bool) -> None:
        """A forward begins.

        Args:
            from_python: ops of ours may run: it is no graph of all layers.
        """
        self.running: contextlib.AbstractContextManager[Any] | None = None
        self.from_python = from_python
        self._busy.acquire()
        self.guarded, self._token = ops.begin_forward(defers=True, own=self._own) if from_python else (self._none, None)

    def end(
        self, kind: type[BaseException] | None = None, error: BaseException | None = None, trace: Any = None
    ) -> None:
        """The model has run, or raised."""
        if self._token is not None:
            ops.end_forward(self._token)
        if kind is not None:
            self.guarded = self._none  # K and V that were noted are not wanted any more
        try:
            if self.running is not None:
                self.running.__exit__(kind, error, trace)
            if kind is None:
                self._books.accept_loaded()
        finally:
            self._books.after_forward()
            self._busy.release()

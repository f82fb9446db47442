"""Continuous batching: who runs, how much of each prompt, and who has to leave when pages run out."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from batching import Plan, Work
from workload import Request, State

if TYPE_CHECKING:
    from engine import Engine


class Scheduler:
    """Plans each forward: the decodes first, then chunks of prefill as far as the token budget goes.

    Attributes:
        waiting: requests without a row, in order; retracted ones come first.
        running: requests with a row, oldest first.
        retracts, aborts: how often that happened.
        hits: positions that the prefix cache had for requests.
        chunks: parts of prefills that did not end them.
    """

    def __init__(self, engine: Engine):
        self.engine, self.config, self.memory = engine, engine.config, engine.memory
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.retracts = self.aborts = self.hits = self.chunks = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def plan(self) -> Plan | None:
        """The next forward; None if nobody can run in this step."""
        self._abort_due()
        self._admit()
        budget, work = self.config.token_budget, []
        for request in sorted(self.running, key=lambda r: r.missing > 1):  # decodes first; the sort is stable
            made = self._work_of(request, budget) if request in self.running else None
            if made is not None and self._room_for(made):
                budget -= len(made.tokens)
                work.append(made)
        work = [w for w in work if w.request.state is State.RUNNING]  # some may have been retracted for others
        self.chunks += sum(w.stop < w.request.length for w in work)
        return Plan(work, self.memory) if work else None

    def _work_of(self, request: Request, budget: int) -> Work | None:
        """What a request would do next: a chunk of prefill, or its last token and those proposed to follow."""
        if request.state is not State.RUNNING or budget == 0:
            return None
        start, size = request.stored, min(budget, self.config.chunk)
        if request.missing > 1:
            request.forget_proposed()
        tokens = (request.tail(start) + request.proposed)[:size]
        return Work(request, start, tokens, request.tree[: max(0, len(tokens) - request.missing)])

    def _room_for(self, work: Work) -> bool:
        """Make room for what a request adds: evict, then retract the youngest."""
        need = self.memory.missing(work.request, work.stop)
        while not self.engine.make_room(need):
            victims = [r for r in self.running if r.state is State.RUNNING]
            if not victims or any(r.state is State.SAVING for r in self.running):
                return False  # pages come back in the next step
            self.retract(victims[-1])
            if victims[-1] is work.request:
                return False
        self.memory.grow(work.request, work.stop)
        return True

    # ---- coming and going

    def _admit(self) -> None:
        """Give waiting requests a row, as long as there are rows and pages for what they have to store at once."""
        while self.waiting and self.memory.rows:
            request = self.waiting.popleft()
            request.row = self.memory.rows.pop()
            self.running.append(request)
            if request.saved is not None:
                request.stored = request.saved.length
            else:
                self.engine.use_prefix_cache(request)
            if not self._spare():
                self.put_back(request)
                return
            request.state = State.RUNNING
            if request.saved is None:
                self.hits += request.stored
            else:
                self.memory.grow(request, request.stored)
                request.state = State.LOADING
                self.engine.load(request)

    def _spare(self) -> bool:
        """Whether everybody who is in, the last to come included, has room for a step; else two could take turns
        in coming in and having to leave, and nobody would ever run."""
        full = window = 0
        for request in self.running:
            stop = min(request.length + self.config.ahead, request.stored + self.config.chunk)
            need = self.memory.missing(request, stop)
            full, window = full + max(1, need[0]), window + max(1, need[1])
        return self.engine.make_room((full, window if self.memory.window else 0))

    def retract(self, request: Request) -> None:
        """Take a request out of the batch; it goes on later, where it was or from its prefix."""
        self.retracts += 1
        request.forget_proposed()
        if self.config.offload and request.stored:
            self.engine.save(request)
        else:
            self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Free what a request has; it waits, first in the queue."""
        self._leave(request, State.WAITING)
        request.stored = 0
        self.waiting.appendleft(request)

    def finish(self, request: Request, state: State) -> None:
        """A request is done, or was sent to another instance."""
        self._leave(request, state)

    def _leave(self, request: Request, state: State) -> None:
        request.state = state
        self.running.remove(request)
        pages = self.engine.faults.on_release(self.memory.leave(request))
        self.memory.drop(pages, request.id)

    def _abort_due(self) -> None:
        """Clients went away: in the queue, or in the middle of a prefill or decode."""
        for request in [r for r in self.running if r.wants_abort and r.state is State.RUNNING]:
            self._leave(request, State.ABORTED)
            self.aborts += 1
        for request in [r for r in self.waiting if r.wants_abort]:
            self.waiting.remove(request)
            request.state = State.ABORTED
            self.aborts += 1

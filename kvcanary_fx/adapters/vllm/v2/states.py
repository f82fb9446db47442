"""The running states of a Model Runner V2's requests: what is compared before the model, and fingerprinted behind it.

::

    execute_model        blocks are prepared on the device; with mamba_cache_mode=align, states are copied to new ones
      pre_forward          bytes of those that the last step of their request left fingerprinted
      model or graph       places of all states (:mod:`.state_places`), with attention's checks
      finish_forward       some of the batch's states are fingerprinted, in turn
    ...                    nobody may write to them until the next step of their request

The bytes are looked at by launches of their own, in steps in which somebody has a turn and those behind them.  A state
is rewritten in each step of its request, so a fingerprint is of one step: what a fault changes between two steps is
told if the request had its turn in the first one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ....engine.session import EngineSession
from ..state_groups import StateGroup
from .outputs import News
from .rows import Rows
from .state_checks import Moved, StateChecks
from .state_memory import StateHalf, StateTable, StepInputs
from .state_places import StatePlaces
from .turns import Turns, seconds_of


class _Left(NamedTuple):
    """A state that a step left fingerprinted: its block in each group, and how many tokens are in it."""

    blocks: tuple[int, ...]
    tokens: int


class States:
    """The states of one model runner.

    Attributes:
        session: of their pools.
        groups: the KV cache groups that they are in.
        news: of their violations.
        turns: how many requests are fingerprinted in a step.
        places: of all states, once :meth:`guard_places` was called.
    """

    def __init__(self, runner: Any, session: EngineSession, groups: Sequence[StateGroup], rows: Rows):
        """
        Args:
            rows: where the requests' blocks are, as the scheduler said.
        """
        self.session, self.groups, self._rows = session, groups, rows
        self.news = News(session)
        self._tables = runner.block_tables.input_block_tables
        self._checks = checks_of(session, groups, runner.max_num_reqs)
        (self._page,) = {group.tokens for group in groups}  # vLLM's groups of states are scheduled alike
        self._slots = min(pool.declared.slots for pool in session.pools.values())
        self.turns = Turns(None, 1, 0.0)
        self._content = False
        self._left: dict[str, _Left] = {}  # by request: the state that its next step reads
        # by the block of the first group: where a block of tokens ends; it loses its fingerprint when it is handed out
        self._cached: dict[int, _Left] = {}
        self._last_turn: dict[str, int] = {}  # by request: the step
        self._recording: list[tuple[str, _Left]] = []  # of the running step
        self._turn = 0  # requests that have it in the step that begins

    @property
    def size(self) -> int:
        """Bytes of a request's states."""
        return sum(half.view[0].numel() * half.view.element_size() for half in self._checks.halves)

    def warm_up(self, budget: float | None, every: int, content: bool) -> None:
        """Compile, and look how long a request's states take, before anything is stored in the cache.

        Args:
            budget, every: as of :class:`.Turns`.
            content: the bytes of states are compared at all.
        """
        checks, most = self._checks, self._slots - 1
        blocks = (most,) * len(self.groups)
        moved = [Moved(0, 0, blocks, blocks)]
        checks.begin(0, moved, moved)

        def once() -> None:
            checks.record()
            checks.compare()

        price = seconds_of(once, checks.step.device)
        began = time.perf_counter()
        checks.begin(0, moved, moved)
        once()
        self.turns = Turns(budget if content else None, every, price, time.perf_counter() - began)
        self._content = content

    def guard_places(self, attention: EngineSession) -> None:
        """From now on :attr:`places` can be checked, in the steps of attention's session."""
        names = "request_rows", "owners", "prefix_lens", "extend_lens"
        inputs = [buffer for name in names if (buffer := attention.inputs.buffer(name)) is not None]
        tables, pools = [], [self.session.pools[group.name] for group in self.groups]
        for group, pool in zip(self.groups, pools, strict=True):
            given, planned = self._tables[group.number], self._rows.tables[group.number]
            tables.append(StateTable(pool.space, given, planned, pool.content.bytes.sites[0].half_id))
        (control,) = self.session.controls.by_device.values()
        self.places = StatePlaces(tables, StepInputs(*inputs), self._page, control, pools[0].checks)

    def idle(self, batch: Any, scheduled: Any) -> bool:
        """Whether no bytes are looked at in a step, as in most; :meth:`before` follows if any are.

        Args:
            batch: vLLM's ``InputBatch``.
            scheduled: the ``SchedulerOutput`` of the step.
        """
        due = self._turn = self.turns.due(len(batch.req_ids)) if self._content else 0
        return not due and not self._left and not (self._cached and scheduled.scheduled_new_reqs)

    def before(self, batch: Any, scheduled: Any, step: int) -> None:
        """The inputs of a forward are prepared: before the model, if it is not :meth:`idle`.

        Args:
            batch, scheduled: as of :meth:`idle`.
            step: its number.
        """
        began = time.perf_counter()
        looked = _Batch(self, batch)
        compared = [*self._due(looked, scheduled)]
        recorded = self._choose(looked, self._turn, step)
        if compared or recorded:
            self._recording = [(looked.requests[row], looked.left(row)) for row in recorded]
            self._checks.begin(step, compared, [looked.moved(row, *looked.left(row)) for row in recorded])
            self._checks.compare()
        self.turns.took(time.perf_counter() - began)

    def after(self) -> None:
        """The model has run, or is about to in the order of the device."""
        recording, self._recording = self._recording, []
        if not recording:
            return
        began = time.perf_counter()
        self._checks.record()
        for request, left in recording:
            self._left[request] = left
            if self._page and left.tokens % self._page == 0:
                self._cached[left.blocks[0]] = left
        self.turns.took(time.perf_counter() - began)

    def drop(self) -> None:
        """What :meth:`after` was to do is not to be done: the model raised."""
        self._recording = []

    def ended(self, requests: Iterable[str]) -> None:
        """Requests ended, or gave up their blocks."""
        for request in requests:
            self._left.pop(request, None)
            self._last_turn.pop(request, None)

    def forget(self) -> None:
        """Nothing of what is stored stays."""
        self._left.clear()
        self._cached.clear()

    # ---- what is compared

    def _due(self, looked: _Batch, scheduled: Any) -> Iterator[Moved]:
        """The states that are fingerprinted among those that the forward reads."""
        for new in scheduled.scheduled_new_reqs if self._cached else ():
            row = looked.row_of.get(new.req_id)
            if row is not None and looked.stored[row]:
                yield from self._read(looked, row, self._cached)
        for request in [request for request in self._left if request in looked.row_of]:
            left = self._left.pop(request)
            yield from self._read(looked, looked.row_of[request], {left.blocks[0]: left})

    def _read(self, looked: _Batch, row: int, known: dict[int, _Left]) -> Iterator[Moved]:
        """The state that a request reads, which has so many tokens, if it is known, and where it is to be written."""
        stored = looked.stored[row]
        if not stored or not self._exist(looked.left(row).blocks):
            return
        blocks = looked.blocks(row, stored)
        left = known.get(blocks[0])
        if left is not None and left == (blocks, stored):
            yield looked.moved(row, blocks, stored)

    # ---- what is fingerprinted

    def _choose(self, looked: _Batch, due: int, step: int) -> list[int]:
        """The rows of the batch whose states have their turn: those that had none for longest; before them, those that
        the prefix cache is going to keep."""
        if not due:
            return []
        last, page = self._last_turn, self._page
        rows: Sequence[int] = range(len(looked.requests))
        if due < len(rows):
            turns = [last.get(request, 0) for request in looked.requests]
            full = [not tokens % page for tokens in looked.tokens] if page else [False] * len(turns)
            rows = sorted(rows, key=[turn - step * end for turn, end in zip(turns, full, strict=True)].__getitem__)
        chosen = [row for row in rows[:due] if self._exist(looked.left(row).blocks)]
        last.update((looked.requests[row], step) for row in chosen)
        return chosen

    def _exist(self, blocks: tuple[int, ...]) -> bool:
        """Whether a request's blocks are such that a kernel may look there."""
        return min(blocks) > 0 and max(blocks) < self._slots

    def blocks_of(self, request: str, tokens: int) -> tuple[int, ...]:
        """The blocks of the state of so many tokens, by group; -1 where the scheduler has said of none."""
        column = (tokens - 1) // self._page if self._page else 0
        (found,) = self._rows.blocks_at([request], [group.number for group in self.groups], [column])
        return found


class _Batch:
    """The requests of a forward, and where the states are that it reads and writes.

    Attributes:
        stored, tokens: that each request has before the forward, and after it.
    """

    def __init__(self, states: States, batch: Any):
        """
        Args:
            batch: vLLM's ``InputBatch``.
        """
        self._states, self.requests = states, list(batch.req_ids)  # vLLM writes to its own
        self.row_of = {request: row for row, request in enumerate(self.requests)}
        self.stored: list[int] = batch.num_computed_tokens_np.tolist()
        self.tokens = [a + b for a, b in zip(self.stored, batch.num_scheduled_tokens.tolist(), strict=True)]
        self._left: dict[int, _Left] = {}

    def left(self, row: int) -> _Left:
        """What the forward leaves of a request."""
        found = self._left.get(row)
        if found is None:
            tokens = self.tokens[row]
            found = self._left[row] = _Left(self.blocks(row, tokens), tokens)
        return found

    def blocks(self, row: int, tokens: int) -> tuple[int, ...]:
        """The blocks of a request's state of so many tokens."""
        return self._states.blocks_of(self.requests[row], tokens)

    def moved(self, row: int, known: tuple[int, ...], tokens: int) -> Moved:
        """A state of so many tokens that was fingerprinted in some blocks, and whose bytes are in those that are to be
        written."""
        owner = self._states.session.ids.hash(self.requests[row])
        return Moved(owner, tokens - 1, known, self.left(row).blocks)


def checks_of(session: EngineSession, groups: Sequence[StateGroup], most: int) -> StateChecks:
    """What looks at the states of groups, in their session.

    Args:
        most: requests of the largest batch.
    """
    halves = []
    for number, group in enumerate(groups):
        pool = session.pools[group.name]
        sites = pool.content.bytes.sites
        halves += [StateHalf(site, view, number) for site, view in zip(sites, pool.views, strict=True)]
    (control,) = session.controls.by_device.values()
    return StateChecks(halves, len(groups), control, most)

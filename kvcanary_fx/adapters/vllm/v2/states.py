"""The running states of a Model Runner V2's requests: what is compared before the model, and fingerprinted behind it.

::

    execute_model        blocks are prepared on the device; with mamba_cache_mode=align, states are copied to new ones
      pre_forward          places of all states; bytes of those that the last step of their request left fingerprinted
      model or graph
      finish_forward       some of the batch's states are fingerprinted, in turn
    ...                    nobody may write to them until the next step of their request

Nothing of it is in vLLM's graphs.  A state is rewritten in each step of its request, so a fingerprint is of one step:
what a fault changes between two steps is told if the request had its turn in the first one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....engine.session import EngineSession
from ..state_groups import StateGroup
from .outputs import Flags
from .rows import Rows
from .state_checks import Moved, StateChecks
from .state_memory import StateHalf, StateTable
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
        flags: of their violations.
        turns: how many requests are fingerprinted in a step.
    """

    def __init__(self, runner: Any, session: EngineSession, groups: Sequence[StateGroup], rows: Rows):
        """
        Args:
            rows: where the requests' blocks are, as the scheduler said.
        """
        self.session, self.groups, self._rows = session, groups, rows
        self.flags = Flags(session)
        self._checks = checks_of(session, groups, runner.block_tables.input_block_tables, runner.max_num_reqs)
        (self._page,) = {group.tokens for group in groups}  # vLLM's groups of states are scheduled alike
        self._slots = min(pool.declared.slots for pool in session.pools.values())
        self.turns = Turns(None, 1, 0.0)
        self._step = 0
        self._left: dict[str, _Left] = {}  # by request: the state that its next step reads
        self._cached: dict[int, _Left] = {}  # by the block of the first group: where a block of tokens ends
        self._last_turn: dict[str, int] = {}  # by request: the step
        self._recording: list[tuple[str, _Left]] = []  # of the running step
        self._batch: tuple[Any, ...] = ()  # what was said of the last one
        self._requests: list[str] = []  # of the batch; and what follows from them
        self._owners: list[int] = []
        self._blocks: list[tuple[int, ...]] = []
        self._row_of: dict[str, int] = {}

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
        checks, device = self._checks, self._checks.step.device
        most = self._slots - 1

        def once(number: int) -> None:
            blocks = (most - number % most,) * len(self.groups)
            moved = [Moved(0, 0, blocks, blocks)]
            checks.begin(0, moved, moved)
            checks.record()
            checks.compare()

        checks.check_places(0)
        price = seconds_of(once, device)
        self.turns = Turns(budget if content else None, every, price)
        self._content = content

    def before(self, batch: Any, scheduled: Any) -> None:
        """The inputs of a forward are prepared: before the model.

        Args:
            batch: vLLM's ``InputBatch``.
            scheduled: the ``SchedulerOutput`` of the step.
        """
        self.session.flush()
        self._step += 1
        stored, added = batch.num_computed_tokens_np, batch.num_scheduled_tokens
        tokens = stored + added
        moved = self._place(batch, self._columns(tokens))
        compared = self._due(stored, scheduled, moved)
        recorded = self._choose(tokens) if self._content else []
        if not (moved or compared or recorded):
            return
        self._recording = [(self._requests[row], _Left(self._blocks[row], int(tokens[row]))) for row in recorded]
        fingerprinted = [self._moved(row, self._blocks[row], int(tokens[row])) for row in recorded]
        self._checks.begin(self._step, compared, fingerprinted)
        self._checks.check_places(len(self._requests))
        self._checks.compare()

    def after(self) -> None:
        """The model has run, or is about to in the order of the device."""
        recording, self._recording = self._recording, []
        if not recording:
            return
        self._checks.record()
        for request, left in recording:
            self._left[request] = left
            if self._page and left.tokens % self._page == 0:
                self._cached[left.blocks[0]] = left

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
        self._batch = ()

    # ---- the batch

    def _columns(self, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Where in a block table the state of so many tokens is."""
        return (tokens - 1) // self._page if self._page else np.zeros_like(tokens)

    def _place(self, batch: Any, columns: np.ndarray[Any, Any]) -> bool:
        """Look up the blocks of a batch, unless they are those of the last one; whether they are others."""
        said = self._rows.moved, columns.tobytes()
        if said == self._batch and batch.req_ids == self._requests:
            return False
        requests = self._requests = list(batch.req_ids)  # vLLM writes to its own
        self._row_of = {request: row for row, request in enumerate(requests)}
        self._owners = self.session.ids.hashes(requests)
        self._blocks = self._at(requests, columns.tolist())
        self._checks.place(self._owners, columns.tolist(), self._blocks)
        self._batch = said
        return True

    def _at(self, requests: Sequence[str], columns: Sequence[int]) -> list[tuple[int, ...]]:
        """The blocks of the states of requests, by group; -1 where the scheduler has said of none."""
        return self._rows.blocks_at(requests, [group.number for group in self.groups], columns)

    def _moved(self, row: int, known: tuple[int, ...], tokens: int) -> Moved:
        return Moved(self._owners[row], tokens - 1, known, self._blocks[row])

    # ---- what is compared

    def _due(self, stored: np.ndarray[Any, Any], scheduled: Any, moved: bool) -> list[Moved]:
        """The states that are fingerprinted among those that the forward reads.

        Args:
            moved: the batch's blocks are others than the last one's.
        """
        found: list[Moved] = []
        for new in scheduled.scheduled_new_reqs if self._cached else ():
            row = self._row_of.get(new.req_id)
            if row is not None and stored[row]:
                found += self._read(row, int(stored[row]), self._cached)
        rows = [(request, self._row_of.get(request)) for request in self._left]
        for request, row in rows:
            if row is None:
                continue
            left = self._left.pop(request)
            found += self._read(row, int(stored[row]), {left.blocks[0]: left})
        for blocks in self._blocks if self._cached and moved else ():
            self._cached.pop(blocks[0], None)  # they are about to be written
        return found

    def _read(self, row: int, stored: int, known: dict[int, _Left]) -> list[Moved]:
        """The state that a request reads, which has so many tokens, if it is known, and where it is to be written."""
        if not stored or min(self._blocks[row]) < 1:
            return []
        column = (stored - 1) // self._page if self._page else 0
        (blocks,) = self._at([self._requests[row]], [column])
        left = known.get(blocks[0])
        if left is None or left != (blocks, stored) or not self._exist(self._blocks[row]):
            return []
        return [self._moved(row, blocks, stored)]

    # ---- what is fingerprinted

    def _choose(self, tokens: np.ndarray[Any, Any]) -> list[int]:
        """The rows of the batch whose states have their turn: those that had none for longest; before them, those that
        the prefix cache is going to keep."""
        n = len(self._requests)
        due = self.turns.due(n)
        if not due:
            return []
        last, page = self._last_turn, self._page
        rows: Sequence[int] = range(n)
        if due < n:

            def order(row: int) -> tuple[bool, int]:
                return not page or bool(tokens[row] % page), last.get(self._requests[row], 0)

            rows = heapq.nsmallest(due, rows, key=order)
        chosen = [row for row in rows if self._exist(self._blocks[row])]
        last.update((self._requests[row], self._step) for row in chosen)
        return chosen

    def _exist(self, blocks: tuple[int, ...]) -> bool:
        """Whether a request's blocks are such that a kernel may look there."""
        return min(blocks) > 0 and max(blocks) < self._slots


def checks_of(session: EngineSession, groups: Sequence[StateGroup], tables: Sequence[Any], most: int) -> StateChecks:
    """What looks at the states of groups, in their session.

    Args:
        tables: what the model gets: int32 ``[>= bs, columns]`` for each KV cache group.
        most: requests of the largest batch.
    """
    halves, given = [], []
    for number, group in enumerate(groups):
        pool = session.pools[group.name]
        sites = pool.content.bytes.sites
        halves += [StateHalf(site, view, number) for site, view in zip(sites, pool.views, strict=True)]
        given.append(StateTable(pool.space, tables[group.number], sites[0].half_id))
    (control,) = session.controls.by_device.values()
    return StateChecks(halves, given, control, most, pool.checks)

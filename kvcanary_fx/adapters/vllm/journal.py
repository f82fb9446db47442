"""A journal of what the scheduler's block pool did since the last step, sent to the workers.

The scheduler may be in another process than the model, or ahead of it.  So its operations on blocks are recorded, and
travel with the step's message (``SchedulerOutput``) to every worker, which passes them to its session in order.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import compress
from typing import Any

from ...engine.stacks import CallStacks
from .holders import Holders

#: The attribute of a ``SchedulerOutput`` that has the :class:`Message`; of a ``ModelRunnerOutput``, the
#: :class:`~.verdict.Verdict` if there is one.
ATTRIBUTE = "kvcanary"

#: The event of :meth:`Journal.taken`, and those of blocks that a request gives up, and that it takes up.
TAKEN, FREED, TOUCHED = "taken", "freed", "touched"

#: That of blocks that a KV connector is about to fill.
FILLED = "filled_elsewhere"


@dataclasses.dataclass
class Message:
    """The message to a worker with a step.

    Attributes:
        events: ``(name, *arguments)``, methods of :class:`~.books.Books`, in order.
        namespaces: of requests that have one, by id.
        stacks: the scheduler's stack of each event, if stacks are kept.
        plain: nothing happened, and nothing is new in the step but a token of each request.
    """

    events: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    namespaces: dict[str, int] = dataclasses.field(default_factory=dict)
    stacks: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    plain: bool = False


#: Of a step in which nothing happened; of one in which nothing is new either, as in most.  Not to be written to.
NOTHING, PLAIN = Message(), Message(plain=True)


class Journal:
    """Of one block pool.

    Attributes:
        message: what was recorded since the last :meth:`take`.
        retained: by block, references that vLLM added without its block pool: of a copy, until it has been made.
        holders: who says later which request got the blocks of a call; None: whoever records the call, also once there
            was a call that they did not know.
        handed_out: vLLM's blocks of such calls, which are no event yet.
        undecided: nobody has looked whether there are such holders.
    """

    def __init__(self, stacks: int = 0) -> None:
        """
        Args:
            stacks: how many distinct stacks are kept; 0: events have none.
        """
        self.message = Message()
        self._stacks = CallStacks(stacks) if stacks else None
        self.retained: Counter[int] = Counter()
        self.holders: Holders | None = None
        self.handed_out: list[list[Any]] = []
        self.undecided = not stacks  # where each call has a stack, its caller is known
        # by group, the event that blocks can join, and what was freed since
        self._joined: dict[int, tuple[tuple[Any, ...], set[int]]] = {}

    def note(self, name: str, *arguments: Any) -> None:
        """Record an operation on blocks."""
        if self.handed_out:
            self.settle()
        if name == FREED:
            for _, freed in self._joined.values():
                freed.update(*arguments[:2])
        elif name != TAKEN:
            self._joined.clear()
        self.message.events.append((name, *arguments))
        if self._stacks is not None:
            self.message.stacks.append(self._stacks.here())

    def taken(self, blocks: list[int], requests: list[str | None], lengths: list[int], group: int) -> None:
        """Record that blocks were handed out; such calls for a group are one event (:meth:`.Books.taken`), also if in
        between other groups got blocks, and others were freed, as for each request of a model with several groups.

        In a large batch several requests fill a block in each step: an event for each is as many objects more for
        Python's garbage collector, and for each of their readers.

        Args:
            blocks: of all calls, one after the other.
            requests, lengths: of each call, its request and the number of its blocks.
            group: the KV cache group.
        """
        joined = self._joined.get(group)
        if joined is not None and joined[1].isdisjoint(blocks):
            _, to_blocks, to_requests, to_lengths, _ = joined[0]
            to_blocks += blocks
            to_requests += requests
            to_lengths += lengths
            return
        if self._stacks is not None or self.handed_out:
            self.note(TAKEN, blocks, requests, lengths, group)
            return
        event = TAKEN, blocks, requests, lengths, group  # as :meth:`note` does, in a step that waits for the host
        self.message.events.append(event)
        self._joined[group] = event, set()

    def settle(self, asked: Iterable[str] = (), gone: Collection[int] = (), of: str | None = None) -> None:
        """Record the blocks that were handed out, once the tables of those who got them have them.

        Args:
            asked: as of :meth:`.Holders.of`.
            gone: blocks that are in no table any more, since the request ``of`` has just given them up.
        """
        handed_out, self.handed_out = self.handed_out, []
        holders = self.holders
        assert holders is not None
        requests = holders.of(handed_out, asked)
        if None in requests:
            known = [
                (new, of if request is None else request)
                for new, request in zip(handed_out, requests, strict=True)
                if request is not None or new[-1].block_id in gone
            ]
            if len(known) < len(handed_out):  # of nobody that the manager knows: its tables do not say all
                self.holders = None
            handed_out, requests = [new for new, _ in known], [request for _, request in known]
        if requests:
            blocks = [block.block_id for new in handed_out for block in new]
            self.taken(blocks, requests, [*map(len, handed_out)], holders.group)

    def name(self, request: str, namespace: int) -> None:
        """Record a request's namespace."""
        self.message.namespaces[request] = namespace

    def take(self, output: Any = None) -> Message:
        """The recorded events, not to be written to; each is returned once.

        Args:
            output: the ``SchedulerOutput`` that they go with.
        """
        if self.handed_out:
            # it says for whom to look, and not who has a block: one that it gives to another request is told by this
            cached = output.scheduled_cached_reqs
            new = [request.req_id for request in output.scheduled_new_reqs]
            self.settle([*compress(cached.req_ids, cached.new_block_ids), *new])
        taken = self.message
        if not (taken.events or taken.namespaces):
            return NOTHING
        self.message = Message()
        self._joined.clear()
        return taken

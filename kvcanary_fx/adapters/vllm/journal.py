"""A journal of what the scheduler's block pool did since the last step, sent to the workers.

The scheduler may be in another process than the model, or ahead of it.  So its operations on blocks are recorded, and
travel with the step's message (``SchedulerOutput``) to every worker, which passes them to its session in order.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from ...engine.stacks import CallStacks

#: The attribute of a ``SchedulerOutput`` that has the :class:`Message`; of a ``ModelRunnerOutput``, the
#: :class:`~.verdict.Verdict` if there is one.
ATTRIBUTE = "kvcanary"

#: The event of :meth:`Journal.taken`, and those of blocks that a request gives up, and that it takes up.
TAKEN, FREED, TOUCHED = "taken", "freed", "touched"

#: That of blocks that a KV connector is about to fill.
FILLED = "filled_elsewhere"

#: Events that are looked at, the last ones first, for one that blocks can join: those of two requests, in most models.
LOOKED_AT = 12


@dataclasses.dataclass
class Message:
    """The message to a worker with a step.

    Attributes:
        events: ``(name, *arguments)``, methods of :class:`~.books.Books`, in order.
        namespaces: of requests that have one, by id.
        stacks: the scheduler's stack of each event, if stacks are kept.
    """

    events: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    namespaces: dict[str, int] = dataclasses.field(default_factory=dict)
    stacks: list[tuple[str, ...]] = dataclasses.field(default_factory=list)


#: Of a step in which nothing happened, as in most; not to be written to.
NOTHING = Message()


class Journal:
    """Of one block pool.

    Attributes:
        retained: by block, references that vLLM added without its block pool: of a copy, until it has been made.
    """

    def __init__(self, stacks: int = 0) -> None:
        """
        Args:
            stacks: how many distinct stacks are kept; 0: events have none.
        """
        self._message = Message()
        self._stacks = CallStacks(stacks) if stacks else None
        self.retained: Counter[int] = Counter()

    def note(self, name: str, *arguments: Any) -> None:
        """Record an operation on blocks."""
        self._message.events.append((name, *arguments))
        if self._stacks is not None:
            self._message.stacks.append(self._stacks.here())

    def taken(self, blocks: list[int], request: str | None, group: int) -> None:
        """Record that blocks were handed out; such calls for a group are one event (:meth:`.Books.taken`), also if in
        between other groups got blocks, and others were freed, as for each request of a model with several groups.

        In a large batch several requests fill a block in each step: an event for each is as many objects more for
        Python's garbage collector, and for each of their readers.

        Args:
            group: the KV cache group.
        """
        earlier = self._event_to_join(blocks, group) if self._stacks is None else None
        if earlier is not None:
            earlier[1].extend(blocks)
            earlier[2].append(request)
            earlier[3].append(len(blocks))
        else:
            self.note(TAKEN, blocks, [request], [len(blocks)], group)

    def _event_to_join(self, blocks: list[int], group: int) -> tuple[Any, ...] | None:
        """The event of a group that these blocks could have been handed out in: nothing behind it is about them."""
        for event in self._message.events[: -1 - LOOKED_AT : -1]:
            name = event[0]
            if name == TAKEN:
                if event[4] == group:
                    return event
            elif name != FREED or any(block in event[1] or block in event[2] for block in blocks):
                return None
        return None

    def name(self, request: str, namespace: int) -> None:
        """Record a request's namespace."""
        self._message.namespaces[request] = namespace

    def take(self) -> Message:
        """The recorded events, not to be written to; each is returned once."""
        taken = self._message
        if not (taken.events or taken.namespaces):
            return NOTHING
        self._message = Message()
        return taken

"""What the scheduler's block pool did since the last step, on its way to the workers.

The scheduler may be in another process than the model, or ahead of it.  So what it does to blocks is written down, and
travels with the message of the step (``SchedulerOutput``) to every worker, which tells its session in the same order.
"""

from __future__ import annotations

import dataclasses
from typing import Any

#: The attribute of a ``SchedulerOutput`` that has the :class:`Message`; of a ``ModelRunnerOutput``, the ids of the
#: requests to be aborted.
ATTRIBUTE = "kvcanary"


@dataclasses.dataclass
class Message:
    """What a worker is told with a step.

    Attributes:
        events: ``(name, *arguments)``, methods of :class:`~.books.Books`, in order.
        namespaces: of requests that have one, by id.
    """

    events: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    namespaces: dict[str, int] = dataclasses.field(default_factory=dict)


class Journal:
    """Of one block pool."""

    def __init__(self) -> None:
        self._message = Message()

    def note(self, name: str, *arguments: Any) -> None:
        """Something happened to blocks."""
        self._message.events.append((name, *arguments))

    def name(self, request: str, namespace: int) -> None:
        """A request has a namespace."""
        self._message.namespaces[request] = namespace

    def take(self) -> Message:
        """What was written down, once."""
        taken, self._message = self._message, Message()
        return taken

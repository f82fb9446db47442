"""The host's time in the canary's own code within the steps of Hugging Face's batches, by part.

Hooks go around methods of transformers and call them: the clock stands still while these run.  Each part that begins
takes the clock itself about 1 us, half of which counts as ours.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from kvcanary_fx.adapters import hooks
from kvcanary_fx.adapters.huggingface.batching import GuardedProcessor
from kvcanary_fx.engine.steps import Steps

#: Methods of ours with a part of their own, and its name.
PARTS: list[tuple[type, str, str]] = [
    (GuardedProcessor, "_batch", "batch"),
    (Steps, "begin", "fill"),
    (Steps, "begin_forward", "before"),
    (GuardedProcessor, "_check_reads", "reads"),
    (Steps, "end_forward", "after"),
    (Steps, "end", "end"),
]

#: Hooks with a part of their own; all others are "blocks".
HOOKS = {"_generation_step": "around", "update": "layers"}

#: All parts of a step of Hugging Face's batches, in order.
NAMES = ("blocks", *(name for _, _, name in PARTS), "layers", "around")


class OwnTime:
    """Microseconds of our parts.

    Attributes:
        steps: of each step that was ended, the time of each part.
        calls: how often each part ran in the last step that was ended.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.calls: dict[str, int] = {}
        self._taken: dict[str, int] = defaultdict(int)
        self._ran: dict[str, int] = defaultdict(int)
        self._running: list[str | None] = []
        self._since = 0

    def enter(self, part: str | None) -> None:
        """A part begins; None: the engine's own code."""
        now = time.perf_counter_ns()
        if self._running and (outer := self._running[-1]) is not None:
            self._taken[outer] += now - self._since
        self._running.append(part)
        if part is not None:
            self._ran[part] += 1
        self._since = time.perf_counter_ns()

    def leave(self) -> None:
        """It ends, and what it interrupted goes on."""
        part = self._running.pop()
        if part is not None:
            self._taken[part] += time.perf_counter_ns() - self._since
        self._since = time.perf_counter_ns()

    def end_step(self, keep: bool) -> None:
        """What was taken since the last call is a step's; ``keep``: one that counts."""
        if keep:
            self.steps.append({name: taken / 1000 for name, taken in self._taken.items()})
            self.calls = dict(self._ran)
        self._taken.clear()
        self._ran.clear()

    def within(self, part: str | None, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a part."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return timed


def watch() -> OwnTime:
    """From now on."""
    own = OwnTime()
    for owner, name, part in PARTS:
        setattr(owner, name, own.within(part, getattr(owner, name)))
    made = hooks.Hook.__init__

    def init(self: hooks.Hook, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        made(self, owner, name, wrapper)
        # a method that is wrapped twice is ours in between: only the innermost is the engine's
        theirs = not isinstance(self._original, hooks.Hook)
        self._wrapper = own.within(HOOKS.get(name, "blocks"), wrapper)
        self._original = own.within(None if theirs else HOOKS.get(name, "blocks"), self._original)

    hooks.Hook.__init__ = init
    return own

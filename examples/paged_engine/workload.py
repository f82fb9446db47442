"""Requests: what is asked for, and how far it is; and a random workload."""

from __future__ import annotations

import dataclasses
import enum
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload import SavedKV

BOS, VOCAB = 1, 997


class State(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"  # holds pages; its KV is on the way from the host
    RUNNING = "running"
    SAVING = "saving"  # retracted; its KV is on the way to the host
    SENT = "sent"  # prefilled here, handed to the decode instance
    DONE = "done"
    ABORTED = "aborted"


@dataclasses.dataclass
class Request:
    """One request.

    Attributes:
        prompt: begins with :data:`BOS`.
        new_tokens: how many tokens it wants.
        namespace: its LoRA's number; KV of one namespace is useless to another.
        arrival: step of its arrival.
        abort_after: output tokens after which its client goes away, or None.
        output: tokens so far.
        pages: its pages, in order of position.
        stored: positions whose KV is in the pool.
        proposed: tokens that the draft proposes to follow.
        tree: for each of them the number of the one that it follows, -1 for the request's last token.
        caught: positions that each of the draft's pools has with the request's own tokens; empty: as many as stored.
        guessed: where the positions end that the draft's pool holds guesses for.
        saved: its KV on the host, while it is retracted.
    """

    id: str
    prompt: list[int]
    new_tokens: int
    namespace: int = 0
    arrival: int = 0
    abort_after: int | None = None
    output: list[int] = dataclasses.field(default_factory=list)
    state: State = State.WAITING
    row: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    stored: int = 0
    proposed: list[int] = dataclasses.field(default_factory=list)
    tree: list[int] = dataclasses.field(default_factory=list)
    caught: list[int] = dataclasses.field(default_factory=list)
    guessed: int = 0
    saved: SavedKV | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    def tail(self, start: int) -> list[int]:
        """The tokens from ``start`` on, without a copy of those before."""
        split = len(self.prompt)
        return self.prompt[start:] + self.output if start < split else self.output[start - split :]

    @property
    def missing(self) -> int:
        """Tokens that have no KV yet; 1 in decode."""
        return self.length - self.stored

    def forget_proposed(self) -> None:
        """Nothing is proposed any more, and what a draft stored for it is gone."""
        self.proposed, self.tree, self.guessed = [], [], 0

    @property
    def ended(self) -> bool:
        return len(self.output) >= self.new_tokens

    @property
    def wants_abort(self) -> bool:
        return self.abort_after is not None and len(self.output) >= self.abort_after


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How long random requests are.

    Attributes:
        system, own: fewest and most tokens of a system prompt, and of what a request adds to it.
        new: fewest and most tokens that a request wants.
        arrivals: requests that arrive in each step.
    """

    system: tuple[int, int] = (11, 24)
    own: tuple[int, int] = (2, 20)
    new: tuple[int, int] = (4, 20)
    arrivals: int = 2


def workload(
    count: int, seed: int, namespaces: int = 1, abort_share: float = 0.0, lengths: Lengths | None = None
) -> list[Request]:
    """Random requests; many begin with one of a few system prompts, the same in every namespace."""
    rng, lengths = random.Random(seed), lengths or Lengths()

    def words(low: int, high: int) -> list[int]:
        return [rng.randrange(2, VOCAB) for _ in range(rng.randint(low, high))]

    systems = [[BOS, *words(*lengths.system)] for _ in range(3)]
    made = []
    for i in range(count):
        head = rng.choice(systems) if rng.random() < 0.7 else [BOS]
        new = rng.randint(*lengths.new)
        abort = rng.randrange(new) if rng.random() < abort_share else None
        made.append(
            Request(f"r{i}", head + words(*lengths.own), new, rng.randrange(namespaces), i // lengths.arrivals, abort)
        )
    return made

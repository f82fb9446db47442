"""How many requests' states a step fingerprints, so that it takes no longer than a budget says."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ....kernels.replay import capture

#: Steps that come later than this were waited for: what they leave for us is no time of theirs.
LONGEST_STEP = 0.1

#: Measurements of a price, and the lowest, in seconds: less than a launch takes.
MEASURED, LEAST = 5, 1e-6

#: Of what a round is taken to take the host, the part that the last one is, if it took longer.
NEWEST = 1 / 8

#: What took so many times as long was interrupted, or ran for the first time: the rest is no time of ours.
INTERRUPTED = 4


class Turns:
    """Each step leaves a part of its time; when there is enough, some requests have their turn, and that is a round.

    A step's time is that from one to the next on the host, which is the device's where steps follow each other.  A
    round takes the host some launches, in the step in which states are fingerprinted and in the next one, in which they
    are compared: 100 us each where other work has emptied the caches of its core, and a step of 3 ms waits for it.  On
    the device each request has its price.  So a round waits until the host's part is at most half of what it takes, and
    has as many requests as are paid then.

    Args:
        budget: how much longer steps may take, as a fraction; None: as long as it takes.
        every: without a budget, the steps within which each request has its turn.
        price: seconds that the states of one request take the device, compared and fingerprinted.
        round: seconds that a round takes the host, about; 0: nothing, whatever it takes.
    """

    def __init__(self, budget: float | None, every: int, price: float, round: float = 0.0):
        self.budget, self.every, self.price, self.round = budget, every, max(price, LEAST), round
        self._left = 0.0  # seconds that were paid; without a budget, requests
        self._took: float | None = None  # what the running round has taken the host
        self._last = time.perf_counter()

    def due(self, requests: int) -> int:
        """A step begins: how many of its requests have their turn."""
        if self.budget is None and self.every == 1:
            return requests
        if self.budget is None:
            self._left += requests / self.every
            due = min(int(self._left), requests)
            self._left = min(self._left - due, float(requests))
            return due
        now = time.perf_counter()
        self._left += self.budget * min(now - self._last, LONGEST_STEP)
        self._last = now
        if self._left < self.round + max(self.round, self.price):
            return 0
        if self._took is not None:
            longer = self._took - self.round
            self.round += NEWEST * longer if longer > 0 else longer
        due, self._took = min(int((self._left - self.round) / self.price), requests), 0.0
        # what a small batch has left is no large one's
        self._left = min(self._left - due * self.price, self.round + requests * self.price)
        return due

    def took(self, seconds: float) -> None:
        """The states have taken the host so long."""
        if self.budget is not None:
            seconds = min(seconds, INTERRUPTED * self.round)
            self._took = (self._took or 0.0) + seconds
            self._left -= seconds

    def describe(self, size: int) -> str:
        """In words.

        Args:
            size: bytes of a request's states.
        """
        if self.budget is None:
            each = "each request" if self.every == 1 else f"each request once in {self.every} steps"
            return f"{each} in turn" if self.every > 1 else f"{each} in each step"
        return (
            f"as many requests in turn as {self.budget:.2%} pays for: {size} bytes each take {self.price * 1e6:.0f} us"
        )


def seconds_of(run: Callable[[], None], device: torch.device) -> float:
    """What launches take on a device: the median of a few times, without what the host takes.  It waits for them."""
    run()  # compiles, and makes what is made once
    graph = capture(device, run)
    again = run if graph is None else graph.replay
    taken: list[float] = []
    for _ in range(MEASURED):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            begin.record()
            again()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            again()
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)

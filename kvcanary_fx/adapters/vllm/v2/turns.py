"""How many requests' states a step fingerprints, so that it takes no longer than a budget says."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

#: Steps that come later than this were waited for: what they leave for us is no time of theirs.
LONGEST_STEP = 0.1

#: Measurements of a price, and the lowest, in seconds: less than a launch takes.
MEASURED, LEAST = 5, 1e-6


class Turns:
    """Each step leaves a part of its time; when there is enough for a request's states, they have their turn.

    A step's time is that from one to the next on the host, which is the device's where steps follow each other.  So the
    budget is kept over several steps: a single one takes longer by what one request's states take, however short it is.

    Args:
        budget: how much longer steps may take, as a fraction; None: as long as it takes.
        every: without a budget, the steps within which each request has its turn.
        price: seconds that the states of one request take, compared and fingerprinted.
    """

    def __init__(self, budget: float | None, every: int, price: float):
        self.budget, self.every, self.price = budget, every, max(price, LEAST)
        self._left = 0.0  # requests, paid
        self._last = time.perf_counter()

    def due(self, requests: int) -> int:
        """A step begins: how many of its requests have their turn."""
        if self.budget is None and self.every == 1:
            return requests
        if self.budget is None:
            self._left += requests / self.every
        else:
            now = time.perf_counter()
            self._left += self.budget * min(now - self._last, LONGEST_STEP) / self.price
            self._last = now
        due = min(int(self._left), requests)
        self._left = min(self._left - due, float(requests))  # what a small batch has left is no large one's
        return due

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


def seconds_of(run: Callable[[int], None], device: torch.device) -> float:
    """What something takes on a device: the median of a few calls, which are given their number.  It waits for them."""
    run(0)  # compiles, and makes what is made once
    taken: list[float] = []
    for number in range(1, MEASURED + 1):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            begin.record()
            run(number)
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            run(number)
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)

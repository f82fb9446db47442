"""Seeds in several processes: progress, and the first seed that fails."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

#: Seconds from one line about progress to the next.
EVERY = 10.0

_done: Any = None
_failed: Any = None


def _begin(done: Any, failed: Any) -> None:
    global _done, _failed
    _done, _failed = done, failed


class Shares:
    """What runs a share of the seeds, in a process of its own."""

    def __init__(self, body: Callable[..., int], plans: int, settings: dict[str, Any]):
        """
        Args:
            body: of a seed and a number of plans, and of ``settings``; how many violations there were.
            plans: of each seed.
        """
        self._body, self._plans, self._settings = body, plans, settings

    def __call__(self, seeds: Sequence[int]) -> tuple[int, int | None, str]:
        """How many violations there were, and the seed that failed with what it said; no seed begins after that."""
        found = 0
        for seed in seeds:
            if _failed.value:
                break
            try:
                found += self._body(seed, self._plans, **self._settings)
            except Exception:  # whatever a kernel does wrong, it is wrong with this seed
                _failed.value = 1
                return found, seed, traceback.format_exc()
            with _done.get_lock():
                _done.value += self._plans
        return found, None, ""

    def run(self, shares: Sequence[Sequence[int]], jobs: int, what: str, repeat: str) -> int:
        """All shares; 1 if a seed failed, and 0 if all are bit-equal.

        Args:
            repeat: the command that runs a seed again, but for the seed.
        """
        context = multiprocessing.get_context("spawn")  # a forked process has no CUDA
        done, failed = context.Value("q", 0), context.Value("b", 0)
        total, started = self._plans * sum(map(len, shares)), time.monotonic()
        begin: dict[str, Any] = dict(initializer=_begin, initargs=(done, failed))
        processes = functools.partial(concurrent.futures.ProcessPoolExecutor, mp_context=context)
        with (processes if jobs > 1 else concurrent.futures.ThreadPoolExecutor)(jobs, **begin) as pool:
            waiting = [pool.submit(self, seeds) for seeds in shares]
            while concurrent.futures.wait(waiting, timeout=EVERY).not_done:
                print(f"{done.value} of {total} plans ({what}), {time.monotonic() - started:.0f} s", flush=True)
        results = [future.result() for future in waiting]
        for _, seed, text in results:
            if seed is not None:
                print(f"{text}\nit differs, or fails: {repeat}{seed}")
                return 1
        found, seconds = sum(result[0] for result in results), time.monotonic() - started
        print(f"{done.value} random plans ({what}), {found} violations: bit-equal, {seconds:.0f} s")
        return 0

"""Thousands of steps with violations in log mode: what becomes of memory and of the log.

    PYTHONPATH=.:tests/bugs python tests/runtime/long_log.py [--steps 20000]

Each step reads a slot that was freed too early, one whose bytes have just been flipped, and one that belongs to another
request.  Prints a line for every tenth of the steps, and fails if memory still grows or the log has more than a hundred
lines a thousand steps.
"""

from __future__ import annotations

import argparse
import gc
import logging
import resource
import sys

import torch
from toy import Toy


class LongRun:
    """An engine that goes on with a request whose slots are wrong.

    Attributes:
        lines: of the log so far.
    """

    def __init__(self) -> None:
        self.toy, self.lines, self._step = Toy(), 0, 0
        logger = logging.getLogger("kvcanary")
        logger.addFilter(self._count)
        self.toy.add("A", list(range(5, 12)))
        self.toy.run({"A": [3, 4, 5]})
        self.toy.pool.release([4], owner="A")
        self.toy.pool.release([5], owner="A")
        self.toy.pool.allocate([5], owner="B")
        self.toy.take("A", [6])

    def _count(self, record: logging.LogRecord) -> bool:
        self.lines += 1
        return False

    def steps(self, number: int) -> None:
        """Run steps; each writes the same token again."""
        for _ in range(number):
            self._step += 1
            self.toy.kv[self._step % 2][0].view(torch.int32)[3, 0, 1] ^= 1 << self._step % 23
            self.toy.forward(self.toy.plan({"A": [6]}))
            self.toy.session.drain()

    def close(self) -> None:
        logging.getLogger("kvcanary").removeFilter(self._count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    steps, run, sizes = parser.parse_args().steps, LongRun(), []
    for part in range(1, 11):
        run.steps(steps // 10)
        gc.collect()
        sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        print(
            f"{part * steps // 10:7d} steps, {run.toy.session.stats().violations:8d} violations, {run.lines:5d} lines, "
            f"{sizes[-1]:7.1f} MiB at most",
            flush=True,
        )
    grown = sizes[-1] - sizes[len(sizes) // 2]
    print(f"the second half took {grown:.1f} MiB more")
    return 0 if grown < 2 and run.lines < steps / 10 else 1


if __name__ == "__main__":
    sys.exit(main())

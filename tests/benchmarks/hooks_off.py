"""What the hooks of an engine cost where the canary is off: time per step, next to an engine without hooks.

python tests/benchmarks/hooks_off.py [--write]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import report

import kvcanary_fx

STEPS, REPEATS = 200_000, 15


def without_hooks(steps: int) -> None:
    canary = batch = None
    for _ in range(steps):
        _work(canary, batch)


def with_hooks(steps: int) -> None:
    canary = batch = None
    for _ in range(steps):
        with kvcanary_fx.step(canary, batch), kvcanary_fx.forward(canary):
            _work(canary, batch)


def _work(canary: object, batch: object) -> None:
    """Stands for the model."""


def nanoseconds(run: Callable[[int], None]) -> float:
    started = time.perf_counter_ns()
    run(STEPS)
    return (time.perf_counter_ns() - started) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update the section in BENCHMARKS.md")
    args = parser.parse_args()
    taken: dict[str, list[float]] = {"none": [], "off": []}
    for _ in range(REPEATS):  # taking turns, so that both see the same machine
        taken["none"].append(nanoseconds(without_hooks))
        taken["off"].append(nanoseconds(with_hooks))
    rows = [
        [name, f"{statistics.median(runs):.0f} ns", f"{min(runs):.0f} to {max(runs):.0f} ns"]
        for name, runs in (("no hooks", taken["none"]), ("hooks, canary off", taken["off"]))
    ]
    text = (
        f"## Hooks of an engine with the canary off\n\n{report.environment('cpu')}. One `step` and one `forward` "
        f"around an empty function, median of {REPEATS} runs of {STEPS:,} steps, taking turns. Command: "
        f"`python tests/benchmarks/hooks_off.py --write`\n\n{report.table(['engine', 'time a step', 'spread'], rows)}"
    )
    print(text)
    if args.write:
        report.write_section("hooks off", text)


if __name__ == "__main__":
    main()

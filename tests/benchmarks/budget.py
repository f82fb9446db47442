"""Is the budget kept, and is every byte compared within the time that is said?

    python tests/benchmarks/budget.py [--requests 1 64] [--length 4096] [--budget 0.005 0.01] [--write]
    python tests/benchmarks/budget.py --how zero-configuration --requests 16
    python tests/benchmarks/budget.py --tiny --device cpu

The decode of `forward.py`, an 8B-shaped GQA model.  ``captured``: an engine's forward in one CUDA graph, each replay in
a step of the session.  ``zero-configuration``: plain tensors and ``protect``, under ``mode="reduce-overhead"``
(`plain_cache.py`).

For each budget the canary learns what comparing costs, guarded and unguarded steps take turns, and then bits are
flipped one at a time, anywhere in the stored part of the pool: how long until each is reported, in steps and seconds,
beside what the canary said.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import report
import torch
from decode_models import GQA, TINY_GQA, Model
from forward import let_go, milliseconds
from forward_scene import FIRST, Case, Runner, Scene
from plain_cache import PlainRunner

import kvcanary_fx

BUDGETS = (0.005, 0.01, 0.03, 0.1)

#: Requests and tokens of each, as far as they fit into 120 GiB with 15 GiB of weights and 128 KiB a token.
SIZES = (
    (1, 512), (1, 4096), (1, 32768), (8, 512), (8, 4096), (8, 32768), (16, 4096), (16, 32768),
    (32, 4096), (64, 512), (64, 4096), (64, 8192), (128, 512), (128, 4096),
)  # fmt: skip

HEADER = [
    "forward", "how", "budget", "unguarded", "growth", "at most", "1/N", "said", "flips found", "slowest", "problems",
]  # fmt: skip

#: What is made room for: steps take turns with others, and no two graphs run alike.
ALLOWED = 1.25

#: Steps that the host is ahead of the device at most, while prices are learned: an engine reads each step's tokens, and
#: has launched others meanwhile.  With the device idle after each fourth step the log said that 1 to 3 % of a step is
#: time that it waits for our host, which is in none of the timed rounds.
AHEAD = 4

#: Two rounds of unguarded steps that differ by less show a GPU that has warmed up.
STEADY = 5e-4

#: Steps of one configuration before it is the other's turn: readings are of neighbours.
STEPS = 16


@dataclasses.dataclass
class Row:
    """One forward under one budget.

    Attributes:
        plain, guarded: milliseconds of a step, each round.
        every, said: N, and the seconds within which each byte is compared: the most of what was said until the last
            flip was found.
        steps, seconds: until each flip was reported; fewer than ``flips`` where time was up.
    """

    case: Case
    how: str
    budget: float
    plain: list[float]
    guarded: list[float]
    every: int
    said: float
    flips: int = 0
    steps: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    settled: bool = True

    @property
    def growth(self) -> float:
        """The median of two rounds each, the second in the other order: a clock that falls has no part in it."""
        two = zip(_sums_of_two(self.guarded), _sums_of_two(self.plain), strict=True)
        return statistics.median(guarded / plain for guarded, plain in two) - 1

    def problems(self) -> list[str]:
        found = [] if self.settled else ["not settled"]
        if self.growth > ALLOWED * self.budget:
            found.append("longer than the budget")
        if len(self.steps) < self.flips:
            found.append("flips not found")
        if max(self.steps, default=0) > self.every:
            found.append("found too late")
        return found

    def cells(self) -> list[str]:
        slowest = f"{max(self.seconds):.2g} s ({max(self.steps)} steps)" if self.steps else ""
        return [
            self.case.name,
            self.how,
            f"{100 * self.budget:g} %",
            f"{statistics.median(self.plain):.3f} ms",
            f"{100 * self.growth:+.2f} %",
            f"{100 * ALLOWED * self.budget:.3g} %",
            f"1/{self.every}",
            f"{self.said:.2g} s",
            f"{len(self.steps)} of {self.flips}",
            slowest,
            "; ".join(self.problems()),
        ]


def _sums_of_two(times: list[float]) -> list[float]:
    return [first + second for first, second in zip(times[::2], times[1::2], strict=True)]


class Guarded:
    """A guarded and an unguarded way to run one forward, and where its bytes are."""

    def __init__(self, case: Case, model: Model, how: str, device: torch.device):
        self.case, self.how, self.device = case, how, device
        settings = {"budget": BUDGETS[0]}
        if how == "zero-configuration":
            plain: Any = PlainRunner(case, model, None, device)
            guarded: Any = PlainRunner(case, model, {"mode": "log"} | settings, device)
            self.tensors = [t for layer in guarded._model.layers for t in (layer.keys, layer.values)]
            self.run: Callable[[], Any] = guarded.runs[0]
        else:
            scene, mode = Scene(case, device), "manual" if how == "captured" else "eager"
            plain, guarded = (Runner(scene, model, s, mode) for s in (None, settings))
            self.tensors = [t for layer in scene.pools for t in layer]
            self.scene, self._replay = scene, guarded.runs[0]
            self.run = self._step if how == "captured" else guarded.runs[0]
        self.plain: Callable[[], Any] = plain.runs[0]
        self.session = guarded.session
        self._random = random.Random(0)

    def _step(self) -> None:
        with kvcanary_fx.step(self.session, self.scene.batch):
            self._replay()

    def settle(self, seconds: float) -> bool:
        """Run until it is known what comparing costs, and twice as long; whether it is."""
        pace, begun, steps = self.session.pace, time.perf_counter(), 0
        launched: collections.deque[torch.cuda.Event] = collections.deque()
        while time.perf_counter() - begun < seconds:
            self.run()
            steps += 1
            if self.device.type == "cuda":
                launched.append(torch.cuda.Event())
                launched[-1].record()
                if len(launched) > AHEAD:
                    launched.popleft().synchronize()
            if pace.controller.settled:
                for _ in range(steps):
                    self.run()
                self._wait()
                break
        return bool(pace.controller.settled)

    def warm_up(self, seconds: float) -> None:
        """Run both until the unguarded step takes about as long as in the round before, at most so many seconds.

        Seen (H200): in the first seconds of a process steps of 22 ms became 0.6 % longer and shorter again, and the
        cells that were measured then were the only ones that were missed, by 0.03 to 0.3 points.
        """
        begun, last = time.perf_counter(), 0.0
        while time.perf_counter() - begun < seconds:
            times = []
            for _ in range(8):
                times.append(milliseconds(self.plain, self.device, STEPS))
                milliseconds(self.run, self.device, STEPS)
            if abs(statistics.median(times) - last) < STEADY * last:
                break
            last = statistics.median(times)

    def flip(self) -> None:
        """Flip a bit of a byte that is stored, unseen by PyTorch's version counter."""
        tensor, request = self._random.choice(self.tensors).data, self._random.randrange(self.case.requests)
        position = self._random.randrange(self.case.prefix)
        row = (
            tensor[request, :, position] if tensor.dim() == 4 else tensor[FIRST + request * self.case.length + position]
        )
        row.view(torch.int16)[0, self._random.randrange(row.shape[1])] ^= 1 << 5

    def found_after(self, most: int) -> tuple[int, float] | None:
        """Steps and seconds until a violation is reported; None if it takes more steps than ``most``."""
        before, begun = self.session.found.total, time.perf_counter()
        for step in range(1, most + 1):
            self.run()
            self.session.drain()
            if self.session.found.total > before:
                return step, time.perf_counter() - begun
        return None

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(guarded: Guarded, budget: float, args: argparse.Namespace) -> Row:
    """One budget, after those before it."""
    pace, device = guarded.session.pace, guarded.device
    pace.restart(budget)
    settled = guarded.settle(args.seconds)
    plain: list[float] = []
    times: list[float] = []
    begun = time.perf_counter()
    for number in range(args.rounds):
        both = [(guarded.plain, plain), (guarded.run, times)]
        for run, taken in both[:: 1 if number % 2 == 0 else -1]:
            taken.append(milliseconds(run, device, STEPS))
        if time.perf_counter() - begun > args.seconds and number >= 5 and number % 2:
            break
    row = Row(guarded.case, guarded.how, budget, plain, times, pace.every, pace.within, settled=settled)
    begun = time.perf_counter()
    while row.flips < args.flips and (time.perf_counter() - begun < args.seconds or row.flips < 2):
        row.flips += 1
        guarded.flip()
        found = guarded.found_after(2 * max(row.every, pace.every))
        # it may have changed meanwhile, and with it what is said
        row.every, row.said = max(row.every, pace.every), max(row.said, pace.within)
        if found is not None:
            row.steps.append(found[0])
            row.seconds.append(found[1])
    return row


def text(rows: list[Row], args: argparse.Namespace) -> str:
    return (
        f"## The budget\n\n{report.environment(args.device)}. Decode of an 8B-shaped GQA model, bf16, random weights, "
        "`captured`: an engine's forward in one CUDA graph, each replay in a step of the session; "
        "`zero-configuration`: plain tensors under `reduce-overhead`. Medians of "
        f"at most {args.rounds} rounds of {STEPS} steps, guarded and unguarded taking turns, each first in every "
        "second round; `growth`: the median of two rounds each. `said`: within which time every "
        "stored byte is compared; then bits flipped one at a time, anywhere in the pool, and the slowest to be "
        "reported, with a drain after each step. Command: `python tests/benchmarks/budget.py --write`\n\n"
        f"{report.table(HEADER, [row.cells() for row in rows])}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--requests", type=int, nargs="+", help="default: those of all sizes")
    parser.add_argument("--length", type=int, nargs="+", help="tokens of each request; default: those of all sizes")
    parser.add_argument("--budget", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--how", nargs="+", choices=["captured", "called", "zero-configuration"])
    parser.add_argument("--rounds", type=int, default=30, help="at most; two are taken together")
    parser.add_argument("--flips", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10, help="about how long each part of a budget may take")
    parser.add_argument("--warm-up", type=float, help="seconds before the first budget, at most; default: 20 on a GPU")
    parser.add_argument("--write", action="store_true", help="update the section in BENCHMARKS.md")
    args = parser.parse_args(arguments)
    if args.rounds < 2 or args.rounds % 2:
        parser.error(f"--rounds {args.rounds}: two are taken together, so give an even number")
    if args.warm_up is None:  # a CPU's steps differ by more than the rounds of a warm one may
        args.warm_up = 0.0 if args.device == "cpu" else 20.0
    args.how = args.how or ["captured" if args.device == "cuda" else "called"]
    if args.tiny and args.write:
        parser.error("--tiny is no measurement: nothing to --write")
    if args.device == "cpu" and "captured" in args.how:
        parser.error("CUDA graphs need a GPU: --how called")
    args.sizes = [
        (n, length)
        for n, length in ([(2, 192)] if args.tiny else SIZES)
        if n in (args.requests or [n]) and length in (args.length or [length])
    ]
    if not args.sizes:
        parser.error(f"no such size among {SIZES}")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    device, shape = torch.device(args.device), TINY_GQA if args.tiny else GQA
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    model, rows = Model(shape, device), []
    for how in args.how:
        for requests, length in args.sizes:
            guarded = Guarded(Case(shape, requests, length, 1), model, how, device)
            guarded.warm_up(args.warm_up)
            for budget in args.budget:
                rows.append(measure(guarded, budget, args))
                print("  ".join(cell for cell in rows[-1].cells() if cell), flush=True)
            del guarded
            let_go(device)
            if args.write:
                report.write_section(f"budget {args.device}", text(rows, args))
    print("\n" + text(rows, args))
    problems = [f"{' '.join(row.cells()[:3])}: {p}" for row in rows for p in row.problems()]
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

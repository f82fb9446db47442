"""What the history of slots costs: a captured decode of an 8B-shaped model with and without it, and our kernels alone.

    python tests/benchmarks/slot_history.py [--write]
    python tests/benchmarks/slot_history.py --tiny --device cpu

Two sessions over the same pool, one with ``slot_history=0``, take turns.  A whole step differs by more from graph to
graph than the history takes, so the kernels that write it are timed alone, too: those around a forward (walk,
check_writes, store), and that of the allocator's calls.  Their difference, as a share of the step, is the cost.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import report
import torch
from decode_models import GQA, TINY_GQA, Model
from forward import let_go, milliseconds, take_turns
from forward_scene import FIRST, Case, Runner, Scene

from kvcanary_fx.config import CanaryConfig
from kvcanary_fx.kernels.slots import gpu_life
from kvcanary_fx.kernels.slots.events import Event, Events

#: Times that kernels are launched in a graph, to be timed alone.
TIMES = 20

#: Slots of a page, and pages that each of the calls in a step names: a decode of 64 requests takes four.
PAGE, PAGES = 16, 4

SETTINGS: dict[str, dict[str, Any]] = {
    "without": {"verify_fraction": "1/64", "slot_history": 0},
    "with": {"verify_fraction": "1/64"},
}


def captured(launch: Callable[[], None], device: torch.device) -> Callable[[], Any]:
    """Something that runs it TIMES times, in a graph on a GPU."""
    launch()
    if device.type == "cpu":
        return launch
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(TIMES):
            launch()
    return graph.replay


def around_a_forward(runner: Runner) -> Callable[[], Any]:
    """The checks before and after a forward, without the model."""
    session, scene = runner.session, runner.scene

    def empty() -> None:
        with session.forward():
            pass

    def step() -> None:
        with session.step(scene.batch):
            empty()

    if scene.device.type == "cpu":
        return step
    with session.step(scene.batch):
        return captured(empty, scene.device)


def allocator_calls(runner: Runner) -> Callable[[], Any]:
    """Pages at the end of the pool are released and handed out again."""
    pool, device = runner.session.pool, runner.scene.device
    last = pool.space.slots // PAGE - 1
    pages = torch.arange(last - PAGES, last, device=device).repeat(2)
    owner = int(pool.space.owners[int(pages[0]) * PAGE])
    rows = torch.tensor([[Event.RELEASE, 0, owner], [Event.ALLOCATE, PAGES, owner]], device=device)
    if device.type == "cpu":
        return lambda: None
    apply, events = gpu_life.Apply(pool.space, pool.digests.clone()), Events(rows, pages, PAGE)
    return captured(lambda: apply(events), device)


def microseconds(runs: dict[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, float]:
    """The median of each, taking turns."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in list(runs)[:: 1 if number % 2 == 0 else -1]:
            taken[name].append(1e3 * milliseconds(runs[name], device, 2) / (TIMES if device.type == "cuda" else 1))
    return {name: statistics.median(times) for name, times in taken.items()}


def measure(case: Case, args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The row of a case, and what went wrong."""
    device = torch.device(args.device)
    model, scene = Model(case.shape, device), Scene(case, device)
    mode = "manual" if device.type == "cuda" else "eager"
    runners = {name: Runner(scene, model, settings, mode, args.captures) for name, settings in SETTINGS.items()}
    taken = take_turns(dict(runners), device, args.rounds, args.seconds)
    steps = {name: min(map(statistics.median, taken[name])) for name in runners}
    counts = {name: runner.counts() for name, runner in runners.items()}
    problems = [
        f"{case.name}, {name}: {p}" for name, c in counts.items() if c for p in c.problems(case, SETTINGS[name])
    ]
    around = microseconds({n: around_a_forward(r) for n, r in runners.items()}, device, args.rounds)
    calls = microseconds({n: allocator_calls(r) for n, r in runners.items()}, device, args.rounds)
    last = runners["with"].session.pool.histories([FIRST + case.prefix])[0]
    if last is None or last.written is None:
        problems.append(f"{case.name}: the history has no write of the slot that each forward wrote")
    extra = around["with"] - around["without"] + calls["with"] - calls["without"]
    slot = runners["with"].session.pool.space.past[0].nbytes
    row = [
        case.name,
        f"{steps['without']:.3f} ms",
        f"{steps['with']:.3f} ms ({100 * (steps['with'] / steps['without'] - 1):+.2f} %)",
        f"{around['without']:.2f} us, {around['with']:.2f} us",
        f"{calls['without']:.2f} us, {calls['with']:.2f} us",
        f"{extra / 10 / steps['without']:+.3f} %",
        f"{slot} of {case.shape.layers * sum(case.shape.row_bytes):,} bytes, "
        f"{100 * slot / (case.shape.layers * sum(case.shape.row_bytes)):.3f} %",
    ]
    return row, problems


HEADER = [
    "decode",
    "step without",
    "step with",
    "kernels around a forward, without and with",
    "allocator's calls, without and with",
    "cost of the step",
    "memory of the pool",
]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--captures", type=int, default=4, help="graphs of each decode; the fastest counts")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=10, help="about how long the rounds of a step may take")
    parser.add_argument("--write", action="store_true", help="update the section in BENCHMARKS.md")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    shape, length = (TINY_GQA, 192) if args.tiny else (GQA, 4096)
    rows, problems = [], []
    for requests in args.requests:
        row, wrong = measure(Case(shape, requests, length, 1), args)
        let_go(torch.device(args.device))
        rows.append(row)
        problems += wrong
        print("  ".join(row), flush=True)
    print("\n" + (text := report.table(HEADER, rows)))
    if args.write and not args.tiny:
        report.write_section(
            f"slot history {args.device}",
            f"## History of slots\n\n{report.environment(args.device)}. A decode of the 8B-shaped GQA model in a CUDA "
            f"graph, 1/64 of the stored bytes compared in each step, with {CanaryConfig().slot_history} events a "
            "slot and without. The kernels that write the history are timed alone, in graphs of "
            f"{TIMES}; the calls are a release and an allocation of {PAGES} pages of {PAGE} slots. The cost is what "
            "these kernels take longer, as a share of the step. Command: "
            "`python tests/benchmarks/slot_history.py --write`\n\n"
            f"{text}",
        )
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

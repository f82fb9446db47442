"""What the canary adds to a forward: decode and prefill of an 8B-shaped GQA model, decode of an MLA-shaped one.

    python tests/benchmarks/forward.py [--only "gqa decode 64"] [--json PATH] [--write]
    python tests/benchmarks/forward.py --tiny --device cpu

For each forward, every configuration of the canary is built over the same weights and the same pool, and then they
take turns.  The prefixes of all requests are known to every session, identity and bytes, and the counts of the
sessions are compared with what that means: a row is only good if the checks had something to check.

Decodes are captured several times: the same kernels over other addresses.  In some graphs one matrix product takes 5 %
longer than in others, with the canary and without, which is more than all checks take; so graphs are compared at their
fastest, and the slowest is shown beside.
The sizes need about 90 GiB of GPU memory; `--only` leaves out the largest.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import report
import torch
from decode_models import GQA, MLA, STEP, TINY_GQA, TINY_MLA, Model, Shape
from forward_scene import CONFIGURATIONS, MODES, Case, Runner, Scene

HEADER = [
    "forward", "configuration", "time (10 % to 90 %)", "slowest graph", "overhead",
    "identities checked", "digests checked", "recorded", "violations",
]  # fmt: skip

HOW = {
    "manual": "compiled with Inductor and captured in a CUDA graph with the checks inside",
    "reduce-overhead": "compiled with Inductor and its own CUDA graphs, called from Python with all hooks",
    "eager": "called op by op from Python with all hooks",
}


@dataclasses.dataclass
class Row:
    """One configuration of one forward; times in milliseconds, of its fastest graph; counts for each forward."""

    case: str
    mode: str
    configuration: str
    placement: str | None
    median: float
    low: float
    high: float
    slowest: float  # median of the slowest of its graphs
    graphs: int
    overhead: float | None = None  # of the medians, in percent of "off"
    rounds: int = 0
    build_seconds: float = 0.0
    counts: dict[str, float] | None = None
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> tuple[str, ...]:
        return (self.case, self.mode, self.configuration, *([self.placement] if self.placement else []))

    def cells(self) -> list[str]:
        counts = self.counts or {}
        found = [f"{counts[name]:,.0f}" if counts else "" for name in ("identities", "digests", "recorded")]
        return [
            self.case if self.mode == "manual" else f"{self.case}, {self.mode}",
            ", ".join(self.key[2:]),
            f"{self.median:.3f} ms ({self.low:.3f} to {self.high:.3f})",
            f"{self.slowest:.3f} ms" if self.graphs > 1 else "",
            "" if self.overhead is None else f"{self.overhead:+.2f} %",
            *found,
            "; ".join(self.problems) or ("0" if counts else ""),
        ]


def cases(tiny: bool) -> list[Case]:
    if tiny:
        return [Case(TINY_GQA, 2, 192, 1), Case(TINY_GQA, 1, 32, 32), Case(TINY_MLA, 2, 192, 1)]

    def decode(shape: Shape) -> list[Case]:
        return [Case(shape, requests, 4096, 1) for requests in (1, 64, 128)]

    return [*decode(GQA), *(Case(GQA, 1, tokens, tokens) for tokens in (2048, 8192)), *decode(MLA)]


def milliseconds(run: Callable[[], Any], device: torch.device, calls: int) -> float:
    """One forward's time; on a GPU after a forward that hides how long the host needs to start the first."""
    if device.type == "cpu":
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - begun) * 1e3 / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / calls


#: Milliseconds of each round, by the graphs of a configuration.
Times = list[list[float]]


def take_turns(runners: dict[str, Runner], device: torch.device, rounds: int, seconds: float) -> dict[str, Times]:
    """The times of each round, fewer rounds where all of them would take longer than ``seconds``."""
    graphs = max(len(runner.runs) for runner in runners.values())
    once = sum(milliseconds(runner.runs[0], device, 1) for runner in runners.values()) / 1e3
    rounds = max(min(rounds, 5), min(rounds, int(seconds / (3 * once * graphs))))
    taken: dict[str, Times] = {name: [[] for _ in runner.runs] for name, runner in runners.items()}
    for number in range(rounds * graphs):  # every second one backwards, so that nobody always follows the same one
        for name in list(runners)[:: 1 if number % 2 == 0 else -1]:
            runners[name].next_turn()
            turn = number % len(runners[name].runs)
            taken[name][turn].append(milliseconds(runners[name].runs[turn], device, 2))
    return taken


def rows_of(runners: dict[str, Runner], mode: str, placement: str | None, taken: dict[str, Times]) -> Iterator[Row]:
    plain = min(map(statistics.median, taken["off"])) if "off" in taken else None
    for name, runner in runners.items():
        graphs, case = sorted(taken[name], key=statistics.median), runner.scene.case
        times, median = sorted(graphs[0]), statistics.median(graphs[0])
        edge, slowest = len(times) // 10, statistics.median(graphs[-1])
        row = Row(case.name, mode, name, None, median, times[edge], times[-1 - edge], slowest, len(graphs))
        row.rounds = len(times)
        row.placement = placement if runner.session is not None else None
        row.build_seconds = runner.seconds
        if plain is not None and name != "off":
            row.overhead = 100 * (median / plain - 1)
        counts = runner.counts()
        if counts is not None:
            row.counts = dataclasses.asdict(counts)
            row.problems = counts.problems(case, runner.settings or {})
        yield row


def measure(case: Case, model: Model, mode: str, args: argparse.Namespace) -> list[Row]:
    """All configurations of one forward."""
    device, runners = torch.device(args.device), {}
    scene = Scene(case, device)
    for name in args.configs:
        settings = CONFIGURATIONS[name]
        if settings is not None and args.placement:
            settings = {**settings, "placement": args.placement}
        runners[name] = Runner(scene, model, settings, mode, args.captures if case.added == 1 else 1)
        print(f"{case.name}, {mode}: {name} built in {runners[name].seconds:.1f} s{held(device)}", flush=True)
    taken = take_turns(runners, device, args.rounds, args.seconds)
    return list(rows_of(runners, mode, args.placement, taken))


def held(device: torch.device) -> str:
    return f", {torch.cuda.memory_allocated() / 2**30:.1f} GiB held" if device.type == "cuda" else ""


def let_go(device: torch.device) -> None:
    """Drop what a case compiled and captured, and with it its pool, before the next pool is allocated."""
    STEP.pools = {}
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Results:
    """The rows so far, in a file as soon as there are new ones; those of an earlier run like this one are kept."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.environment = args, report.environment(args.device)
        self.rows: dict[tuple[str, ...], Row] = {}
        if args.json and args.json.exists():
            old = json.loads(args.json.read_text())
            if old["environment"] == self.environment:
                self.add([Row(**row) for row in old["rows"]])

    def add(self, rows: list[Row]) -> None:
        self.rows.update({row.key: row for row in rows})
        if self.args.json:
            made = {"environment": self.environment, "rows": [dataclasses.asdict(row) for row in self.rows.values()]}
            self.args.json.write_text(json.dumps(made, indent=1))
        if self.args.write and self.rows:
            report.write_section(f"forward {self.args.device}", self.text())

    def text(self) -> str:
        rows = list(self.rows.values())
        rounds, graphs = sorted({row.rounds for row in rows}), max(row.graphs for row in rows)
        captured = f"A decode is captured in {graphs} graphs, of which the fastest counts. " if graphs > 1 else ""
        placement = f" --placement {self.args.placement}" if self.args.placement else ""
        modes = ", or ".join(HOW[mode] for mode in dict.fromkeys(row.mode for row in rows))
        return (
            f"## A whole forward\n\n{self.environment}. 8B-shaped GQA model (32 layers, 8 KV heads of 128) and "
            f"MLA-shaped one (27 layers, latent 512 + 64), bf16, random weights, attention in one opaque op, {modes}. "
            "`64 x 4096`: 64 requests, one token added to 4,095 stored. Configurations take "
            f"turns, median of {' or '.join(map(str, rounds))} rounds of two forwards. {captured}"
            "`identity`: all checks but content and operand; `recorded`: all but content; `content 1/64` and "
            "`content`: all, with that share of the stored bytes compared in each forward. With a captured graph the "
            "time is that of its replay, without "
            "what an engine copies to its inputs before. Counts are those of the sessions, for each forward, and are "
            "compared with what the batch makes them. Command: "
            f"`python tests/benchmarks/forward.py{placement} --write`\n\n"
            f"{report.table(HEADER, [row.cells() for row in rows])}"
        )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it runs")
    parser.add_argument(
        "--only", nargs="+", metavar="WORDS", help='forwards that have all these words: gqa, "gqa decode 64", "prefill"'
    )
    parser.add_argument("--configs", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--modes", nargs="+", choices=MODES, help="default: manual on a GPU, eager on a CPU")
    parser.add_argument("--placement", help="the setting of that name: inline, side, ...; default: the canary's own")
    parser.add_argument("--captures", type=int, default=6, help="graphs of each decode that is captured")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=15, help="about how long the rounds of a forward may take")
    parser.add_argument("--json", type=Path, help="results as they come; rows there, of the same day and machine, stay")
    parser.add_argument("--write", action="store_true", help="update the section in BENCHMARKS.md, as rows come")
    args = parser.parse_args(arguments)
    args.modes = args.modes or ["manual" if args.device == "cuda" else "eager"]
    if args.device == "cpu" and args.modes != ["eager"]:
        parser.error("CUDA graphs need a GPU: --modes eager")
    if args.tiny and args.write:
        parser.error("--tiny is no measurement: nothing to --write")
    args.cases = [
        c for c in cases(args.tiny) if not args.only or any(set(w.split()) <= set(c.words) for w in args.only)
    ]
    if not args.cases:
        parser.error(f"--only leaves none of: {', '.join(' '.join(c.words) for c in cases(args.tiny))}")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    device = torch.device(args.device)
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # each configuration compiles the same functions anew
    results, left_out = Results(args), []
    for shape, group in itertools.groupby(args.cases, key=lambda case: case.shape):
        model = Model(shape, device)
        for case, mode in itertools.product(group, args.modes):
            try:
                rows = measure(case, model, mode, args)
            except torch.OutOfMemoryError as e:
                left_out.append(f"{case.name}, {mode}: the memory does not hold all configurations at once: {e}")
                rows = []
            let_go(device)
            results.add(rows)
            for row in rows:
                print("  ".join(cell for cell in row.cells() if cell), flush=True)
        del model
        let_go(device)
    print("\n" + results.text())
    problems = [f"{' '.join(row.key)}: {p}" for row in results.rows.values() for p in row.problems]
    for line in left_out + problems:
        print(line, file=sys.stderr)
    return 1 if left_out or problems else 0


if __name__ == "__main__":
    sys.exit(main())

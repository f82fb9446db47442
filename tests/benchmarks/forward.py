"""What the canary adds to a forward: decode and prefill of an 8B-shaped GQA model, decode of an MLA-shaped one.

    python tests/benchmarks/forward.py [--only "gqa decode 64"] [--json PATH] [--write]
    python tests/benchmarks/forward.py --only reduce-overhead zero-configuration
    python tests/benchmarks/forward.py --tiny --device cpu

Three sections: an engine's forward captured in a graph, decodes under ``mode="reduce-overhead"``, and a decode over
plain tensors with nothing but ``protect`` (`plain_cache.py`).

For each forward, every configuration of the canary is built over the same weights and the same pool, and then they
take turns.  The prefixes of all requests are known to every session, identity and bytes, and the counts of the
sessions are compared with what that means: a row is only good if the checks had something to check.

Decodes are captured several times: the same kernels over other addresses.  In some graphs one matrix product takes 5 %
longer than in others, with the canary and without, which is more than all checks take; so graphs are compared at their
fastest, and the slowest is shown beside.  Once a process has used many streams, each of its kernels takes longer
(`streams.py`), and graphs with checks beside the model have some: so a GPU's first forward is also timed without the
canary before anything else runs, as `off, before the others`.
The sizes need about 90 GiB of GPU memory; `--only` leaves out the largest, and picks those that are not usual.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import plain_cache
import torch
from decode_models import GQA, MLA, STEP, TINY_GQA, TINY_MLA, Model, Shape
from forward_report import Results, Row
from forward_scene import CONFIGURATIONS, MODES, Case, Runner, Scene
from plain_cache import PlainRunner
from torch._dynamo.utils import counters


@dataclasses.dataclass(frozen=True)
class Turn:
    """One forward in one mode, by some configurations.

    Attributes:
        usual: it runs if nothing is picked by ``--only``.
    """

    case: Case
    mode: str
    configurations: Sequence[str]
    usual: bool = True

    @property
    def words(self) -> set[str]:
        return {*self.case.words, self.mode}


def turns(tiny: bool, modes: Sequence[str]) -> list[Turn]:
    """Those of a tiny model or of a large one, in these modes, one shape after the other.

    The usual ones of all modes take about five minutes on an H200.
    """

    def decode(shape: Shape) -> list[Case]:
        return [Case(shape, requests, 4096, 1) for requests in (1, 64, 128)]

    if tiny:
        cases = [Case(TINY_GQA, 2, 192, 1), Case(TINY_GQA, 1, 32, 32), Case(TINY_MLA, 2, 192, 1)]
        plain, unusual = Case(TINY_GQA, 2, 64, 1), set()
    else:
        gqa, mla, long = decode(GQA), decode(MLA), Case(GQA, 1, 8192, 8192)
        cases, plain = [*gqa, Case(GQA, 1, 2048, 2048), long, *mla], Case(GQA, 16, 4096, 1)
        unusual = {long, mla[0], mla[2]}
    made = []
    for mode, case in itertools.product(modes, cases):
        if mode == "zero-configuration":
            continue
        few = mode == "reduce-overhead" and not tiny
        usual = case not in unusual and (not few or case in gqa[:2])
        made.append(Turn(case, mode, ("off", "recorded") if few else tuple(CONFIGURATIONS), usual))
    if "zero-configuration" in modes:
        made.append(Turn(plain, "zero-configuration", tuple(plain_cache.CONFIGURATIONS), not tiny or len(modes) == 1))
    return sorted(made, key=lambda turn: turn.case.shape != made[0].case.shape)


AnyRunner = Runner | PlainRunner


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


def take_turns(runners: dict[str, AnyRunner], device: torch.device, rounds: int, seconds: float) -> dict[str, Times]:
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


def rows_of(runners: dict[str, AnyRunner], mode: str, taken: dict[str, Times]) -> Iterator[Row]:
    plain = min(map(statistics.median, taken["off"])) if "off" in taken else None
    for name, runner in runners.items():
        graphs, case = sorted(taken[name], key=statistics.median), runner.case
        times, median = sorted(graphs[0]), statistics.median(graphs[0])
        edge, slowest = len(times) // 10, statistics.median(graphs[-1])
        row = Row(case.name, mode, name, median, times[edge], times[-1 - edge], slowest, len(graphs))
        row.rounds = len(times)
        row.build_seconds = runner.seconds
        if plain is not None and name != "off":
            row.overhead = 100 * (median / plain - 1)
        counts = runner.counts()
        if counts is not None:
            row.counts = dataclasses.asdict(counts)
            row.problems = counts.problems(case, runner.settings or {})
        row.problems += runner.problems
        yield row


#: The configuration "off", timed when nothing guarded has run in the process.
BEFORE = "off, before the others"


def measure(turn: Turn, model: Model, args: argparse.Namespace, first: bool) -> list[Row]:
    """All configurations of one forward.

    Args:
        first: the process has run none before, on a device where that tells.
    """
    device, case, mode, runners = torch.device(args.device), turn.case, turn.mode, {}
    before: dict[str, Times] | None = None
    scene = Scene(case, device) if mode != "zero-configuration" else None
    for name, settings in placed(turn, args.placement):
        skipped = counters["inductor"]["cudagraph_skips"]
        if scene is None:
            runner: AnyRunner = PlainRunner(case, model, settings, device)
        else:
            runner = Runner(scene, model, settings, mode, args.captures if case.added == 1 else 1)
        if counters["inductor"]["cudagraph_skips"] > skipped:
            runner.problems.append("Inductor ran it without CUDA graphs")
        runners[name] = runner
        print(f"{case.name}, {mode}: {name} built in {runner.seconds:.1f} s{held(device)}", flush=True)
        if name == "off" and len(runners) == 1 and first:
            before = take_turns({BEFORE: runner}, device, args.rounds, args.seconds)
    taken = take_turns(runners, device, args.rounds, args.seconds)
    rows = list(rows_of(runners, mode, taken))
    return rows if before is None else [*rows_of({BEFORE: runners["off"]}, mode, before), *rows]


def placed(turn: Turn, placements: Sequence[str]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """The configurations and their settings; guarded ones once for each placement."""
    plain = turn.mode == "zero-configuration"
    for name in turn.configurations:
        settings = (plain_cache.CONFIGURATIONS if plain else CONFIGURATIONS)[name]
        if plain or settings is None or not placements:
            yield name, settings
            continue
        for placement in placements:
            yield f"{name}, {placement}", {**settings, "placement": placement}


def held(device: torch.device) -> str:
    return f", {torch.cuda.memory_allocated() / 2**30:.1f} GiB held" if device.type == "cuda" else ""


def let_go(device: torch.device) -> None:
    """Drop what a case compiled and captured, and with it its pool, before the next pool is allocated."""
    STEP.pools = {}
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it runs")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORDS",
        help='forwards that have all these words: gqa, "gqa decode 64 manual", reduce-overhead',
    )
    parser.add_argument(
        "--configs", nargs="+", choices=list(dict.fromkeys([*CONFIGURATIONS, *plain_cache.CONFIGURATIONS]))
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, help="default: all but eager on a GPU, eager on a CPU")
    parser.add_argument(
        "--placement", nargs="+", default=[], help="the setting of that name, taking turns; default: the canary's own"
    )
    parser.add_argument("--captures", type=int, default=6, help="graphs of each decode that is captured")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=10, help="about how long the rounds of a forward may take")
    parser.add_argument("--json", type=Path, help="results as they come; rows there, of the same day and machine, stay")
    parser.add_argument("--write", action="store_true", help="update the section in BENCHMARKS.md, as rows come")
    args = parser.parse_args(arguments)
    possible = [m for m in MODES if m != "eager"] if args.device == "cuda" else ["eager", "zero-configuration"]
    if args.device == "cpu" and (set(args.modes or ()) - set(possible) or asked_for(args.only) & GRAPHS):
        parser.error("CUDA graphs need a GPU: --modes eager")
    if args.tiny and args.write:
        parser.error("--tiny is no measurement: nothing to --write")
    every = turns(args.tiny, args.modes or possible)
    args.turns = [t for t in every if t.usual] if not args.only else picked(every, args.only)
    if args.configs:
        args.turns = [
            dataclasses.replace(t, configurations=[c for c in args.configs if c in t.configurations])
            for t in args.turns
        ]
        args.turns = [t for t in args.turns if t.configurations]
    args.cases = list(dict.fromkeys(t.case for t in args.turns))
    if not args.turns:
        known = ", ".join(dict.fromkeys(" ".join(t.case.words) for t in every))
        parser.error(f"--only leaves none of: {known}; {', '.join(dict.fromkeys(t.mode for t in every))}")
    return args


#: Modes that need a GPU.
GRAPHS = {"manual", "reduce-overhead"}


def asked_for(only: list[str] | None) -> set[str]:
    return {word for words in only or () for word in words.split()}


def picked(every: list[Turn], only: list[str]) -> list[Turn]:
    return [t for t in every if any(set(words.split()) <= t.words for words in only)]


def main(arguments: list[str] | None = None) -> int:
    args, begun = parse(arguments), time.perf_counter()
    device = torch.device(args.device)
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # each configuration compiles the same functions anew
    results, left_out = Results(args), []
    for shape, group in itertools.groupby(args.turns, key=lambda turn: turn.case.shape):
        model = Model(shape, device)
        for turn in group:
            try:
                rows = measure(turn, model, args, first=turn is args.turns[0] and device.type == "cuda")
            except torch.OutOfMemoryError as e:
                left_out.append(
                    f"{turn.case.name}, {turn.mode}: the memory does not hold all configurations at once: {e}"
                )
                rows = []
            let_go(device)
            results.add(rows)
            for row in rows:
                print("  ".join(cell for cell in row.cells() if cell), flush=True)
        del model
        let_go(device)
    for mode in results.modes():
        print("\n" + results.text(mode))
    print(f"\n{time.perf_counter() - begun:.0f} s in all")
    problems = [f"{' '.join(row.key)}: {p}" for row in results.rows.values() for p in row.problems]
    for line in left_out + problems:
        print(line, file=sys.stderr)
    return 1 if left_out or problems else 0


if __name__ == "__main__":
    sys.exit(main())

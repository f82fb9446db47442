"""Random programs against an oracle: guarded as the README says, beside the same program unguarded.

    python tests/fuzz/run.py --programs 3000 --seed 0 --inner eager --jobs 2
    python tests/fuzz/run.py --programs 1 --seed 1234     # the program of one seed: its code, shrunk if it fails

The exit status says whether a program failed: a false alarm, a silent miss, a wrong layer or half, other numbers than
unguarded, a crash, or more than 5 % of the programs said to be unguarded.  What is known to fail is in known.py.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

if __name__ == "__main__":
    sys.path[:0] = [str(p) for p in Path(__file__).parents[1:3]]  # tests, and the checkout

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from torch.torch_version import TorchVersion

from fuzz.execute import Failure, Invalid, Outcome, run_program
from fuzz.known import known
from fuzz.models import code
from fuzz.program import Program
from fuzz.strategies import programs

#: Largest share of programs whose cache the summary may call unguarded.
SAID = 0.05

#: Programs that a process runs before a new one takes its place: Dynamo keeps some memory of each.
PER_PROCESS = 500

_QUIET = dict(max_examples=2, database=None, deadline=None, suppress_health_check=[*HealthCheck], print_blob=False)


def program_of(seed: int) -> Program:
    """The program of a seed."""
    drawn: list[Program] = []

    @seeded(seed)
    @settings(phases=[Phase.generate], **_QUIET)
    @given(programs())
    def draw(program: Program) -> None:
        drawn.append(program)

    draw()
    return drawn[-1]  # the first is the simplest one, whatever the seed


def shrink(seed: int, inner: str) -> str:
    """The simplest program that hypothesis finds from that of a seed, and how it fails; empty if it does not."""

    @seeded(seed)
    @settings(**_QUIET)
    @given(programs())
    def check(program: Program) -> None:
        failure = None if known(program) else run_one(program, inner).failure
        if failure is not None:
            failure.program = program
            raise failure

    try:
        check()
    except Failure as failure:
        return f"{failure.program}\n{code(failure.program)}{failure.kind}: {failure}"
    except Exception as several:  # hypothesis found more than one kind
        return "\n".join(map(str, getattr(several, "exceptions", [several])))
    return ""


def run_one(program: Program, inner: str) -> Outcome:
    """Run a program.  One that does not run unguarded either is a failure of the fuzzer's, or of the inner backend."""
    torch.set_num_threads(1)
    try:
        with (
            warnings.catch_warnings(),
            # Dynamo times every new guard with the processor's caches flushed: a tenth of a program's time
            mock.patch.object(torch._dynamo.guards, "profile_guard_manager", return_value=0.0, create=True),
        ):
            warnings.simplefilter("ignore")
            return run_program(program, inner)
    except Invalid as e:
        what = f"does not run unguarded: {e}"
        return Outcome(failure=Failure(what)) if inner == "eager" else Outcome(unable=what)
    except Exception as e:  # the fuzzer's own: the other programs still run
        where = traceback.extract_tb(e.__traceback__)[-1]
        return Outcome(failure=Failure(f"{type(e).__name__} in {where.name}: {e}"))


def unsupported(program: Program) -> bool:
    """Whether this version of torch cannot compile a program, guarded or not: a write in a branch, before 2.13."""
    return program.idiom == "in_cond" and TorchVersion(torch.__version__) < "2.13"


def run_seed(seed: int, inner: str) -> tuple[Program, Outcome | None, str]:
    """The program of a seed, how it went (None if it is known not to hold), and what failed, in words."""
    program = program_of(seed)
    if known(program) or unsupported(program):
        return program, None, ""
    outcome = run_one(program, inner)
    failure, outcome.failure = outcome.failure, None
    return program, outcome, "" if failure is None else f"{failure.kind}: {failure}"


COLUMNS = ("programs", "guarded", "unguarded", "faults", "found", "said", "missed", "false alarm", "wrong place",
           "numeric", "crash", "failure", "unable", "known")  # fmt: skip


def table(counts: dict[str, Counter[str]]) -> str:
    """The counts by idiom."""
    total: Counter[str] = Counter()
    for row in counts.values():
        total.update(row)
    lines = [f"{'idiom':28s}" + "".join(f"{c:>12s}" for c in COLUMNS)]
    for idiom, row in [*sorted(counts.items()), ("all", total)]:
        lines.append(f"{idiom:28s}" + "".join(f"{row[c] or '':>12}" for c in COLUMNS))
    return "\n".join(lines)


def count(row: Counter[str], outcome: Outcome | None, what: str) -> None:
    """Add one program to its idiom's counts."""
    row["programs"] += 1
    if outcome is None:
        row["known"] += 1
        return
    if outcome.unable:
        row["unable"] += 1
        return
    row["unguarded" if outcome.said else "guarded"] += 1
    for column in ("faults", "found", "said"):
        row[column] += getattr(outcome, column)
    if what:
        row[what.split(":")[0]] += 1


def results(seeds: Sequence[int], inner: str, jobs: int) -> Iterator[tuple[int, Program, Outcome | None, str]]:
    """Run the programs of many seeds, in order."""
    if jobs == 1:
        for seed in seeds:
            yield seed, *run_seed(seed, inner)
        return
    # not by max_tasks_per_child: the pool hung when all of its processes were to be replaced
    for first in range(0, len(seeds), PER_PROCESS * jobs):
        some = seeds[first : first + PER_PROCESS * jobs]
        with ProcessPoolExecutor(jobs, get_context("spawn")) as workers:
            running = [workers.submit(run_seed, seed, inner) for seed in some]
            for seed, job in zip(some, running, strict=True):
                yield seed, *job.result()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--inner", default="eager")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--shrink", type=int, default=3, help="how many failures to shrink")
    options = parser.parse_args(arguments)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    failures: list[int] = []
    said, began = 0, time.time()
    seeds = range(options.seed, options.seed + options.programs)
    for n, (seed, program, outcome, what) in enumerate(results(seeds, options.inner, options.jobs), start=1):
        count(counts[program.idiom], outcome, what)
        said += outcome is not None and outcome.said > 0
        if what:
            failures.append(seed)
            print(f"seed {seed}: {what[:600]}\n  {program}", flush=True)
        if options.programs == 1:
            print(program, code(program), sep="\n")
        if n % 100 == 0:
            print(f"{n} programs, {len(failures)} failures, {time.time() - began:.0f} s", flush=True)
    print(table(counts))
    for seed in failures[: options.shrink]:
        print(f"\nseed {seed}, shrunk:\n{shrink(seed, options.inner)}")
    return int(bool(failures) or said > SAID * options.programs)


if __name__ == "__main__":
    sys.exit(main())

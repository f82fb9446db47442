"""Random schedules of an engine under both canaries, SGLang's and ours: what SGLang's reports, ours must, and as soon.

    python tests/engines/sglang_schedules.py --clean 500 --faulty 2000 [--seed 0] [--jobs 2] [--only "class"]

A clean schedule must be silent on both sides.  The table says by class of fault who reported the faulty ones; `ours
later` is later than SGLang's.  Ends with 1 if SGLang reported anything that ours did not in that step or before, or a
clean one spoke.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import logging
import multiprocessing
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scheduled_engine import Engine, Guarded
from scheduled_faults import FAULTS, Fault
from sglang_reference import Reference

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import sglang_kernels

STEPS = 14

#: How often a schedule is drawn anew where its fault found no place.
TRIES = 12


class Outcome(NamedTuple):
    """What became of a schedule: steps of the plant and of each side's first report, None for never."""

    name: str
    seed: str
    planted: int | None
    ours: int | None
    theirs: int | None
    what: str
    seen: dict[str, int]

    @property
    def verdict(self) -> str:
        if self.theirs is None:
            return "neither" if self.ours is None else "ours"
        if self.ours is None:
            return "theirs"
        return "both" if self.ours <= self.theirs else "ours later"


class Planter:
    """Plants a fault at the first opportunity from a step on."""

    def __init__(self, fault: Fault | None, since: int):
        self.fault, self.since, self.step, self.planted = fault, since, 0, None

    def __call__(self, point: str, engine: Engine, subject: Any) -> bool:
        fault = self.fault
        if fault is None or self.planted is not None or self.step < self.since or fault.point != point:
            return False
        if not fault.act(engine, subject):
            return False
        self.planted = self.step
        return True


peer = functools.cache(sglang_kernels.load)


@functools.cache
def sides(windowed: bool) -> tuple[Guarded, Reference]:
    guarded = Guarded(windowed)
    return guarded, Reference(peer(), guarded)


def run(name: str, seed: str) -> Outcome:
    """One schedule."""
    rng, fault = random.Random(seed), FAULTS.get(name)
    windowed = rng.random() < 0.3 if fault is None or fault.pool is None else fault.pool == "windowed"
    windowed = windowed and not (fault is not None and fault.cached)
    guarded, reference = sides(windowed)
    guarded.reset()
    reference.reset()
    planter = Planter(fault, rng.randrange(2, 9))
    engine = Engine(guarded, rng, planter)
    engine.caches |= fault is not None and fault.cached
    engine.drafts = engine.drafts or 2 * (fault is not None and fault.drafts)
    ours = theirs = None
    what = ""
    for step in range(STEPS):
        planter.step = step
        engine.step(reference.head, reference.tail)
        if step % 2:
            guarded.session.sweep.run(prefixes=engine.prefixes())
            reference.sweep(engine.listed())
        found = guarded.session.violations()
        if found and ours is None:
            ours, what = step, f"{what} ours: {found[0].check} {found[0].why} {found[0].phase};"
        if reference.found and theirs is None:
            theirs, what = step, f"{what} theirs: {reference.reasons()};"
        if ours is not None and theirs is not None:
            break
    return Outcome(name, seed, planter.planted, ours, theirs, what, engine.seen)


def schedule(task: tuple[str, str]) -> Outcome:
    """One schedule in which the fault found a place."""
    name, seed = task
    outcome = run(name, seed)
    for attempt in range(1, TRIES if name in FAULTS else 1):
        if outcome.planted is not None or outcome.ours is not None or outcome.theirs is not None:
            break
        outcome = run(name, f"{seed}.{attempt}")
    return outcome


def tasks(args: argparse.Namespace) -> list[tuple[str, str]]:
    names = [n for n in FAULTS if args.only is None or args.only in n]
    random.Random(args.seed).shuffle(names)  # so that a few schedules have other classes with another seed
    faulty = [(names[i % len(names)], f"{args.seed}/{i}") for i in range(args.faulty)]
    chosen = [("clean", f"{args.seed}/clean {i}") for i in range(args.clean)] + faulty
    random.Random(args.seed).shuffle(chosen)
    return chosen


def early(outcome: Outcome) -> bool:
    """Whether somebody spoke before there was anything to report."""
    reports = [s for s in (outcome.ours, outcome.theirs) if s is not None]
    return bool(reports) and (outcome.planted is None or min(reports) < outcome.planted)


def begin() -> None:
    """Of a process."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)


def table(outcomes: list[Outcome]) -> str:
    verdicts = ["both", "ours", "theirs", "neither", "ours later"]
    counts: dict[str, collections.Counter[str]] = {}
    for outcome in outcomes:
        counts.setdefault(outcome.name, collections.Counter())[outcome.verdict] += 1
    counts["all"] = sum(counts.values(), collections.Counter())
    width = max(map(len, counts))
    lines = [f"{'class':{width}}  planted  " + "  ".join(verdicts)]
    for name, of in counts.items():
        cells = "  ".join(f"{of[v] or '-':>{len(v)}}" for v in verdicts)
        lines.append(f"{name:{width}}  {sum(of.values()):>7}  {cells}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clean", type=int, default=500)
    parser.add_argument("--faulty", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", help="part of the names of the classes to plant")
    parser.add_argument("--one", nargs=2, metavar=("CLASS", "SEED"), help="run this schedule alone")
    args = parser.parse_args()
    begin()
    if args.one:
        print(run(*args.one))
        return 0
    try:
        peer()
    except sglang_kernels.PeerMissingError as e:
        print(f"sglang_schedules: {e}", file=sys.stderr)
        return 1
    outcomes, todo = [], tasks(args)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.jobs, context, begin) as workers:
        done = workers.map(schedule, todo, chunksize=8) if args.jobs > 1 else map(schedule, todo)
        with contextlib.suppress(KeyboardInterrupt):  # what is done by then is worth a table
            for outcome in done:
                outcomes.append(outcome)
                if len(outcomes) % 100 == 0:
                    print(f"{len(outcomes)} of {len(todo)}", file=sys.stderr, flush=True)
    return report(outcomes)


def report(outcomes: list[Outcome]) -> int:
    """Print the table and what must not be; the exit status."""
    planted = [o for o in outcomes if o.name != "clean" and o.planted is not None]
    loud = [o for o in outcomes if early(o)]
    missed = [o for o in planted if o.verdict in ("theirs", "ours later")]
    clean = sum(o.name == "clean" for o in outcomes)
    print(f"{clean} clean schedules; {len(outcomes) - clean - len(planted)} faults found no place")
    seen = sum((collections.Counter(o.seen) for o in outcomes), collections.Counter())
    print("in all of them " + ", ".join(f"{count} {what}" for what, count in sorted(seen.items())) + "\n")
    if planted:
        print(table(planted))
    for title, listed in {"spoke without a fault": loud, "SGLang first, or alone": missed}.items():
        print(f"\n{title}: {len(listed)}")
        for o in listed[:60]:
            print(f"  {o.name!r} {o.seed!r} planted {o.planted}, ours {o.ours}, theirs {o.theirs};{o.what}")
    return int(bool(loud or missed))


if __name__ == "__main__":
    sys.exit(main())

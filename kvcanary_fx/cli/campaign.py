"""Inject faults into a small serving engine, one per run, and count what the canary says.

Each run serves a few short requests on the engine in examples/paged_engine and strikes once.  A token oracle says
whether the fault mattered, the engine's books say whether anybody used what was struck.  Every 20th run has no fault.

columns:
  injected  strikes
  mattered  an output differed from the oracle's
  same      reported in the step of the strike
  later     reported in a later step, or by the sweep that ends each run
  missed    not reported, although it mattered or somebody used what was struck
  harmless  not reported, and rightly: it did not matter, and nobody used what was struck before it was freed
  alarms    reports without a fault, before it, or about another slot or request than the fault explains
  per s     injections per second

With a --verify-fraction below 1, or a --budget, the classes marked ~ are found by sampling: a miss of theirs is no
failure.
The exit status is 1 if any other class has a miss, or any class has a false alarm or no injection.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import EngineError
from ..proof.perturb import CLASSES
from ..reports.summary import muted

#: Where the laboratory is in a checkout.
FOLDER = Path("examples") / "paged_engine"

#: One run in this many has no fault.
CLEAN_EVERY = 20

#: Maximum number of runs per wanted injection; a run may have no opportunity.
PATIENCE = 4

#: Misses and false alarms of a class that are shown in detail.
DETAILS = 3

_HEADINGS = ("injected", "mattered", "same", "later", "missed", "harmless", "alarms")


@dataclasses.dataclass
class Tally:
    """The counts of one class.

    Attributes:
        sampled: its misses do not count as failures.
        details: the first misses and false alarms, with the seed of their run.
        latest: the most steps between a strike and its first report.
    """

    name: str
    sampled: bool
    injected: int = 0
    mattered: int = 0
    same: int = 0
    later: int = 0
    missed: int = 0
    harmless: int = 0
    alarms: int = 0
    runs: int = 0
    latest: int = 0
    seconds: float = 0.0
    details: list[str] = dataclasses.field(default_factory=list)

    @property
    def failed(self) -> bool:
        return self.alarms > 0 or self.injected == 0 or (self.missed > 0 and not self.sampled)

    @property
    def rate(self) -> float:
        return self.injected / self.seconds if self.seconds else 0.0

    def add(self, trial: Any, seed: int) -> None:
        """Count one run of the laboratory."""
        self.runs += 1
        for step, violation, explained in trial.reports:
            if not explained:
                self.alarms += 1
                self._tell(f"false alarm in run {seed}, step {step}: {violation.line()}; strike: {trial.strike}")
        if trial.strike is not None:
            self._count(trial, seed)

    def _count(self, trial: Any, seed: int) -> None:
        self.injected += 1
        self.mattered += trial.mattered
        steps = [step for step, _, explained in trial.reports if explained]
        if steps:
            delay = steps[0] - trial.strike.step
            self.same += delay == 0
            self.later += delay > 0
            self.latest = max(self.latest, delay)
        elif trial.mattered or trial.visible:
            self.missed += 1
            self._tell(f"missed in run {seed}: {trial.strike}")
        else:
            self.harmless += 1

    def _tell(self, text: str) -> None:
        if len(self.details) < DETAILS:
            self.details.append(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--per-class", type=int, default=100, metavar="N", help="injections per class (default: 100)")
    parser.add_argument("--classes", metavar="A,B", help=f"of {', '.join(CLASSES)} (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of all choices; one seed gives the same runs again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts to FILE, too")
    parser.add_argument("--lab", type=Path, metavar="DIR", help=f"the engine (default: {FOLDER} of the checkout)")
    parser.add_argument("--model", choices=("oracle",), default="oracle", help="model that the engine serves")
    share = parser.add_mutually_exclusive_group()
    share.add_argument("--verify-fraction", default="1", help="share of the slots whose bytes are checked each step")
    share.add_argument("--budget", help="how much longer a step may take, in place of that share: 1%%")


def run(args: argparse.Namespace) -> int:
    names = _classes(args.classes)
    if args.per_class < 1:
        raise EngineError(f"--per-class {args.per_class}: give 1 or more injections")
    trials = _load(args.lab)
    sampled = args.budget is not None or args.verify_fraction != "1"
    lab = trials.Lab(**{"budget": args.budget} if args.budget else {"verify_fraction": args.verify_fraction})
    tallies: list[Tally] = []
    print(f"{'class':15s}" + "".join(f"{h:>10s}" for h in (*_HEADINGS, "per s")), flush=True)
    try:
        with muted(), _one_thread():
            for name in names:
                tallies.append(Tally(name, trials.PLANTS[name].by_bytes and sampled))
                _campaign(lab, tallies[-1], args.per_class, args.seed)
                print(_row(tallies[-1]), flush=True)
                if args.json is not None:  # written after each class: finished ones are kept if the rest is interrupted
                    args.json.write_text(json.dumps(_record(args, tallies), indent=2) + "\n")
    finally:
        lab.close()
    for line in _summary(tallies):
        print(line)
    return int(any(t.failed for t in tallies))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, and wait for them where the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _classes(given: str | None) -> list[str]:
    names = list(dict.fromkeys(given.split(","))) if given else list(CLASSES)
    unknown = [n for n in names if n not in CLASSES]
    if unknown:
        raise EngineError(f"--classes {','.join(unknown)}: no such class. They are: {', '.join(CLASSES)}")
    return names


def _load(given: Path | None) -> Any:
    """The module ``trials`` of the laboratory.

    Raises:
        EngineError: it does not exist.
    """
    places = [given] if given is not None else [Path(__file__).resolve().parents[2] / FOLDER, Path.cwd() / FOLDER]
    found = next((p for p in places if (p / "trials.py").is_file()), None)
    if found is None:
        raise EngineError(
            f"no laboratory at {' or '.join(map(str, places))}: it is part of the source checkout, not of the wheel. "
            f"Run from a checkout of kvcanary_fx, or give --lab path/to/{FOLDER}"
        )
    if str(found.resolve()) not in sys.path:
        sys.path.insert(0, str(found.resolve()))
    return importlib.import_module("trials")


def _campaign(lab: Any, tally: Tally, wanted: int, seed: int) -> None:
    """Run one class until it has the injections it wants; a run's number is its seed."""
    _warm_up(lab, tally, seed)
    start = time.perf_counter()
    for number in range(PATIENCE * wanted + CLEAN_EVERY):
        if tally.injected == wanted:
            break
        own = seed * 1_000_000 + number
        tally.add(lab.trial(tally.name, own, armed=number % CLEAN_EVERY != 0), own)
        tally.seconds = time.perf_counter() - start
        _progress(f"{tally.name}: {tally.injected}/{wanted}, {tally.rate:.0f} per s")
    _progress("")


def _warm_up(lab: Any, tally: Tally, seed: int) -> None:
    """Let the model be compiled before the clock starts."""
    _progress(f"{tally.name}: compiling")
    lab.trial(tally.name, seed, armed=False)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _row(tally: Tally) -> str:
    counts = "".join(f"{getattr(tally, h):10d}" for h in _HEADINGS)
    return f"{tally.name + ' ~' * tally.sampled:15s}{counts}{tally.rate:10.1f}"


def _summary(tallies: Sequence[Tally]) -> Iterator[str]:
    sums = "".join(f"{sum(getattr(t, h) for t in tallies):10d}" for h in _HEADINGS)
    seconds = sum(t.seconds for t in tallies)
    yield f"{'all':15s}{sums}{sum(t.injected for t in tallies) / seconds:10.1f}"
    for tally in tallies:
        yield from (f"{tally.name}: {text}" for text in tally.details)
        if not tally.injected:
            yield f"{tally.name}: no injection in {tally.runs} runs"


def _record(args: argparse.Namespace, tallies: Sequence[Tally]) -> dict[str, Any]:
    settings = {k: getattr(args, k) for k in ("per_class", "seed", "model", "verify_fraction", "budget")}
    return {**settings, "failed": any(t.failed for t in tallies), "classes": [dataclasses.asdict(t) for t in tallies]}

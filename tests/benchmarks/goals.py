"""Which goals are reached: the benchmarks that have one, side by side on the GPUs of a machine.

    PYTHONPATH=. python tests/benchmarks/goals.py [--only TEXT ...] [--seconds 1800] [--logs DIR]
    python tests/benchmarks/goals.py --list

Each benchmark has a GPU and a share of the hardware threads for itself, and the longest begin first: more than an
hour of one GPU, twenty minutes of four.  What is not done when the time is up is told as such, and what it printed
until then counts.  A time of the host that misses its goal is shown as one of a slow host where the host was slow all
along, next to that of another process; it counts as a goal that is not reached.
The goals are those of the table at the top of BENCHMARKS.md that need no engine; vLLM's have scripts of their own.
Each output goes to a file, and the last lines are a table.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cores
import report

HERE = Path(__file__).parent

#: A host that takes more than so many times as long as it did elsewhere is slow: seen are 1.0 to 1.1, and 1.5 to 2.
SLOWER = 1.2


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure that has a goal.

    Attributes:
        host: microseconds of a fixed piece of Python at the times that count, where it is the host's time.
    """

    what: str
    measured: str
    goal: str
    reached: bool
    host: float | None = None

    def cells(self, fastest: float | None = None) -> list[str]:
        """Those of a row.

        Args:
            fastest: the least ``host`` of all figures.
        """
        answer = "**no**, slow host" if self.on_slow_host(fastest) else "yes" if self.reached else "**no**"
        return [self.what, self.measured, self.goal, answer]

    def on_slow_host(self, fastest: float | None) -> bool:
        """Whether it misses its goal, and its host was never as fast as that of another figure."""
        return not (self.reached or self.host is None or fastest is None) and self.host > SLOWER * fastest


@dataclasses.dataclass
class Benchmark:
    """A benchmark with a goal.

    Attributes:
        command: script and arguments.
        seconds: about how long it takes on an H200; the longest begin first.
        read: the figures in what it prints, complete or not.
        status: of its process; None: it has not ended.
    """

    name: str
    command: str
    seconds: float
    read: Callable[[str], Iterator[Figure]]
    status: int | None = None
    figures: list[Figure] = dataclasses.field(default_factory=list)

    def run(self, gpu: int, logs: Path, seconds: float) -> None:
        """Run it on one GPU for at most so long, and read what it printed."""
        log = logs / f"{re.sub(r'[^a-z0-9_]+', '-', self.name)}.log"
        script, *arguments = words(self.command)
        env = dict(os.environ, CUDA_VISIBLE_DEVICES=str(gpu))
        command = [sys.executable, str(HERE / script), *arguments]
        with (
            log.open("w") as out,
            subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True) as process,
        ):
            try:
                self.status = process.wait(max(0.0, seconds))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # and the processes that a benchmark starts
        self.figures = list(self.read(log.read_text(errors="replace")))


def words(command: str) -> list[str]:
    """A command's script and arguments."""
    return shlex.split(command)


def cells_of(text: str, *start: str) -> Iterator[list[str]]:
    """The cells of the lines that a benchmark prints as it goes, two blanks between them, of those that start so."""
    for line in text.splitlines():
        cells = line.split("  ")
        if cells[: len(start)] == list(start):
            yield cells


def number(cell: str) -> float:
    """The first number of a cell."""
    found = re.search(r"[+-]?\d[\d,]*\.?\d*", cell)
    if found is None:
        raise ValueError(f"no number in {cell!r}")
    return float(found[0].replace(",", ""))


def of_generate(text: str) -> Iterator[Figure]:
    for cells in cells_of(text):
        if len(cells) == 8 and cells[1] in ("log", "raise"):
            least = -2 if cells[1] == "log" else -3
            reached = number(cells[3]) >= least and cells[7] == "0"
            yield Figure(f"generate {cells[0]}, {cells[1]}, tokens/s", cells[3], f"at least {least} %", reached)


def of_batches(text: str) -> Iterator[Figure]:
    for cells in cells_of(text):
        if len(cells) >= 7 and cells[1] in ("log", "raise"):
            reached = number(cells[3]) >= -3
            yield Figure(f"generate_batch {cells[0]}, {cells[1]}, tokens/s", cells[3], "at least -3 %", reached)


def of_forward(configuration: str, most: float) -> Callable[[str], Iterator[Figure]]:
    def read(text: str) -> Iterator[Figure]:
        for cells in cells_of(text):
            if len(cells) > 4 and cells[1] == configuration:
                overhead = next(cell for cell in cells[3:] if cell.endswith(" %"))
                reached = number(overhead) <= most
                yield Figure(f"forward {cells[0]}, {configuration}", overhead, f"at most +{most:g} %", reached)

    return read


def of_steps(text: str) -> Iterator[Figure]:
    """Of the steps at the host's fast times: at others it is the host that is slow."""
    for line in text.splitlines():
        if line.startswith("['"):
            name, total, fast, *_, python = ast.literal_eval(line)
            measured = f"{total} us (Python {python}), {fast or 'none'} at fast times"
            reached = bool(fast) and number(fast) <= 150
            host = number(python.partition("(")[2] or python)
            yield Figure(f"engine's session, {name}", measured, "at most 150 us at fast times", reached, host)


def of_budget(text: str) -> Iterator[Figure]:
    for cells in cells_of(text):
        if len(cells) >= 9 and cells[1] in ("captured", "called", "zero-configuration"):
            what = f"budget {cells[2]}, {cells[0]}, {cells[1]}"
            found = [cell for cell in cells[8:] if cell[0].isdigit()]
            problems = [cell for cell in cells[8:] if cell not in found]
            measured = f"{cells[4]}; {cells[6]}, {cells[7]} said; found {', '.join(found)}"
            yield Figure(what, "; ".join([measured, *problems]), f"at most +{cells[5]}", not problems)


def of_kernels(text: str) -> Iterator[Figure]:
    for cells in cells_of(text, "64 x 0 + 4096"):
        if len(cells) == 7:  # of the content checks
            yield Figure("record of 262,144 slots", cells[3], "at most 150 us", number(cells[3]) <= 150)
    for cells in cells_of(text, "64 x 4096 + 1"):
        if len(cells) == 5:  # of the identity checks
            yield Figure("identity of 64 x 4,096", cells[1], "at most 12 us", number(cells[1]) <= 12)


def of_compilation(text: str) -> Iterator[Figure]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in ("cold", "warm") and len(cells) > 4:
            most, more = (10 if cells[0] == "cold" else 5), number(cells[4]) - 100
            measured = f"{more:+.1f} %, median of pairs: {cells[4]}"
            yield Figure(f"first compile, {cells[0]}", measured, f"at most +{most} %", more <= most)


def benchmarks() -> list[Benchmark]:
    """All of them."""
    found = []
    for shape, seconds in (("1b", 80), ("8b", 150)):
        for requests in (1, 8, 32):
            for context in (512, 4096):
                long = requests == 32 and context == 4096
                command = f"generate.py --shape {shape} --requests {requests} --context {context} --mode log raise"
                few = " --rounds 3 --new-tokens 96" if long else " --rounds 5"
                # a call of 1b takes less than a second, and rounds differ by more than the goal
                command += few if shape == "8b" else " --rounds 15"
                name = f"generate {shape} {requests} x {context}"
                found.append(Benchmark(name, command, seconds + 60 * long, of_generate))
    batches = "generate_batch.py --shape 8b --requests 8 --context 512 --new-tokens 48 --rounds 60 --seconds 380"
    found.append(Benchmark("generate_batch 8b", batches, 470, of_batches))
    found.append(Benchmark("forward plain", "forward.py --only zero-configuration", 150, of_forward("log, default", 2)))
    found.append(
        Benchmark(
            "forward mla",
            'forward.py --only "mla decode 64 manual" --configs off identity recorded',
            160,
            of_forward("recorded", 1),
        )
    )
    for turn in range(3):
        for at_once in ("", " --at-once"):
            command = f"engine_step.py --source pages{at_once}"
            found.append(Benchmark(f"engine_step{at_once.replace(' --', ' ')} {turn}", command, 30, of_steps))
    for requests, lengths in BUDGETS.items():
        for length in lengths:
            command = f"budget.py --seconds 2.2 --requests {requests} --length {length}"
            seconds = (
                45 + 45 * (requests >= 32) + (45 + 4 * requests) * (length == 32768)
            )  # those find a flip in seconds
            found.append(Benchmark(f"budget {requests} x {length}", command, seconds, of_budget))
    found.append(Benchmark("kernels", "kernels.py", 90, of_kernels))
    found.append(Benchmark("compile_time", "compile_time.py --repeats 3 --warm 3 --at-once", 330, of_compilation))
    return found


#: Requests, and tokens of each, of `budget.py`.
BUDGETS = {
    1: (512, 4096, 32768),
    8: (512, 4096, 32768),
    16: (4096, 32768),
    32: (4096,),
    64: (512, 4096, 8192),
    128: (512, 4096),
}


def run_all(chosen: list[Benchmark], gpus: int, logs: Path, seconds: float) -> None:
    """Run them, each GPU one after the other; each is told of when it has ended."""
    end = time.monotonic() + seconds
    waiting: queue.SimpleQueue[Benchmark] = queue.SimpleQueue()
    for benchmark in sorted(chosen, key=lambda b: -b.seconds):
        waiting.put(benchmark)

    def work(gpu: int, cpus: set[int]) -> None:
        os.sched_setaffinity(0, cpus)  # this thread's, and of what it starts
        while time.monotonic() < end:
            try:
                benchmark = waiting.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            benchmark.run(gpu, logs, end - began)
            how = {0: "", None: ", its time was up"}.get(benchmark.status, f", status {benchmark.status}")
            print(f"GPU {gpu}, {time.monotonic() - began:.0f} s: {benchmark.name}{how}", flush=True)
            for figure in benchmark.figures:
                print("  " + "  ".join(figure.cells()), flush=True)

    shares = cores.parts(os.sched_getaffinity(0), gpus)
    threads = [threading.Thread(target=work, args=(gpu, share)) for gpu, share in enumerate(shares)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="benchmarks with one of these in the name"
    )
    parser.add_argument("--seconds", type=float, default=7200, help="for all of them")
    parser.add_argument("--logs", type=Path, default=Path("build/goals"), help="directory for what they print")
    parser.add_argument("--list", action="store_true", help="print names and commands, and run nothing")
    args = parser.parse_args(arguments)
    args.chosen = [b for b in benchmarks() if any(text in b.name for text in args.only)]
    if not args.chosen:
        names = ", ".join(b.name for b in benchmarks())
        parser.error(f"--only {' '.join(args.only)}: no benchmark has that in its name: {names}")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.list:
        print("\n".join(f"{b.name}: {b.command}" for b in args.chosen))
        return 0
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        sys.exit("no GPU is visible: the goals are those of a GPU; cpu_decode.py is for a CPU")
    args.logs.mkdir(parents=True, exist_ok=True)
    run_all(args.chosen, gpus, args.logs, args.seconds)
    figures = [figure for benchmark in args.chosen for figure in benchmark.figures]
    fastest = min((figure.host for figure in figures if figure.host is not None), default=None)
    print(f"\n{report.environment('cuda')}, {gpus} of them, each benchmark on one\n")
    print(report.table(["what", "measured", "goal", "reached"], [figure.cells(fastest) for figure in figures]))
    without = [b.name for b in args.chosen if not b.figures]
    if without:
        print(f"\nno figure: {', '.join(without)}; see {args.logs}")
    missed = [figure for figure in figures if not figure.reached]
    slow = sum(figure.on_slow_host(fastest) for figure in figures)
    print(f"\n{len(figures) - len(missed)} of {len(figures)} figures reach their goal")
    if slow:
        print(
            f"{slow} of the others are times of a slow host: Python took it over {SLOWER:g} times the {fastest:g} us "
            "that it took elsewhere"
        )
    return 1 if missed or without else 0


if __name__ == "__main__":
    sys.exit(main())

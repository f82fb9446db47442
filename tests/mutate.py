"""Would the tests notice a broken check?  Negate each comparison in the checks, one at a time, and run their tests.

    python tests/mutate.py [--only TEXT ...] [--skip TEXT ...] [--jobs N] [--results FILE] [--minutes N]

Each mutant is made in a copy of the checkout and tested with the tests named below, which are run once as they are:
tests that fail anyway kill nothing.  Prints the survivors, and for each file how many mutants were killed, survived and
were not judged; exits with 1 below 95 %, or if some were not judged.  With --results each verdict is a line of the file
as soon as it is there, and a mutant whose verdict is in the file is not run again.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import dataclasses
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]

SPACES = ["tests/kernels/test_slot_spaces.py"]
INTERPRETED = ["tests/kernels/test_slot_spaces.py", "-k", "interpreted or chain_of"]
PLANNED = [*SPACES, "tests/kernels/test_bit_equality.py::test_cpu_equals_reference_on_random_plans"]
SITES = ["tests/kernels/test_bit_equality.py", "-k", "cpu"]
ENGINE = ["tests/runtime/test_engine_session.py", "tests/runtime/test_opaque_attention.py"]
ENGINE += ["tests/runtime/test_side_stream.py", "-m", "not slow"]
WRITES = ["tests/kernels/test_write.py"]
POOLS = ["tests/pools/test_layouts.py", "-k"]
FEWER_TOKENS = [*POOLS, "compressed or c128 or completed or plan or doctor or batch"]

#: The files with checks in them, and the tests that must notice.
TARGETS = {
    "kernels/slots/planned.py": PLANNED,
    "kernels/slots/checks.py": SPACES,
    "kernels/slots/tokens.py": SPACES,
    "kernels/slots/triton_reads.py": INTERPRETED,
    "kernels/slots/triton_writes.py": INTERPRETED,
    "kernels/slots/triton_shared.py": INTERPRETED,
    "kernels/slots/life.py": ["tests/kernels/test_life.py", *SPACES],
    "kernels/findings.py": SPACES,
    "kernels/content/cpu.py": SITES,
    "kernels/content/triton_digest.py": ["tests/kernels/test_bit_equality.py", "-k", "interpreted"],
    "kernels/content/triton_half.py": ["tests/kernels/test_bit_equality.py", "-k", "interpreted"],
    "kernels/writes/triton_resolve.py": ["tests/kernels/test_plan.py", "tests/kernels/test_bit_equality.py"]
    + ["-k", "test_plan or interpreted"],
    "kernels/content/triton_write.py": WRITES,
    "kernels/content/gpu_write.py": WRITES,
    "kernels/content/gpu_prompt.py": WRITES,
    "kernels/content/kept_launches.py": WRITES,
    "kernels/content/triton_layer.py": ["tests/kernels/test_bit_equality.py", "-k", "interpreted"],
    "kernels/content/triton_listed.py": ["tests/kernels/test_bit_equality.py", "-k", "interpreted or halves"],
    "kernels/content/gpu_layer.py": ["tests/kernels/test_layer_record.py", "tests/kernels/test_bit_equality.py"]
    + ["-k", "layer_record or interpreted or halves"],
    "kernels/content/layer.py": ENGINE,
    "kvcanary_fx/engine/layers.py": [
        "tests/runtime/test_engine_layers.py",
        "tests/runtime/test_kept_forward.py",
        *ENGINE,
    ],
    "kernels/slots/identity.py": ["tests/kernels/test_names.py"],
    "kernels/writes/row_state.py": SITES,
    "kernels/layer_ops.py": ENGINE,
    "kvcanary_fx/engine/observers/sweep.py": ["tests/runtime/test_sweep_prefixes.py", *ENGINE],
    "kvcanary_fx/engine/observers/health.py": ENGINE,
    "kvcanary_fx/runtime/adoption.py": ["tests/runtime/test_adoption.py", "tests/runtime/test_two_graphs.py"]
    + ["-m", "not slow"],
    "kvcanary_fx/engine/layouts/fewer_tokens.py": [
        *POOLS,
        "compressed or c128 or completed or plan or doctor or batch",
    ],
    "kvcanary_fx/engine/layouts/compressed.py": FEWER_TOKENS,
    "kvcanary_fx/engine/observers/windows.py": [*POOLS, "window_report"],
    "passes/states.py": ["tests/passes/test_states.py", "tests/passes/test_idioms.py"]
    + ["-k", "test_states or eager and not aot or a_state or a_window"],
    "passes/only_read.py": ["tests/runtime/test_only_read.py", "tests/runtime/test_two_graphs.py", "-m", "not slow"],
    "passes/join_side_streams.py": ["tests/passes/test_join_side_streams.py"],
}

_OF_A_KEY = "of a key: either tells the forms apart"
_DETAILS = "of the sum over a block: where it is wrong, each position is looked at, for time alone"
_ROW_OF_THE_GRID = "either row of the grid may take either half: they differ in nothing else"

#: Mutants that no test can notice, by file and function, and why.  They are not run.
EQUIVALENT = {
    "kernels/content/gpu_write.py: _slots_of_scanner: site.half.baseline is not None": "for time alone",
    "kernels/content/kept_launches.py: seen: site.half.baseline is not None": _OF_A_KEY,
    "kernels/content/gpu_layer.py: record: n > FEW_SLOTS": _OF_A_KEY,
    "kernels/content/gpu_layer.py: record: n != 0": _OF_A_KEY,
    "kernels/content/gpu_layer.py: record: plan.taken is not None": _OF_A_KEY,
    "kernels/content/gpu_layer.py: record: shape[0] < n": _OF_A_KEY,
    "kernels/slots/triton_reads.py: chain_before: slot < 0": _DETAILS,
    "kernels/slots/triton_reads.py: chain_before: slot >= slots": _DETAILS,
    "kernels/slots/triton_reads.py: walk_kernel: position != enters": _DETAILS,
    "kernels/content/triton_write.py: record_write_kernel: tl.program_id(1) != 1": _ROW_OF_THE_GRID,
    "kernels/content/triton_layer.py: record_kernel: tl.program_id(1) != 1": _ROW_OF_THE_GRID,
    "kernels/content/triton_listed.py: verify_listed_kernel: tl.program_id(1) != 1": _ROW_OF_THE_GRID,
}

#: Random scenes of a test: most mutants die of few, the others see all.
SEEDS = ("40", "300")
#: Of tests whose scenes are several launches each, in the interpreter.
FEWER_SEEDS = ("5", "40")

#: Where a worker's tests write what pytest prints.
OUTPUT = "tests-output.txt"

_NEGATED: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: ">=",
    ast.GtE: "<",
    ast.Gt: "<=",
    ast.LtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A file with one comparison negated."""

    file: str
    line: int
    column: int
    shown: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.shown}"


def path_of(root: Path, file: str) -> Path:
    """Where a file is in a checkout, or in a copy that has folders in the place of its links."""
    return root / file if file.startswith("kvcanary_fx/") else root / "kvcanary_fx" / file


def mutants_of(file: str) -> list[Mutant]:
    """One mutant per comparison with one operator, except those that mean the same."""
    source = path_of(ROOT, file).read_text()
    tree, found = ast.parse(source), []
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    function_of = {node: function.name for function in functions for node in ast.walk(function)}  # the innermost
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            continue
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        shown = f"{left} {_NEGATED[type(node.ops[0])]} {right}"
        if f"{file}: {function_of.get(node)}: {shown}" in EQUIVALENT:
            continue
        lines = source.splitlines(keepends=True)
        start = sum(len(x) for x in lines[: node.lineno - 1]) + node.col_offset
        end = sum(len(x) for x in lines[: node.end_lineno - 1]) + node.end_col_offset
        found.append(Mutant(file, node.lineno, node.col_offset + 1, shown, f"{source[:start]}({shown}){source[end:]}"))
    return found


def seeds_of(file: str) -> tuple[str, str]:
    """Numbers of random scenes that the file's tests draw, one after the other."""
    return FEWER_SEEDS if TARGETS[file] is WRITES else SEEDS


class Runner:
    """Runs mutants, each worker in a copy of the checkout of its own."""

    def __init__(self, scratch: Path):
        self._scratch, self._local, self._count = scratch, threading.local(), 0
        self._lock = threading.Lock()
        self._seconds: dict[tuple[str, ...], float] = {}
        # Tests of a mutant that dies take a second, and imports of torch and triton five: they are made once.
        self._fork = multiprocessing.get_context("forkserver")
        self._fork.set_forkserver_preload(
            ["torch", "torch._dynamo", "triton", "triton.language", "pytest", "hypothesis"]
        )

    def passes_unchanged(self, file: str) -> bool:
        """Whether the file's tests pass as it is: tests that fail anyway kill nothing."""
        started = time.monotonic()
        passes = self._passes(self._home(), file, seeds_of(file)[-1], 600)
        self._seconds[tuple(TARGETS[file])] = time.monotonic() - started
        if not passes:
            told = (self._home() / OUTPUT).read_text(errors="replace").splitlines()[-12:]
            print("\n".join([*told, f"after {time.monotonic() - started:.0f} s"]), flush=True)
        return passes

    def survives(self, mutant: Mutant) -> bool:
        home = self._home()
        target = path_of(home, mutant.file)
        original = target.read_text()
        target.write_text(mutant.source)
        limit = 30 + 3 * self._seconds[tuple(TARGETS[mutant.file])]  # a loop without an end is noticed, too
        try:
            return all(self._passes(home, mutant.file, seeds, limit) for seeds in seeds_of(mutant.file))
        finally:
            target.write_text(original)

    def _passes(self, home: Path, file: str, seeds: str, limit: float) -> bool:
        process = self._fork.Process(target=run_tests, args=(home, TARGETS[file], seeds))
        process.start()
        process.join(limit)
        if process.is_alive():
            process.kill()
            process.join()
        return process.exitcode == 0

    def _home(self) -> Path:
        if not hasattr(self._local, "home"):
            with self._lock:
                self._count += 1
                self._local.home = self._scratch / str(self._count)
            ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
            shutil.copytree(ROOT, self._local.home, symlinks=True, ignore=ignored)
        home: Path = self._local.home
        return home


class Verdicts:
    """What became of each mutant: told as it is known, and kept in a file."""

    def __init__(self, total: int, kept: Path | None):
        self._total, self._kept, self._lock = total, kept, threading.Lock()
        lines = kept.read_text().splitlines() if kept is not None and kept.exists() else []
        self._known = {mutant: verdict for verdict, _, mutant in (line.partition(" ") for line in lines)}
        self._told = 0.0
        self.of: dict[str, str] = {}

    def known(self, mutant: Mutant) -> bool:
        if str(mutant) in self._known:
            self.of[str(mutant)] = self._known[str(mutant)]
        return str(mutant) in self._known

    def take(self, mutant: Mutant, alive: bool) -> None:
        with self._lock:
            verdict = self.of[str(mutant)] = "survived" if alive else "killed"
            if self._kept is not None:
                with self._kept.open("a") as out:
                    out.write(f"{verdict} {mutant}\n")
            if alive:
                print(f"survived {mutant}", flush=True)
            if time.monotonic() > self._told + 5:
                self._told = time.monotonic()
                print(self.summary(), file=sys.stderr, flush=True)

    def summary(self) -> str:
        count = Counter(self.of.values())
        return f"{len(self.of)} of {self._total} mutants run, {count['killed']} killed, {count['survived']} survived"

    def by_file(self, mutants: list[Mutant]) -> str:
        """What became of the mutants of each file, and below it those that survived."""
        kinds = ("killed", "survived", "not judged")
        count = Counter((m.file, self.of.get(str(m), kinds[-1])) for m in mutants)
        lines = ["".join(f"{kind:>12}" for kind in kinds)]
        for file in dict.fromkeys(m.file for m in mutants):
            lines.append("".join(f"{count[file, kind]:12}" for kind in kinds) + f"  {file}")
        return "\n".join([*lines, *(f"survived {m}" for m in mutants if self.of.get(str(m)) == "survived")])


def run_tests(home: Path, tests: list[str], seeds: str) -> None:
    """Run tests of a copy of the checkout, in a process that is only there for it."""
    os.chdir(home)
    sys.path.insert(0, str(home))
    sys.dont_write_bytecode = True  # a mutant of the same second and size would run as the one before
    os.environ["CANARY_TEST_SEEDS"] = seeds
    output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import pytest

    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="files whose name contains any")
    parser.add_argument("--skip", nargs="+", default=[], metavar="TEXT", help="but none that contains any")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path, metavar="FILE", help="verdicts, read and added to")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin nothing after that: 0 shows what is in FILE"
    )
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a job has a core
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # kernels are interpreted, which is read when triton is imported
    os.environ["TRITON_INTERPRET"] = "1"
    files = [file for file in TARGETS if any(t in file for t in args.only) and not any(t in file for t in args.skip)]
    mutants = [m for file in files for m in mutants_of(file)]
    verdicts = Verdicts(len(mutants), args.results)
    waiting = [m for m in mutants if not verdicts.known(m)]
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runner = Runner(Path(scratch))
        suites = {tuple(TARGETS[m.file]): m.file for m in waiting}
        failing = []

        def can_tell(file: str) -> bool:
            if time.monotonic() > until:
                return False
            passes = runner.passes_unchanged(file)
            if not passes:
                failing.append(f"fails with nothing changed, so it cannot tell: pytest {' '.join(TARGETS[file])}")
            return passes

        def judge(mutant: Mutant) -> None:
            if time.monotonic() < until:
                verdicts.take(mutant, runner.survives(mutant))

        baselines = {pool.submit(can_tell, file): tests for tests, file in suites.items()}
        judged = []  # in the order in which the suites end: mutants of quick ones first
        for done in concurrent.futures.as_completed(baselines):
            if done.result():
                judged += [pool.submit(judge, m) for m in waiting if tuple(TARGETS[m.file]) == baselines[done]]
        for verdict in judged:
            verdict.result()
    print("\n".join([verdicts.by_file(mutants), *failing, verdicts.summary()]))
    killed = sum(verdict == "killed" for verdict in verdicts.of.values())
    return 0 if len(verdicts.of) == len(mutants) and killed >= 0.95 * len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())

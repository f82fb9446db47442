"""Run everything that needs a GPU, and print a short table.

    PYTHONPATH=. python tests/run_gpu.py [--logs DIR] [--only TEXT] [--marked] [--no-benchmarks]

The tests marked ``gpu``, the rest of the suite on this machine's torch (not with ``--marked``), and the examples under
Inductor, ``mode="reduce-overhead"`` and manual capture, side by side, on all GPUs of the machine; then the benchmarks,
one at a time.  Each job's output goes to a file, and of a job that fails the tests that did, and why, are printed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import os
import queue
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Tests that compile kernels for many layouts, by the number of their blocks: a process for each block.  In one the
#: first did not get beyond its third block in 200 s (H200); side by side all were done in less.
BLOCKS = {
    "tests/kernels/test_bit_equality.py::test_gpu_equals_reference_on_random_plans[{}]": 10,
    "tests/kernels/test_slot_spaces.py::test_checks_on_the_gpu_equal_the_reference[{}-triton]": 5,
}

#: Seconds that a process gets to end after it was interrupted.
UNTIL_KILLED = 20.0

ARCHITECTURES = ("llama", "qwen3", "gemma3", "mixtral", "deepseek_v3", "gpt2")


@dataclass
class Job:
    """One process; it passes when it exits with 0."""

    name: str
    command: list[str]
    seconds: float = 0.0
    status: int = -1
    last_line: str = ""

    def run(self, logs: Path, timeout: float, places: queue.SimpleQueue[dict[str, str]] | None = None) -> Job:
        """Run it, where there are ``places``, at one of them: the environment for a GPU."""
        place = {} if places is None else places.get()
        started = time.perf_counter()
        log = logs / f"{self.name.replace(' ', '_').replace('/', '_')}.log"
        env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(logs / "cache" / log.stem), **place)
        with log.open("w") as out:
            self.status = status_of(self.command, timeout, stdout=out, stderr=subprocess.STDOUT, env=env)
        if places is not None:
            places.put(place)
        self.seconds = time.perf_counter() - started
        text = log.read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        self.last_line = lines[-1][:90] if lines else ""
        told = [f"{'ok  ' if self.status == 0 else 'FAIL'} {self.seconds:6.1f} s  {self.name}: {self.last_line}"]
        print("\n".join(told + ([] if self.status == 0 else why_failed(text))), flush=True)
        return self


def places_for(workers: int, gpus: list[str]) -> queue.SimpleQueue[dict[str, str]] | None:
    """A place for each of so many jobs at once, the GPUs in turn; None where there is one GPU, or none.

    A job's own GPU is the first that it sees, and it sees the others, too: some tests need two.
    """
    if len(gpus) < 2:
        return None
    places: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
    for number in range(workers):
        first = number % len(gpus)
        places.put({"CUDA_VISIBLE_DEVICES": ",".join(gpus[first:] + gpus[:first])})
    return places


def visible_gpus() -> list[str]:
    """The GPUs of the machine, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(gpu) for gpu in range(torch.cuda.device_count())]


def status_of(command: list[str], timeout: float, **arguments: Any) -> int:
    """The status of a process; 124 if its time was up: it is interrupted then, so that pytest says what has failed."""
    with subprocess.Popen(command, **arguments) as process:
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(UNTIL_KILLED)
            except subprocess.TimeoutExpired:
                process.kill()
        return 124


def take_interrupts() -> None:
    """Let the processes that are started from here on be interrupted.

    A shell that starts a program in the background has it ignore that, and so do all that it starts.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def why_failed(text: str, most: int = 8) -> list[str]:
    """Of pytest's output the tests that failed, and then its lines about errors; what repeats is there once."""
    lines = re.findall(r"^(?:FAILED|ERROR) .*|^E   +\S.*", text, re.MULTILINE)
    found = list(dict.fromkeys(line[:200] for line in lines))
    found.sort(key=lambda line: line.startswith("E "))  # the tests before the errors
    rest = [f"     and {len(found) - most} more lines of this kind"] if len(found) > most else []
    return [f"     {line}" for line in found[:most]] + rest


def kernel_tests(pytest: list[str], parallel: list[str]) -> list[Job]:
    """The tests of the kernels, side by side also where pytest cannot do it."""
    blocks = [] if parallel else [test.format(n) for test, count in BLOCKS.items() for n in range(count)]
    left_out = [argument for block in blocks for argument in ("--deselect", block)]
    alone = [Job(f"tests kernels {block.split('::')[1]}", [*pytest, block]) for block in blocks]
    return [*alone, Job("tests kernels", [*pytest, *parallel, *left_out, "tests/kernels"])]


def jobs(marked: bool) -> list[Job]:
    python = sys.executable
    pytest = [python, "-m", "pytest", "-p", "no:cacheprovider", *(["-m", "gpu"] if marked else [])]
    parallel = ["-n", str(max(6, (os.cpu_count() or 6) // 4))] if importlib.util.find_spec("xdist") else []
    plans = [python, "tests/kernels/random_plans.py", "--device", "cuda", "--kernels", "triton"]
    made = [
        *kernel_tests(pytest, parallel),
        Job("tests passes", [*pytest, *parallel, "tests/passes", "--ignore=tests/passes/test_code_lint.py"]),
        Job("lint of every idiom", [*pytest, *parallel, "-rP", "tests/passes/test_code_lint.py"]),
        Job("tests runtime", [*pytest, *parallel, "tests/runtime"]),
        Job("tests examples", [*pytest, *parallel, "tests/examples"]),
        Job("tests pools", [*pytest, *parallel, "tests/pools"]),
        Job("doctor", [python, "-m", "kvcanary_fx", "doctor"]),
        Job("random plans", [*plans, "--plans", "5000", "--jobs", "6"]),
    ]
    made.append(Job("tests models, bugs", [*pytest, *parallel, "tests/models", "tests/bugs"]))
    if not marked:  # these have no test that a GPU runs
        made.append(Job("tests cli", [*pytest, *parallel, "tests/cli"]))
    for arch in ARCHITECTURES:
        generate = [python, "examples/hf_generate.py", "--arch", arch, "--device", "cuda"]
        made.append(Job(f"hf_generate {arch} reduce-overhead", [*generate, "--mode", "reduce-overhead"]))
        made.append(Job(f"hf_generate {arch} aot_eager", [*generate, "--inner", "aot_eager"]))
        made.append(Job(f"hf_generate {arch} manual capture", [*generate, "--capture"]))
    plain = [python, "examples/plain_decoder.py", "--device", "cuda"]
    made.append(Job("plain_decoder reduce-overhead", [*plain, "--mode", "reduce-overhead"]))
    made.append(Job("plain_decoder manual capture", [*plain, "--capture"]))
    for what in ("wrong slot", "stride", "-1", "of 24", "two tokens", "NaN"):
        # a device-side assert ends the process's CUDA context, so each mistake gets a process
        command = [python, "examples/misdirected_writes.py", "--device", "cuda", "--inner", "inductor", "--only", what]
        made.append(Job(f"misdirected {what}", command))
    return made


def benchmarks() -> list[Job]:
    """They update BENCHMARKS.md."""
    generate = [sys.executable, "tests/benchmarks/generate.py"]
    batches = [sys.executable, "tests/benchmarks/generate_batch.py"]
    return [
        Job("benchmark kernels", [sys.executable, "tests/benchmarks/kernels.py", "--write"]),
        Job("benchmark growth", [sys.executable, "tests/benchmarks/growth.py", "--write"]),
        Job("benchmark engine step", [sys.executable, "tests/benchmarks/engine_step.py", "--write"]),
        Job("benchmark forward", [sys.executable, "tests/benchmarks/forward.py", "--write"]),
        Job("benchmark generate", [*generate, "--shape", "1b", "--mode", "log", "raise", "--write"]),
        Job("benchmark generate_batch", [*batches, "--shape", "1b", "--requests", "8", "32", "--write"]),
        Job("benchmark budget", [sys.executable, "tests/benchmarks/budget.py", "--length", "4096", "--write"]),
        Job("benchmark layers", [sys.executable, "tests/benchmarks/layers.py", "--write"]),
        Job("benchmark compile time", [sys.executable, "tests/benchmarks/compile_time.py", "--write"]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=Path("build/gpu-logs"), help="directory for the jobs' output")
    parser.add_argument("--only", default="", help="run the jobs whose name contains this text")
    parser.add_argument("--marked", action="store_true", help="of the tests, only those that a GPU runs")
    parser.add_argument("--no-benchmarks", action="store_true", help="tests and examples only")
    parser.add_argument("--timeout", type=float, default=500, help="seconds for one job")
    parser.add_argument("--workers", type=int, default=max(2, (os.cpu_count() or 2) // 3))
    args = parser.parse_args()
    tests, timed = jobs(args.marked), [] if args.no_benchmarks else benchmarks()
    chosen, alone = ([job for job in those if args.only in job.name] for those in (tests, timed))
    if not chosen and not alone:
        names = ", ".join(job.name for job in (*tests, *timed))
        parser.error(f"--only {args.only!r}: no job has that in its name: {names}")
    args.logs.mkdir(parents=True, exist_ok=True)
    take_interrupts()
    lacking = [name for name in ("expecttest", "hypothesis", "xdist") if not importlib.util.find_spec(name)]
    if lacking:
        print(f"not installed: {', '.join(lacking)} (pip install -e '.[test]'); their tests fail, or run one by one")
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        places = places_for(args.workers, visible_gpus())
        done = list(pool.map(lambda job: job.run(args.logs, args.timeout, places), chosen))
    done += [job.run(args.logs, args.timeout) for job in alone]
    failed = [job for job in done if job.status != 0]
    print(f"\n{len(done) - len(failed)} of {len(done)} jobs passed" + "".join(f"\n  failed: {j.name}" for j in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

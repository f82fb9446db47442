"""How long vLLM's engine takes to start, guarded and not, with cold and with warm caches, each in a fresh process.

    python tests/benchmarks/vllm_startup.py --shape 8b --repeats 3 [--gpus 0 1] [--json FILE]

A cold start has an empty folder for the caches of vLLM, Inductor and Triton, the warm one after it the same folder.
Python's bytecode is there in both, as after an installation, whatever PYTHONDONTWRITEBYTECODE says.  A warm start of 8B
took 38 to 41 s without it and 34 to 35 with it (H200s of two hosts).
Guarded and unguarded starts take turns; with ``--gpus`` both are made at once, and on each other's GPU the next time.
Seconds are those from the start of the process, Python's imports included, until ``LLM(...)`` is made.

The parts of a guarded start are named: our pass over the graph; the guard as a whole, and in it the proof, the warm-up
and the checks that are captured; our Triton kernels, wherever they are compiled or loaded.  vLLM's capture is there for
both: the guarded graphs have more in them.  The parts are known if vLLM forks its engine, as it does on a GPU by
default, or with ``--in-process``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
from vllm_shapes import SHAPES, write_config

#: The file that a started engine adds its parts to.
PARTS = "STARTUP_PARTS"

_CACHES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}

#: Packages whose bytecode is there before the first start.
PACKAGES = ("vllm", "torch", "triton", "transformers", "kvcanary_fx", "pydantic", "huggingface_hub")

#: What vLLM's log says of its own parts.
_LOGGED = {
    "torch.compile": r"torch\.compile.* took ([\d.]+) s",
    "capture": r"Graph capturing finished in ([\d.]+) sec",
}


class Start:
    """One engine that starts and ends, in a process of its own."""

    def __init__(
        self, args: argparse.Namespace, mode: str | None, caches: str, gpu: str | None, kept: Path | None = None
    ):
        """
        Args:
            kept: where its log is kept.
        """
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVCANARY_") or mode is not None}
        environment.update({name: f"{caches}/{folder}" for name, folder in _CACHES.items()})
        environment["PYTHONPYCACHEPREFIX"] = args.bytecode
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if mode is not None:
            environment["KVCANARY_MODE"] = mode
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        self._kept = kept
        self._parts, self._log = Path(caches) / "parts", Path(caches) / "log"
        self._parts.write_text("")
        command = [sys.executable, __file__, "--worker", "--shape", args.shape, "--engine", json.dumps(args.engine)]
        self._began = time.time()
        environment[PARTS] = str(self._parts)
        if args.in_process:
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        with self._log.open("w") as out:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=out, env=environment, text=True)

    def wait(self) -> dict[str, Any]:
        """Its seconds, until it had started, and those of its parts."""
        out, _ = self._process.communicate()
        log = out + self._log.read_text(errors="replace")
        if self._kept is not None:
            self._kept.write_text(log)
        found = re.search(r"STARTED (.*)", log)
        if self._process.returncode or not found:
            sys.exit(f"an engine ended with {self._process.returncode}:\n{log[-4000:]}")
        parts: dict[str, float] = collections.defaultdict(float)
        for line in self._parts.read_text().splitlines():
            name, seconds = line.rsplit(" ", 1)
            parts[name] += float(seconds)
            if name == "our kernels":
                parts["variants of them"] += 1
        for name, pattern in _LOGGED.items():
            parts[name] = sum(map(float, re.findall(pattern, log)))
        return dict(seconds=float(found[1]) - self._began, parts=parts, cached=sorted(set(_of_caches(log))))


def _of_caches(log: str) -> list[str]:
    """Lines that say what vLLM took from its caches, without their times and paths."""
    lines = re.findall(r"\] (.*(?:Directly load|reusing previous|AOT|from the cache).*)", log)
    return [re.sub(r"\S*/\S*|[\d.]+ s\b", "...", line)[:120] for line in lines]


def write_bytecode(folder: str) -> None:
    """Compile the sources of the packages that a start imports, as an installer does."""
    places: list[str] = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        for place in (spec and spec.submodule_search_locations) or ():
            links = [path for path in Path(place).iterdir() if path.is_symlink() and path.is_dir()]  # of a checkout
            places += [place, *map(str, links)]
    environment = dict(os.environ, PYTHONPYCACHEPREFIX=folder)
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", *places]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # some are no Python


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """All starts, by variant and state of the caches."""
    runs: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    variants = {"plain": None, "guarded": args.mode}
    for number in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            order = list(variants)[:: -1 if number % 2 else 1]
            for state in ("cold", "warm"):
                starting: dict[str, Start] = {}
                for variant in order:
                    caches = Path(folder) / variant
                    caches.mkdir(exist_ok=True)
                    gpu = args.gpus[order.index(variant)] if args.gpus else None
                    kept = args.logs / f"{variant}-{state}-{number}.log" if args.logs else None
                    starting[variant] = Start(args, variants[variant], str(caches), gpu, kept)
                    if not args.gpus:
                        _keep(runs, f"{variant} {state}", starting.pop(variant))
                for variant, start in starting.items():
                    _keep(runs, f"{variant} {state}", start)
    return runs


def _keep(runs: dict[str, list[dict[str, Any]]], name: str, start: Start) -> None:
    found = start.wait()
    runs[name].append(found)
    parts = {part: round(seconds, 2) for part, seconds in found["parts"].items()}
    print(f"{name}: {found['seconds']:.1f} s {parts} {found['cached']}", flush=True)


HEADER = ["caches", "plain", "guarded", "difference", "ours: guard, pass", "capture, plain", "guarded"]


def row(state: str, runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Medians, with the spread of the seconds."""
    plain, guarded = runs[f"plain {state}"], runs[f"guarded {state}"]

    def part(found: list[dict[str, Any]], name: str) -> str:
        return f"{statistics.median(run['parts'].get(name, 0.0) for run in found):.2f} s"

    seconds = [[run["seconds"] for run in found] for found in (plain, guarded)]
    shown = [f"{statistics.median(s):.1f} s ({min(s):.1f} to {max(s):.1f})" for s in seconds]
    difference = statistics.median(seconds[1]) / statistics.median(seconds[0]) - 1
    ours = f"{part(guarded, 'guard')}, {part(guarded, 'our pass')}"
    return [state, *shown, f"{100 * difference:+.1f} %", ours, part(plain, "capture"), part(guarded, "capture")]


def worker(args: argparse.Namespace) -> None:
    """Start an engine, and say when it was there."""
    from vllm import LLM
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if os.environ.get("KVCANARY_MODE"):
        name_parts()
    llm = LLM(model=write_config(args.shape), skip_tokenizer_init=True, load_format="dummy", **args.engine)
    print(f"\nSTARTED {time.time()}", flush=True)
    del llm


def name_parts() -> None:
    """Have the parts of a guarded start measured, in this process and those that it forks."""
    from vllm.platforms import current_platform

    from kvcanary_fx.adapters.vllm import graph, proof

    _time(graph, "insert_guards", "our pass")
    _time(proof, "prove", "proof")
    if not current_platform.is_cuda_alike():
        from kvcanary_fx.adapters.vllm import runner  # imports Model Runner V1, which an engine on a GPU does not

        _time(runner, "guard", "guard")
        return
    from triton.runtime.jit import JITFunction

    from kvcanary_fx.adapters.vllm.v2 import forwards, hooks, warm_up

    _time(hooks, "guard", "guard")
    _time(warm_up.WarmUp, "run", "warm-up")
    _time(forwards.Forwards, "__init__", "captured checks")
    compile_ = JITFunction._do_compile

    def compiled(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if not kernel.fn.__module__.startswith("kvcanary_fx"):
            return compile_(kernel, *args, **kwargs)
        return _timed(compile_, "our kernels", kernel, *args, **kwargs)

    JITFunction._do_compile = compiled


def _time(owner: Any, name: str, part: str) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: _timed(original, part, *args, **kwargs))


#: Times of parts that are not in the file yet.
_NOTED: queue.SimpleQueue[str] = queue.SimpleQueue()

#: The guard was made: what comes then is written at once.
_MADE = threading.Event()


def _timed(original: Callable[..., Any], part: str, *args: Any, **kwargs: Any) -> Any:
    began = time.perf_counter()
    try:
        return original(*args, **kwargs)
    finally:
        _NOTED.put(f"{part} {time.perf_counter() - began}\n")
        if part == "guard":
            _MADE.set()
        if part != "our kernels" or _MADE.is_set():  # opening the file for each of 357 took 0.2 s of the guard's 0.75
            _write_down()


def _write_down() -> None:
    """Put the parts so far into the file."""
    noted = []
    with contextlib.suppress(queue.Empty):
        while True:
            noted.append(_NOTED.get_nowait())
    with open(os.environ[PARTS], "a") as out:
        out.writelines(noted)


def main() -> None:
    """Measure, or be an engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gpus", nargs=2, help="two GPUs for the two variants, which then start at once")
    parser.add_argument("--mode", default="log", choices=["log", "raise"])
    parser.add_argument("--engine", type=json.loads, default={"max_model_len": 8192}, help="JSON, arguments of LLM")
    parser.add_argument("--in-process", action="store_true", help="the engine in the process of LLM")
    parser.add_argument("--logs", type=Path, help="keep the log of each start in this directory")
    parser.add_argument("--json", type=Path, help="write all starts to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as args.bytecode:
        write_bytecode(args.bytecode)
        runs = measure(args)
    print(report.table(HEADER, [row(state, runs) for state in ("cold", "warm")]))
    if args.json:
        args.json.write_text(json.dumps(runs))


if __name__ == "__main__":
    main()

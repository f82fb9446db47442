"""What the canary adds to compile time: a Llama of 8 layers, cold and warm caches, each in a fresh process.

    python tests/benchmarks/compile_time.py [--repeats 3] [--warm 4] [--write]
    python tests/benchmarks/compile_time.py --at-once
    python tests/benchmarks/compile_time.py --profile DIRECTORY

A run compiles one decode step and times the first call, until the device is done.  Cold runs start with an empty cache
directory; warm runs are other processes with the same directory.  Guarded and unguarded runs take turns, each first in
every second pair: runs of one kind differ by a third, so what tells is the median of many pairs' own ratios.
With ``--at-once`` both runs of a pair are made at the same time, each on half of the cores, the other half in the next
pair: a host whose speed changes from one run to the next says little about runs that follow each other.
``--profile`` writes where the time of a warm run goes, guarded and not, as text; ``--parts`` prints what the canary's
kernels take of it, by variant and thread.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cores
import report

LAYERS = 8


class KernelTimes:
    """What our Triton kernels take of a first call, and in which thread.

    Attributes:
        parts: kernel, what is done with it, thread, seconds from the clock's start to the begin, and seconds.  A
            ``compile`` is one variant, compiled or taken from Triton's cache; ``load`` makes its launcher and brings it
            to the device; a ``first launch`` has both in it, unless another thread has done it; ``wait`` is for that.
    """

    def __init__(self) -> None:
        import triton.compiler
        from triton.compiler import CompiledKernel
        from triton.runtime.jit import JITFunction

        from kvcanary_fx.kernels.compile_ahead import InBackground

        self.parts: list[tuple[str, str, str, float, float]] = []
        self.started = time.perf_counter()
        self._launched: set[str] = set()
        run, compiling = JITFunction.run, triton.compiler.compile
        load, wait = CompiledKernel._init_handles, InBackground.wait

        def timed_run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            first, before = self._is_first(kernel), self._variants(kernel)
            with self._part(kernel.fn, "first launch", lambda: first or self._variants(kernel) > before):
                return run(kernel, *args, **kwargs)

        def timed_compile(source: Any, *args: Any, **kwargs: Any) -> Any:
            with self._part(getattr(source, "fn", None), "compile"):
                return compiling(source, *args, **kwargs)

        def timed_load(kernel: Any) -> None:
            new = kernel.module is None
            with self._part(getattr(kernel.src, "fn", None), "load", lambda: new):
                load(kernel)

        def timed_wait(ahead: Any) -> None:
            with self._part(InBackground, "wait"):
                wait(ahead)

        JITFunction.run, triton.compiler.compile = timed_run, timed_compile
        CompiledKernel._init_handles, InBackground.wait = timed_load, timed_wait

    @contextlib.contextmanager
    def _part(self, of: Any, what: str, counts: Callable[[], bool] = lambda: True) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        function = getattr(of, "fn", of)
        if getattr(function, "__module__", "").startswith("kvcanary_fx") and counts():
            thread = threading.current_thread().name
            self.parts.append((function.__name__, what, thread, began - self.started, seconds))

    def _is_first(self, kernel: Any) -> bool:
        """Whether this thread has not launched a kernel before, which another one may have compiled."""
        key = f"{kernel.fn.__name__} {threading.current_thread().name}"
        new = key not in self._launched
        self._launched.add(key)
        return new

    @staticmethod
    def _variants(kernel: Any) -> int:
        return sum(len(cache[0]) for cache in kernel.device_caches.values())


def in_first_call(found: dict[str, Any]) -> float:
    """Seconds that the first call itself spends on our kernels, the passes aside: launches, and waiting for them."""
    return sum(p[4] for p in found["kernels"] if p[1] in ("first launch", "wait") and p[2] == "MainThread")


def beside_it(found: dict[str, Any]) -> float:
    """Seconds that other threads spend on them."""
    return sum(p[4] for p in found["kernels"] if p[1] in ("compile", "load") and p[2] != "MainThread")


def variants(found: dict[str, Any]) -> int:
    return sum(p[1] == "compile" for p in found["kernels"])


def measure(variant: str, device: str, profile: Path | None = None) -> dict[str, Any]:
    """One run, in this process: seconds of the first call, of importing us before it, of our passes and kernels, and
    what the caches said."""

    import torch
    import torch._inductor.compile_fx  # else the unguarded run imports it before its clock starts
    from torch._dynamo.utils import counters
    from transformers import StaticCache

    began = time.perf_counter()
    import kvcanary_fx

    importing = time.perf_counter() - began
    from kvcanary_fx.adapters.huggingface.caches import cache_name
    from kvcanary_fx.proof import tiny

    model = tiny.build("llama", LAYERS, device=device)
    cache = StaticCache(config=model.config, max_cache_len=64)
    cache.early_initialization(1, 2, 8, torch.float32, device)
    backend = kvcanary_fx.CanaryBackend() if variant == "guarded" else "inductor"
    run = torch.compile(model.forward, backend=backend)
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    kernels = KernelTimes() if variant == "guarded" and device == "cuda" else None
    started = time.perf_counter()
    if kernels is not None:
        kernels.started = started
    with torch.no_grad(), profiled(profile):
        run(token, **{cache_name(model): cache})
        if device == "cuda":
            torch.cuda.synchronize()  # the guarded call has waited, as it is in mode raise
    seconds = time.perf_counter() - started
    passes = sum(sum(p.seconds.values()) for p in backend.session.plans) if variant == "guarded" else 0.0
    ops = backend.session.stats().recorded if variant == "guarded" else 0
    hits = {
        "fx": (counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]),
        "aot": (
            counters["aot_autograd"]["autograd_cache_hit"],
            counters["aot_autograd"]["autograd_cache_miss"],
        ),
    }
    made = kernels.parts if kernels is not None else []
    found = {"seconds": seconds, "importing": importing, "passes": passes, "recorded": ops, "hits": hits}
    return {**found, "kernels": made}


@contextlib.contextmanager
def profiled(path: Path | None) -> Iterator[None]:
    """Write where the time goes, by what is called and by what calls; nothing for None."""
    if path is None:
        yield
        return
    profile = cProfile.Profile()
    profile.enable()
    yield
    profile.disable()
    with path.open("w") as out:
        for order in ("cumulative", "tottime"):
            pstats.Stats(profile, stream=out).sort_stats(order).print_stats(80)


def in_new_process(variant: str, device: str, cache: str, *arguments: str) -> dict[str, Any]:
    env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache, TRITON_CACHE_DIR=f"{cache}/triton")
    command = [sys.executable, __file__, "--variant", variant, "--device", device, *arguments]
    out = subprocess.run(command, env=env, capture_output=True, text=True)
    if out.returncode:
        sys.exit(out.stderr)
    found: dict[str, Any] = json.loads(out.stdout.strip().splitlines()[-1])
    return found


#: Runs, by variant and what the caches were.
Runs = dict[tuple[str, str], list[dict[str, Any]]]


def take_turns(args: argparse.Namespace) -> Runs:
    """All runs, each printed when it is over."""
    runs: Runs = {}
    for number in range(args.repeats):
        with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as guarded:
            for turn, kind in enumerate(("cold", *["warm"] * args.warm), number):
                pair = [("plain", plain), ("guarded", guarded)][:: -1 if turn % 2 else 1]
                for variant, found in run_pair(pair, args):
                    runs.setdefault((variant, kind), []).append(found)
                    print(f"{kind:5s} {variant:8s} {found['seconds']:6.2f} s {found['hits']}", flush=True)
                    if args.parts:
                        print_parts(found)
    return runs


def run_pair(pair: list[tuple[str, str]], args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs, given by variant and cache, one after the other or at once."""
    if not args.at_once:
        for variant, cache in pair:
            yield variant, in_new_process(variant, args.device, cache)
        return
    with concurrent.futures.ThreadPoolExecutor() as threads:
        found = [
            (variant, threads.submit(in_new_process_on, cpus, variant, args.device, cache))
            for (variant, cache), cpus in zip(pair, cores.parts(os.sched_getaffinity(0), 2), strict=True)
        ]
    for variant, run in found:
        yield variant, run.result()


def in_new_process_on(cpus: set[int], *arguments: str) -> dict[str, Any]:
    """:func:`in_new_process` on some hardware threads; this thread is on no other from here on, either."""
    os.sched_setaffinity(0, cpus)
    return in_new_process(*arguments)


def _row(kind: str, plain: list[dict[str, Any]], guarded: list[dict[str, Any]]) -> list[str]:
    a, b = (statistics.median(r["seconds"] for r in group) for group in (plain, guarded))
    ratios = [g["seconds"] / p["seconds"] for p, g in zip(plain, guarded, strict=True)]
    passes = statistics.median(r["passes"] for r in guarded)
    importing = statistics.median(r["importing"] for r in guarded)
    (fx_hit, fx_miss), (aot_hit, aot_miss) = guarded[-1]["hits"]["fx"], guarded[-1]["hits"]["aot"]
    seconds = [r["seconds"] for r in guarded]
    kernels, ahead = (statistics.median(map(part, guarded)) for part in (in_first_call, beside_it))
    return [
        kind,
        f"{a:.2f} s",
        f"{b:.2f} s ({min(seconds):.2f} to {max(seconds):.2f})",
        f"{100 * (b / a - 1):+.1f} %",
        report.paired(ratios),
        f"{passes * 1e3:.0f} ms",
        f"{kernels * 1e3:.0f} ms",
        f"{ahead * 1e3:.0f} ms",
        f"{importing * 1e3:.0f} ms",
        f"FX {fx_hit} hit {fx_miss} miss, AOT {aot_hit} hit {aot_miss} miss",
    ]


def write_profiles(directory: Path, device: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for variant in ("plain", "guarded"):
        path = directory / f"{variant}.txt"
        with tempfile.TemporaryDirectory() as cache:
            in_new_process(variant, device, cache)
            found = in_new_process(variant, device, cache, "--profile", str(path))
        print(f"{variant}: {found['seconds']:.2f} s under the profiler, {path}", flush=True)
        print_parts(found)


def print_parts(found: dict[str, Any]) -> None:
    for name, what, thread, began, seconds in sorted(found["kernels"], key=lambda part: part[3]):
        print(f"  {began:6.2f} s: {name}, {what}, {seconds * 1e3:.0f} ms, {thread}", flush=True)


def parse() -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="pairs with empty caches")
    parser.add_argument("--warm", type=int, default=1, help="pairs with the caches of each of these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--profile", type=Path, metavar="DIRECTORY", help="two warm runs, where their time goes; no table"
    )
    parser.add_argument("--parts", action="store_true", help="print what our kernels take, by variant and thread")
    parser.add_argument("--at-once", action="store_true", help="both runs of a pair, each on half of the cores")
    parser.add_argument("--write", action="store_true", help="update the section in BENCHMARKS.md")
    parser.add_argument("--variant", choices=("plain", "guarded"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in ("repeats", "warm"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: give how many pairs, 1 at least")
    if args.at_once and not all(cores.parts(os.sched_getaffinity(0), 2)):
        parser.error("--at-once: there is one core, and both runs would be on it; do without")
    return args


HEADER = ["caches", "unguarded", "guarded (spread)", "difference", "pairs", "of it our passes", "our kernels"]
HEADER += ["these beside it", "import kvcanary_fx", "caches, guarded run"]


def text(runs: Runs, args: argparse.Namespace) -> str:
    """What stands in BENCHMARKS.md."""
    rows = [_row(kind, runs["plain", kind], runs["guarded", kind]) for kind in ("cold", "warm")]
    kernels = ""
    if args.device == "cuda":
        count = variants(runs["guarded", "cold"][0])
        kernels = (
            f" The guarded run compiles {count} variants of the canary's Triton kernels too, or takes them from "
            "Triton's cache, however many layers there are: other threads do, while Inductor compiles."
        )
    turns = "at once, each on half of the cores" if args.at_once else "taking turns"
    command = f"python tests/benchmarks/compile_time.py --repeats {args.repeats} --warm {args.warm}"
    command += " --at-once" * args.at_once + " --write"
    return (
        f"## Compile time\n\n{report.environment(args.device)}. First call of a compiled decode step of a tiny Llama "
        f"of {LAYERS} layers, Inductor, medians of {args.repeats} runs with empty caches and {args.repeats * args.warm}"
        f" with those of one before, in fresh processes, guarded and unguarded {turns}; `pairs`: a guarded run's "
        f"time as a share of that of the unguarded one beside it.{kernels} Command: `{command}`\n\n"
        f"{report.table(HEADER, rows)}"
    )


def main() -> None:
    args = parse()
    if args.variant:
        print(json.dumps(measure(args.variant, args.device, args.profile)))
        return
    if args.profile:
        write_profiles(args.profile, args.device)
        return
    found = text(take_turns(args), args)
    print("\n" + found)
    if args.write:
        report.write_section(f"compile time {args.device}", found)


if __name__ == "__main__":
    main()

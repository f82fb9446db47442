"""What the canary's part of a decode step of Hugging Face `generate` is: its kernels, the device's time, the host's.

    python tests/benchmarks/generate_profile.py [--shape 1b] [--requests 1] [--context 512] [--mode log]
    python tests/benchmarks/generate_profile.py --shape tiny --layers 16 --device cpu

The models and calls are those of `generate.py`.  Each configuration is timed in turns, and one more call of each is
profiled from the end of its prefill on: the kernels of its steps, and how long the device is busy in one.  The host's
time of a guarded call is what precedes the compiled graph, the graph (its launch, on a GPU), and what follows it;
profilers are off then.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import generate
import report
import torch
from generate import SHAPES, Runner
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from triton.runtime.jit import KernelInterface

from kvcanary_fx.runtime.session import CanarySession


class HostTimes:
    """Seconds of each guarded call before, in and after its compiled graph."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, float, float]] = []

    def watch(self) -> None:
        """From now on; graphs that are compiled already are not seen."""
        original = CanarySession.runner

        def runner(session: CanarySession) -> Callable[..., Any]:
            run = original(session)

            def timed(binding: Any, compiled: Callable[..., Any], args: Any) -> Any:
                inside = [0.0, 0.0]

                def graph(*given: Any) -> Any:
                    inside[0] = time.perf_counter()
                    out = compiled(*given)
                    inside[1] = time.perf_counter()
                    return out

                began = time.perf_counter()
                out = run(binding, graph, args)
                ended = time.perf_counter()
                self.calls.append((inside[0] - began, inside[1] - inside[0], ended - inside[1]))
                return out

            return timed

        CanarySession.runner = runner

    def medians(self) -> list[float]:
        """Of the three parts, in us."""
        return [1e6 * statistics.median(part) for part in zip(*self.calls, strict=True)]


def our_kernels() -> set[str]:
    """Names of the canary's Triton kernels."""
    modules = [module for name, module in sys.modules.items() if name.startswith("kvcanary_fx.kernels")]
    values = [value for module in modules for value in vars(module).values()]
    return {value.fn.__name__ for value in values if isinstance(value, KernelInterface)}


def profiled(runner: Runner, ids: torch.Tensor, new: int) -> dict[str, list[tuple[float, float]]]:
    """When each kernel and copy of the steps after the prefill ran, by name: begin and end in us."""
    watched = profile(activities=[ProfilerActivity.CUDA])
    model = runner._model
    prefill = model._prefill

    def then_watch(*args: Any, **kwargs: Any) -> Any:
        out = prefill(*args, **kwargs)
        watched.start()
        return out

    model._prefill = then_watch
    try:
        runner.run(ids, new)
        watched.stop()
    finally:
        model._prefill = prefill
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in watched.events() or ():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            found[event.name].append((event.time_range.start, event.time_range.end))
    return found


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of them was running."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def kernels_of(runners: dict[str, Runner], ids: torch.Tensor, new: int) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of the device's time of a step, and of the kernels that are ours or run more often under guard."""
    steps = new - 1
    found = {name: profiled(runner, ids, new) for name, runner in runners.items()}
    device = []
    for name, kernels in found.items():
        spans = [span for each in kernels.values() for span in each]
        length = max(end for _, end in spans) - min(begin for begin, _ in spans)
        cells = [len(spans) / steps, busy(spans) / steps, sum(end - begin for begin, end in spans) / steps]
        device.append([name, *(f"{cell:,.0f}" for cell in cells), f"{length / steps:,.0f}"])
    ours, off = our_kernels(), found["off"]
    rows = []
    for name, kernels in found.items():
        for kernel, spans in kernels.items():
            mine = kernel in ours
            if name != "off" and (mine or len(spans) > len(off.get(kernel, ()))):
                took = sum(end - begin for begin, end in spans)
                runs = [f"{len(spans) / steps:.2f}", f"{len(off.get(kernel, ())) / steps:.2f}"]
                times = [f"{took / steps:.1f}", f"{took / len(spans):.2f}"]
                rows.append([name, kernel[:70], "ours" if mine else "", *runs, *times])
    return device, rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mode", nargs="+", choices=["log", "raise"], default=["log"])
    parser.add_argument("--setting", dest="settings", type=generate.setting, action="append", default=[])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    return parser.parse_args()


def main() -> None:
    args = parse()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch._dynamo.config.recompile_limit = 64
    device = torch.device(args.device)
    model = generate.build(args.shape, args.layers, args.context + args.new_tokens, device)
    ids = torch.randint(model.config.vocab_size, (args.requests, args.context), device=device)
    configurations: dict[str, dict[str, Any] | None] = {"off": None}
    configurations |= {mode: {"mode": mode} | dict(args.settings) for mode in args.mode}
    runners, hosts = {}, {}
    for name, settings in configurations.items():
        runners[name], hosts[name] = Runner(generate.sharing_weights(model), settings, device), HostTimes()
        original = CanarySession.runner
        hosts[name].watch()
        for _ in range(3):  # compiles, records the graphs, replays them
            runners[name].run(ids, args.new_tokens)
        CanarySession.runner = original
        for kept in (runners[name].seconds, runners[name].decode, hosts[name].calls):
            kept.clear()
    for turn in range(args.rounds):
        for runner in list(runners.values())[:: 1 if turn % 2 == 0 else -1]:
            runner.run(ids, args.new_tokens)
    rows = []
    for name, runner in runners.items():
        step = statistics.median(runner.decode) / (args.new_tokens - 1)
        more = statistics.median(m / o for m, o in zip(runner.decode, runners["off"].decode, strict=True)) - 1
        parts = [f"{part:,.1f}" for part in hosts[name].medians()] or 3 * [""]  # no call of "off" is guarded
        rows.append([name, f"{1e6 * step:,.0f}", f"{100 * more:+.1f} %", *parts])
    print(f"{report.environment(device.type)}, {args.shape} {args.requests} x {args.context}; us of a step\n")
    print(report.table(["canary", "step", "longer", "host before graph", "graph", "after"], rows))
    if device.type == "cuda":
        on_device, kernels = kernels_of(runners, ids, args.new_tokens)
        print(report.table(["canary", "kernels and copies", "busy", "their sum", "profiled step"], on_device))
        print(report.table(["canary", "kernel", "", "a step", "a step, off", "us a step", "us each"], kernels))
    for name, runner in runners.items():
        if runner.session is not None:
            print(f"{name}: " + "\n".join(runner.session.summary().splitlines()[:5]))


if __name__ == "__main__":
    main()

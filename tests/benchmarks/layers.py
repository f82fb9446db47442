"""What the checks of a layer cost where an engine calls them: around attention, from Python.

    python tests/benchmarks/layers.py [--requests 1 64] [--configs off side] [--write]
    python tests/benchmarks/layers.py --tiny --device cpu

A decode of an 8B-shaped GQA model whose attention is one opaque op, compiled by Inductor without the canary, as vLLM
does it.  Attention's own code calls ``EagerLayers``.  The model is called from Python, and captured whole in a CUDA
graph with its checks inside; guarded and unguarded forwards take turns.

The host's time is that of a call on a device with nothing to do, and within it that of the two checks of each layer.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import report
import torch
from decode_models import GQA, STEP, TINY_GQA, Model
from forward import let_go, take_turns
from forward_scene import Case, Counts, Scene

import kvcanary_fx
from kvcanary_fx.engine.layers import EagerLayers

#: The settings of each configuration; None: the model without the canary.
CONFIGURATIONS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "side": {"placement": "side", "verify_fraction": "1/64"},
    "inline": {"placement": "inline", "verify_fraction": "1/64"},
}
HEADER = [
    "forward", "how", "configuration", "time (10 % to 90 %)", "overhead", "host, a call", "verify, a layer",
    "record, a layer", "violations",
]  # fmt: skip
HOST_CALLS = 30


class Timed:
    """An :class:`EagerLayers` that knows how long the host was in it."""

    def __init__(self, layers: EagerLayers):
        self._layers, self.taken = layers, {"verify": 0, "record": 0}

    def verify(self, *given: Any) -> None:
        self._time("verify", given)

    def record(self, *given: Any) -> None:
        self._time("record", given)

    def _time(self, name: str, given: tuple[Any, ...]) -> None:
        begun = time.perf_counter_ns()
        getattr(self._layers, name)(*given)
        self.taken[name] += time.perf_counter_ns() - begun


@dataclasses.dataclass
class Row:
    """One configuration of one forward: milliseconds of each round, and microseconds of the host."""

    case: Case
    how: str
    configuration: str
    times: list[float]
    host: float
    verify: float
    record: float
    problems: list[str]
    overhead: float | None = None

    def cells(self) -> list[str]:
        times, edge, guarded = sorted(self.times), len(self.times) // 10, self.configuration != "off"
        return [
            self.case.name,
            self.how,
            self.configuration,
            f"{statistics.median(times):.3f} ms ({times[edge]:.3f} to {times[-1 - edge]:.3f})",
            "" if self.overhead is None else f"{self.overhead:+.2f} %",
            f"{self.host:,.0f} us",
            f"{self.verify:.1f} us" if self.verify else "",
            f"{self.record:.1f} us" if self.record else "",
            "; ".join(self.problems) or ("0" if guarded else ""),
        ]


class Runner:
    """One configuration of a forward, called or captured.

    Attributes:
        runs: one forward.
    """

    def __init__(self, scene: Scene, model: Callable[..., Any], settings: dict[str, Any] | None, captured: bool):
        self.scene, self.settings, self._model, self._captured = scene, settings, model, captured
        self.session = None if settings is None else scene.session(**settings)
        self._layers = None if self.session is None else EagerLayers(self.session)
        self.checks: Any = self._layers
        for _ in range(3):
            self._call()
        self.runs = [self._captured_call() if captured else self._call]
        self._synchronize()
        self._before = None if self.session is None else self.session.stats()

    def _forward(self) -> None:
        STEP.checks = self.checks
        try:
            self._model(self.scene.batch.input_ids, self.scene.last)
        finally:
            STEP.checks = None

    def _call(self) -> None:
        with kvcanary_fx.step(self.session, self.scene.batch), kvcanary_fx.forward(self.session), torch.no_grad():
            self._forward()

    def _captured_call(self) -> Callable[[], None]:
        if self.session is not None:
            self.session.inputs.freeze()
        self._synchronize()
        graph = torch.cuda.CUDAGraph()
        step, forward = kvcanary_fx.step(self.session, self.scene.batch), kvcanary_fx.forward(self.session)
        with step, torch.no_grad(), torch.cuda.graph(graph), forward:
            self._forward()
        return graph.replay

    def _synchronize(self) -> None:
        if self.scene.device.type == "cuda":
            torch.cuda.synchronize()

    def next_turn(self) -> None:
        """Other slots are due in a captured forward, as in the next step of an engine."""
        if self.session is not None and self._captured:
            self.session.inputs.counts[2].add_(1)

    def host(self) -> tuple[float, float, float]:
        """Microseconds of the host: of a call, and of the two checks of a layer in it."""
        calls, timed = [], None
        if self._layers is not None and not self._captured:
            self.checks = timed = Timed(self._layers)
        for _ in range(HOST_CALLS):
            self._synchronize()
            begun = time.perf_counter_ns()
            self.runs[0]()
            calls.append((time.perf_counter_ns() - begun) / 1e3)
        self.checks = self._layers
        each = 1e3 * HOST_CALLS * self.scene.case.shape.layers
        taken = timed.taken if timed is not None else {"verify": 0, "record": 0}
        return statistics.median(calls), taken["verify"] / each, taken["record"] / each

    def problems(self) -> list[str]:
        """Where the counts since the warm-up are not what the batch makes them."""
        if self.session is None or self.settings is None:
            return []
        self.session.health.check()
        after, before = self.session.stats(), self._before
        forwards = max(1, after.forwards - before.forwards)
        counts = Counts(
            (after.slots_checked - before.slots_checked) / forwards,
            (after.checked - before.checked) / forwards,
            (after.recorded - before.recorded) / forwards,
            after.violations + len(self.session.uncovered),
        )
        return counts.problems(self.scene.case, self.settings)


def measure(case: Case, model: Model, captured: bool, args: argparse.Namespace) -> list[Row]:
    device = torch.device(args.device)
    scene = Scene(case, device)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=args.inner, dynamic=False, fullgraph=True)
    runners: dict[str, Any] = {name: Runner(scene, compiled, CONFIGURATIONS[name], captured) for name in args.configs}
    taken = take_turns(runners, device, args.rounds, args.seconds)
    rows = []
    for name, runner in runners.items():
        row = Row(case, "captured" if captured else "called", name, taken[name][0], *runner.host(), runner.problems())
        if name != "off" and "off" in taken:
            row.overhead = 100 * (statistics.median(row.times) / statistics.median(taken["off"][0]) - 1)
        rows.append(row)
        print("  ".join(cell for cell in row.cells() if cell), flush=True)
    return rows


def text(rows: list[Row], args: argparse.Namespace) -> str:
    rounds = sorted({len(row.times) for row in rows})
    return (
        f"## Checks that an engine calls\n\n{report.environment(args.device)}. Decode of an 8B-shaped GQA model (32 "
        "layers, 8 KV heads of 128), bf16, random weights, attention in one opaque op whose code calls `EagerLayers`, "
        "all else compiled by Inductor; `called` from Python, or `captured` whole in a CUDA graph. All checks, 1/64 of "
        "the stored bytes in each forward. Configurations take turns, median of "
        f"{' or '.join(map(str, rounds))} rounds of two forwards. The host's time is that of a call on an idle device, "
        "with the step's inputs and checks of identity. Command: `python tests/benchmarks/layers.py --write`\n\n"
        f"{report.table(HEADER, [row.cells() for row in rows])}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--length", type=int, default=4096, help="tokens of each request")
    parser.add_argument("--configs", nargs="+", choices=list(CONFIGURATIONS), default=list(CONFIGURATIONS))
    parser.add_argument("--how", nargs="+", choices=["called", "captured"], help="default: what the device can")
    parser.add_argument("--inner", default="inductor", help="what compiles the model")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=10, help="about how long the rounds of a forward may take")
    parser.add_argument("--write", action="store_true", help="update the section in BENCHMARKS.md")
    args = parser.parse_args(arguments)
    args.how = args.how or (["called", "captured"] if args.device == "cuda" else ["called"])
    if args.tiny:
        args.length, args.requests = 192, [2]
        if args.write:
            parser.error("--tiny is no measurement: nothing to --write")
    if args.device == "cpu" and "captured" in args.how:
        parser.error("CUDA graphs need a GPU: --how called")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    device, shape = torch.device(args.device), TINY_GQA if args.tiny else GQA
    torch.manual_seed(0)
    model, rows = Model(shape, device), []
    for requests, how in itertools.product(args.requests, args.how):
        rows += measure(Case(shape, requests, args.length, 1), model, how == "captured", args)
        let_go(device)
    print("\n" + text(rows, args))
    if args.write:
        report.write_section(f"layers {args.device}", text(rows, args))
    problems = [f"{' '.join(row.cells()[:3])}: {p}" for row in rows for p in row.problems]
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

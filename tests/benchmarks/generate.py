"""Hugging Face `generate` end to end, host included: Llama shapes, static cache, compiled as transformers does it.

    python tests/benchmarks/generate.py [--shape 1b 8b] [--requests 1 8 32] [--context 512 4096] [--write]
    python tests/benchmarks/generate.py --shape 1b --requests 8 --context 512 --mode log --profile build/profile.txt
    python tests/benchmarks/generate.py --shape tiny --device cpu

Random weights in bfloat16, shared by all configurations, which take turns in one process.  Without the canary
`generate` gets nothing but `cache_implementation="static"`: on a GPU transformers then compiles its decode steps by
itself, with Inductor and `reduce-overhead`.  On a CPU nothing is compiled by default, so everything goes through
`backend="eager"`: what is measured there is the host.

A guarded model's prefill is compiled, too, and Inductor may round a value elsewhere in a graph with checks in it.  With
random weights the best two tokens are often that close, so the share of equal tokens is shown; on a CPU it must be all.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import dataclasses
import gc
import io
import logging
import pstats
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import report
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

import kvcanary_fx
from kvcanary_fx.adapters import huggingface

#: As Llama 3.2 1B and Llama 3.1 8B are, and one whose forward takes the host only.
SHAPES: dict[str, dict[str, int]] = {
    "1b": dict(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128256,
    ),
    "8b": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
    ),
    "tiny": dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=128,
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Prompts of one length, and how many tokens are added to each."""

    shape: str
    requests: int
    context: int
    new: int

    @property
    def name(self) -> str:
        return f"{self.shape} {self.requests} x {self.context}"


class Runner:
    """One configuration of one model.

    Attributes:
        session: None without the canary.
        tokens: int64 ``[requests, context + new]`` of the last run.
        seconds: of each run, from the first line of ``generate`` to the last.
        decode: of each run, from the end of the prefill on.
    """

    def __init__(self, model: Any, settings: dict[str, Any] | None, device: torch.device):
        self._model, self._device = model, device
        self._options: dict[str, Any] = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
        if settings is None:
            self._options["cache_implementation"] = "static"
            if device.type == "cpu":
                config = CompileConfig(backend="eager", mode=None)
                config._compile_all_devices = True
                self._options["compile_config"] = config
        else:
            huggingface.protect(model, **settings, **(dict(inner="eager") if device.type == "cpu" else {}))
        self.session = None if settings is None else kvcanary_fx.session_of(model)
        self.tokens = torch.empty(0)
        self.seconds: list[float] = []
        self.decode: list[float] = []
        self._prefilled = 0.0
        self._prefill = getattr(model, "_prefill", None)
        if self._prefill is not None:
            model._prefill = self._timed_prefill

    def _timed_prefill(self, *args: Any, **kwargs: Any) -> Any:
        assert self._prefill is not None
        result = self._prefill(*args, **kwargs)
        self._wait()
        self._prefilled = time.perf_counter()
        return result

    def clear(self) -> None:
        """Forget the runs so far."""
        self.seconds.clear()
        self.decode.clear()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def run(self, ids: torch.Tensor, new: int) -> None:
        """One call of ``generate``."""
        self._wait()
        self._prefilled = started = time.perf_counter()
        self.tokens = self._model.generate(ids, max_new_tokens=new, **self._options)
        self._wait()
        ended = time.perf_counter()
        self.seconds.append(ended - started)
        self.decode.append(ended - self._prefilled)

    def profiled(self, ids: torch.Tensor, new: int) -> str:
        """Where the host's time of one call goes: the functions that take longest by themselves, and ours with all."""
        profile, out = cProfile.Profile(), io.StringIO()
        profile.enable()
        self.run(ids, new)
        profile.disable()
        stats = pstats.Stats(profile, stream=out)
        stats.sort_stats("tottime").print_stats(40)
        stats.sort_stats("cumtime").print_stats("kvcanary_fx", 40)
        return out.getvalue()


def sharing_weights(model: Any) -> Any:
    """A copy of a model over the same parameters and buffers."""
    return copy.deepcopy(model, {id(t): t for t in [*model.parameters(), *model.buffers()]})


def build(shape: str, layers: int | None, longest: int, device: torch.device) -> Any:
    sizes = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    config = LlamaConfig(**sizes, max_position_embeddings=longest, tie_word_embeddings=shape == "1b")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


@dataclasses.dataclass
class Row:
    """What one configuration did in one case."""

    case: Case
    configuration: str
    runner: Runner
    off: Runner

    def cells(self) -> list[str]:
        rates, steps = speeds(self.case, self.runner)
        same = (self.runner.tokens == self.off.tokens)[:, self.case.context :].float().mean().item()
        session, mine = self.runner.session, self.runner is self.off
        return [
            self.case.name,
            self.configuration,
            rates,
            "" if mine else f"{report.more_tokens(self.runner.seconds, self.off.seconds):+.1f} %",
            steps,
            "" if mine else f"{report.more_tokens(self.runner.decode, self.off.decode):+.1f} %",
            "" if mine else f"{100 * same:.0f} %",
            "" if session is None else f"{len(session.violations()) + len(session.uncovered)}",
        ]

    def problems(self) -> list[str]:
        """What makes the row worthless."""
        session, found = self.runner.session, []
        if session is not None:
            found += [str(v) for v in session.violations()[:3]] + list(session.uncovered)
            if session.calls < self.case.new:
                found.append(f"only {session.calls} forwards were guarded")
        if self.runner._device.type == "cpu" and not torch.equal(self.runner.tokens, self.off.tokens):
            found.append("the tokens are others than without the canary")
        return found


def speeds(case: Case, runner: Runner) -> tuple[str, str]:
    """Tokens a second of its calls, and what a decode step takes."""
    rates = [case.requests * case.new / s for s in runner.seconds]
    # the prefill gives the first token
    steps = [s / max(1, case.new - 1) * 1e6 for s in runner.decode]
    return (
        f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})",
        f"{statistics.median(steps):,.0f} us ({min(steps):,.0f} to {max(steps):,.0f})",
    )


HEADER = ["generate", "canary", "tokens/s (spread)", "more", "a decode step", "more", "same tokens", "reports"]


def measure(case: Case, model: Any, args: argparse.Namespace, first: bool) -> tuple[list[list[str]], list[str]]:
    """The cells of a row for each configuration, and what makes them worthless.

    Args:
        first: nothing guarded has run in the process, on a device where that tells: see ``streams.py``.
    """
    device = torch.device(args.device)
    ids = torch.randint(model.config.vocab_size, (case.requests, case.context), device=device)
    configurations: dict[str, dict[str, Any] | None] = {"off": None}
    configurations |= {mode: {"mode": mode} | dict(args.settings) for mode in args.mode}
    runners: dict[str, Runner] = {}
    before: list[list[str]] = []
    for name, how in configurations.items():
        runner = runners[name] = Runner(sharing_weights(model), how, device)
        started = time.perf_counter()
        for _ in range(3):  # compiles, records the graphs, replays them
            runner.run(ids, case.new)
        print(f"{case.name} {name}: warm after {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        runner.clear()
        if name == "off" and first:
            for _ in range(args.rounds):
                runner.run(ids, case.new)
            rate, step = speeds(case, runner)
            before = [[case.name, "off, before the others", rate, "", step, "", "", ""]]
            runner.clear()
    recorded = counters["inductor"]["cudagraph_skips"]
    if recorded:
        print(f"CUDA graphs were skipped: {recorded}", file=sys.stderr)
    for turn in range(args.rounds):
        order = list(runners.values())
        for runner in order if turn % 2 == 0 else reversed(order):
            runner.run(ids, case.new)
    rows = [Row(case, name, runner, runners["off"]) for name, runner in runners.items()]
    cells = [*before, *(row.cells() for row in rows)]
    for line in cells:
        print("  ".join(cell for cell in line if cell), flush=True)
    if args.profile is not None:
        args.profile.parent.mkdir(parents=True, exist_ok=True)
        with args.profile.open("a") as out:
            for name, runner in runners.items():
                out.write(f"==== {case.name}, {name}, {case.new} tokens\n{runner.profiled(ids, case.new)}\n")
    return cells, [f"{case.name} {row.configuration}: {p}" for row in rows for p in row.problems()]


def text(rows: list[list[str]], args: argparse.Namespace) -> str:
    settings = "".join(f", {name}={value}" for name, value in args.settings)
    return (
        f"## Hugging Face generate\n\n{report.environment(args.device)}. Llama shapes, random weights, static cache, "
        f"compiled as transformers does it by default (`reduce-overhead` on a GPU), {args.new_tokens} new tokens, "
        f"{args.rounds} rounds, taking turns{settings}. `1b 8 x 512`: 8 requests with prompts of 512 tokens. Tokens a "
        "second are those of the whole call, prefill and host included; a decode step is what comes after the prefill, "
        f"by steps. Command: `python tests/benchmarks/generate.py {' '.join(sys.argv[1:])}`\n\n"
        + report.table(HEADER, rows)
    )


def setting(given: str) -> tuple[str, Any]:
    name, _, value = given.partition("=")
    return name, int(value) if value.isdigit() else value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["1b", "8b"])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", nargs="+", type=int, default=[512, 4096], help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mode", nargs="+", choices=["log", "raise"], default=["log"])
    parser.add_argument("--setting", dest="settings", type=setting, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--profile", type=Path, help="append cProfile's view of one call of each configuration here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--write", action="store_true", help="update the section in BENCHMARKS.md")
    return parser.parse_args()


def main() -> int:
    args = parse()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch._dynamo.config.recompile_limit = 64  # each configuration compiles the same function anew
    rows: list[list[str]] = []
    problems: list[str] = []
    started = False
    for shape in args.shape:
        model = build(shape, args.layers, max(args.context) + args.new_tokens, torch.device(args.device))
        for context in args.context:
            for requests in args.requests:
                case = Case(shape, requests, context, args.new_tokens)
                try:
                    measured, wrong = measure(case, model, args, not started and args.device == "cuda")
                except torch.OutOfMemoryError as e:
                    measured, wrong = [], [f"{case.name}: the memory does not hold all configurations at once: {e}"]
                started = True
                rows += measured
                problems += wrong
                torch._dynamo.reset()
                gc.collect()
                if args.device == "cuda":
                    torch.cuda.empty_cache()
        del model
    section = f"generate {args.device}" if args.write else None
    return report.conclude(text(rows, args) if rows else "", section, problems)


if __name__ == "__main__":
    sys.exit(main())

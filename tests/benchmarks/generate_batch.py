"""Hugging Face `generate_batch` end to end, host included: continuous batching with and without the canary.

    python tests/benchmarks/generate_batch.py [--shape 1b 8b] [--requests 1 8 32] [--context 512 4096] [--write]
    python tests/benchmarks/generate_batch.py --shape 1b --requests 8 --context 512 --profile build/profile.txt
    python tests/benchmarks/generate_batch.py --shape tiny --device cpu --requests 2 --context 24 --new-tokens 8
    PYTHONPATH=. python tests/benchmarks/generate_batch.py --device none --requests 32 --context 512 4096

Models of random weights, shared by all configurations, which take turns in one process; each has a paged cache of its
own, of the same size.  Prompts are others in each round, so that none is in the cache.  CUDA graphs, asynchronous
batching and attention are what transformers chooses for itself, and what it chose is printed: a guarded batch turns
some of it off.

``--device none`` runs the host code of a GPU over CPU tensors and launches nothing (``without_device.py``).  Attention
is left out, and what is measured is our own Python, in microseconds of a decode step, by part (``own_time.py``).
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import functools
import gc
import io
import logging
import pstats
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import report
import torch
from generate import SHAPES, build, setting, sharing_weights
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api

from kvcanary_fx.adapters import huggingface
from kvcanary_fx.adapters.huggingface.paged_cache import page_setting

if TYPE_CHECKING:
    from own_time import OwnTime


@dataclasses.dataclass(frozen=True)
class Case:
    """Prompts of one length, how many tokens are added to each, and the cache for them."""

    shape: str
    requests: int
    context: int
    new: int
    page: int
    batch_tokens: int

    @property
    def name(self) -> str:
        return f"{self.shape} {self.requests} x {self.context}"

    @property
    def blocks(self) -> int:
        """Of the cache: those of all requests, and a third more: transformers admits no request with 15 % free."""
        each = -(-(self.context + self.new) // self.page)
        return self.requests * each * 4 // 3 + 2

    def prompts(self, vocabulary: int, turn: int) -> list[list[int]]:
        made = torch.Generator("cpu").manual_seed(turn)
        shape = self.requests, self.context
        found: list[list[int]] = torch.randint(3, vocabulary, shape, generator=made, device="cpu").tolist()
        return found


class Runner:
    """One configuration of one model.

    Attributes:
        tokens: new tokens of each request of the last run.
        seconds: of each run, the whole call.
        steps: seconds from the begin of a decode step of all requests to that of the next one.
        rest: seconds of each run that are in none of these: its prompts, and what comes before and behind them.
        settings: what transformers chose, and what it ran with.
    """

    def __init__(self, model: Any, case: Case, settings: dict[str, Any] | None, device: torch.device):
        self.model, self._case, self._device = model, case, device
        self.settings: list[str] = []
        self.tokens: list[list[int]] = []
        self.seconds: list[float] = []
        self.steps: list[float] = []
        self.rest: list[float] = []
        self._guarded, self._last = settings is not None, 0.0
        RUNNERS[id(model)] = self
        if settings is not None:
            # nothing of a GPU is proved where nothing is launched
            huggingface.protect(model, **settings, **(dict(inner="eager") if device.type == "cpu" else {}))

    @property
    def session(self) -> Any:
        return huggingface.batch_session(self.model) if self._guarded else None

    def run(self, turn: int) -> None:
        """One call of ``generate_batch``."""
        case = self._case
        prompts = case.prompts(self.model.config.vocab_size, turn)
        generation = GenerationConfig(max_new_tokens=case.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        sizes = {page_setting(): case.page, "num_blocks": case.blocks, "max_batch_tokens": case.batch_tokens}
        self._last = 0.0
        steps = len(self.steps)
        self._wait()
        started = time.perf_counter()
        results = self.model.generate_batch(
            prompts,
            generation_config=generation,
            continuous_batching_config=ContinuousBatchingConfig(**sizes),
            persistent_manager=True,
        )
        self._wait()
        self.seconds.append(time.perf_counter() - started)
        self.rest.append(self.seconds[-1] - sum(self.steps[steps:]))
        self.tokens = [result.generated_tokens for result in results.values()]

    def begins(self, processor: Any) -> None:
        """A step is about to run."""
        now, batch = time.perf_counter(), processor.inputs_and_outputs
        if hasattr(batch, "io_pairs"):
            batch = batch.io_pairs[batch.current_pair].host_io
        if not self._last:
            self.settings[1:] = [told(processor.cb_config)]
        added = [future.query_length for future in batch.requests_in_batch]
        decode = added == [1] * self._case.requests
        if decode and self._last > 0:
            self.steps.append(now - self._last)
        self._last = now if decode else -1.0

    def close(self) -> None:
        del RUNNERS[id(self.model)]
        self.model.destroy_cached_continuous_batching_manager()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


#: The runner of each model, by its id: where transformers says which model it runs.
RUNNERS: dict[int, Runner] = {}


def told(config: Any) -> str:
    """The settings of a batch that transformers chooses."""
    chosen = {
        "graphs": "+".join(n for n, on in zip(("varlen", "decode"), config.cuda_graph_booleans, strict=True) if on),
        "async": bool(config.use_async_batching),
        "block table": bool(config.max_blocks_per_request),
        "compiled": config.varlen_compile_config is not None,
    }
    return ", ".join(f"{name} {value if value not in ('', False) else 'off'}" for name, value in chosen.items())


def watch_managers() -> None:
    """From now on runners learn what transformers chose, and when their steps begin."""
    manager, processor = continuous_api.ContinuousBatchingManager, continuous_api.ContinuousBatchProcessor
    made, stepped = manager.__init__, processor._generation_step

    def init(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        made(self, model, *args, **kwargs)
        if id(model) in RUNNERS:
            attention = model.config._attn_implementation
            RUNNERS[id(model)].settings = [f"{attention}, {told(self.continuous_batching_config)}"]

    def step(self: Any, model: Any) -> None:
        if id(model) in RUNNERS:
            RUNNERS[id(model)].begins(self)
        stepped(self, model)

    manager.__init__, processor._generation_step = init, step


def profiled(runner: Runner, turn: int) -> str:
    """Where the host's time of the batches of one call goes, in the thread that runs them."""
    profile, out = cProfile.Profile(), io.StringIO()
    manager = continuous_api.ContinuousBatchingManager
    loop = manager._run_generation_loop

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        profile.enable()
        try:
            loop(self, *args, **kwargs)
        finally:
            profile.disable()

    manager._run_generation_loop = run
    try:
        runner.run(turn)
    finally:
        manager._run_generation_loop = loop
    stats = pstats.Stats(profile, stream=out)
    stats.sort_stats("tottime").print_stats(40)
    stats.sort_stats("cumtime").print_stats("kvcanary_fx", 50)
    return out.getvalue()


@dataclasses.dataclass
class Row:
    """What one configuration did in one case."""

    case: Case
    configuration: str
    runner: Runner
    off: Runner
    cpu: bool

    def cells(self) -> list[str]:
        tokens, mine = self.case.requests * self.case.new, self.runner is self.off
        rates = [tokens / s for s in self.runner.seconds]
        steps, before = self.runner.steps or [0.0], self.off.steps or [0.0]
        session = self.runner.session
        longer = statistics.median(steps) / (statistics.median(before) or 1.0) - 1
        return [
            self.case.name,
            self.configuration,
            f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})",
            "" if mine else f"{report.more_tokens(self.runner.seconds, self.off.seconds):+.1f} %",
            f"{1e6 * statistics.median(steps):,.0f} us",
            "" if mine else f"{100 * longer:+.1f} %",
            f"{1e3 * statistics.median(self.runner.rest):,.0f} ms",
            "" if mine else f"{100 * self.same():.0f} %",
            "" if session is None else f"{len(session.violations()) + len(session.uncovered)}",
        ]

    def same(self) -> float:
        """The share of equal tokens."""
        pairs = [
            a == b for m, o in zip(self.runner.tokens, self.off.tokens, strict=True) for a, b in zip(m, o, strict=True)
        ]
        return sum(pairs) / max(1, len(pairs))

    def problems(self) -> list[str]:
        """What makes the row worthless."""
        session, found, expected = self.runner.session, [], [self.case.new] * self.case.requests
        if [len(tokens) for tokens in self.runner.tokens] != expected:
            return ["requests failed: their tokens are " + ", ".join(str(len(t)) for t in self.runner.tokens)]
        if not self.runner.steps:
            found.append("no two decode steps of all requests follow each other")
        if session is not None:
            found += [str(v) for v in session.violations()[:3]] + list(session.uncovered)
            layers = len(session.eager_layers)
            if session.stats().recorded < 2 * layers * self.case.requests * (self.case.context + self.case.new - 1):
                found.append("not all that was written was recorded")
        if self.cpu and self.same() < 1:
            found.append("the tokens are others than without the canary")
        return found


HEADER = [
    "generate_batch",
    "canary",
    "tokens/s (spread)",
    "more",
    "a decode step",
    "longer",
    "the rest of a call",
    "same tokens",
    "reports",
]


def take_turns(case: Case, runners: dict[str, Runner], args: argparse.Namespace) -> int:
    """The rounds of a case, each printed when it is over; how many there was time for, one at least."""
    began, order = time.perf_counter(), list(runners.values())
    for turn in range(args.rounds):
        for runner in order if turn % 2 == 0 else reversed(order):
            runner.run(args.warm + turn)
        rates = ", ".join(f"{name} {case.requests * case.new / r.seconds[-1]:,.0f}" for name, r in runners.items())
        print(f"{case.name} round {turn + 1} of {args.rounds}: tokens/s {rates}", flush=True)
        if args.seconds and (time.perf_counter() - began) * (turn + 2) / (turn + 1) > args.seconds:
            return turn + 1
    return args.rounds


def measure(case: Case, model: Any, args: argparse.Namespace) -> tuple[list[list[str]], list[str]]:
    """The cells of a row for each configuration, and what makes them worthless."""
    configurations: dict[str, dict[str, Any] | None] = {"off": None}
    configurations |= {mode: {"mode": mode} | dict(args.settings) for mode in args.mode}
    device = torch.device(args.device)
    runners = {name: Runner(sharing_weights(model), case, how, device) for name, how in configurations.items()}
    try:
        for name, runner in runners.items():
            started = time.perf_counter()
            for turn in range(args.warm):
                runner.run(turn)
            took = time.perf_counter() - started
            print(f"{case.name} {name}: warm after {took:.0f} s; {' -> '.join(runner.settings)}", flush=True)
            for taken in (runner.seconds, runner.steps, runner.rest):
                taken.clear()
        turns = take_turns(case, runners, args)
        rows = [Row(case, name, runner, runners["off"], args.device == "cpu") for name, runner in runners.items()]
        cells = [row.cells() for row in rows]
        for line in cells:
            print("  ".join(cell for cell in line if cell), flush=True)
        wrong = [f"{case.name} {row.configuration}: {p}" for row in rows for p in row.problems()]
        if args.profile is not None:
            args.profile.parent.mkdir(parents=True, exist_ok=True)
            with args.profile.open("a") as out:
                for name, runner in runners.items():
                    seen = profiled(runner, args.warm + turns)
                    out.write(f"==== {case.name}, {name}, {case.new} tokens\n{seen}\n")
        return cells, wrong
    finally:
        for runner in runners.values():
            runner.close()


# ---- without a device


def leave_attention_out() -> None:
    """Let nothing be read from the cache, and no mask be made: both take time that grows with what is stored."""
    from transformers.generation.continuous_batching import cache, input_outputs

    new, original = page_setting() == "page_size", cache.PagedAttentionCache.update

    @torch.compiler.disable
    @functools.wraps(original)
    def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if new:
            return key_states, value_states
        return tuple(x.squeeze(0).transpose(0, 1) for x in (key_states, value_states))  # as they are returned there

    cache.PagedAttentionCache.update = update
    input_outputs.attn_mask_is_needed = lambda config: False


def own_time(case: Case, model: Any, args: argparse.Namespace, own: OwnTime) -> list[list[str]]:
    """The cells of our own time of a decode step: medians, and what one step in ten stays within."""
    from own_time import NAMES

    runner = Runner(sharing_weights(model), case, {"mode": args.mode[0]} | dict(args.settings), torch.device("cpu"))
    begins = runner.begins

    def begin(processor: Any) -> None:
        last = runner._last
        begins(processor)
        own.end_step(keep=last > 0 and runner._last > 0)  # what came since the last one began is that one's

    runner.begins = begin  # type: ignore[method-assign]
    own.steps.clear()
    runner.run(0)
    steps, rows = own.steps[8:], []  # behind those that bind launches
    if not steps:
        raise SystemExit(f"{case.name}: fewer than 9 decode steps follow each other")
    for label, percent in (("", 50), (", 10th percentile", 10)):
        share = {name: _share([step.get(name, 0.0) for step in steps], percent) for name in NAMES}
        total = _share([sum(step.values()) for step in steps], percent)
        rows.append([f"{case.name}{label}", f"{total:.0f}", *(f"{share[name]:.0f}" for name in NAMES)])
        print("  ".join(rows[-1]), flush=True)
    print(f"{case.name}: calls in a step {own.calls}, {len(steps)} steps", flush=True)
    if args.profile is not None:
        args.profile.parent.mkdir(parents=True, exist_ok=True)
        with args.profile.open("a") as out:
            out.write(f"==== {case.name}\n{profiled(runner, 1)}\n")
    runner.close()
    return rows


def _share(values: Sequence[float], percent: int) -> float:
    return sorted(values)[len(values) * percent // 100]


# ---- all cases


def text(rows: list[list[str]], args: argparse.Namespace) -> str:
    settings = "".join(f", {name}={value}" for name, value in args.settings)
    command = f"Command: `python tests/benchmarks/generate_batch.py {' '.join(sys.argv[1:])}`"
    if args.own:
        from own_time import NAMES

        return (
            f"## Hugging Face generate_batch, our own time of a decode step\n\n{report.environment('cpu')}. "
            f"Microseconds of our own Python, launches and attention left out, {args.layers} layers, pages of "
            f"{args.page} tokens{settings}. {command}\n\n" + report.table(["step", "total", *NAMES], rows)
        )
    import transformers

    rounds = f"{args.rounds} rounds" + (f" or as many as {args.seconds:g} s have room for" if args.seconds else "")
    return (
        f"## Hugging Face generate_batch\n\n{report.environment(args.device)}, "
        f"transformers {transformers.__version__}. Continuous batching as transformers does it by default, Llama "
        f"shapes, random weights, {args.new_tokens} new tokens, pages of {args.page} tokens, at most "
        f"{args.batch_tokens} tokens in a batch, {rounds}, taking turns{settings}. `1b 8 x 512`: 8 "
        "requests with prompts of 512 tokens. Tokens a second are those of the whole call; a decode step is the median "
        f"time from the begin of one, of all requests, to the begin of the next. {command}\n\n"
        + report.table(HEADER, rows)
    )


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, help="default: 1b and 8b, tiny without a device")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", nargs="+", type=int, default=[512, 4096], help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, help="instead of the shape's own number; without a device 16")
    parser.add_argument("--page", type=int, default=256, help="tokens of a page; 256 is transformers' own default")
    parser.add_argument("--batch-tokens", type=int, help="most of a batch; default: transformers' own, 8192")
    parser.add_argument("--rounds", type=int, default=3, help="of each case")
    what = "of each case: begin no round that would end later; the first one is always made"
    parser.add_argument("--seconds", type=float, default=0, help=what)
    parser.add_argument("--warm", type=int, default=1, help="calls of each configuration before the rounds")
    parser.add_argument("--mode", nargs="+", choices=["log", "raise"], default=["log"])
    parser.add_argument("--setting", dest="settings", type=setting, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--profile", type=Path, help="append cProfile's view of one call of each configuration here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--write", action="store_true", help="update the section in BENCHMARKS.md")
    args = parser.parse_args(given)
    if args.seconds < 0:
        parser.error(f"--seconds {args.seconds:g}: give how long the rounds of a case may take, or 0 for all of them")
    args.own = args.device == "none"
    args.shape = args.shape or (["tiny"] if args.own else ["1b", "8b"])
    args.batch_tokens = args.batch_tokens or (2048 if args.own else 8192)
    if args.own:
        args.device, args.layers = "cpu", args.layers or 16
    return args


def main() -> int:
    args = parse()
    for name in ("transformers", "ContinuousBatchingLogger"):
        logging.getLogger(name).setLevel(logging.ERROR)
    own = None
    if args.own:
        import own_time as clock
        from without_device import pretend

        from kvcanary_fx.adapters.huggingface.versions import require_known_batches, require_known_version

        require_known_version()  # another version proves itself, while there is something that runs
        require_known_batches()
        pretend()
        logging.disable(logging.WARNING)  # what is launched nowhere finds out nothing
        leave_attention_out()
        own = clock.watch()
    watch_managers()
    rows: list[list[str]] = []
    problems: list[str] = []
    for shape in args.shape:
        model = build(shape, args.layers, max(args.context) + args.new_tokens, torch.device(args.device))
        for context in args.context:
            for requests in args.requests:
                case = Case(shape, requests, context, args.new_tokens, args.page, max(args.batch_tokens, requests))
                measured: list[list[str]]
                wrong: list[str] = []
                try:
                    if own is not None:
                        measured = own_time(case, model, args, own)
                    else:
                        measured, wrong = measure(case, model, args)
                except torch.OutOfMemoryError as e:
                    measured, wrong = [], [f"{case.name}: the memory does not hold all configurations at once: {e}"]
                rows += measured
                problems += wrong
                gc.collect()
                if args.device == "cuda":
                    torch.cuda.empty_cache()
        del model
    section = f"generate batch {'none' if args.own else args.device}"
    return report.conclude(text(rows, args) if rows else "", section if args.write else None, problems)


if __name__ == "__main__":
    sys.exit(main())

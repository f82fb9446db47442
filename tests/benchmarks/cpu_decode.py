"""What the checks add to a decode step on a CPU: tiny Llamas of 4 and of 32 layers, guarded and not.

    OMP_NUM_THREADS=1 python tests/benchmarks/cpu_decode.py [--layers 4 32] [--context 512] [--write]
    OMP_NUM_THREADS=1 python tests/benchmarks/cpu_decode.py --before CHECKOUT [--repeats 2] [--write]
    OMP_NUM_THREADS=1 python tests/benchmarks/cpu_decode.py --shape 1b --layers 4

Hugging Face models with random weights, one request, a static cache, compiled by Inductor.  Guarded is
``backend=kvcanary_backend`` and nothing else: on a CPU each step then compares every stored slot of every layer.  In a
round both decode as many tokens, in turn; the other one is first in every second round.  A round's time is the median
of its steps; the overhead is the median of the rounds' own ratios.  Counts of the session say whether all was compared.

There is no kernel here: the checks call torch, as often for a small layer as for a large one.  A tiny model's step is
next to nothing, so the time that is added says more than the per cent.  Other shapes have layers of a usual size.

``--before`` measures the package of another checkout, too, with this script: processes take turns.  Without it the
package that Python imports is measured: ``PYTHONPATH=CHECKOUT`` is another way to name one.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report
import torch
import transformers
from generate import SHAPES, build, sharing_weights
from transformers import StaticCache

import kvcanary_fx

#: Steps before the first round: the first compiles and takes in what is stored.
WARM_UP = 10
HEADER = ["layers", "code", "plain, a step", "guarded, a step", "overhead (10 % to 90 %)", "added, a layer"]


class Decoder:
    """One compiled model, and its cache with a prompt in it."""

    def __init__(self, model: Any, prompt: torch.Tensor, room: int, **compiling: Any):
        # cache from transformers 5.24 on.  Not by the package's cache_name: older checkouts have none.
        names = inspect.signature(model.forward).parameters
        argument = next(name for name in ("cache", "past_key_values") if name in names)
        self._options = {argument: StaticCache(config=model.config, max_cache_len=room)}
        with torch.no_grad():
            model(prompt, **self._options)
        self._run = torch.compile(sharing_weights(model), fullgraph=True, dynamic=False, **compiling)

    def microseconds(self, tokens: torch.Tensor) -> float:
        """The median time of the steps that add these tokens, int64 ``[n]``."""
        taken = []
        with torch.no_grad():
            for token in tokens.view(-1, 1, 1):
                begun = time.perf_counter_ns()
                self._run(token, **self._options)
                taken.append((time.perf_counter_ns() - begun) / 1e3)
        return statistics.median(taken)


@dataclasses.dataclass
class Measured:
    """A model of so many layers: microseconds of a step in each round, and what makes them worthless."""

    layers: int
    code: str
    plain: list[float]
    guarded: list[float]
    problems: list[str]

    def with_rounds_of(self, other: Measured) -> Measured:
        lists = {n: getattr(self, n) + getattr(other, n) for n in ("plain", "guarded", "problems")}
        return dataclasses.replace(self, **lists)

    def cells(self) -> list[str]:
        rounds = list(zip(self.plain, self.guarded, strict=True))
        percent = sorted(100 * (guarded / plain - 1) for plain, guarded in rounds)
        edge = len(percent) // 10
        added = statistics.median(guarded - plain for plain, guarded in rounds) / self.layers
        return [
            str(self.layers),
            self.code,
            f"{statistics.median(self.plain):,.0f} us",
            f"{statistics.median(self.guarded):,.0f} us",
            f"{statistics.median(percent):+,.0f} % ({percent[edge]:+,.0f} to {percent[-1 - edge]:+,.0f})",
            f"{added:,.0f} us",
        ]


def measure(layers: int, args: argparse.Namespace) -> Measured:
    torch._dynamo.reset()
    room = args.context + WARM_UP + args.rounds * args.steps
    model = build(args.shape, layers, room, torch.device("cpu"))
    prompt = torch.randint(model.config.vocab_size, (1, args.context))
    guarded: dict[str, Any] = dict(backend=kvcanary_fx.kvcanary_backend)
    if args.inner != "inductor":
        guarded["options"] = {"kvcanary.inner": args.inner}
    decoders = {
        "plain": Decoder(model, prompt, room, backend=args.inner),
        "guarded": Decoder(model, prompt, room, **guarded),
    }
    tokens = torch.randint(model.config.vocab_size, (room - args.context,))
    for decoder in decoders.values():
        decoder.microseconds(tokens[:WARM_UP])
    session, taken = kvcanary_fx.session(), dict[str, list[float]](plain=[], guarded=[])
    before = session.stats()
    for number, chosen in enumerate(tokens[WARM_UP:].split(args.steps)):
        for name in list(decoders)[:: 1 if number % 2 == 0 else -1]:
            taken[name].append(decoders[name].microseconds(chosen))
    problems = [f"{layers} layers: {p}" for p in wrong(session, before, layers, range(args.context + WARM_UP, room))]
    return Measured(layers, commit(), taken["plain"], taken["guarded"], problems)


def wrong(session: Any, before: Any, layers: int, stored: Sequence[int]) -> list[str]:
    """What was not checked in steps that found so many tokens stored, and what failed."""
    after, found = session.stats(), [*map(str, session.violations()[:3]), *session.uncovered]
    halves = 2 * layers
    for name, due in (("checked", halves * sum(stored)), ("recorded", halves * len(stored))):
        count = getattr(after, name) - getattr(before, name)
        if count != due:
            found.append(f"{count:,} fingerprints were {name}, not {due:,}")
    return found


def commit() -> str:
    """The last commit that changed the package that is measured, and its day."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(kvcanary_fx.__file__).parents[1]), *arguments]
        done = subprocess.run([*command, "--", "kvcanary_fx", "kernels", "passes"], capture_output=True, text=True)
        return done.stdout.strip()

    try:
        last, changed = git("log", "-1", "--format=%h of %cs"), git("status", "--porcelain")
    except FileNotFoundError:  # there is no git
        last = changed = ""
    return (last or "not in git") + (", changed" if changed else "")


def in_turns(args: argparse.Namespace) -> list[Measured]:
    """Both checkouts, each in processes of its own; the rounds of its processes together."""
    runs: dict[tuple[int, bool], Measured] = {}
    for number in range(args.repeats):
        for before in (True, False) if number % 2 == 0 else (False, True):
            for measured in in_new_process(args, before):
                print(f"process {number + 1}: " + "  ".join(measured.cells()), flush=True)
                key = (measured.layers, not before)
                runs[key] = runs[key].with_rounds_of(measured) if key in runs else measured
    return [runs[key] for key in sorted(runs)]


def in_new_process(args: argparse.Namespace, before: bool) -> list[Measured]:
    path = os.environ.get("PYTHONPATH", "")
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(args.before.resolve()), path])) if before else None
    done = subprocess.run(
        [sys.executable, __file__, "--json", *options(args)], env=env, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(done.returncode)
    return [Measured(**one) for one in json.loads(done.stdout.splitlines()[-1])]


def options(args: argparse.Namespace) -> list[str]:
    """What a process is measured with."""
    named = {name: getattr(args, name) for name in ("shape", "layers", "context", "rounds", "steps", "inner")}
    values = {name: value if isinstance(value, list) else [value] for name, value in named.items()}
    return list(itertools.chain(*([f"--{name}", *map(str, value)] for name, value in values.items())))


def text(measured: list[Measured], args: argparse.Namespace) -> str:
    shape, threads = SHAPES[args.shape], torch.get_num_threads()
    size = f"hidden size {shape['hidden_size']}, {shape['num_key_value_heads']} KV heads of {shape['head_dim']}"
    before = f" --before CHECKOUT --repeats {args.repeats}" if args.before else ""
    turns = f", in {args.repeats} processes of each code, which took turns" if args.before else ""
    return (
        f"## A decode step on a CPU, shape {args.shape}\n\n{report.environment('cpu')}, transformers "
        f"{transformers.__version__}, {os.cpu_count()} cores. Llamas ({size}) with random weights, one request, a "
        f"`StaticCache`, {args.context} tokens and more stored, compiled by {args.inner} with and without "
        "`kvcanary_backend` at its defaults, which compare every stored slot in each step. Wall time, "
        f"{len(measured[0].plain)} rounds of {args.steps} steps{turns}; plain and guarded took turns. Command: "
        f"`OMP_NUM_THREADS={threads} python tests/benchmarks/cpu_decode.py {' '.join(options(args))}{before} "
        "--write`\n\n"
        f"{report.table(HEADER, [one.cells() for one in measured])}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--context", type=int, default=512, help="tokens that are stored before the first step")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument("--inner", default="inductor", help="what compiles the model")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="an older checkout, measured as well")
    parser.add_argument("--repeats", type=int, default=2, help="processes of each checkout, with --before")
    parser.add_argument("--write", action="store_true", help="update the section in BENCHMARKS.md")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.before and not (args.before / "kvcanary_fx").is_dir():
        parser.error(f"--before {args.before}: there is no kvcanary_fx in it")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    torch._dynamo.config.recompile_limit = 64  # each model compiles the same function anew
    measured = in_turns(args) if args.before else [measure(layers, args) for layers in args.layers]
    if args.json:
        print(json.dumps([dataclasses.asdict(one) for one in measured]))
        return 0
    print("\n" + text(measured, args))
    problems = [f"{one.code}, {p}" for one in measured for p in one.problems]
    print("\n".join(problems), file=sys.stderr)
    if args.write and not problems:
        report.write_section(f"decode step cpu {args.shape}", text(measured, args))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

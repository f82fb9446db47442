"""A false-alarm soak: long prompts with every feature on, until so many slots were checked.  Nothing may be reported.

    python examples/paged_engine/soak.py --slot-checks 1e7
    python examples/paged_engine/soak.py --slot-checks 3e9 --device cuda
    python examples/paged_engine/soak.py --slot-checks 1e6 --speculate [--capture]

Rounds follow one another, each on fresh engines and with requests of its own: float8 in every second one, and in every
second pair of rounds a prefill instance hands its requests to a decode instance.  The pools are too small for what
runs, so requests are retracted, off-loaded and loaded back, and the prefix cache evicts.  A slot check is a comparison
of a slot's identity, or of one layer's and half's bytes, before a forward reads it; sweeps are not counted.

With ``--speculate`` the rounds take turns with the kinds of drafts: rows of 1 to 8 tokens, trees, and a layer for each
token; what comes out is also compared with an engine that does not speculate, and has no canary.  With ``--capture``
the forwards of a draft that come one after the other are one CUDA graph.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [p for p in (str(Path(__file__).parent),) if p not in sys.path]

import torch  # noqa: E402
from config import EngineConfig  # noqa: E402
from serving import Served, serve  # noqa: E402
from workload import Lengths, Request, workload  # noqa: E402

#: Sizes by the type of device: one step of a GPU takes as long for many slots as for few.
SIZES = {
    "cpu": dict(width=1024, page=16, max_running=8, requests=32, layers=2, chunk=160, token_budget=320, share=0.3),
    "cuda": dict(
        width=8192, page=64, max_running=96, requests=192, layers=6, chunk=2048, token_budget=4096, share=0.15
    ),
}
#: The drafts of rounds that speculate; the first is what others have, all the time.
DRAFTS: list[dict[str, Any]] = [
    dict(draft=8, draft_varies=True),
    dict(draft=4, draft_varies=True, topk=3),
    dict(draft=3, draft_varies=True, draft_model="mtp"),
]
CHECKS = ("slots checked: identity", "slots checked: bytes")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slot-checks", type=float, default=1e7, help="how many to make at least")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two lines of progress")
    parser.add_argument("--speculate", action="store_true", help="all kinds of drafts, and no speculation beside it")
    parser.add_argument("--capture", action="store_true", help="capture the loop of a draft in a CUDA graph")
    for name, what in (
        ("width", "positions that a request can have; prompts are up to three quarters of it"),
        ("page", "slots of a page"),
        ("max-running", "requests that run at once"),
        ("requests", "requests of a round"),
        ("layers", "layers of the full group"),
        ("chunk", "tokens of one request's prefill in a step"),
        ("token-budget", "tokens of a step"),
    ):
        parser.add_argument(f"--{name}", type=int, help=f"{what}; by default what suits the device")
    parser.add_argument(
        "--share", type=float, help="pages of a pool, as a share of what the running requests could use"
    )
    args = parser.parse_args(argv)
    for name, value in SIZES[torch.device(args.device).type].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def config_of(args: argparse.Namespace, number: int) -> EngineConfig:
    """The engine of round ``number``."""
    columns, window = args.width // args.page, args.width // 8
    near = -(-(window + args.chunk) // args.page) + 1  # pages that a request has in the window group
    least = -(-(window + args.token_budget) // args.page) + 3
    return EngineConfig(
        width=args.width,
        page=args.page,
        max_running=args.max_running,
        pages=max(columns + 1, int(args.max_running * columns * args.share)),
        chunk=args.chunk,
        token_budget=args.token_budget,
        offload=True,
        window=window,
        window_pages=max(least, args.max_running * near * 2 // 3),
        **(DRAFTS[number % len(DRAFTS)] if args.speculate else dict(draft=2)),
        fp8=number % 2 == 1,
        layers=args.layers,
        device=args.device,
        capture=args.capture,
    )


def requests_of(args: argparse.Namespace, number: int) -> list[Request]:
    """Prompts of a quarter to three quarters of the width; the rest is for what they ask for."""
    eighth = args.width // 8
    new = (args.width // 128, args.width // 32)
    lengths = Lengths(system=(eighth, 2 * eighth), own=(eighth, 4 * eighth), new=new, arrivals=2)
    return workload(args.requests, args.seed + number, namespaces=3, abort_share=0.1, lengths=lengths)


@dataclasses.dataclass
class Soak:
    """What was done so far.

    Attributes:
        done: counts of the rounds that have ended.
        reports: violations, as they would be shown.
        wrong: requests whose output is not the oracle's.
        different: requests whose output is not what it is without speculation.
    """

    every: float
    started: float = dataclasses.field(default_factory=time.perf_counter)
    done: Counter[str] = dataclasses.field(default_factory=Counter)
    reports: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)
    different: list[str] = dataclasses.field(default_factory=list)
    _told: float = 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def checks(self) -> int:
        return sum(self.done[name] for name in CHECKS)

    def watch(self, step: int, served: Served) -> None:
        """A line of progress now and then."""
        if self.seconds - self._told < self.every:
            return
        self._told, now = self.seconds, served.counts()
        checks = self.checks + sum(now[name] for name in CHECKS)
        running = sum(len(e.scheduler.running) for e in served.engines)
        print(
            f"{self.seconds:6.0f} s  {checks:14,} slot checks, {checks / self.seconds:12,.0f} a second  "
            f"round {self.done['rounds'] + 1}, step {step}: {running} running, {now['retracts']} retracts, "
            f"{now['violations']} violations",
            flush=True,
        )

    def add(self, served: Served) -> None:
        """A round has ended."""
        self.done.update(served.counts(), rounds=1)
        self.reports += [v.explain() for v in served.violations()]
        self.wrong += served.wrong()

    def compare(self, served: Served, outputs: list[list[int]]) -> None:
        """Note whose output differs; who went away may have got more or less before that."""
        for request, plain in zip(served.requests, outputs, strict=True):
            count = min(len(plain), len(request.output)) if request.wants_abort else request.new_tokens
            if request.output[:count] != plain[:count]:
                self.different.append(request.id)


def plain_outputs(args: argparse.Namespace, number: int) -> list[list[int]]:
    """What round ``number`` gives without speculation and without the canary."""
    torch._dynamo.reset()
    config = dataclasses.replace(config_of(args, number), draft=0, draft_model="eagle", topk=1)
    return [r.output for r in serve(requests_of(args, number), config, mode="off").requests]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    logging.getLogger("kvcanary").setLevel(logging.ERROR)  # what is reported is printed at the end
    soak = Soak(args.every)
    while soak.checks < args.slot_checks and not soak.reports and not soak.wrong:
        number = soak.done["rounds"]
        torch._dynamo.reset()  # each engine is compiled anew, and Dynamo keeps few graphs of one model
        config, requests = config_of(args, number), requests_of(args, number)
        served = serve(
            requests, config, number // 2 % 2 == 0, watch=soak.watch, mode="log", budget=None, sweep_every=20
        )
        soak.add(served)
        if args.speculate:
            soak.compare(served, plain_outputs(args, number))
    equal = {"outputs equal those without speculation": not soak.different} if args.speculate else {}
    shown = {**soak.done, "slot checks": soak.checks, "outputs equal the oracle's": not soak.wrong, **equal}
    for name, value in shown.items():
        print(f"{name:39} {value:,}" if type(value) is int else f"{name:39} {value}")
    print(f"{'seconds':39} {soak.seconds:.1f}")
    for text in soak.reports[:3] + [f"wrong output: {name}" for name in soak.wrong[:3]]:
        print(f"\n{text}")
    return 1 if soak.reports or soak.wrong or soak.different else 0


if __name__ == "__main__":
    sys.exit(main())

"""Serve random requests on a small engine with one shared paged pool, under the canary.

    python examples/paged_engine/main.py --requests 40 --model oracle --seed 0
    python examples/paged_engine/main.py --model llama --inner inductor --requests 10

With the oracle every output is known beforehand, so a wrong context shows; with the llama the run is repeated
without the canary and must give the same tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path[:0] = [p for p in (str(Path(__file__).parent),) if p not in sys.path]

from config import BUILDS, EngineConfig  # noqa: E402
from serving import Served, serve  # noqa: E402
from workload import workload  # noqa: E402


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--model", choices=("oracle", "llama"), default="oracle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--inner", default="eager", help="backend that compiles the model: eager, aot_eager, inductor")
    parser.add_argument("--build", choices=BUILDS, default="visible", help="how the llama's attention finds its KV")
    parser.add_argument("--canary", choices=("raise", "log", "off"), default="raise")
    share = parser.add_mutually_exclusive_group()
    share.add_argument("--verify-fraction", default="1", help="share of the read slots whose bytes are checked")
    share.add_argument("--budget", help="how much longer a step may take, in place of that share: 1%%")
    parser.add_argument("--sweep-every", type=int, default=10, help="steps between two sweeps of idle slots, 0: none")
    parser.add_argument("--pages", type=int, default=56, help="pages of the pool; few: more retracts")
    parser.add_argument("--namespaces", type=int, default=3, help="LoRAs; KV of one is useless to another")
    parser.add_argument("--abort-share", type=float, default=0.1, help="share of the clients that go away")
    parser.add_argument("--window", type=int, default=12, help="tokens of the sliding-window group, 0: no such group")
    parser.add_argument("--draft", type=int, default=2, help="tokens that the draft proposes a step, 0: no draft")
    for name, on, what in (
        ("prefix-cache", True, "keep the pages of prompts for later requests"),
        ("offload", True, "the KV of retracted requests goes to the host and back"),
        ("transfer", True, "prefill on one instance, decode on another"),
        ("fp8", False, "K and V in float8 with scales"),
        ("split", False, "cut the graph at attention, and compile the pieces one by one"),
    ):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=on, help=what)
    return parser.parse_args(argv)


def run(args: argparse.Namespace, mode: str) -> Served:
    """Serve the workload once."""
    config = EngineConfig(
        model=args.model,
        pages=args.pages,
        prefix_cache=args.prefix_cache,
        offload=args.offload,
        window=args.window or None,
        draft=args.draft,
        fp8=args.fp8,
        seed=args.seed,
        inner=args.inner,
        device=args.device,
        build=args.build,
        split=args.split,
    )
    requests = workload(args.requests, args.seed, args.namespaces, args.abort_share)
    share = {"budget": args.budget} if args.budget else {"verify_fraction": args.verify_fraction}
    settings = dict(mode=mode, sweep_every=args.sweep_every, **share)
    return serve(requests, config, args.transfer, watch=tell, **settings)


def tell(step: int, served: Served) -> None:
    if step % 50 == 0:
        waiting, running = (sum(len(getattr(e.scheduler, q)) for e in served.engines) for q in ("waiting", "running"))
        print(f"step {step}: {running} requests running, {waiting} waiting", flush=True)


def agrees(args: argparse.Namespace, served: Served) -> bool:
    """Whether the outputs are what they must be."""
    if args.model == "oracle":
        return not served.wrong()
    print("again without the canary", flush=True)
    plain = run(args, "off")
    return [r.output for r in plain.requests] == [r.output for r in served.requests]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    start = time.perf_counter()
    served = run(args, args.canary)
    seconds = time.perf_counter() - start
    equal = agrees(args, served)
    for name, value in [*served.counts().items(), ("seconds", f"{seconds:.1f}")]:
        print(f"{name:26} {value}")
    what = "the oracle's" if args.model == "oracle" else "those without the canary"
    print(f"{f'outputs equal {what}':26} {equal}")
    return 0 if equal and not served.violations() else 1


if __name__ == "__main__":
    sys.exit(main())

"""The llama in every build, under every inner backend, whole and split at attention: is it guarded all the same?

    python examples/paged_engine/builds.py
    python examples/paged_engine/builds.py --builds opaque --inners eager inductor --device cuda

Each line of the table is an engine with a sliding window and a draft.  It must give the tokens of the unguarded run
of the whole graph, without a violation; then one bit is flipped in each layer and half, and each must be reported at
its layer, half, slot, request and position.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [p for p in (str(Path(__file__).parent),) if p not in sys.path]

import torch  # noqa: E402
from config import BUILDS, EngineConfig  # noqa: E402
from engine import Engine  # noqa: E402
from flips import Flips, sessions  # noqa: E402
from serving import Served, drive, serve  # noqa: E402
from workload import Request, workload  # noqa: E402

INNERS = ("eager", "aot_eager", "inductor")
HEAD = ("build", "inner", "graph", "tokens equal", "violations", "pieces", "halves guarded", "flips found", "seconds")


@dataclasses.dataclass
class Row:
    """What one engine did.

    Attributes:
        graphs: of the target and the draft; more than one each would be graph breaks.
        pieces: that were compiled one by one; as many as graphs where they are whole.
        guarded, halves: tensors that left fingerprints, of how many.
        flips: the flips, with what was reported of them.
    """

    config: EngineConfig
    equal: bool
    violations: int
    graphs: int
    pieces: int
    guarded: int
    halves: int
    flips: Flips
    seconds: float

    @property
    def good(self) -> bool:
        found = len(self.flips.right) == self.flips.count and not self.flips.wrong
        cut = self.graphs == 2 and (self.pieces > 2) == self.config.split
        return self.equal and self.violations == 0 and cut and self.guarded == self.halves and found

    def cells(self) -> tuple[str, ...]:
        graph = "split" if self.config.split else "whole"
        guarded, found = f"{self.guarded} of {self.halves}", f"{len(self.flips.right)} of {self.flips.count}"
        shown = (str(self.equal), str(self.violations), str(self.pieces), guarded, found, f"{self.seconds:.1f}")
        return self.config.build, self.config.inner, graph, *shown


def requests(count: int) -> list[Request]:
    """The same requests each time, long enough for all flips."""
    return [dataclasses.replace(r, new_tokens=12) for r in workload(count, seed=0, namespaces=3)]


def unguarded(config: EngineConfig, count: int) -> list[list[int]]:
    """The tokens without the canary."""
    torch._dynamo.reset()
    return [r.output for r in serve(requests(count), config, mode="off").requests]


def measure(config: EngineConfig, count: int, tokens: list[list[int]]) -> Row:
    """Serve under the canary, and once more with flips, by one compiled engine; ``tokens`` are the right ones."""
    start = time.perf_counter()
    torch._dynamo.reset()
    engine = Engine(config, mode="log", budget=None)
    clean, again = Served(requests(count), [engine]), Served(requests(count), [engine])
    drive(clean)
    violations = len(clean.violations())
    pools = [pool for session in sessions(engine) for pool in session.pools.values()]
    guarded = sum(int((pool.digests[:, 0] != 0).any(1).sum()) for pool in pools)
    engine.faults = flips = Flips(engine)
    drive(again)
    flips.before_step(engine)
    engine.close()
    equal = tokens == [r.output for r in clean.requests]
    halves = sum(len(pool.halves) for pool in pools)
    graphs = sum(len(session.plans) for session in sessions(engine))
    pieces = sum(engine.config.inner.pieces) if config.split else graphs
    seconds = time.perf_counter() - start
    return Row(config, equal, violations, graphs, pieces, guarded, halves, flips, seconds)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The model is so small that threads would mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def line(cells: tuple[str, ...]) -> str:
    widths = (15, 10, 6, 13, 11, 7, 15, 12, 7)
    return "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


@one_thread()
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builds", nargs="+", choices=BUILDS, default=BUILDS)
    parser.add_argument("--inners", nargs="+", default=INNERS, help="backends: eager, aot_eager, inductor")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=4)
    args = parser.parse_args(argv)
    logging.getLogger("kvcanary").setLevel(logging.ERROR)  # the flips are reported in the table
    base = EngineConfig(model="llama", pages=40, window=12, draft=2, prefix_cache=False, device=args.device)
    rows = []
    print(line(HEAD), flush=True)
    for build in args.builds:
        for inner in args.inners:
            whole = dataclasses.replace(base, build=build, inner=inner)
            tokens = unguarded(whole, args.requests)
            for config in (whole, dataclasses.replace(whole, split=True)):
                rows.append(measure(config, args.requests, tokens))
                print(line(rows[-1].cells()), flush=True)
                for struck, found in rows[-1].flips.wrong:
                    print(f"  {struck}\n  reported as {found}")
    good = sum(row.good for row in rows)
    print(f"{good} of {len(rows)} as they must be")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())

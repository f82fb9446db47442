"""Where the main thread of vLLM's engine is, guarded and not: its stack is looked at each millisecond.

    python tests/benchmarks/vllm_stacks.py --shape 1b --requests 64 256 --rounds 15
    python tests/benchmarks/vllm_stacks.py --shape 8b --requests 200 --rate 12 --rounds 2   # as a server's clients send
    python tests/benchmarks/vllm_stacks.py --shape 1b --requests 64 --before CHECKOUT       # and what another one does

All engines are alive at once and take turns, with the same prompts (``vllm_engine.py``).  Clocks around functions cost
more than many of them take, and make those that are called often look slow; a look costs all functions alike, about 5
us.  A look is the canary's if the innermost frame of vLLM's or the canary's own is the canary's: what vLLM does below a
function that the canary wraps is vLLM's.  What Python's garbage collector takes is printed beside it.
"""

from __future__ import annotations

import argparse
import collections
import gc
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import cores
import report
import vllm_engine
from vllm_shapes import SHAPES

#: Seconds between two looks.
EVERY = 0.001


class Place(NamedTuple):
    """Where a frame is: its function, and whose it is."""

    function: str
    owner: str


class Stacks:
    """Looks at the stack of the main thread of this process.

    Attributes:
        looks: how many there were, by whose they are.
        within: in how many of the canary's own each of its functions was, and in how many of all each other one.
        at: how many of the canary's own were at which of its lines, or in what it calls there.
        collected: seconds of the garbage collector; ``collections``, how often, by generation.
    """

    def __init__(self) -> None:
        self.looks: collections.Counter[str] = collections.Counter()
        self.within: collections.Counter[str] = collections.Counter()
        self.at: collections.Counter[str] = collections.Counter()
        self.collected, self.collections = 0.0, [0, 0, 0]
        self._began = 0.0
        self._places: dict[CodeType, Place] = {}

    def start(self) -> None:
        """Begin; from the main thread."""
        gc.callbacks.append(self._on_collection)
        signal.signal(signal.SIGALRM, lambda _, frame: self.look(frame))
        signal.setitimer(signal.ITIMER_REAL, EVERY, EVERY)

    def stop(self) -> dict[str, Any]:
        """End; what was seen."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.callbacks.remove(self._on_collection)
        found = dict(looks=self.looks, within=self.within, at=self.at)
        found |= dict(collected=self.collected, collections=self.collections)
        return {name: dict(value) if isinstance(value, dict) else value for name, value in found.items()}

    def look(self, frame: FrameType | None) -> None:
        """Count where a frame and its callers are."""
        whose, seen = "", set()
        while frame is not None:
            place = self._places.get(frame.f_code) or self._place(frame.f_code)
            if not whose and place.owner == "canary":
                self.at[f"{place.function}, line {frame.f_lineno}"] += 1
            whose = whose or place.owner
            seen.add(place)
            frame = frame.f_back
        self.looks[whose or "others"] += 1
        self.within.update(p.function for p in seen if p.owner != "canary" or whose == "canary")

    def _place(self, code: CodeType) -> Place:
        parts = Path(code.co_filename).parts
        owner = "canary" if "kvcanary_fx" in parts else "vllm" if "vllm" in parts else ""
        made = self._places[code] = Place(f"{'/'.join(parts[-2:])}:{code.co_qualname}", owner)
        return made

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.collections[info["generation"]] += 1
            self.collected += time.perf_counter() - self._began


_RUNNING: list[Stacks] = []


def start_in(worker: Any) -> None:
    """Begin in a worker of vLLM, in whose process the engine is, too, if it has one GPU."""
    _RUNNING.append(Stacks())
    _RUNNING[0].start()


def stop_in(worker: Any) -> dict[str, Any]:
    """End there; see :meth:`Stacks.stop`."""
    return _RUNNING.pop().stop()


def table(found: dict[str, dict[str, Any]], rounds: int, rows: int) -> str:
    """Milliseconds of a round by function, those first in which two engines differ most; and by line of the canary's.

    Args:
        found: of each engine, by its name, the plain one first.
    """
    each = 1000 * EVERY / rounds

    def shown(name: str, values: list[float]) -> list[str]:
        return [name, *(f"{value:,.1f}" for value in values)]

    lines = [
        shown("in vLLM", [each * f["looks"].get("vllm", 0) for f in found.values()]),
        shown("**in the canary**", [each * f["looks"].get("canary", 0) for f in found.values()]),
        shown("in neither", [each * f["looks"].get("others", 0) for f in found.values()]),
        shown("garbage collector", [1000 * f["collected"] / rounds for f in found.values()]),
    ]
    functions = set().union(*(f["within"] for f in found.values()))
    by_function = {name: [each * f["within"].get(name, 0) for f in found.values()] for name in functions}
    differ = sorted(by_function, key=lambda name: min(by_function[name]) - max(by_function[name]))
    table = report.table(["ms of a run", *found], lines + [shown(name, by_function[name]) for name in differ[:rows]])
    at = sum((collections.Counter(f["at"]) for f in found.values()), collections.Counter())
    own = [shown(line, [each * f["at"].get(line, 0) for f in found.values()]) for line, _ in at.most_common(rows)]
    return table + "\n\n" + report.table(["ms at a line of the canary's", *found], own)


def add(found: dict[str, Any], more: dict[str, Any]) -> None:
    """Add what was seen in a round to what was seen before."""
    for name, value in more.items():
        if isinstance(value, dict):
            found[name] = collections.Counter(found.get(name, {})) + collections.Counter(value)
        elif isinstance(value, list):
            found[name] = [a + b for a, b in zip(found.get(name, [0] * len(value)), value, strict=True)]
        else:
            found[name] = found.get(name, 0) + value


def measure(engines: dict[str, vllm_engine.Engine], args: argparse.Namespace, requests: int) -> None:
    """The rounds of one number of requests."""
    names, taken = list(engines), {name: [] for name in engines}
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for engine in engines.values():
        engine.ask(*_work(args, requests, 0))
    for number in range(1, args.rounds + 1):
        for name in names[:: -1 if number % 2 else 1]:
            engines[name].ask("stacks", "start")  # not while it waits for its turn
            taken[name].append(engines[name].ask(*_work(args, requests, number)))
            add(found[name], engines[name].ask("stacks", "stop"))
    times = ", ".join(f"{name} {1000 * statistics.median(taken[name]):,.1f} ms" for name in names)
    print(f"{args.shape}, {requests} requests, {args.rounds} rounds, medians: {times}\n")
    print(table(found, args.rounds, args.rows), flush=True)


def _work(args: argparse.Namespace, requests: int, number: int) -> tuple[Any, ...]:
    return ("load", requests, number, args.rate) if args.rate else ("run", requests, number)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b", choices=list(SHAPES))
    parser.add_argument("--requests", nargs="+", type=int, default=[64])
    parser.add_argument("--rate", type=float, default=0, help="requests a second; default: all at once")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--before", metavar="CHECKOUT", help="a third engine, guarded by the code of another checkout")
    parser.add_argument("--rows", type=int, default=40, help="functions that are shown")
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=10500, help="KV cache blocks of each engine")
    parser.add_argument("--share", type=float, default=0.1, help="of the GPU's memory, for each engine")
    parser.add_argument("--kv-gib", type=float, default=6, help="memory of each KV cache")
    parser.add_argument("--logs", default=tempfile.gettempdir(), help="directory of the engines' logs")
    args = parser.parse_args()
    args.profile = args.mixed = False
    args.steps, args.ranks = None, 1
    if args.before and not (Path(args.before) / "kvcanary_fx").is_dir():
        parser.error(f"--before {args.before}: no kvcanary_fx is there; name the root of another checkout")
    engines = {
        name: vllm_engine.Engine(args, args.shape, mode, name=name)
        for name, mode in (("plain", None), ("guarded", "log"))
    }
    if args.before:
        path = os.pathsep.join([args.before, os.environ.get("PYTHONPATH", "")])
        engines["before"] = vllm_engine.Engine(args, args.shape, "log", name="before", PYTHONPATH=path)
    for engine in engines.values():
        engine.wait()
    cores.put_alike([engine.pid for engine in engines.values()])
    for requests in args.requests:
        measure(engines, args, requests)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()

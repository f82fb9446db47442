"""What an engine's session takes of the host in a step, by part, and how often it launches something.

    python tests/benchmarks/engine_step.py [--device cpu] [--source device] [--calls 64] [--at-once] [--write]
    PYTHONPATH=. python tests/benchmarks/engine_step.py --device none

64 requests, one token each.  In each step the allocator moves 500 blocks of 16 slots in 64 calls: a quarter each is
released by its request, released by the one that shared it, handed out, and shared.  No model runs, so that what is
left is the session's own time.  With ``--at-once`` the calls of a kind are one: ``release_each``, ``allocate_each`` and
``share_each``.

A second of steps comes before those that count, as an engine's steps come after many; the first are shown as well.
Seen on one host: 134 us in the first 0.2 s, 88 us from there on.

Hosts differ by as much, and one host from one second to the next, by 1.8 times, as if somebody else had the other
thread of the core.  So a fixed piece of Python is timed between each 25 steps, and the median of those steps before and
behind which it took about as long as in the quickest tenth is shown beside that of all.

* ``eager``: the session's forward runs in each step; a model's piecewise graphs would be replayed within.
* ``captured``: the session's forward is part of a CUDA graph, which is replayed.

``--device none`` runs the host code of a GPU over CPU tensors and launches nothing (``without_device.py``): what is
left is our own Python.  There also the 10th percentile is shown: other programs of the machine take part in the median.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import report
import torch

import kvcanary_fx
from kvcanary_fx import Batch, KVPool

REQUESTS, PAGE, BLOCKS, CONTEXT = 64, 16, 500, 512
WARM_UP = 1.0  # seconds of steps before those that count
FIRST = 200  # of these steps, those whose median is shown
CHUNK = 25  # steps between two looks at how fast the host is
SLOWER = 1.1  # at its fast times a host takes at most so many times as long as in the quickest tenth of looks
PARTS = ("events", "fill", "before", "after", "end of step")
LAUNCHES = ("launch", "memcpy", "memset")


class Times:
    """Microseconds of each part, a list a part.

    Args:
        named: the parts are also named in a profile, which takes microseconds itself.
    """

    def __init__(self, named: bool = False) -> None:
        self.named = named
        self.taken: dict[str, list[float]] = {part: [] for part in PARTS}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        named = torch.profiler.record_function(f"part:{name}") if self.named else contextlib.nullcontext()
        started = time.perf_counter_ns()
        with named:
            yield
        self.taken[name].append((time.perf_counter_ns() - started) / 1000)

    def share(self, percent: int) -> dict[str, float]:
        """Of each part, the time that so many of a hundred steps stay within."""
        return {part: _share(runs, percent) if runs else 0.0 for part, runs in self.taken.items()}

    def add(self, other: Times) -> None:
        """Those of other steps, too."""
        for part, runs in other.taken.items():
            self.taken[part] += runs

    def total(self, percent: int) -> float:
        """The same of the sum."""
        return _share([sum(parts) for parts in zip(*filter(None, self.taken.values()), strict=True)], percent)


def _share(runs: list[float], percent: int) -> float:
    return sorted(runs)[len(runs) * percent // 100]


class Scene:
    """A session whose requests have their context in the pool already."""

    def __init__(
        self, device: str, source: str, calls: int, layers: int, mode: str, at_once: bool = False, **settings: Any
    ):
        own = (CONTEXT + PAGE) // PAGE  # blocks of a request
        moved = BLOCKS // 4
        blocks = 1 + REQUESTS * own + 2 * moved
        self.at_once = at_once
        self.device, self.calls, self.page_size = device, calls, PAGE if source == "pages" else 1
        self.names = [f"request {number}" for number in range(REQUESTS)]
        kv = [tuple(torch.zeros(blocks, PAGE, 1, 8, device=device) for _ in range(2)) for _ in range(layers)]
        ids = torch.arange(REQUESTS * own, dtype=torch.int32).view(REQUESTS, own) + 1
        table = torch.cat((torch.zeros(1, own, dtype=torch.int32), ids)).to(device)
        session = kvcanary_fx.install_canary(
            KVPool(kv, table, paged=True, table_page_size=PAGE, reserved=tuple(range(PAGE))),
            mode=mode,
            max_requests=REQUESTS,
            max_tokens=REQUESTS,
            health_every=0,
            **settings,
        )
        assert session is not None
        self.session, self.pool = session, session.pool
        session.mark_ready()
        for number, row in enumerate(ids.tolist()):
            slots = _slots(row)
            self.pool.allocate(slots, owner=f"request {number}")
            self.pool.adopt(slots[:CONTEXT], [5] * CONTEXT, range(CONTEXT), owner=f"request {number}")
        first = 1 + REQUESTS * own
        # the blocks that go from hand to hand, in two sets that take turns, each in as many calls
        self.sets = [_split(range(first + k * moved, first + (k + 1) * moved), calls // 4, source) for k in (0, 1)]
        self.turn = 0
        self._hand_out(self.sets[1])
        self.batch = self._batch(ids, "cuda" if device == "cuda" and source == "device" else "cpu", source)

    def _batch(self, ids: torch.Tensor, device: str, source: str) -> Batch:
        fields = dict(
            input_ids=[7] * REQUESTS,
            slots=(ids[:, CONTEXT // PAGE] * PAGE).tolist(),
            request_rows=list(range(1, REQUESTS + 1)),
            prefix_lens=[CONTEXT] * REQUESTS,
            extend_lens=[1] * REQUESTS,
            positions=[CONTEXT] * REQUESTS,
        )
        if source not in ("pages", "list"):
            fields = {name: torch.tensor(values, device=device) for name, values in fields.items()}
        return Batch(**fields, request_ids=[f"request {i}" for i in range(REQUESTS)])

    def events(self) -> None:
        """What the allocator does between two steps."""
        old, new = self.sets[1 - self.turn], self.sets[self.turn]
        self.turn = 1 - self.turn
        if self.at_once:
            whose = list(zip(old, self.names))  # noqa: B905
            self.pool.release_each([*whose, *((slots, None) for slots in old)], self.page_size)
            self._hand_out(new)
            return
        for name, slots in zip(self.names, old):  # noqa: B905  strict is not the session's time
            self.pool.release(slots, name, self.page_size)
        for slots in old:
            self.pool.release(slots, None, self.page_size)
        self._hand_out(new)

    def _hand_out(self, groups: list[object]) -> None:
        if self.at_once:
            self.pool.allocate_each(list(zip(groups, self.names)), self.page_size, written_in_step=True)  # noqa: B905
            self.pool.share_each(list(zip(groups, self.names[1:])), self.page_size)  # noqa: B905
            return
        for name, slots in zip(self.names, groups):  # noqa: B905
            self.pool.allocate(slots, name, self.page_size)
        for name, slots in zip(self.names[1:], groups):  # noqa: B905
            self.pool.share(slots, name, self.page_size)

    def eager(self, times: Times) -> None:
        with times.part("events"):
            self.events()
        step, forward = self.session.step(self.batch), self.session.forward()
        with times.part("fill"):
            step.__enter__()
        with times.part("before"):
            forward.__enter__()
        with times.part("after"):
            forward.__exit__(None, None, None)
        with times.part("end of step"):
            step.__exit__(None, None, None)

    def capture(self) -> Callable[[Times], None]:
        """A step whose forward is replayed."""
        self.eager(Times())
        self.session.inputs.freeze()
        graph = torch.cuda.CUDAGraph()
        with self.session.step(self.batch), torch.cuda.graph(graph), self.session.forward():
            pass

        def captured(times: Times) -> None:
            with times.part("events"):
                self.events()
            step = self.session.step(self.batch)
            with times.part("fill"):
                step.__enter__()
            with times.part("before"):
                graph.replay()
            with times.part("end of step"):
                step.__exit__(None, None, None)

        return captured

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _slots(blocks: list[int]) -> torch.Tensor:
    return (torch.tensor(blocks).unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()


def _split(blocks: range, calls: int, source: str) -> list[object]:
    """The slots of blocks for a number of calls."""
    pages = [group.tolist() for group in torch.tensor(blocks).tensor_split(calls)]
    if source == "pages":
        return list(pages)
    groups = [_slots(group) for group in pages]
    if source == "list":
        return [group.tolist() for group in groups]
    return [group.cuda() for group in groups] if source == "device" else list(groups)


class Measured:
    """Steps, and how fast the host was meanwhile.

    Attributes:
        all, first: the steps, and the first of the warm-up.
        fast: of ``all`` those at the host's fast times.
        python, quickest: microseconds of a fixed piece of Python, in the median of all looks and in the quickest tenth.
    """

    def __init__(self, scene: Scene, run: Callable[[Times], None], steps: int):
        for _ in range(5):
            run(Times())
        end, self.first = time.perf_counter() + WARM_UP, repeat(scene, run, min(steps, FIRST))
        while time.perf_counter() < end:
            repeat(scene, run, 1)
        looks, chunks = [speed_of_python()], []
        for begin in range(0, steps, CHUNK):
            chunks.append(repeat(scene, run, min(CHUNK, steps - begin)))
            looks.append(speed_of_python())
        self.python, self.quickest = _share(looks, 50), _share(looks, 10)
        most = SLOWER * self.quickest
        self.all, self.fast = Times(), Times()
        for chunk, before, behind in zip(chunks, looks, looks[1:]):  # noqa: B905  one look more
            self.all.add(chunk)
            if max(before, behind) <= most:
                self.fast.add(chunk)

    def at_fast_times(self, percent: int) -> str:
        """The sum that so many of a hundred steps stay within, and how many of all steps these are."""
        fast, count = (len(times.taken["fill"]) for times in (self.fast, self.all))
        return f"{self.fast.total(percent):.0f} ({100 * fast / count:.0f} %)" if fast else ""


def repeat(scene: Scene, run: Callable[[Times], None], steps: int) -> Times:
    times = Times()
    for _ in range(steps):
        scene.sync()
        run(times)
    return times


def launches(scene: Scene, run: Callable[[Times], None]) -> dict[str, str]:
    """Launches and copies of one step on a GPU, by part; empty on a CPU."""
    if scene.device != "cuda":
        return {}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run(Times(named=True))
        scene.sync()
    events = list(profile.events())
    spans = [(e.name[5:], e.time_range) for e in events if e.name.startswith("part:") and e.device_type.name == "CPU"]
    counts = {part: Counter[str]() for part in PARTS}
    for event in events:
        kind = next((k for k in LAUNCHES if k in event.name.lower() and event.name.startswith("cu")), None)
        inside = [part for part, span in spans if span.start <= event.time_range.start <= span.end]
        if kind is not None and inside and event.device_type.name == "CPU":
            counts[inside[0]][kind] += 1
    return {part: f"{c['launch']} + {c['memcpy'] + c['memset']}" for part, c in counts.items()}


def speed_of_python(pieces: int = 40) -> float:
    """Microseconds of a fixed piece of Python like ours, the median: numbers into lists and a dictionary, and out."""

    def piece() -> int:
        kept = {number: [number, number + 1] for number in range(400)}
        return sum(first for first, _ in kept.values())

    taken = []
    for _ in range(pieces):
        started = time.perf_counter_ns()
        piece()
        taken.append((time.perf_counter_ns() - started) / 1000)
    return _share(taken, 50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--source", choices=("pages", "list", "host", "device"), help="what slots and batches are; default: all"
    )
    parser.add_argument("--calls", type=int, default=64, help="of the allocator in a step, a multiple of 4")
    parser.add_argument("--at-once", action="store_true", help="calls of a kind as one")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--mode", default="log")
    parser.add_argument("--write", action="store_true", help="update the section in BENCHMARKS.md")
    args = parser.parse_args()
    gpu, stub = args.device == "cuda", args.device == "none"
    if stub:
        import logging

        from without_device import pretend

        pretend()
        logging.disable(logging.WARNING)  # what is launched nowhere finds out nothing, and the first steps are checked
        args.device = "cpu"
    layers, steps = args.layers or (32 if gpu else 2), args.steps or (2000 if stub else 1000 if gpu else 5)
    rows = []
    for source in [args.source] if args.source else ["pages", "list", "host", *(["device"] if gpu else [])]:
        default = dict(budget=0.01) if stub else {}  # what it is on a GPU
        scene = Scene(args.device, source, args.calls, layers, args.mode, args.at_once, **default)
        for name in ("eager", "captured") if gpu else ("eager",):
            run = scene.eager if name == "eager" else scene.capture()
            found = Measured(scene, run, steps)
            counted = launches(scene, run)
            for percent in (50, 10) if stub else (50,):
                taken = found.all.share(percent)
                cells = [f"{taken[part]:.0f}" + (f" ({counted[part]})" if counted else "") for part in PARTS]
                which = "" if percent == 50 else f", {percent}th percentile"
                totals = [f"{times.total(percent):.0f}" for times in (found.all, found.first)]
                totals.insert(1, found.at_fast_times(percent))
                rows.append([f"{name}, {source}{which}", *totals, *cells, f"{found.python:.0f} ({found.quickest:.0f})"])
                print(rows[-1], flush=True)
        wrong = scene.session.violations()
        if wrong and not stub:
            raise SystemExit(f"{len(wrong)} violations, where nothing is wrong: {wrong[0]}")
    where, command = (", launches left out", "--device none --write") if stub else ("", "--write")
    text = (
        f"## An engine's session, host time of a step{where}\n\n{report.environment(args.device)}. Microseconds, "
        f"medians of {steps} steps after {WARM_UP:g} s of them, whose first {min(steps, FIRST)} are shown as well, and "
        "on a GPU launches + copies; `Python`: a fixed piece of it, which tells how fast the host is, in brackets in "
        "the quickest tenth; `at fast times`: "
        f"of the steps beside which it took at most {SLOWER:g} times its quickest tenth, and how many these are; "
        f"{REQUESTS} requests, {BLOCKS} blocks of {PAGE} "
        f"slots handed out, shared or released in {args.calls} calls, {layers} layers, mode `{args.mode}`. No model "
        "runs. What the engine gives are lists of pages, lists of slots, tensors of the host, or of the device. "
        f"Command: `python tests/benchmarks/engine_step.py {command}`\n\n"
        f"{report.table(['step', 'total', 'at fast times', 'at first', *PARTS, 'Python'], rows)}"
    )
    print(text)
    if args.write:
        report.write_section(f"engine step {'none' if stub else args.device}", text)


if __name__ == "__main__":
    main()

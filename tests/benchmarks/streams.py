"""What each kernel takes longer once kernels of its process have run in several streams.

    python tests/benchmarks/streams.py [--way streams branches off inline side]

A graph of small kernels in a row is replayed, and timed again whenever one more stream was used: in one process by a
kernel in a stream of its own, in another one by a graph with a branch, which has streams that the driver makes.  On an
H200 (driver 580.159) nothing changes up to six streams, the default one among them.  From the seventh on each kernel
takes 0.18 us longer, of that process and for good; in a model's graph, between matrix products, 0.35.  Three graphs
with a branch are enough, whichever stream they were captured on.  A graph's destruction, and
``CUDA_DEVICE_MAX_CONNECTIONS`` of 1, 2 or 32, change nothing.

``off``, ``inline`` and ``side`` ask the same of a small model whose decode is captured, without the canary and with its
checks placed so: behind which of its steps do other kernels take longer?
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable

import torch

#: Kernels of the graph that is timed.
KERNELS = 300

#: In how many streams kernels run, and how many graphs with a branch are replayed.
STREAMS, BRANCHES = 12, 4

#: Decodes that are captured.
DECODES = 10


def nanoseconds_of_a_kernel() -> float:
    """What a small kernel takes in this process, in a graph of such kernels in a row."""
    return timed(linear(torch.zeros(4096, device="cuda")))


def linear(x: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of kernels that follow each other."""

    def run() -> None:
        for _ in range(KERNELS):
            x.add_(1)

    return captured(run)


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what a function launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def timed(graph: torch.cuda.CUDAGraph) -> float:
    """Nanoseconds of a kernel: of 15 times two replays, the third quickest."""
    taken = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 2 * 1e6 / KERNELS)
    return sorted(taken)[2]


def use_streams(x: torch.Tensor, look: Callable[[str], None]) -> None:
    """Kernels in one more stream each time."""
    made = []
    for number in range(STREAMS):
        made.append(torch.cuda.Stream())
        with torch.cuda.stream(made[-1]):
            x.mul_(1)
        torch.cuda.synchronize()
        look(f"and {number + 1} more")


def use_branches(x: torch.Tensor, look: Callable[[str], None]) -> None:
    """One more graph with a branch each time, all captured on one stream."""
    side, made = torch.cuda.Stream(), []

    def fork() -> None:
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            x.mul_(1)
        y = x + 1
        here.wait_stream(side)
        del y

    for number in range(BRANCHES):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            fork()
        made.append(graph)
        graph.replay()
        torch.cuda.synchronize()
        look(f"and graphs with a branch: {number + 1}")


def use_decodes(placement: str, look: Callable[[str], None]) -> None:
    """One more captured decode each time, all of one model."""
    from decode_models import TINY_MLA, Model
    from forward_scene import CONFIGURATIONS, Case, Runner, Scene

    device, recorded = torch.device("cuda"), CONFIGURATIONS["recorded"]
    scene, model = Scene(Case(TINY_MLA, 2, 192, 1), device), Model(TINY_MLA, device)
    settings = None if recorded is None or placement == "off" else recorded | {"placement": placement}
    look("and a model")
    made = [Runner(scene, model, settings, "manual", captures=0)]
    look(f"{placement}: compiled, and called")
    for number in range(DECODES):
        made.append(Runner(scene, model, settings, "manual", captures=1))
        look(f"{placement}: captured decodes: {number + 1}")


#: Ways, each in a process of its own.
WAYS = ("streams", "branches", "off", "inline", "side")


def main() -> None:
    """Measure, each way in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", nargs="+", choices=WAYS, default=WAYS, help="one: in this process; default: all")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU, and it measures what a GPU's kernels take")
    if len(args.way) > 1:
        for way in args.way:
            subprocess.run([sys.executable, __file__, "--way", way], check=True)
        return
    (way,) = args.way
    x = torch.zeros(4096, device="cuda")
    graph = linear(x)
    before = timed(graph)
    print(f"{torch.cuda.get_device_name()}: {before:,.0f} ns a kernel, in the default stream")

    def look(what: str) -> None:
        now = timed(graph)
        print(f"  {now:,.0f} ns, {now - before:+,.0f}: {what}", flush=True)

    if way in ("streams", "branches"):
        (use_streams if way == "streams" else use_branches)(x, look)
    else:
        use_decodes(way, look)


if __name__ == "__main__":
    main()

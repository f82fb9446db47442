"""What a branch of a CUDA graph costs the kernels beside it, and the host: products of matrices, and small launches.

    python tests/benchmarks/graph_branches.py [--layers 24] [--rounds 24]

The small launches are in front of the products, or in a branch that is joined after the first layer or at the end, or
in one beside the last layers.  Each graph is captured three times and they take turns; shown is the difference of the
fastest.  The host's time is that of launching a replay while the GPU has nothing to do.  ``again`` forks to the stream
of a branch that was joined before: then the second one depends on the first one's last launch, too, and a branch is
open from there on.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import report
import torch

#: Rows of a batch, width of the model and of its MLP.
ROWS, WIDTH, WIDE = 64, 4096, 14336

#: How often each graph is captured.
CAPTURES = 3

#: Where the small launches are: how many in front, in a branch at the begin, the layer behind which that is joined
#: (None: the last), and whether there is a branch beside the last layers, in a stream of its own or in the first one's.
KINDS: dict[str, tuple[int, int, int | None, str]] = {
    "none": (0, 0, None, ""),
    "8 in front": (8, 0, None, ""),
    "1 in a branch to the end": (0, 1, None, ""),
    "8 in a branch to the end": (0, 8, None, ""),
    "8 in a branch of a layer": (0, 8, 0, ""),
    "1 in front, 8 in a branch": (1, 8, 0, ""),
    "1 beside the last layers": (0, 0, None, "own"),
    "both": (0, 8, 0, "own"),
    "both, again": (0, 8, 0, "again"),
}


class Model:
    """Layers of three products and what is small between them."""

    def __init__(self, layers: int):
        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.01

        shapes = (WIDTH, WIDE), (WIDE, WIDTH), (WIDTH, WIDTH)
        self._layers = [[weights(*shape) for shape in shapes] for _ in range(layers)]
        self._x = weights(ROWS, WIDTH)

    def run(self) -> Iterator[int]:
        """The number of each layer, when it has been launched."""
        x = self._x
        for number, (up, down, out) in enumerate(self._layers):
            x = torch.nn.functional.silu(x @ up) @ down @ out
            x = x / (1e-3 + x.abs().amax(-1, keepdim=True))
            yield number


def captured(model: Model, layers: int, front: int, branch: int, joined: int | None, last: str) -> torch.cuda.CUDAGraph:
    """A graph of the model and the small launches, as :data:`KINDS` has them."""
    graph, small, side = torch.cuda.CUDAGraph(), torch.zeros(WIDTH, device="cuda"), torch.cuda.Stream()

    def launch(count: int) -> None:
        for _ in range(count):
            small.add_(1)

    def fork(count: int) -> None:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            launch(count)

    with torch.cuda.graph(graph):
        main, ends = torch.cuda.current_stream(), layers - 1 if joined is None else joined
        launch(front)
        if branch:
            fork(branch)
        for number in model.run():
            if number == layers - 2 and last:
                side = side if last == "again" else torch.cuda.Stream()
                fork(1)
                ends = layers - 1
            if number == ends and (branch or last):
                main.wait_stream(side)
    return graph


def microseconds(run: Callable[[], None]) -> float:
    """Of one replay, behind one that hides how long the host needs."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(2):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 2 * 1e3


def microseconds_of_host(run: Callable[[], None]) -> float:
    """Of launching one replay, when the device has ended the last one."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e6


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=24)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU, and it measures CUDA graphs")
    if args.layers < 3:
        parser.error(f"--layers {args.layers}: a branch beside the last layers needs 3")
    model = Model(args.layers)
    for _ in model.run():
        pass
    torch.cuda.synchronize()
    graphs = {kind: [captured(model, args.layers, *how) for _ in range(CAPTURES)] for kind, how in KINDS.items()}
    taken: dict[str, list[list[float]]] = {kind: [[] for _ in made] for kind, made in graphs.items()}
    host: dict[str, list[float]] = {kind: [] for kind in graphs}
    for number in range(args.rounds):
        for kind in list(graphs)[:: -1 if number % 2 else 1]:
            for times, graph in zip(taken[kind], graphs[kind], strict=True):
                times.append(microseconds(graph.replay))
                host[kind].append(microseconds_of_host(graph.replay))
    fastest = {kind: min(map(statistics.median, times)) for kind, times in taken.items()}
    rows = [
        [kind, f"{us:,.1f} us", f"{us - fastest['none']:+.1f} us", f"{statistics.median(host[kind]):.1f} us"]
        for kind, us in fastest.items()
    ]
    print(report.environment("cuda"))
    print(report.table(["small launches", "a replay", "more than none", "host"], rows))


if __name__ == "__main__":
    main()

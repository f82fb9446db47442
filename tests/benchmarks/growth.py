"""How the cost of the checks grows with the context, on one GPU: a table, and a plot.

    python tests/benchmarks/growth.py [--write]

Eight requests, each with one token added to a context of 1k to 128k.  The identity checks run once a forward, for all
layers; the content checks are those of one layer's K.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import report
import svg_plot
import torch

import kernels
from kvcanary_fx.kernels.buffers import Count, Gate, HalfBuffers, Site
from kvcanary_fx.kernels.content import gpu
from kvcanary_fx.kernels.ring import Word
from kvcanary_fx.kernels.slots.space import SpaceCount
from kvcanary_fx.kernels.writes.layout import SlotLayout

REQUESTS = 8
CONTEXTS = [1024 * 2**n for n in range(8)]
LINES = ("identity: walk, check_writes, store", "content of 1/64", "content")
PLOT = Path("docs") / "benchmarks-growth.svg"


@dataclasses.dataclass
class Point:
    """What the checks of one context take, in microseconds, in the order of ``LINES``."""

    context: int
    microseconds: list[float]
    spread: list[float]
    terabytes_per_second: float  # of the full content check
    checked: list[int]  # slots that one call compared
    due: list[int]  # slots that it was to compare
    violations: int

    def cells(self) -> list[str]:
        times = [f"{t:.1f} us (+-{s / 2:.1f})" for t, s in zip(self.microseconds, self.spread, strict=True)]
        times[-1] += f", {self.terabytes_per_second:.2f} TB/s"
        return [short(self.context), *times, " / ".join(f"{n:,}" for n in self.checked), str(self.violations)]

    def good(self) -> bool:
        """Whether the checks saw what they were to see, and nothing wrong in it."""
        return self.violations == 0 and self.checked == self.due


def short(context: float) -> str:
    return f"{context / 1024:g}k"


def measure(context: int) -> Point:
    """The checks of eight requests whose slots are scattered one by one, as `kernels.py` measures them."""
    scene = kernels.Scene(REQUESTS, context, 1)
    owned = scene.table[:, :context].reshape(-1).long()
    view = torch.empty(scene.space.slots, 8, 128, device=kernels.DEVICE, dtype=torch.bfloat16).normal_()
    layout = SlotLayout(tuple(view.shape), (0,), view.dtype)
    half = HalfBuffers.allocate(layout, 1, kernels.DEVICE)
    gate, counters = (torch.zeros(n, dtype=torch.int64, device=kernels.DEVICE) for n in (len(Gate), len(Count)))
    site = Site(layout, half, scene.space.control, gate, counters, 9, 3, 5, kernels.CONTENT, space=scene.space)

    def identity() -> None:
        scene.before()
        scene.store()

    def content() -> None:
        gpu.verify(site, view, None)

    gpu.record(site, view, owned, None, 0)
    taken, checked = [], []
    for every, call in ((1, identity), (64, content), (1, content)):
        scene.space = dataclasses.replace(scene.space, verify_every=every)
        scene.walk()  # lists the slots for the content checks
        taken.append(kernels.microseconds(call))
        before = compared(scene, counters)
        call()
        checked.append(sum(compared(scene, counters)) - sum(before))
    due = [owned.numel(), int((owned % 64 == 0).sum()), owned.numel()]
    speed = owned.numel() * layout.row_bytes / taken[-1][0] / 1e6
    found = int(scene.space.control.words[Word.HEAD])
    return Point(context, [t for t, _ in taken], [s for _, s in taken], speed, checked, due, found)


def compared(scene: kernels.Scene, counters: torch.Tensor) -> tuple[int, int]:
    """Slots whose identity, and whose bytes, were compared so far."""
    return int(scene.space.counters[SpaceCount.CHECKED]), int(counters[Count.CHECKED])


def section(points: list[Point]) -> str:
    header = ["context", *LINES, "slots checked", "violations"]
    return (
        f"## Growth with the context\n\n{report.environment('cuda')}. {REQUESTS} requests, one token added to each "
        "context, slots scattered one by one, all checks on, in a CUDA graph. Identity is once a forward, for all "
        "layers; content is one layer's K of 2,048 bytes a slot. Command: "
        f"`python tests/benchmarks/growth.py --write`\n\n{report.table(header, [p.cells() for p in points])}\n\n"
        f"![Time of the checks by context]({PLOT.as_posix()})"
    )


def plotted(points: list[Point]) -> str:
    lines = {name: [(p.context, p.microseconds[i]) for p in points] for i, name in enumerate(LINES)}
    names = {LINES[0]: "identity, all layers", LINES[1]: "content of 1/64, one K", LINES[2]: "content, one K"}
    return svg_plot.plot(
        f"Time of the checks, {REQUESTS} requests",
        "context, tokens of each request",
        "microseconds a forward",
        {names[name]: line for name, line in lines.items()},
        short,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="TOKENS")
    parser.add_argument("--write", action="store_true", help=f"update the section in BENCHMARKS.md, and {PLOT}")
    args = parser.parse_args(arguments)
    points: list[Point] = []
    for context in args.contexts:
        points.append(measure(context))
        print("  ".join(points[-1].cells()), flush=True)
        if args.write:  # after each, so that a run that is cut short keeps what it has
            (report.FILE.parent / PLOT).write_text(plotted(points))
            report.write_section("growth cuda", section(points))
    print("\n" + section(points))
    return 0 if all(p.good() for p in points) else 1


if __name__ == "__main__":
    raise SystemExit(main())

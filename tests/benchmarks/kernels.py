"""Time of the checks' kernels inside a CUDA graph, on one GPU.

    python tests/benchmarks/kernels.py [--write]

Each number is the median of replays of a graph that holds the call many times over, divided by that number.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Callable

import report
import torch

from kvcanary_fx.kernels.buffers import Count, Gate, HalfBuffers, Site
from kvcanary_fx.kernels.checks import Check
from kvcanary_fx.kernels.content import gpu
from kvcanary_fx.kernels.ring import Control
from kvcanary_fx.kernels.slots import gpu as gpu_requests
from kvcanary_fx.kernels.slots.space import RequestPlan, SlotSpace
from kvcanary_fx.kernels.writes.layout import SlotLayout

DEVICE = torch.device("cuda")
CHECKS = Check.BOUNDS | Check.POISON | Check.CHAIN | Check.INDEX | Check.OWNER | Check.NAMESPACE | Check.TOKEN
CONTENT = Check.CONTENT | Check.OPERAND | Check.POISON
REPLAYS, CALLS = 30, 20


def microseconds(call: Callable[[], None], calls: int = CALLS, replays: int = REPLAYS) -> tuple[float, float]:
    """``(median, spread)`` of one call in a graph, in microseconds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # or the first call reads digests that are not there yet
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    times = sorted(times[3:])
    return statistics.median(times), times[-1] - times[0]


class Scene:
    """Requests with scattered slots, in a pool twice their size.

    Args:
        checks: of the slots; with content the walk lists those whose bytes are to be compared.
    """

    def __init__(self, requests: int, length: int, extend: int, checks: Check = CHECKS):
        self.requests, self.extend = requests, extend
        slots = 2 * requests * (length + extend)
        made = torch.Generator(DEVICE).manual_seed(0)
        owned = torch.randperm(slots, generator=made, device=DEVICE)[: requests * (length + extend)] + 1
        control = Control.allocate(4096, DEVICE)
        control.stamps = torch.full((2, slots + 1), -1, device=DEVICE)
        self.space = SlotSpace.allocate(slots + 1, DEVICE, control, 1, checks, owner_known=False)
        self.table = owned.view(requests, length + extend).to(torch.int32)
        self.history = torch.randint(100_000, self.table.shape, generator=made, device=DEVICE)
        if length:
            gpu_requests.store(self.space, self.plan(0, length))
        self.now = self.plan(length, extend)

    def plan(self, prefix: int, extend: int) -> RequestPlan:
        def each(value: int) -> torch.Tensor:
            return torch.full((self.requests,), value, device=DEVICE)

        added = slice(prefix, prefix + extend)
        return RequestPlan(
            counts=torch.tensor([self.requests, self.requests * extend, 0], device=DEVICE),
            rows=torch.arange(self.requests, device=DEVICE),
            prefix_lens=each(prefix),
            extend_lens=each(extend),
            tokens=self.history[:, added].flatten().contiguous(),
            slots=self.table[:, added].reshape(-1).long(),
            positions=None,
            owners=each(0),
            namespaces=None,
            table=self.table,
            columns=self.table.shape[1],
            history=self.history,
            history_lens=each(self.table.shape[1]),
        )

    def walk(self) -> None:
        gpu_requests.walk(self.space, self.now)

    def before(self) -> None:
        gpu_requests.walk(self.space, self.now)
        gpu_requests.check_writes(self.space, self.now)

    def store(self) -> None:
        gpu_requests.store(self.space, self.now)


def copy_speed() -> float:
    """Bytes per second that a device copy reads and writes, in TB/s.

    Not in a graph: there a copy becomes a memcpy node, which reached 2.7 TB/s where a kernel reached 4.27 (H200).
    """
    source = torch.zeros(2**29, device=DEVICE)
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.numel() * 4 / statistics.median(times) / 1e9


def site_of(scene: Scene, view: torch.Tensor, layout: SlotLayout) -> Site:
    """A half whose stored slots are all recorded, and listed by a walk."""
    half = HalfBuffers.allocate(layout, 1, DEVICE)
    gate, counters = (torch.zeros(n, dtype=torch.int64, device=DEVICE) for n in (len(Gate), len(Count)))
    site = Site(layout, half, scene.space.control, gate, counters, 9, 3, 5, CONTENT, space=scene.space)
    scene.walk()
    stored = scene.table[:, : -scene.extend].reshape(-1).long()
    if len(stored):
        gpu.record(site, view, stored, None, 0)
    return site


def content_rows(copied: float) -> list[list[str]]:
    """The content check of one layer's K, and its record, at 2,048 bytes a slot."""
    rows = []
    for requests, length, extend in ((1, 4096, 1), (64, 4096, 1), (256, 4096, 1), (64, 0, 4096)):
        scene = Scene(requests, length, extend, CHECKS | CONTENT)
        view = torch.randn(scene.space.slots, 8, 128, device=DEVICE).bfloat16()
        layout = SlotLayout(tuple(view.shape), (0,), view.dtype)
        site, added = site_of(scene, view, layout), scene.now.slots
        values, nbytes = view[added], requests * length * layout.row_bytes
        cells = [f"{requests} x {length} + {extend}"]
        verify, spread = microseconds(lambda: gpu.verify(site, view, None))  # noqa: B023
        speed = nbytes / verify / 1e6
        share = f"{speed:.2f} TB/s, {100 * speed / copied:.0f} % of a copy" if length else "nothing stored"
        cells.append(f"{verify:.1f} us (+-{spread / 2:.1f}), {share}")
        scene.space = dataclasses.replace(scene.space, verify_every=64)
        scene.walk()  # which lists the slots whose turn it is
        cells.append(f"{microseconds(lambda: gpu.verify(site, view, None))[0]:.1f} us")  # noqa: B023
        for call in (
            lambda: gpu.record(site, view, added, None, 1),  # noqa: B023
            lambda: gpu.record(site, view, added, values, 1),  # noqa: B023
            lambda: gpu.record_halves([site] * 2, [view] * 2, added, [values] * 2, 1),  # noqa: B023
        ):
            median, spread = microseconds(call)
            cells.append(f"{median:.1f} us (+-{spread / 2:.1f})")
        rows.append([*cells, str(int(scene.space.control.words[0]))])
        print("  ".join(rows[-1]), flush=True)
    return rows


#: Rows of one layer by what they hold: elements of a slot, and bytes before the first slot.
ROWS: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {
    "2,048 bytes: 8 heads of 128, bf16": ((8, 128), torch.bfloat16, 0),
    "2,032 bytes: 8 heads of 127, bf16": ((8, 127), torch.bfloat16, 0),
    "240 bytes: 3 heads of 40, bf16": ((3, 40), torch.bfloat16, 0),
    "1,152 bytes: a latent of 576, bf16": ((576,), torch.bfloat16, 0),
    "1,152 bytes, 2 bytes off": ((576,), torch.bfloat16, 2),
    "576 bytes, uint8": ((576,), torch.uint8, 0),
    "584 bytes, uint8": ((584,), torch.uint8, 0),
    "584 bytes, 1 byte off": ((584,), torch.uint8, 1),
    "583 bytes, uint8": ((583,), torch.uint8, 0),
}


def row_rows() -> list[list[str]]:
    """The content check of 64 x 4,096 slots and the record of 64 with rows of other sizes."""
    rows = []
    for name, (row, dtype, offset) in ROWS.items():
        scene = Scene(64, 4096, 1, CHECKS | CONTENT)
        count = scene.space.slots * math.prod(row)
        store = torch.randint(0, 120, (count * dtype.itemsize + offset,), dtype=torch.uint8, device=DEVICE)
        flat = store[offset:] if dtype == torch.uint8 else store.view(dtype)[offset // dtype.itemsize :]
        view = flat[:count].view(-1, *row)
        layout = SlotLayout(tuple(view.shape), (0,), dtype)
        site, added = site_of(scene, view, layout), scene.now.slots
        values = view[added]
        verify, _ = microseconds(lambda: gpu.verify(site, view, None))  # noqa: B023
        record, _ = microseconds(lambda: gpu.record(site, view, added, values, 1))  # noqa: B023
        speed = 64 * 4096 * layout.row_bytes / verify / 1e6
        found = int(scene.space.control.words[0])
        rows.append([name, f"{verify:.1f} us", f"{speed:.2f} TB/s", f"{record:.1f} us", str(found)])
        print("  ".join(rows[-1]), flush=True)
    return rows


def identity_rows() -> list[list[str]]:
    """The identity checks, for batches of different shapes."""
    rows = []
    for requests, length, extend in ((1, 4096, 1), (64, 4096, 1), (256, 4096, 1), (64, 32768, 1), (1, 0, 4096),
                                     (1, 0, 131072), (64, 0, 4096)):  # fmt: skip
        scene = Scene(requests, length, extend)
        cells = [f"{requests} x {length} + {extend}"]
        for call in (scene.walk, scene.before, scene.store):
            median, spread = microseconds(call)
            cells.append(f"{median:.1f} us (+-{spread / 2:.1f})")
        found = int(scene.space.control.words[0])
        rows.append([*cells, str(found)])
        print("  ".join(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update the section in BENCHMARKS.md")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU is visible: kernels are timed on one; cpu_decode.py is for a CPU")
    header = ["requests x stored + added", "walk", "walk and check_writes", "store", "violations"]
    copied = copy_speed()
    columns = ["requests x stored + added", "content check", "of 1/64", "record", "with operand"]
    columns += ["K and V at once", "violations"]
    content = (
        f"## Content checks\n\n{report.environment('cuda')}. One layer's K, 2,048 bytes a slot, slots scattered one by "
        f"one, 32-bit digests, in a CUDA graph of {CALLS} calls, median of {REPLAYS} replays. A device copy of 2 GiB "
        f"reads and writes {copied:.2f} TB/s. Command: `python tests/benchmarks/kernels.py --write`\n\n"
        f"{report.table(columns, content_rows(copied))}"
    )
    text = (
        f"## Identity checks\n\n{report.environment('cuda')}. All checks on, slots scattered one by one, in a CUDA "
        f"graph of {CALLS} calls, median of {REPLAYS} replays. Command: `python tests/benchmarks/kernels.py --write`"
        f"\n\n{report.table(header, identity_rows())}"
    )
    shapes = (
        f"## Rows of other sizes\n\n{report.environment('cuda')}. Content check of 64 x 4,096 stored slots of one "
        f"tensor, scattered one by one, and record of 64 slots with their operand, in a CUDA graph of {CALLS} "
        f"calls, median of {REPLAYS} replays. Command: `python tests/benchmarks/kernels.py --write`\n\n"
        f"{report.table(['row', 'content check', 'stored bytes read', 'record', 'violations'], row_rows())}"
    )
    print("\n\n".join(("", content, shapes, text)))
    if args.write:
        report.write_section("content cuda", content)
        report.write_section("rows cuda", shapes)
        report.write_section("identity cuda", text)


if __name__ == "__main__":
    main()

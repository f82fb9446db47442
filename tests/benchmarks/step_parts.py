"""What the parts of a step take of the main thread of vLLM's engine, by a plugin: see ``vllm_serve.py --parts``.

The engine of a server is a process of its own: a copy of this module is put into a folder of its ``PYTHONPATH``, and
``VLLM_STEP_PARTS`` names the file that it writes.  Each part has a clock, of 1 us: the same in guarded and unguarded
engines, and in guarded ones more, around what is the canary's.  And events say what the device takes for the graph of a
decode step.  What the thread took of its processor says whether a long step waited, or all of its code was slow.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

#: Names the file.
VARIABLE = "VLLM_STEP_PARTS"

#: Steps between two writes.
EVERY = 250

#: Kinds of a step, by whether it has a prompt or a part of one.
DECODE, PROMPT = "decode", "prompt"

#: What the device takes for what is replayed in a decode step, from an event before it to one behind it.
GRAPH = "on the GPU: vLLM's graph"

#: What the main thread took of its processor in a step.
PROCESSOR = "a step, the processor's time"

#: Methods of the canary's, whose time is also in a part of vLLM's.
OURS = ("begin_step", "before_model", "after_model", "sampled", "read")


def environment(folder: Path, file: Path, others: Mapping[str, str]) -> dict[str, str]:
    """The variables of a server that is to have the plugin.

    Args:
        folder: where it is installed.
        file: that the engine writes.
        others: what there is of variables.
    """
    about = folder / "step_parts-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: step-parts\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nstep_parts = step_parts:install\n")
    shutil.copy(__file__, folder / "step_parts.py")
    paths = os.pathsep.join([str(folder), *filter(None, [others.get("PYTHONPATH")])])
    return {**others, VARIABLE: str(file), "PYTHONPATH": paths}


class Parts:
    """Sums of seconds, by kind of step and part; ``steps`` has how many there were of a kind."""

    def __init__(self) -> None:
        self.steps = dict.fromkeys((DECODE, PROMPT), 0)
        self.sums: dict[str, dict[str, float]] = {DECODE: {}, PROMPT: {}}
        self._running: dict[str, float] = {}
        self._kind: str | None = None

    def clock(self, owner: type, name: str, part: str) -> None:
        """From now on calls of a method are a part."""
        original = getattr(owner, name)

        def clocked(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._running[part] = self._running.get(part, 0.0) + time.perf_counter() - began

        setattr(owner, name, clocked)

    def scheduled(self, output: Any) -> None:
        """The running step has a batch."""
        tokens = output.num_scheduled_tokens
        if tokens:
            self._kind = PROMPT if output.total_num_scheduled_tokens > len(tokens) else DECODE

    def clock_graphs(self, owner: type, event: Callable[[], Any]) -> Callable[[], None]:
        """From now on replays of a decode step are a part.

        Args:
            owner: of ``replay``, a CUDA graph.
            event: makes one that has a time.

        Returns:
            What adds the times that have arrived; it waits for none.
        """
        replay, under_way = owner.replay, deque[tuple[Any, Any]]()

        def clocked(graph: Any) -> None:
            if self._kind != DECODE:
                replay(graph)
                return
            begin, end = event(), event()
            begin.record()
            replay(graph)
            end.record()
            under_way.append((begin, end))

        def collect() -> None:
            sums = self.sums[DECODE]
            while under_way and under_way[0][1].query():
                begin, end = under_way.popleft()
                sums[GRAPH] = sums.get(GRAPH, 0.0) + begin.elapsed_time(end) / 1e3

        owner.replay = clocked
        return collect

    def step(self, run: Callable[[], Any]) -> Any:
        """``run``, a step of the engine; one without a batch does not count."""
        self._running.clear()
        self._kind, began, before = None, time.perf_counter(), time.thread_time()
        try:
            return run()
        finally:
            if self._kind is not None:
                self.steps[self._kind] += 1
                sums = self.sums[self._kind]
                whole = {"a step": time.perf_counter() - began, PROCESSOR: time.thread_time() - before}
                for part, seconds in {**whole, **self._running}.items():
                    sums[part] = sums.get(part, 0.0) + seconds

    def write(self, to: TextIO) -> None:
        """Write what there is as a line, and begin anew."""
        to.write(json.dumps(dict(steps=self.steps, seconds=self.sums)) + "\n")
        self.steps = dict.fromkeys(self.steps, 0)
        self.sums = {kind: {} for kind in self.sums}


def install() -> None:
    """For vLLM, in each of its processes: clocks for the engine's."""
    if VARIABLE not in os.environ:
        return
    from vllm.v1.engine.core import EngineCoreProc

    parts, step, loop = Parts(), EngineCoreProc._process_engine_step, EngineCoreProc.run_busy_loop
    collecting: list[Callable[[], None]] = []

    def run_busy_loop(core: Any, *args: Any, **kwargs: Any) -> Any:
        collecting.append(_set_clocks(parts, core))  # the canary's part of the engine is there by now
        return loop(core, *args, **kwargs)

    def process(core: Any) -> Any:
        try:
            return parts.step(lambda: step(core))
        finally:
            if sum(parts.steps.values()) >= EVERY:
                collecting[0]()
                with Path(os.environ[VARIABLE]).open("a") as to:
                    parts.write(to)

    EngineCoreProc.run_busy_loop, EngineCoreProc._process_engine_step = run_busy_loop, process


def _set_clocks(parts: Parts, core: Any) -> Callable[[], None]:
    import torch
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    executor, scheduler = type(core.model_executor), type(core.scheduler)
    schedule = scheduler.schedule

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        parts.scheduled(output)
        return output

    scheduler.schedule = noted
    parts.clock(scheduler, "schedule", "schedule")
    parts.clock(scheduler, "update_from_output", "update_from_output")
    parts.clock(executor, "execute_model", "execute_model")
    parts.clock(executor, "sample_tokens", "sample_tokens")
    parts.clock(AsyncOutput, "get_output", "waiting for the GPU")
    if os.environ.get("KVCANARY_MODE"):
        from kvcanary_fx.adapters.vllm.v2.guard import GuardV2

        for name in OURS:
            parts.clock(GuardV2, name, f"the canary's {name}")
    return parts.clock_graphs(torch.cuda.CUDAGraph, lambda: torch.cuda.Event(enable_timing=True))


def read(path: Path) -> Parts:
    """All that an engine wrote; nothing, if it has not had a batch of steps yet."""
    found = Parts()
    for line in path.read_text().splitlines() if path.exists() else ():
        told = json.loads(line)
        for kind, seconds in told["seconds"].items():
            found.steps[kind] += told["steps"][kind]
            for part, value in seconds.items():
                found.sums[kind][part] = found.sums[kind].get(part, 0.0) + value
    return found


def table(plain: Parts, guarded: Parts) -> list[list[str]]:
    """Milliseconds of a step in the mean, a row for each kind and part."""
    rows = []
    for kind in (DECODE, PROMPT):
        for part in dict.fromkeys((*plain.sums[kind], *guarded.sums[kind])):
            values = [
                f"{1e3 * side.sums[kind].get(part, 0.0) / side.steps[kind]:.3f}" if side.steps[kind] else "-"
                for side in (plain, guarded)
            ]
            rows.append([f"{kind} ({plain.steps[kind]:,} and {guarded.steps[kind]:,} steps)", part, *values])
    return rows


HEADER = ["kind of step", "part, ms", "plain", "guarded"]

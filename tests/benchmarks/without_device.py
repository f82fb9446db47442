"""A GPU's host path on a machine without one: its code runs over CPU tensors, and launches nothing.

What is left out is the driver's share: a launch of a compiled kernel, the replay of a small graph and a copy took 12 to
15 us each in a session on an H200.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from kvcanary_fx.engine import gathered, kept_calls, kept_forward, step_inputs, steps  # noqa: F401  they capture
from kvcanary_fx.kernels import bound_launch, compile_ahead, replay
from kvcanary_fx.kernels.ring import Control

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
from gpu_on_cpu import use_gpu_kernels


class Launcher:
    """In the place of a compiled kernel."""

    def __init__(self, name: str, counts: Counter[str]):
        self._name, self._counts = name, counts

    def __getitem__(self, grid: Any) -> Any:
        return self._launch

    def _launch(self, *words: Any, **settings: Any) -> None:
        self._counts[self._name] += 1


class Graph:
    """In the place of a captured graph."""

    def __init__(self, counts: Counter[str]):
        self._counts = counts

    def replay(self) -> None:
        self._counts["graph"] += 1


def pretend() -> Counter[str]:
    """From now on sessions over CPU tensors run a GPU's host code; what would have been launched, by name."""
    counts: Counter[str] = Counter()
    use_gpu_kernels(setattr)

    def first(self: bound_launch.BoundLaunch, grid: Any, changing: Any, stream: Any) -> None:
        self._compiled = Launcher(self._kernel.fn.__name__, counts)

    def call(self: bound_launch.BoundLaunch, grid: Any, changing: Any, stream: Any) -> None:
        for at, value in zip(self._at, changing):  # noqa: B905
            self._words[at] = value
        self._compiled[grid](*self._words, stream=None)

    bound_launch.BoundLaunch.first = first
    bound_launch.BoundLaunch.__call__ = call
    gathered.hands_over = steps.hands_over = lambda device: True
    _replace_everywhere(replay.capture, lambda device, run: Graph(counts))
    _replace_everywhere(compile_ahead.launch_or_compile, lambda *_, **__: None)
    step_inputs.StepInputs._gathers = lambda self: not self._captured
    allocate = Control.allocate

    def with_bell(capacity: int, device: torch.device) -> Control:
        control = allocate(capacity, device)
        control.bell = torch.zeros(2, dtype=torch.int64)
        return control

    Control.allocate = with_bell
    return counts


def _replace_everywhere(function: Any, ours: Any) -> None:
    """In each module of the package that has it by its name."""
    for module in [each for name, each in sys.modules.items() if name.startswith("kvcanary_fx")]:
        if vars(module).get(function.__name__) is function:
            setattr(module, function.__name__, ours)

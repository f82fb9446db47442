"""The GPU's kernels over CPU tensors: interpreted, or compiled and not run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import kvcanary_fx
from kvcanary_fx.kernels.content import gpu, gpu_held, gpu_layer
from kvcanary_fx.kernels.content import gpu_pool as gpu_pool_bytes
from kvcanary_fx.kernels.slots import gpu as gpu_requests
from kvcanary_fx.kernels.slots import gpu_life, gpu_parked

KERNELS = (
    ("kernels_for", gpu),
    ("request_kernels_for", gpu_requests),
    ("pool_kernels_for", gpu_pool_bytes),
    ("life_kernels_for", gpu_life),
    ("parked_kernels_for", gpu_parked),
    ("layer_kernels_for", gpu_layer),
    ("held_kernels_for", gpu_held),
)


def use_gpu_kernels(replace: Callable[[Any, str, Any], None]) -> None:
    """Let every module that picks kernels by device take the GPU's.

    Args:
        replace: ``setattr``, or a fixture's that undoes it.
    """
    for name in kvcanary_fx.__all__:
        getattr(kvcanary_fx, name)  # imports its module
    for name, module in list(sys.modules.items()):
        for finder, kernels in KERNELS:
            if name.startswith("kvcanary_fx") and hasattr(module, finder):
                replace(module, finder, lambda device, kernels=kernels: kernels)


class Graph:
    """In the place of a captured graph: does what was captured."""

    def __init__(self, run):
        self._run, self.replays = run, 0

    def replay(self):
        self.replays += 1
        self._run()

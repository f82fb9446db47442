"""What the checks of a decode step of plain tensors launch on a GPU."""

from __future__ import annotations

from collections import Counter

import pytest
from gpu_on_cpu import use_gpu_kernels
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Rig

from kvcanary_fx.kernels.content import triton_half, triton_layer, triton_write, triton_write_layers
from kvcanary_fx.kernels.writes import triton_resolve

LAYERS = 3


class Launched:
    """In the place of a kernel, and of what Triton compiles of it: notes each launch."""

    def __init__(self, kernel, launches):
        self.fn, self._launches = kernel.fn, launches

    def __getitem__(self, grid):
        def launch(*given, **named):
            self._launches[self.fn.__name__] += 1
            return self

        return launch


class Inside(TorchDispatchMode):
    """Notes the torch ops in the bodies of our ops."""

    def __init__(self, ops):
        super().__init__()
        self._ops = ops

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self._ops[function.name()] += 1
        return function(*args, **(kwargs or {}))


class AroundOurs(TorchDispatchMode):
    """:class:`Inside`, in each of our ops."""

    def __init__(self, ops):
        super().__init__()
        self._ops = ops

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace != "kvcanary":
            return function(*args, **(kwargs or {}))
        with Inside(self._ops):
            return function(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch):
    counted = Counter()
    use_gpu_kernels(monkeypatch.setattr)
    for module in (triton_half, triton_layer, triton_write, triton_write_layers, triton_resolve):
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Launched(kernel, counted))
    return counted


@pytest.mark.parametrize(
    ("settings", "checks"),
    [
        ({"budget": "1%"}, {"verify_layers_kernel": 1, "verify_turns_kernel": 1, "record_layers_kernel": 1}),
        ({}, {"verify_write_kernel": LAYERS, "record_write_kernel": LAYERS}),
    ],
    ids=["under a budget", "everything compared"],
)
def test_a_decode_step_of_plain_tensors_launches_a_fixed_few_and_runs_no_small_ops(launches, settings, checks):
    """Twice a layer where all bytes are compared: then each layer is checked in front of its own write."""
    rig = Rig.build(LAYERS, mode="log", **settings)
    for _ in range(2):
        launches.clear()
        rig.step()
        assert launches == {"begin_kernel": 1, "identify_write_kernel": 1, **checks}
    ops = Counter()
    with AroundOurs(ops):
        rig.step()
    assert not ops

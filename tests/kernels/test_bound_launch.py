"""A launch that was made before: the compiled kernel's own launcher gets the words, unless a profiler looks on."""

from __future__ import annotations

import pytest
import torch
from triton import knobs
from triton.compiler import CompiledKernel

from kvcanary_fx.kernels.bound_launch import BoundLaunch


class Compiled(CompiledKernel):
    """What Triton would compile, for no device; notes how it is launched."""

    def __init__(self, launched):
        self._run = lambda *given: launched.append(("short", *given))
        self.module, self.function, self.packed_metadata = object(), 17, (4, 1)
        self._launched = launched

    def __getitem__(self, grid):
        return lambda *words, stream: self._launched.append(("whole", grid, *words))


class Kernel:
    """In the place of a kernel with these parameters."""

    def __init__(self, launched):
        self.fn = lambda out_ptr, n, BLOCK: None
        self._launched = launched

    def __getitem__(self, grid):
        return lambda *given, num_warps: Compiled(self._launched)


@pytest.fixture
def bound(monkeypatch):
    launched = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    launch = BoundLaunch(Kernel(launched), torch.device("cpu"), dict(out_ptr=torch.zeros(2), BLOCK=8), ("n",), 4)
    launch.first((1, 1, 1), (3,), None)
    return launch, launched


def test_a_launch_that_comes_again_goes_to_the_compiled_kernels_launcher(bound):
    launch, launched = bound
    launch((2, 3, 1), (9,), None)
    (launch_way, *given), (address, n, block) = launched[0][:10], launched[0][10:]
    assert (launch_way, given) == ("short", [2, 3, 1, 5, 17, (4, 1), None, None, None])
    assert (type(address), n, block) == (int, 9, 8)


def test_a_profiler_that_hooks_into_launches_is_told_of_those_that_come_again(bound):
    launch, launched = bound
    hook = lambda metadata: None  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch((2, 3, 1), (9,), None)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert [way for way, *_ in launched] == ["whole"]

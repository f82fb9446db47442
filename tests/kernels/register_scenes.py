"""Scenes of test_registers.py, for a process in which Triton's compiler is not replaced by its interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parent))
from gpu_on_cpu import use_gpu_kernels
from no_device import NoDevice

import kvcanary_fx
from kvcanary_fx.kernels.buffers import Count, Gate, HalfBuffers, Site
from kvcanary_fx.kernels.checks import Check
from kvcanary_fx.kernels.content import gpu
from kvcanary_fx.kernels.slots import gpu_life  # noqa: F401  modules whose kernels are picked by device
from kvcanary_fx.kernels.writes.layout import SlotLayout

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
PAGE, HEADS, DIM = 16, 8, 128


@pytest.fixture
def used(monkeypatch, tmp_path):
    """Registers of a thread, and bytes that it keeps in memory for want of them, of each kernel that is launched."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    driver.set_active(NoDevice())
    use_gpu_kernels(monkeypatch.setattr)
    run, found = JITFunction.run, {}

    def compiled(self, *args, grid, warmup, **settings):
        kernel = run(self, *args, grid=grid, warmup=True, **settings)
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes((kernel.result() if hasattr(kernel, "result") else kernel).asm["cubin"])
        told = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
        found[self.fn.__name__] = tuple(map(int, re.search(r"REG:(\d+) STACK:(\d+)", told).groups()))

    monkeypatch.setattr(JITFunction, "run", compiled)
    return found


def test_sixteen_programs_that_read_a_pool_fit_on_a_processor(used):
    """Of one warp each, as many as 128 registers allow.  With 168 a check of 64 x 4,096 slots took 189 us, not 134."""
    kv = [tuple(torch.zeros(33, PAGE, HEADS, DIM, dtype=torch.bfloat16) for _ in range(2)) for _ in range(2)]
    table = torch.arange(33, dtype=torch.int32).view(1, 33)
    pool = kvcanary_fx.KVPool(kv, table, paged=True, table_page_size=PAGE, reserved=tuple(range(PAGE)))
    session = kvcanary_fx.install_canary(pool, mode="log", max_requests=1, max_tokens=4096, health_every=0)
    session.pool.content.verify_listed(in_flight=False)
    space = session.pool.space
    view = torch.zeros(4096, HEADS, DIM, dtype=torch.bfloat16)
    layout = SlotLayout(tuple(view.shape), (0,), view.dtype)
    gate, counters = (torch.zeros(n, dtype=torch.int64) for n in (len(Gate), len(Count)))
    half = HalfBuffers.allocate(layout, 1, view.device)
    checks = Check.CONTENT | Check.OPERAND | Check.POISON
    site = Site(layout, half, space.control, gate, counters, 9, 3, 5, checks, space=space)
    gpu.verify(site, view, None)
    gpu.record(site, view, torch.arange(1, 4000), None, 1)
    read = ("verify_pool_kernel", "verify_listed_kernel", "record_kernel")
    assert {name: used[name][0] for name in read} == dict.fromkeys(read, 128)
    assert max(used[name][1] for name in read) <= 16

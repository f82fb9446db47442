"""No copy of a pool that the unguarded model does not make: Inductor's code, with and without the canaries."""

from __future__ import annotations

import pytest
import torch
from idioms import IDIOMS
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache

from kvcanary_fx import CanaryConfig
from kvcanary_fx.compile.inductor import compile_and_read
from kvcanary_fx.passes.code_lint import pool_sized_buffers
from kvcanary_fx.passes.pipeline import passes, run_passes

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _code_is_read_and_not_run(monkeypatch):
    """Inductor writes its code as ever; no C++ compiler makes kernels of it that nobody would call."""

    def never_called(*_):
        raise AssertionError("the code is read, not run")

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda self, argtypes, source: never_called)
    PyCodeCache.cache_clear()
    yield
    PyCodeCache.cache_clear()  # modules without kernels are not for other tests


def copies(idiom, device: str) -> dict[str, int]:
    """Pool halves copied by the code for the plain, the guarded and the rewritten graph."""
    counted = {}

    def backend(gm, example_inputs):
        kinds = [("plain", False), ("guarded", CanaryConfig().rewrite), ("rewritten", True)]
        for kind, rewrite in kinds[1:] if idiom.refused else kinds:
            graph, plan = run_passes(gm, example_inputs, passes(rewrite=rewrite))
            states = [torch.zeros(1, dtype=torch.int32, device=d) for d in plan.devices]
            source = (gm, list(example_inputs)) if kind == "plain" else (graph, [*example_inputs, *states])
            _, code = compile_and_read(*source, {})
            assert code
            counted[kind] = sum(copy.size for copy in pool_sized_buffers("\n".join(code), plan.pool_bytes))
            half = plan.pool_bytes[0]
        counted.update({kind: size // half for kind, size in counted.items()})
        return gm.forward

    # a number stays on the host: one on a GPU Dynamo refuses to index with
    args = [a.to(device) if isinstance(a, torch.Tensor) and a.dim() else a for a in idiom.make()]
    with torch.no_grad():
        torch.compile(idiom.run, backend=backend, fullgraph=True)(*args)
    return counted


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda i: i.name)
def test_guarding_adds_no_copy_of_a_pool(idiom, device, record_property):
    counted = copies(idiom, device)
    record_property("halves_copied", counted)
    print(f"{idiom.name:28s} {device:5s} halves copied: {counted}")
    assert counted["guarded"] <= counted.get("plain", 0)
    if idiom.readable:
        # what a rolling window is rolled into is a buffer of its own in any case
        assert counted["rewritten"] <= (2 if idiom.name == "rolling" else 0)


def test_buffers_are_read_from_the_code():
    code = """
        buf0 = empty_strided_cpu((2, 16, 8), (128, 8, 1), torch.float32)
    buf1 = empty_strided_cuda((256, ), (1, ), torch.bfloat16)
    buf2 = empty_strided_cpu((s0, 16), (16, 1), torch.float32)
    buf3 = empty_strided_cpu((2, 2, 16, 8), (256, 128, 8, 1), torch.float32)
    """
    assert [f.name for f in pool_sized_buffers(code, [1024, 1024])] == ["buf0", "buf3"]
    assert [f.name for f in pool_sized_buffers(code, [512, 512])] == ["buf0", "buf1"]
    assert pool_sized_buffers(code, []) == []

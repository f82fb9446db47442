"""CUDA graphs: cudagraph trees and manual capture; checks run on every replay, and find what they must."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from toys import VOCAB, Rig, new_caches

import kvcanary_fx
from kvcanary_fx import CanaryBackend, CanaryConfig, CaptureError, KVCacheViolation
from kvcanary_fx.kernels.buffers import Gate
from kvcanary_fx.kernels.content import triton_half as triton_kernels
from kvcanary_fx.kernels.content import triton_layer as triton_records
from kvcanary_fx.kernels.content import triton_write
from kvcanary_fx.kernels.ring import Word
from kvcanary_fx.runtime import readback

pytestmark = pytest.mark.gpu


def static(rig: Rig) -> Rig:
    for pair in rig.caches:
        for tensor in pair:
            torch._dynamo.mark_static_address(tensor)
    return rig


def steps_of(rig: Rig) -> int:
    return sum(int(g[Gate.STEP]) for b in rig.session.bindings for g in b.gates.values())


@pytest.mark.parametrize("partition", [False, True])
def test_cudagraph_trees(partition):
    counters.clear()
    options = {"triton.cudagraphs": True, "graph_partition": partition}
    rig = static(Rig.build(3, device="cuda", inner="inductor", compile_options={"options": options, "dynamic": False}))
    rig.step(5, guarded=False)
    for n in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        rig.step()
        assert steps_of(rig) == n + 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert rig.found() == []
    for layer in range(3):
        for half in range(2):
            rig.flip(layer, half, row=1, position=3)
            torch.compiler.cudagraph_mark_step_begin()
            with pytest.raises(KVCacheViolation) as caught:
                rig.step()
            rig.length += 1
            assert [(v.layer, v.half, v.index) for v in caught.value.violations] == [(f"layers.{layer}", "KV"[half], 3)]
    assert counters["inductor"]["cudagraph_skips"] == 0


class Captured:
    """A decode step of a rig in one CUDA graph, its inputs in fixed tensors."""

    def __init__(self, rig: Rig, warm_up: int = 2):
        self.rig = rig
        batch = rig.caches[0][0].shape[0]
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
        self.index = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.positions = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(warm_up):
                self.prepare()
                self.run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        gc.collect()  # graphs of earlier tests would free their memory in the middle of this capture, and end it
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self.logits = self.run()

    def run(self):
        return self.rig.guarded(self.ids, self.positions, self.index, self.rig.caches)

    def prepare(self):
        self.ids.random_(0, VOCAB)
        self.index.fill_(self.rig.length)
        self.positions.fill_(self.rig.length)
        self.rig.length += 1

    def replay(self):
        self.prepare()
        self.graph.replay()
        return self.logits


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_manual_capture(inner):
    rig = static(Rig.build(2, device="cuda", inner=inner, compile_options={"dynamic": False}))
    plain = [tuple(t.clone() for t in pair) for pair in rig.caches]
    rig.step(5, guarded=False)
    for pair, copy in zip(rig.caches, plain, strict=True):
        for a, b in zip(pair, copy, strict=True):
            b.copy_(a)
    captured = Captured(rig)
    for pair, copy in zip(rig.caches, plain, strict=True):
        for a, b in zip(pair, copy, strict=True):
            b.copy_(a)
    before = steps_of(rig)
    for n in range(5):
        got = captured.replay()
        with torch.no_grad():
            expected = rig.model(captured.ids, captured.positions, captured.index, plain)
        assert torch.allclose(got, expected, atol=1e-4)
        assert steps_of(rig) == before + n + 1
    rig.session.check()
    for layer in range(2):
        for half in range(2):
            rig.flip(layer, half, row=0, position=2)
            captured.replay()
            with pytest.raises(KVCacheViolation) as caught:
                rig.session.check()
            told = [(v.layer, v.half, v.index, v.position) for v in caught.value.violations]
            assert told == [(f"layers.{layer}", "KV"[half], 2, 2)]
    captured.replay()
    rig.session.check()


def held(session) -> torch.Tensor:
    """The word by which a session's budget says what is compared, and which nothing changes any more: int64 ``[1]``."""
    session.pace._wait = 1 << 30
    (control,) = session.controls.by_device.values()
    return control.words[Word.EVERY : Word.EVERY + 1]


def test_a_captured_graph_follows_the_share_that_a_budget_sets():
    rig = static(
        Rig.build(2, device="cuda", inner="inductor", mode="log", budget="10%", compile_options={"dynamic": False})
    )
    rig.step(5, guarded=False)
    captured = Captured(rig)
    word, checked = held(rig.session), []
    for every in (1, 4, 1):
        word.fill_(every)
        before = rig.session.stats().checked
        for _ in range(4):
            captured.replay()
        checked.append(rig.session.stats().checked - before)
    assert rig.found() == []
    assert checked[1] * 2 < checked[0] < checked[2]  # what a step rewrites is compared at every share
    word.fill_(1 << 20)
    rig.flip(1, 0, row=0, position=2)
    captured.replay()
    assert rig.found() == []
    word.fill_(1)
    captured.replay()
    assert [(v.layer, v.half, v.index) for v in rig.session.violations()] == [("layers.1", "K", 2)]


@pytest.mark.default_budget
def test_a_gpu_has_a_budget_by_default_and_keeps_what_it_says():
    rig = static(Rig.build(2, device="cuda", mode="log", compile_options={"dynamic": False}))
    rig.step(8)
    for _ in range(200):
        rig.step(at=8)
    torch.cuda.synchronize()
    rig.step(at=8)
    pace = rig.session.pace
    assert pace.controller.price is not None
    assert "budget 1 %: every stored byte is compared within" in rig.session.summary()
    assert rig.found() == []
    word = held(rig.session)
    rig.flip(1, 0, row=0, position=2)
    for _ in range(int(word)):
        rig.step(at=8)
    assert [(v.layer, v.half, v.index) for v in rig.session.violations()] == [("layers.1", "K", 2)]


def capture(run):
    with torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run()


def test_capture_over_an_unseen_cache_is_refused():
    rig = static(Rig.build(device="cuda", inner="eager", compile_options={"dynamic": False}))
    captured = Captured(rig)
    rig.caches = new_caches(device="cuda")
    with pytest.raises(CaptureError, match="has no shadow yet"):
        capture(captured.run)


def test_capture_of_a_graph_that_is_not_compiled_is_refused():
    def write(pool, k, slot):
        pool.index_copy_(0, slot, k)
        return pool.sum()

    run = torch.compile(write, backend=CanaryBackend(CanaryConfig(inner="eager")))
    inputs = (
        torch.zeros(8, 2, 4, device="cuda"),
        torch.ones(1, 2, 4, device="cuda"),
        torch.zeros(1, device="cuda").long(),
    )
    torch.cuda.synchronize()
    with pytest.raises(BackendCompilerFailed, match="this graph is not compiled yet"):
        capture(lambda: run(*inputs))


def test_new_prompt_between_replays_of_a_captured_graph():
    rig = static(Rig.build(device="cuda", inner="aot_eager", compile_options={"dynamic": False}))
    rig.step(5, guarded=False)
    captured = Captured(rig)
    for prompt in (3, 9, 4):
        rig.reset()
        rig.step(prompt, guarded=False)
        for _ in range(3):
            captured.replay()
        rig.session.check()


def test_capture_on_one_stream_and_replay_on_another():
    rig = static(Rig.build(device="cuda", inner="inductor", compile_options={"dynamic": False}))
    rig.step(5, guarded=False)
    captured = Captured(rig)
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(3):
            captured.replay()
        other.synchronize()
    rig.session.check()
    rig.flip(1, 0, row=1, position=1)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        captured.replay()
        other.synchronize()
    with pytest.raises(KVCacheViolation):
        rig.session.check()


def test_log_mode_reads_back_without_waiting():
    rig = static(Rig.build(device="cuda", inner="eager", mode="log"))
    rig.step(5)
    rig.flip(1, 1, row=0, position=2)
    rig.step()
    assert [f[1:] for f in rig.found()] == [("layers.1", "V", 0, 2)]


def copied_words(monkeypatch) -> list[readback.Words]:
    """The words that are copied to the host from here on, if it were not time to copy them anyway."""
    monkeypatch.setattr(readback, "BETWEEN", 3600.0)
    copies: list[readback.Words] = []
    start = readback.Words.start
    monkeypatch.setattr(readback.Words, "start", lambda self: (start(self), copies.append(self)))
    return copies


def test_log_mode_hears_of_a_violation_without_copying_words(monkeypatch):
    rig = Rig.build(device="cuda", inner="aot_eager", mode="log")
    for _ in range(4):
        rig.step()
    rig.session.look()
    copies = copied_words(monkeypatch)
    for _ in range(6):
        rig.step()
    assert copies == []
    rig.flip(1, 1, row=0, position=2)
    for _ in range(3):  # a failed check, a look that starts, its end
        rig.step()
        torch.cuda.synchronize()
    told = [(v.layer, v.half, v.index) for v in rig.session.known_violations()]
    assert told == [("layers.1", "V", 2)]
    assert copies == []


def test_raise_mode_raises_in_the_call_without_copying_words(monkeypatch):
    rig = Rig.build(device="cuda", inner="aot_eager")
    for _ in range(4):
        rig.step()
    copies = copied_words(monkeypatch)
    for layer, half in ((0, 1), (1, 0)):
        rig.step()
        rig.flip(layer, half, row=0, position=2)
        with pytest.raises(KVCacheViolation) as caught:
            rig.step()
        rig.length += 1
        assert [(v.layer, v.half, v.index) for v in caught.value.violations] == [(f"layers.{layer}", "KV"[half], 2)]
    assert copies == []


def test_out_of_range_on_the_gpu_survives_the_device_assert(tmp_path):
    import subprocess
    import sys

    program = """
import torch, kvcanary_fx
def write(pool, k, slot):
    pool[slot] = k
    return pool.sum()
run = torch.compile(write, backend=kvcanary_fx.CanaryBackend(kvcanary_fx.CanaryConfig(inner="eager")))
pool = torch.zeros(8, 2, 4, device="cuda")
with torch.no_grad():
    run(pool, torch.ones(2, 2, 4, device="cuda"), torch.tensor([1, 2], device="cuda"))
    try:
        run(pool, torch.ones(2, 2, 4, device="cuda"), torch.tensor([3, 8], device="cuda"))
    except kvcanary_fx.KVCacheViolation as e:
        print("REPORTED", e.violations[0].line())
        print("IN STEP", e.violations[0].step, "AT", e.violations[0].position)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert "REPORTED kvcanary.violation check=bounds" in out.stdout, out.stdout + out.stderr[-2000:]
    assert "stored=8 found=-1" in out.stdout
    assert "IN STEP 2 AT None" in out.stdout


def test_pools_on_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    backend = CanaryBackend(CanaryConfig(inner="eager"))

    def write(a, b, k, pos):
        a.index_copy_(0, pos, k)
        b.index_copy_(0, pos.to(b.device), k.to(b.device))
        return a.sum() + b.sum().to(a.device)

    run = torch.compile(write, backend=backend)
    a, b = (torch.zeros(8, 2, 4, device=f"cuda:{i}") for i in range(2))
    with torch.no_grad():
        for n in range(3):
            run(a, b, torch.randn(1, 2, 4, device="cuda:0"), torch.tensor([n], device="cuda:0"))
        b.data[1, 0, 0] += 1
        with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
            run(a, b, torch.randn(1, 2, 4, device="cuda:0"), torch.tensor([3], device="cuda:0"))
    assert [(v.pool, v.slot) for v in caught.value.violations] == [("b", 1)]


def compiled_variants() -> dict[str, int]:
    """How often each kernel was compiled in this process."""
    modules = vars(triton_kernels) | vars(triton_records) | vars(triton_write)
    kernels = {n: k for n, k in modules.items() if n.endswith("_kernel")}
    return {n: sum(len(cache[0]) for cache in k.device_caches.values()) for n, k in kernels.items()}


def test_more_layers_compile_no_more_kernels():
    counts = []
    for layers in (2, 8):
        rig = Rig.build(layers, device="cuda")
        for tokens in (5, 1, 1):
            rig.step(tokens)
        counts.append(compiled_variants())
    assert counts[0]["record_write_kernel"] >= 1
    assert counts[1] == counts[0]

"""Threads: each with a cache of its own is fine, one cache in two forwards at once is not."""

from __future__ import annotations

import dataclasses
import threading
import time

import eight_threads
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Rig, new_caches

import kvcanary_fx
from kvcanary_fx import Batch, ConcurrentUseError, KVPool, MissingContextError, has_forward_context
from kvcanary_fx.compile import module_call
from kvcanary_fx.engine.layers import EagerLayers
from kvcanary_fx.kernels import ops
from kvcanary_fx.kernels.buffers import Gate
from kvcanary_fx.kernels.content import cpu
from kvcanary_fx.kernels.ring import Control
from kvcanary_fx.kernels.slots.space import REFERENCE
from kvcanary_fx.passes import dynamo_calls
from kvcanary_fx.runtime.binding import Controls
from kvcanary_fx.runtime.readback import Readback


def in_thread(work, name="other"):
    """Run ``work`` in a thread and return what it raised."""
    raised = []

    def run():
        try:
            work()
        except Exception as e:
            raised.append(e)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_one_cache_in_two_forwards_at_once():
    entered, leave = threading.Event(), threading.Event()

    def slow(gm, example_inputs):
        def run(*args):
            if threading.current_thread().name == "holder":
                entered.set()
                leave.wait(10)
            return gm.forward(*args)

        return run

    rig = Rig.build(inner=slow)
    rig.step(3)
    holder = threading.Thread(target=lambda: rig.step(at=3), name="holder")
    holder.start()
    entered.wait(10)
    error = in_thread(lambda: rig.step(at=3))
    leave.set()
    holder.join()
    assert isinstance(error, ConcurrentUseError)
    assert "thread 'other' entered a forward over the KV cache" in str(error)
    assert "while thread 'holder' is inside one" in str(error)
    rig.step(at=4)  # and afterwards it serves again


def test_a_cache_may_change_hands_between_forwards():
    rig = Rig.build()
    rig.step(3)
    assert in_thread(rig.step) is None
    rig.flip()
    assert isinstance(in_thread(rig.step), kvcanary_fx.KVCacheViolation)


def held_in_the_graph(begun, leave):
    """An inner backend: the thread ``holder`` waits behind the graph's first op, ``stopped`` ends behind a verify."""

    def inner(gm, example_inputs):
        class Slow(torch.fx.Interpreter):
            def run_node(self, node):
                out, thread = super().run_node(node), threading.current_thread().name
                if "begin" in str(node.target) and thread == "holder":
                    begun.set()
                    leave.wait(10)
                if "verify" in str(node.target) and thread == "stopped":
                    raise KeyboardInterrupt
                return out

        return lambda *args: Slow(gm).run(*args)

    return inner


def test_a_thread_in_the_middle_of_the_graph_is_not_one_whose_checks_did_not_run(monkeypatch):
    """Two threads, one graph, a cache for each: what one has not run yet, it will."""
    begun, leave = threading.Event(), threading.Event()
    rig = Rig.build(inner=held_in_the_graph(begun, leave))
    other = dataclasses.replace(rig, caches=new_caches(2, 2, 24, "cpu"))
    rig.step(3)
    other.step(3)
    holder = threading.Thread(target=other.step, name="holder")
    holder.start()
    begun.wait(10)
    start = Readback.start

    def start_and_let_go(readback, **given):
        start(readback, **given)
        leave.set()
        while len(set(readback.binding.calls())) > 1:  # until nobody is in the graph
            time.sleep(0.01)

    monkeypatch.setattr(Readback, "start", start_and_let_go)
    rig.step()
    holder.join()
    assert rig.session.uncovered == []
    monkeypatch.undo()
    rig.step()
    other.step()
    assert rig.session.uncovered == []


def test_checks_of_several_threads_are_all_counted(monkeypatch):
    """One graph, a cache for each thread, and a processor that leaves off in the middle of an addition."""

    def interrupted(gate, ops=1):
        counted = int(gate[Gate.OPS])
        time.sleep(1e-4)
        gate[Gate.OPS] = counted + ops

    for module in (cpu, ops):
        monkeypatch.setattr(module, "count_op", interrupted)
    first = Rig.build(mode="log")
    first.step(4)
    rigs = [dataclasses.replace(first, caches=new_caches(), length=0) for _ in range(3)]

    def work(rig):
        rig.step(4)
        for _ in range(5):
            rig.step()

    threads = [threading.Thread(target=work, args=(rig,)) for rig in rigs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for binding in first.session.bindings:
        steps, ran = binding.progress()
        assert ran == steps * binding.plan.ops
    assert first.session.uncovered == []


def test_a_protected_model_is_guarded_while_another_thread_compiles():
    compiling, leave = threading.Event(), threading.Event()

    def slow(gm, example_inputs):
        compiling.set()
        leave.wait(10)
        return gm.forward

    rig = Rig.protected_model(dynamic=False)
    rig.step(1)
    compiler = threading.Thread(target=torch.compile(lambda x: x + 1, backend=slow), args=(torch.zeros(2),))
    compiler.start()
    compiling.wait(10)
    try:
        for _ in range(3):
            rig.step(1)
    finally:
        leave.set()
        compiler.join()
    assert rig.session.stats().steps == 4
    assert rig.session.uncovered == []


def test_forwards_beside_compiling_threads_are_guarded_or_reported():
    """The long run is ``eight_threads.py --seconds 600``."""
    seen = eight_threads.run(seconds=2)
    assert seen.errors == set()
    assert seen.silent == 0
    assert seen.share >= 0.99
    assert min(seen.guarded, seen.compiled) > 0


@pytest.mark.skipif(not dynamo_calls.isolation(), reason="this torch has one cache and one limit for all models")
def test_models_in_threads_are_more_than_the_recompile_limit(monkeypatch):
    """They share a cache, since two threads were in calls at once; seen: the ninth model of a class ran unguarded."""
    monkeypatch.setattr(module_call._THREADS, "at_once", True)
    rigs = []
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):
            rigs.append(Rig.protected_model())
            for rig in rigs:
                rig.step(2)
    assert [rig.session.uncovered for rig in rigs] == [[]] * 4
    assert [rig.session.stats().steps for rig in rigs] == [4, 3, 2, 1]


def test_a_forward_that_fails_beside_another_is_forgiven_to_itself_alone():
    """Two threads in one graph, the one is stopped while the other is in the middle: neither's checks are missing."""
    begun, leave = threading.Event(), threading.Event()
    rig = Rig.build(inner=held_in_the_graph(begun, leave))
    other = dataclasses.replace(rig, caches=new_caches())
    rig.step(2)
    holder = threading.Thread(target=other.step, args=(2,), name="holder")
    holder.start()
    begun.wait(10)

    def stopped():
        with pytest.raises(KeyboardInterrupt):
            rig.step(2)

    assert in_thread(stopped, "stopped") is None
    leave.set()
    holder.join()
    for _ in range(2):
        rig.step(2)
    assert rig.session.uncovered == []


def test_a_context_belongs_to_its_thread():
    seen = []

    def inner(gm, example_inputs):
        def run(*args):
            seen.append(in_thread(kvcanary_fx.get_forward_context))
            assert has_forward_context()
            return gm.forward(*args)

        return run

    rig = Rig.build(inner=inner)
    rig.step(2)
    assert isinstance(seen[0], MissingContextError)
    assert "no ForwardContext is published in thread 'other'" in str(seen[0])
    assert not has_forward_context()


def test_draft_inside_its_target_restores_the_context():
    draft = Rig.build()
    contexts = []

    def inner(gm, example_inputs):
        def run(*args):
            outer = kvcanary_fx.get_forward_context()
            draft.step()
            contexts.append(kvcanary_fx.get_forward_context() is outer)
            return gm.forward(*args)

        return run

    target = Rig.build(inner=inner)
    target.step(2)
    assert contexts == [True]
    assert draft.session.stats().steps == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_context_is_restored_after_an_exception(error):
    def inner(gm, example_inputs):
        def run(*args):
            raise error

        return run

    rig = Rig.build(inner=inner)
    with pytest.raises(error), torch.no_grad():
        rig.step(2)
    assert not has_forward_context()
    assert rig.session._running.idle()


def test_threads_that_bind_their_first_graphs_at_once_share_the_buffers_of_a_device(monkeypatch):
    made = Control.allocate

    def slowly(capacity, device):
        time.sleep(0.05)  # the other thread asks in between
        return made(capacity, device)

    monkeypatch.setattr(Control, "allocate", staticmethod(slowly))
    controls, given = Controls(64), []

    def bind(slots):
        given.append(controls(torch.device("cpu")))
        controls.reserve_stamps(torch.device("cpu"), slots)

    threads = [threading.Thread(target=bind, args=(slots,)) for slots in (24, 48, 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(control) for control in given}) == 1
    assert given[0].stamps.shape == (2, 48)


class Interrupted(TorchDispatchMode):
    """Before whatever the thread that enters it writes, another thread does something, if that can go on."""

    def __init__(self, doing):
        super().__init__()
        self._doing, self._idle, self._go, self._left = doing, threading.Event(), threading.Event(), False
        self._idle.set()
        self.raised, self.done = [], 0
        self._other = threading.Thread(target=self._work)

    def _work(self):
        while self._go.wait(10) and not self._left:
            self._go.clear()
            try:
                self._doing()
                self.done += 1
            except Exception as e:
                self.raised.append(e)
            self._idle.set()

    def __enter__(self):
        self._other.start()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._idle.wait(10)
        self._left = True
        self._go.set()
        self._other.join()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable and self._idle.is_set():
            self._idle.clear()
            self._go.set()
            self._idle.wait(0.05)
        return func(*args, **kwargs or {})


class Decoding:
    """A request whose tokens come one by one, in an engine whose scheduler has a thread of its own."""

    def __init__(self):
        self.kv = torch.zeros(400, 1, 4), torch.zeros(400, 1, 4)
        table = torch.zeros(2, 256, dtype=torch.int32)
        table[1] = torch.arange(1, 257)
        self.session = kvcanary_fx.install_canary(KVPool([self.kv], table), mode="log", inner="eager")
        self.pool, self.layers, self.stored = self.session.pool, EagerLayers(self.session), 0
        self.session.mark_ready()
        self.pool.allocate(list(range(1, 257)), owner="A")
        self.calls = 0

    def step(self):
        at = self.stored
        if at == 256:
            return
        batch = Batch([at], [at + 1], request_rows=[1], prefix_lens=[at], extend_lens=[1], request_ids=["A"])
        with self.session.step(batch), self.session.forward():
            self.layers.verify("layers.0")
            k, v = torch.full((2, 1, 1, 4), float(at + 1))
            self.kv[0][at + 1], self.kv[1][at + 1] = k[0], v[0]
            self.layers.record("layers.0", k, v, torch.tensor([at + 1]))
        self.stored += 1

    def next_call(self):
        """Of two others: one has slots, which the other shares, and a prefix of A's."""
        calls = (
            lambda: self.pool.allocate([300, 301], owner="B"),
            lambda: self.pool.share([1, 300], owner="C"),
            lambda: self.pool.release([300, 301], owner="B"),
            lambda: self.pool.release([1, 300], owner="C"),
        )
        calls[self.calls % 4]()
        self.calls += 1

    def finish_calls(self):
        self.next_call()
        while self.calls % 4:
            self.next_call()

    def references(self):
        return (self.pool.space.flags[[1, 2, 300, 301]] // REFERENCE).tolist()


@pytest.mark.parametrize("interrupted", ["the allocator's thread", "the model's thread"])
def test_a_scheduler_has_a_thread_of_its_own(interrupted):
    """Seen as slots that were "never written": the release of another request's wrote back what it had read before."""
    engine = Decoding()
    engine.step()
    engine.step()
    mine, theirs = engine.finish_calls, engine.step
    if interrupted == "the model's thread":
        mine, theirs = engine.step, engine.next_call
    with Interrupted(theirs) as between:
        mine()
    assert between.raised == []
    assert between.done
    engine.finish_calls()
    engine.step()
    assert [v.explain() for v in engine.session.violations()] == []
    assert engine.references() == [1, 1, 0, 0]
    assert engine.pool.live_slots == 256

"""What Python's garbage collector does while a guarded graph is compiled."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from kvcanary_fx import CanaryBackend, CanaryConfig
from kvcanary_fx.compile.collector import no_full_collections


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(50, 3, 2)  # so that a few objects are enough
    try:
        yield gc.get_threshold()
    finally:
        gc.set_threshold(*before)


@pytest.fixture
def collected():
    """The generation of each collection."""
    seen = []

    def note(phase, info):
        if phase == "stop":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def make_objects():
    """As many as set off a full collection, which comes when a quarter of all are new."""
    return [[] for _ in range(2 * len(gc.get_objects()))]


def write(cache, k, position):
    cache.index_copy_(2, position, k)
    return cache.sum()


def compile_with(inner):
    backend = CanaryBackend(CanaryConfig(inner=inner))
    torch.compile(write, backend=backend)(torch.zeros(2, 2, 8, 4), torch.randn(2, 2, 1, 4), torch.tensor([3]))


def test_no_full_collection_while_the_inner_backend_compiles(collected, thresholds):
    meanwhile = []

    def inner(gm, example_inputs):
        collected.clear()
        make_objects()
        meanwhile.extend(collected)
        return gm.forward

    compile_with(inner)
    assert set(meanwhile) == {0, 1}
    assert gc.get_threshold() == thresholds


def test_an_inner_backend_that_fails_leaves_the_collector_as_it_was(thresholds):
    def broken(gm, example_inputs):
        raise RuntimeError("broken")

    with pytest.raises(BackendCompilerFailed):
        compile_with(broken)
    assert gc.get_threshold() == thresholds


def test_threads_that_compile_at_once(thresholds):
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
    seen = []

    def first():
        with no_full_collections():
            first_is_in.set()
            second_is_in.wait(60)
        seen.append(gc.get_threshold()[2] > 10**6)
        first_is_out.set()

    def second():
        first_is_in.wait(60)
        with no_full_collections():
            second_is_in.set()
            first_is_out.wait(60)

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True]
    assert gc.get_threshold() == thresholds


def test_thresholds_that_another_sets_meanwhile_stay():
    with no_full_collections():
        gc.set_threshold(9, 8, 7)
    assert gc.get_threshold() == (9, 8, 7)

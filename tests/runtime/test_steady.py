"""The fast way into a guarded call: what it is taken for, and that nothing hides in it."""

from __future__ import annotations

import gc

import pytest
import torch
from toys import Rig, new_caches

from kvcanary_fx import KVCacheViolation


class SlowWay(Exception):
    """A call looked at everything anew."""


@pytest.fixture
def steady(monkeypatch):
    """A rig in the middle of decoding, whose session fails where it would leave the fast way."""

    def build(**settings):
        rig = Rig.build(**settings)
        rig.step(4)
        rig.step()
        rig.step()

        def refuse(*args):
            raise SlowWay

        monkeypatch.setattr(rig.session, "_run_anew", refuse)
        return rig

    return build


@pytest.mark.parametrize("mode", ["log", "raise"])
@pytest.mark.parametrize("break_at", [None, 1])
def test_a_decode_loop_goes_the_fast_way(steady, mode, break_at):
    rig = steady(mode=mode, break_at=break_at)
    for _ in range(4):
        rig.step()
    assert rig.session.stats().violations == 0
    rig.flip(1, 1, row=0, position=2)
    if mode == "raise":
        with pytest.raises(KVCacheViolation):
            rig.step()
    else:
        rig.step()
        assert [v.check for v in rig.session.violations()] == ["content"]


def test_under_inference_mode_too_where_torch_counts_no_writes(steady):
    with torch.inference_mode():
        rig = Rig.build()
        rig.caches = new_caches()
        rig.step(4)
        rig.step()
        rig.session._run_anew = None
        for _ in range(3):
            rig.step()
        for k, v in rig.caches:
            k.zero_(), v.zero_()
        rig.length = 0
        rig.step()  # a reset is legal
        rig.step()
        rig.flip(1, 1, row=0, position=0)
        with pytest.raises(KVCacheViolation):
            rig.step()


def write(rig):
    rig.caches[1][0][0, 0, 20] += 1


def set_memory(rig):
    rig.caches[1][0].set_(rig.caches[1][0].clone())


def swap_memory(rig):
    rig.caches[1][0].data = rig.caches[1][0].clone()


def other_tensor(rig):
    rig.caches[1] = rig.caches[1][0].clone(), rig.caches[1][1]


@pytest.mark.parametrize("change", [write, set_memory, swap_memory, other_tensor])
def test_what_changed_between_two_calls_is_looked_at(steady, change):
    rig = steady()
    rig.step()
    change(rig)
    with pytest.raises(SlowWay):
        rig.step()


def test_a_cache_whose_memory_is_swapped_is_a_new_one():
    """``tensor.data = other`` counts as no write: the other memory has nothing of what was recorded."""
    rig = Rig.build()
    rig.step(4)
    rig.step()
    for cache in rig.caches:
        for half in cache:
            half.data = torch.zeros_like(half)
    rig.step(4, guarded=False, at=0)
    rig.step()
    rig.step()
    assert rig.session.stats().violations == 0
    rig.flip(1, 1, row=0, position=2)
    with pytest.raises(KVCacheViolation):
        rig.step()


def test_caches_that_take_turns_and_die_are_told_apart():
    rig = Rig.build()
    first = rig.caches
    for _ in range(4):
        rig.caches, rig.length = new_caches(), 0  # often where the last ones were
        rig.step(4)
        rig.step()
        rig.step()
        gc.collect()
    rig.caches, rig.length = first, 0
    rig.step(4)
    rig.step()
    assert rig.session.stats().violations == 0


def test_a_write_seen_by_one_of_two_graphs_is_not_forgotten_by_the_other():
    """A reset between two forwards that a graph of another length saw first."""
    rig = Rig.build(layers=2)
    other = rig.caches
    rig.step(4)
    for _ in range(3):
        rig.step()
    for cache in other:
        for half in cache:
            half.zero_()
    rig.step(4, at=0)  # the prefill's graph sees the write
    for _ in range(3):
        rig.step()
    stats = rig.session.stats()
    assert (stats.violations, rig.session.uncovered) == (0, [])


def test_a_failed_forward_leaves_the_fast_way():
    """What it wrote is nobody's, so the next call looks at everything."""
    failing = []

    def inner(gm, example_inputs):
        def run(*args):
            out = gm.forward(*args)
            if failing:
                raise ValueError(failing.pop())
            return out

        return run

    rig = Rig.build(inner=inner)
    rig.step(4)
    rig.step()
    rig.step()
    failing.append("out of memory")
    with pytest.raises(ValueError, match="out of memory"):
        rig.step()
    rig.step(at=rig.length - 1)
    rig.step()
    assert rig.session.stats().violations == 0
    assert rig.session.uncovered == []

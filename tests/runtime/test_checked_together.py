"""A decode step whose layers are checked together: what it finds, and when."""

from __future__ import annotations

import pytest
from toys import Rig

from kvcanary_fx.kernels import ops

LAYERS = 3
EVERY = 4


@pytest.fixture
def together(monkeypatch):
    """A name for each layer that one op for all of them has recorded."""
    seen, mark = [], ops._mark_again
    monkeypatch.setattr(ops, "_mark_again", lambda *given: (seen.append("layer"), mark(*given)))
    return seen


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_flip_in_each_half_is_found_within_the_steps_of_the_share(inner, together):
    rig = Rig.build(LAYERS, mode="log", inner=inner, verify_fraction=f"1/{EVERY}")
    rig.step(5)
    for _ in range(4):
        rig.step()
    assert rig.found() == []
    assert len(together) == 5 * LAYERS
    for layer in range(LAYERS):
        for half, label in enumerate("KV"):
            rig.flip(layer, half, row=1, position=2)
            before = len(rig.found())
            for _ in range(EVERY):
                rig.step(at=9)
            assert rig.found()[before:] == [("content", f"layers.{layer}", label, 1, 2)]


@pytest.mark.parametrize(("share", "behind"), [(None, "_record_written"), (f"1/{EVERY}", "join_side")])
def test_what_a_layer_does_to_a_later_one_is_found_in_its_step_or_by_the_next_comparison(share, behind, monkeypatch):
    """In its step where all bytes are compared; under a share when the slot has its turn, as before the model."""
    rig = Rig.build(LAYERS, mode="log", verify_fraction=share)
    rig.step(5)
    rig.step()
    run, strays = getattr(ops, behind), []

    def then_stray(*given):
        run(*given)
        if not strays:  # the first layer writes
            strays.append(rig.flip(2, 0, row=1, position=3))

    monkeypatch.setattr(ops, behind, then_stray)
    rig.step()
    expected = [("content", "layers.2", "K", 1, 3)]
    assert rig.found() == (expected if share is None else [])
    for _ in range(EVERY):
        rig.step(at=rig.length - 1)
    assert rig.found() == expected

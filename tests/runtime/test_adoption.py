"""Which rows of the ring are a legal rewrite, by which halves of which layers changed together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvcanary_fx.kernels.buffers import HalfBuffers
from kvcanary_fx.kernels.checks import Check
from kvcanary_fx.kernels.ring import Ring
from kvcanary_fx.kernels.writes.layout import SlotLayout
from kvcanary_fx.runtime.adoption import judge
from kvcanary_fx.runtime.registry import PoolRegistry


def registry(layers: int, halves: int, kind: str) -> PoolRegistry:
    """Halves numbered layer by layer; slots without rows."""
    peers = {layer * halves + half: layer for layer in range(layers) for half in range(halves)}
    layout = SlotLayout((8, 4), (0,), torch.float32)
    made = {
        n: SimpleNamespace(
            id=n,
            peers=peers,
            kind=kind,
            place=SimpleNamespace(layout=layout),
            reported={},
            forward=None,
            seeds=(1, 2),
            buffers=HalfBuffers.allocate(layout, 1, torch.device("cpu")),
        )
        for n in peers
    }
    return cast(PoolRegistry, SimpleNamespace(by_id=made.get))


STAMPS = torch.full((2, 8), -1, dtype=torch.int64)


def changed(half: int, slot: int = 3) -> list[int]:
    row = [0] * len(Ring)
    row[Ring.STEP], row[Ring.HALF], row[Ring.CHECK], row[Ring.LENIENT], row[Ring.SLOT] = 1, half, Check.CONTENT, 1, slot
    row[Ring.STORED], row[Ring.FOUND] = 10 + half, 20 + half
    return row


@pytest.mark.parametrize(
    ("layers", "halves", "kind", "hit", "adopted"),
    [
        pytest.param(2, 2, "kv", [0, 1, 2, 3], True, id="K and V of every layer"),
        pytest.param(2, 2, "kv", [2, 3], True, id="K and V of all but the first layer, where they only know the token"),
        pytest.param(2, 2, "kv", [3], False, id="one half of a layer"),
        pytest.param(3, 2, "kv", [2, 3], False, id="one layer of two above the first"),
        pytest.param(2, 1, "kv", [0, 1], True, id="a latent in two layers"),
        pytest.param(2, 1, "kv", [1], False, id="one of two latents: one half above the first says nothing"),
        pytest.param(3, 1, "kv", [1, 2], True, id="a latent in three layers"),
        pytest.param(2, 1, "state", [0, 1], True, id="the states of two layers"),
        pytest.param(2, 1, "state", [1], False, id="one state of two layers"),
        pytest.param(1, 1, "state", [0], False, id="a state alone"),
        pytest.param(1, 2, "kv", [0, 1], True, id="K and V of the only layer"),
    ],
)
def test_a_slot_that_changed_in_these_halves_was(layers: int, halves: int, kind: str, hit: list[int], adopted: bool):
    rows = [changed(half) for half in hit]
    verdict = judge(rows, registry(layers, halves, kind), STAMPS)
    assert (verdict.adopted_slots, verdict.adopted_fingerprints) == ((1, len(hit)) if adopted else (0, 0))
    assert verdict.violations == ([] if adopted else rows)


def test_where_nothing_else_can_have_written_no_pattern_is_legal():
    rows: list[Any] = [changed(half) for half in range(4)]
    for row in rows:
        row[Ring.LENIENT] = 0
    assert judge(rows, registry(2, 2, "kv"), STAMPS).violations == rows


def test_of_two_slots_the_one_that_changed_everywhere_is_adopted():
    legal, flipped = [changed(half, 5) for half in range(4)], changed(2, 6)
    verdict = judge([*legal[:3], flipped, legal[3]], registry(2, 2, "kv"), STAMPS)
    assert verdict.violations == [flipped]
    assert verdict.adopted_slots == 1

"""The checks of an engine's pools equal their plain reference, on random lives of a slot space."""

from __future__ import annotations

import os

import pytest
from random_plans import run_plans

SEEDS = int(os.environ.get("KVCANARY_TEST_SEEDS", "300"))
BLOCKS = 5


def _seeds(block: int) -> range:
    return range(block * SEEDS // BLOCKS, (block + 1) * SEEDS // BLOCKS)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_vectorised_checks_equal_the_reference(block):
    assert sum(run_plans(seed, plans=5) for seed in _seeds(block)) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("block", range(BLOCKS))
def test_checks_on_the_gpu_equal_the_reference(block):
    assert sum(run_plans(seed, plans=5, device="cuda") for seed in _seeds(block)) > 0

"""Random programs against an oracle: what every change must pass.  ``run.py`` runs as many as one likes."""

from __future__ import annotations

import pytest

from fuzz.run import run_seed

EACH = 24


@pytest.mark.parametrize("first", range(0, 6 * EACH, EACH))
def test_nothing_silent_and_nothing_wrong(first: int):
    """No false alarm, no silent miss, no wrong layer or half, no other numbers, in programs of so many seeds."""
    failed = []
    for seed in range(first, first + EACH):
        program, _, what = run_seed(seed, "eager")
        if what:
            failed.append(f"seed {seed}: {what}\n  {program}")
    assert not failed, "\n".join([*failed, "python tests/fuzz/run.py --programs 1 --seed SEED shrinks one"])

"""The kernels equal the reference bit for bit, on random pools, layouts and steps."""

from __future__ import annotations

import os

import pytest
import torch
from scenes import play, random_scene, random_step, to_device

from kvcanary_fx.kernels import cpu, reference

SEEDS = int(os.environ.get("KVCANARY_TEST_SEEDS", "300"))


def _compare(kernels: object, seed: int, device: str = "cpu", steps: int = 4) -> None:
    scene = random_scene(seed)
    expected, got = scene.clone(), scene.clone().to(device)
    for number in range(steps):
        step = random_step(scene)
        play(reference, expected, step)
        play(kernels, got, to_device(step, device))
        want, have = expected.state(), got.state()
        for name in want:
            assert have[name] == want[name], f"seed {seed}, step {number}, {name}, {scene.site.layout}"
        assert torch.equal(expected.view.contiguous().view(torch.uint8), got.view.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("block", range(10))
def test_cpu_equals_reference_on_random_plans(block):
    for seed in range(block * SEEDS // 10, (block + 1) * SEEDS // 10):
        _compare(cpu, seed)

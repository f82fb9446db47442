"""Kernels that are compiled beside each other before their first launch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
from no_device import run_scenes

from kvcanary_fx.kernels.compile_ahead import compile_ahead


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles what it runs")
def test_kernels_are_compiled_beside_each_other_and_not_launched():
    run_scenes(Path(__file__).with_name("compile_ahead_scenes.py"))


def test_nothing_runs_ahead_on_a_cpu():
    compile_ahead(lambda: pytest.fail("ran"), torch.device("cpu"))


@pytest.mark.gpu
def test_a_session_compiles_its_kernels_ahead_of_its_first_step(tmp_path, monkeypatch):
    """After the steps ran once with nothing but compilations, they compile nothing."""
    from toy import Toy

    def steps():
        toy = Toy(device="cuda")
        toy.add("A", [5, 6, 7, 8])
        toy.run({"A": [3, 4]})
        return toy

    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    compile_ahead(steps, torch.device("cuda"))
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda *, repr, **_: compiled.append(repr))
    toy = steps()
    torch.cuda.synchronize()
    assert compiled == []
    assert toy.session.violations() == []
